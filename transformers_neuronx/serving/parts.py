"""What an engine is made of: its cache, its steps with their measured limits, and what makes draft tokens."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from transformers_neuronx.engine.decoder import Decoder
from transformers_neuronx.engine.images import Pictured, pictured
from transformers_neuronx.errors import ConfigError, InputError
from transformers_neuronx.runtimes.base import want_all_here
from transformers_neuronx.serving.calls import guesser_of
from transformers_neuronx.serving.draft_heads import DraftHead, HeadGuesser
from transformers_neuronx.serving.draft_models import ModelGuesser, want_fitting
from transformers_neuronx.serving.drafting import Costs
from transformers_neuronx.serving.guesses import Compiled, Guesser, PromptLookup
from transformers_neuronx.serving.kv_cache import KVCache
from transformers_neuronx.serving.limits import Limits
from transformers_neuronx.serving.paged import PagedSteps, steps_over
from transformers_neuronx.serving.pages import PAGE, Pages
from transformers_neuronx.serving.slots import SlotSteps
from transformers_neuronx.serving.step_times import StepTimes
from transformers_neuronx.serving.step_writer import ROUNDS
from transformers_neuronx.support.progress import bar
from transformers_neuronx.weights.adapters import open_adapter
from transformers_neuronx.weights.lora import AdapterLayout, placed
from transformers_neuronx.weights.reading import Key


def paged_cache(decoders: Sequence[Decoder], room: int | None, limits: Limits) -> KVCache:
    """Make pages for the layers with each window: for `room` positions, or all windows if that is less."""
    room = max(limits.positions, limits.rows * limits.positions // 4) if room is None else room
    layouts = [decoder.programs.cache for decoder in decoders]
    whole = -(-room // PAGE)
    at_once = -(-limits.tokens // PAGE) + 1  # more than their windows, in a step of tokens of prompts

    def pool(window: int | None) -> Pages:
        if window is None:
            return Pages(whole, PAGE)
        each = -(-(window + limits.guesses) // PAGE) + 1
        return Pages(min(whole, limits.rows * each + at_once), PAGE, window)

    windows = dict.fromkeys(window for layout in layouts for window in layout.windows)
    states = any(layout.has_states for layout in layouts)
    places = 2 if states and limits.guesses else int(any(layout.has_places for layout in layouts))
    return KVCache([pool(window) for window in windows], limits.rows, places)


def steps_of(
    model: Any, draft: Any, cache: KVCache, limits: Limits, adjustments: bool, adapters: AdapterLayout | None
) -> PagedSteps | SlotSteps:
    decoder, features = model.decoder, draft.depths_in(model) if isinstance(draft, DraftHead) else ()
    if decoder.programs.reads_pages:
        overlaps = not isinstance(draft, DraftHead)  # a head must see the tokens of each step
        return steps_over(decoder, cache, limits, adjustments, adapters, features, overlaps)
    return SlotSteps(decoder, limits.guesses, adjustments)


def adapters_of(decoder: Decoder, count: int, rank: int) -> AdapterLayout | None:
    """Return the layout of so many adapters. Raises ConfigError where requests cannot have any."""
    if count < 0 or rank < 1:
        raise ConfigError(f"max_loras must be at least 0, and max_lora_rank at least 1, got {count} and {rank}")
    if count and (not decoder.programs.reads_pages or decoder.memory.layout):
        raise ConfigError("adapters by request need a decoder whose cache is in pages: on the CPU, with kernels")
    return decoder.programs.adapters_of(count, rank) if count else None


def content_of(directory: str | os.PathLike[str], decoder: Decoder, rank: int) -> Mapping[Key, torch.Tensor]:
    """Read an adapter of at most this rank for a model. Raises CheckpointError if it does not fit."""
    weights = decoder.family.weights
    table = weights.table(decoder.config)
    return placed(open_adapter(directory), table, decoder.programs.layers, rank, weights.PREFIX)


def pictured_in(
    model: Any, tokens: Sequence[int], pixel_values: Any = None, image_grid_thw: Any = None
) -> Pictured | None:  # fmt: skip
    """Return the images of a prompt and where they stand. Raises InputError for images that do not fit it, and for any
    if the model reads none.
    """
    if not model.family.images:
        if pixel_values is None and image_grid_thw is None:
            return None
        raise InputError(f"{model.tag} reads no images: load it with NeuronAutoModelForImageTextToText, if it has both")
    images = model.read_images(pixel_values, image_grid_thw)
    found = pictured(tokens, images, model.model_config)
    if images:
        raise InputError(f"the prompt has no tokens for {len(images)} of its images")
    return found


def measured(limits: Limits, steps: PagedSteps | SlotSteps, guesser: Guesser | None, joined: int | None) -> Limits:
    """Return limits with those that steps set, now that they are compiled. If `joined` is given, no time matters."""
    doubled, rounds, costs = math.inf, 1, None
    if isinstance(steps, PagedSteps):
        times = StepTimes(steps)
        rounds = times.most_rounds()
        if joined is None:
            joined, doubled = times.longest_joined()
            if guesser:
                seconds = times.by_tokens()
                costs = Costs([*seconds], [*seconds.values()], guesser.seconds())
    elif joined is None:
        joined = steps.longest_prompt()
    most = min(max(joined, limits.rows), limits.tokens)
    return replace(limits, joined=most, doubled=doubled, rounds=rounds, samples=steps.most_samples(), costs=costs)


def compile_parts(tag: str, *parts: Compiled | None) -> None:
    used = [part for part in parts if part]
    with bar(f"{tag}: programs of the engine", sum(part.programs for part in used)) as built:
        for part in used:
            part.compile(lambda _: built.update())


def drafts_of(draft: Any, model: Any, limits: Limits) -> list[Decoder]:
    """Return the decoders that make draft tokens, none or one. Raises ConfigError if `draft` does not fit the model."""
    if draft is None:
        return []
    if not 1 <= limits.guesses <= ROUNDS:
        raise ConfigError(f"draft_tokens must be from 1 to {ROUNDS}, got {limits.guesses}")
    if model.decoder.programs.cache.has_states and not model.decoder.programs.reads_pages:
        raise ConfigError(
            f"{model.tag} keeps states of sequences in slots, so it cannot verify draft tokens: wrong ones would stay"
        )
    if isinstance(draft, PromptLookup):
        return []
    if isinstance(draft, DraftHead):
        return [draft.decoder_for(model)]
    want_fitting(draft, model, limits)
    return [draft.decoder]


def guesser_for(draft: Any, paged: Sequence[Decoder], cache: KVCache, limits: Limits) -> Guesser | None:
    """Return what makes draft tokens. A draft that is `paged` has pages of the same numbers as the model."""
    if draft is None:
        return None
    if not paged:
        return guesser_of(draft)
    return (HeadGuesser if isinstance(draft, DraftHead) else ModelGuesser)(paged[0], cache, limits)


def check(rows: int, step_tokens: int, decoder: Decoder, paged: bool) -> None:
    want_all_here(decoder.runtime, "an engine")
    slotted = None if paged else decoder
    if slotted and slotted.options.blocks is not None:
        raise ConfigError("an engine needs slots here, and the model has blocks: make it without init_cache_engine()")
    if rows < 1 or (slotted and rows > slotted.slots):
        most = f" and at most the model's batch_size={slotted.slots}, as there are no pages" if slotted else ""
        raise ConfigError(f"rows must be at least 1{most}, got {rows}")
    if step_tokens < rows:
        raise ConfigError(f"step_tokens must be at least rows={rows}, got {step_tokens}")
