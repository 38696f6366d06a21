"""Speculative decoding with both models in one program, where their caches are in slots.

A loop on the devices does what `speculation` does from the host. The tokens are the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch

from transformers_neuronx import hlo
from transformers_neuronx.compiler import compile_py_func
from transformers_neuronx.config import GenerationConfig
from transformers_neuronx.engine.compile_cache import SavedModule
from transformers_neuronx.engine.inputs import Integers
from transformers_neuronx.engine.kv_cache import flattened, in_place
from transformers_neuronx.engine.loops import (
    LOOP,
    ends,
    looped,
    rules_of,
    sampled_after,
    side_by_side,
    state_of,
    with_tokens,
)
from transformers_neuronx.engine.programs import Programs
from transformers_neuronx.engine.slots import SlotDecoder
from transformers_neuronx.errors import ConfigError
from transformers_neuronx.layers.rows import declare_rows, field, words
from transformers_neuronx.layers.sampling import NOTHING, sample
from transformers_neuronx.layers.step import Step
from transformers_neuronx.models.generation import Generation
from transformers_neuronx.models.sampling import ForSampling
from transformers_neuronx.pyhlo import HloModuleProto, HloScribe, Tensor
from transformers_neuronx.runtimes.base import Executable
from transformers_neuronx.speculation.acceptors import Rounds
from transformers_neuronx.speculation.drafts import check_pair, closed_up, padded_on_the_right
from transformers_neuronx.support.arguments import mention_unknown

Array = np.ndarray[Any, Any]


PAIR = np.dtype([*LOOP.descr, ("previous", np.int32)])  # a row of the loop, and the token before its token


class _Model:
    """One of the two models in the program that is being written."""

    def __init__(self, scribe: HloScribe, programs: Programs, parameters: hlo.Parameters, width: int) -> None:
        self.scribe, self.programs, self.width = scribe, programs, width
        self.weights = programs.declare_weights(parameters, programs.whole)

    def run(self, flat: Sequence[Tensor], step: Step, all_positions: bool = False) -> tuple[Tensor, list[Tensor]]:
        """Apply the model to a step. Return logits and caches."""
        programs = self.programs
        x, after = programs.body(self.scribe, programs.whole, *self.weights, None, programs.cache.by_layer(flat), step)
        return programs.logits(self.scribe, self.weights[0], x, None if all_positions else step), flattened(after)


class FusedSpeculativeDecoder(torch.nn.Module):
    """Speculative decoding with both models: the same tokens as `target.sample`, in fewer steps.

    Where the caches of both are in slots, one program has both models. Over pages, the draft's program makes draft
    tokens, and the target's verifies those of each row, as with a `SpeculativeGenerator`.

    - `draft`: a smaller model with the target's `batch_size`, `tp_degree` and vocabulary, and at least its
      `n_positions`.
    - `target`: the model whose tokens are generated.
    - `k`: number of draft tokens that the target verifies in one step, at least 1. Default 4.
    - `pad_token_id`: what `speculative_iteration` returns after the tokens of a row. Default 0.
    - `eos_token_id`: the token that ends a row in `sample`. Default: the configuration's.
    - `buckets`: accepted and ignored: the sizes of programs are the target's.

    A `torch.nn.Module` with both models as its parts. Compiles its programs if both models are on their devices;
    otherwise the first call does. Raises ConfigError if `k`
    is below 1 or the models do not fit each other.
    """

    def __init__(
        self,
        draft: ForSampling,
        target: ForSampling,
        k: int = 4,
        pad_token_id: int = 0,
        eos_token_id: int | None = None,
        buckets: Sequence[int] | None = None,
        **unknown: Any,
    ) -> None:
        mention_unknown(type(self).__name__, unknown, ("pad_token_id", "eos_token_id", "buckets"))
        super().__init__()
        if k < 1:
            raise ConfigError(f"k must be at least 1, got {k}")
        check_pair(draft, target)
        if draft.options.tp_degree != target.options.tp_degree:
            degrees = f"{draft.options.tp_degree} and {target.options.tp_degree}"
            raise ConfigError(f"tp_degree must be the same for draft and target, got {degrees}")
        self.draft, self.target, self.k = draft, target, k
        self.pad_token_id, self.eos_token_id = pad_token_id, eos_token_id
        self.buckets, self.batch_sizes = target.token_buckets, target.batch_sizes
        self.vocab_size, self.tp_degree = target.model_config.vocab_size, target.options.tp_degree
        self._rounds: Rounds | None = None
        self._built: dict[int, Executable] = {}
        if draft.is_on_device and target.is_on_device:
            self.to_neuron()

    def to_neuron(self, workers: int | None = None) -> None:
        """Compile the programs. Both models must be on their devices."""
        if self._in_one_program:
            for width in self.target.decoder.programs.widths(1):
                self._program(width)
        if not self._in_one_program or self.target.switches.continuous_batching is not None:
            self._one_by_one()

    def update_generation_config(self, generation_config: GenerationConfig) -> None:
        """Replace the sampling rules of both models, as `ForSampling.update_generation_config` does."""
        for model in (self.draft, self.target):
            model.update_generation_config(generation_config)

    def speculative_iteration(
        self, input_ids: Integers, cache_ids: Integers | None = None, start_ids: Integers | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Feed prompts, or make and verify draft tokens once, for callers that batch requests themselves.

        The arguments are those of `forward`. Prompts, whose `cache_ids` begin at 0, return the next token of each row,
        s64[batch, 1], and counts of 1, s64[batch, 1]. With the last token of each row, it returns the next tokens of
        each, s64[batch, k + 1], and their numbers s64[batch, 1]; `pad_token_id` follows them. The caller passes the
        last of them next, at the position after the others. The first call compiles the program that verifies draft
        tokens, unless the target has continuous batching: then `to_neuron` does.
        """
        return self._one_by_one().run(input_ids, cache_ids, start_ids)

    @property
    def _in_one_program(self) -> bool:
        slotted = all(isinstance(model.decoder, SlotDecoder) for model in (self.draft, self.target))
        return slotted and not self.target.family.images  # whose positions the program does not turn

    def _one_by_one(self) -> Rounds:
        if self._rounds is None:
            self.target.compile_also(("verify", self.k), lambda decoder: decoder.verifying(self.k))
            self._rounds = Rounds(self.draft, self.target, self.k, self.pad_token_id)
        return self._rounds

    @property
    def models(self) -> list[ForSampling]:
        """Models that it calls in addition to the target."""
        return [self.draft]

    def sample(self, input_ids: Integers, sequence_length: int, **options: Any) -> Any:
        """Generate tokens as `target.sample` does, with its arguments and its result.

        Rows that an `attention_mask` pads on the right are closed up, as `SpeculativeGenerator.sample` does. Raises
        InputError also for `no_repeat_ngram_size`, `output_scores`, and prompts that serve several rows.
        """
        if self.eos_token_id is not None:
            options = dict(eos_token_override=self.eos_token_id) | options
        if options.get("attention_mask") is not None and padded_on_the_right(options["attention_mask"]):
            mask = options.pop("attention_mask")
            return closed_up(self, input_ids, mask, sequence_length, self.pad_token_id, **options)
        return self.target.sample(input_ids, sequence_length, speculator=self, **options)

    def blocks(self, generation: Generation, count: int) -> Iterator[Array]:
        """Yield blocks of tokens as `Generation.on_devices` does."""
        if not self._in_one_program:
            yield from generation.on_devices(count, 1, self.draft, self.k)
            return
        generation.wanted[:] = count
        self.draft.decoder.feed(generation.prompts)
        yield generation.first()
        while generation.wanted.any():
            yield generation.take(self._run(generation))

    @property
    def _steps(self) -> int:
        """Tokens that one dispatch generates; it may generate up to `k` more."""
        target = self.target.decoder
        return max(target.options.chunk, 1) if target.runtime.loops else 1

    def _program(self, width: int) -> Executable:
        if width not in self._built:
            self._built[width] = self.target.decoder.store.build(SavedModule.of(self._module(width, self._steps)))
        return self._built[width]

    def _run(self, generation: Generation) -> Array:
        target, draft = self.target.decoder, self.draft.decoder
        assert isinstance(target, SlotDecoder) and isinstance(draft, SlotDecoder)
        rows, width = target.capped(generation.rows, self._steps)
        program, pairs = self._program(width), np.zeros(target.slots, PAIR)
        for name in LOOP.names or ():
            pairs[name] = rows[name]
        pairs["previous"][: generation.count] = [history[-2] for history in generation.history]
        caches = [*target.caches, *draft.caches]
        weights = [weight for decoder in (target, draft) for weight in decoder.operands(range(decoder.config.n_layer))]
        for decoder in (target, draft):
            decoder.fill(np.arange(target.slots), rows["position"], rows["left"])
        with target.guarded(), draft.guarded():
            tokens, made, *after = program(target.runtime.put([words(pairs)]), *target.seen_now(), *caches, *weights)
            target.seen, caches = after[:1], after[1:]
            target.caches, draft.caches = caches[: len(target.caches)], caches[len(target.caches) :]
            return target.noted(tokens.numpy())[:, : int(made.numpy())]

    def _module(self, width: int, steps: int) -> HloModuleProto:
        """Write the program.

        Parameters: a row of `PAIR` for each slot; seen;
        caches of target and draft; weights of target and draft. Results: tokens; their number of columns; seen with
        these tokens, and the caches, in place.
        """
        target, draft = self.target.decoder.programs, self.draft.decoder.programs

        def program(scribe: HloScribe) -> list[Tensor]:
            parameters = hlo.Parameters()
            packed = declare_rows(parameters, PAIR, target.slots, "rows")
            seen = target.declare_seen(parameters)
            caches = [each.cache.declare(parameters, each.layers) for each in (target, draft)]
            visible = target.visible(caches[0], width) + draft.visible(caches[1], width)
            checker, guesser = (_Model(scribe, each, parameters, width) for each in (target, draft))
            tokens = hlo.full(NOTHING, "s32", [target.slots, steps + self.k])
            state = [hlo.constant(0, "s32"), *state_of(packed, PAIR), field(packed, PAIR, "previous"), seen, tokens]
            (made, *_, seen_after, tokens), after = looped(
                lambda made, token, position, wanted, *_: hlo.logical_and(made < steps, hlo.any(wanted > 0, 0)),
                self._round(checker, guesser, packed),
                state,
                caches[0] + caches[1],
                visible,
                None if self.target.decoder.runtime.loops else 1,  # it is called only while a row needs tokens
            )
            return [tokens, made, *in_place([seen_after], [seen]), *after]

        return compile_py_func(program)

    def _round(self, target: _Model, draft: _Model, packed: Tensor) -> Callable[..., list[Tensor]]:
        """Return the body of the loop: make draft tokens, verify them, and keep those that are right."""
        policy, eos = rules_of(packed, PAIR)
        layout = target.programs.cache
        split = layout.span(range(len(layout.layers))).stop

        def body(
            made: Tensor, token: Tensor, position: Tensor, wanted: Tensor, previous: Tensor, seen: Tensor,
            tokens: Tensor, *flat: Tensor,
        ) -> list[Tensor]:  # fmt: skip
            active = hlo.convert(wanted > 0, "s32")
            guesses, drafted = self._guesses(draft, token, previous, position, active, seen, policy, flat[split:])
            ids = side_by_side([token, *guesses])
            length = hlo.minimum(wanted, self.k + 1)
            step = Step(ids, position, length, position + length, None, target.width)
            logits, checked = target.run(flat[:split], step, all_positions=True)
            sampled = sampled_after(logits, step, seen, policy)
            count = _right(guesses, sampled, eos, wanted)
            columns = []
            for number, pick in enumerate(sampled):
                used = hlo.logical_and(wanted > 0, number < count)
                pick = hlo.select(used, pick, NOTHING)
                columns.append(pick)
                wanted = hlo.select(used, hlo.select(ends(pick, eos), 0, wanted - 1), wanted)
                previous, position = hlo.select(used, token, previous), position + hlo.convert(used, "s32")
                token = hlo.select(pick < 0, token, pick)
                seen = with_tokens(seen, pick)
            tokens = hlo.dynamic_update_slice(tokens, side_by_side(columns), [hlo.constant(0, "s32"), made])
            return [made + count, token, position, wanted, previous, seen, tokens, *checked, *drafted]

        return body

    def _guesses(
        self, draft: _Model, token: Tensor, previous: Tensor, position: Tensor, active: Tensor, seen: Tensor,
        policy: Tensor, flat: tuple[Tensor, ...],
    ) -> tuple[list[Tensor], list[Tensor]]:  # fmt: skip
        """Return the draft's tokens, s32[b] each, and its caches. It is also fed the token before a row's token: that
        may be its last token of the previous round, which it has not been fed.
        """
        step = Step(side_by_side([previous, token]), position - 1, active * 2, position + active, None, draft.width)
        guesses: list[Tensor] = []
        after = list(flat)
        for number in range(1, self.k + 1):
            logits, after = draft.run(after, step)
            guess = hlo.maximum(sample(hlo.reshape(logits, token.sizes[0], -1), seen, policy, position + number), 0)
            guesses.append(guess)
            seen = with_tokens(seen, guess)
            at = position + number
            step = Step(hlo.reshape(guess, -1, 1), at, active, at + active, None, draft.width)
        return guesses, after


def _right(guesses: Sequence[Tensor], sampled: Sequence[Tensor], eos: Tensor, wanted: Tensor) -> Tensor:
    """Return the number of columns of `sampled` to keep: the fewest right draft tokens of a row, plus one. s32[]"""
    right, running = hlo.full(0, "s32", wanted.sizes), wanted > 0
    ended = wanted <= 0
    for guess, pick in zip(guesses, sampled, strict=False):
        ended = hlo.logical_or(ended, hlo.logical_and(running, ends(pick, eos)))
        running = hlo.logical_and(running, hlo.equal(guess, pick))
        right = right + hlo.convert(running, "s32")
    right = hlo.select(ended, len(sampled), right + 1)
    return hlo.minimum(hlo.min(right, 0), hlo.max(wanted, 0))
