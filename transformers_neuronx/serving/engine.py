"""An engine: many callers submit requests, and one thread answers them together.

engine = Engine(model)
handle = engine.submit([5, 6, 7], SamplingParams(max_tokens=8, temperature=0))
tokens = list(handle)  # or: async for token in handle
"""

from __future__ import annotations

import atexit
import itertools
import logging
import os
import threading
from collections.abc import Sequence
from functools import cached_property
from time import monotonic
from typing import Any, cast

import numpy as np
import torch

from transformers_neuronx.engine.decoder import Decoder
from transformers_neuronx.engine.family import EncoderDecoderConfig
from transformers_neuronx.engine.inputs import read_numbers
from transformers_neuronx.engine.outputs import labels_of, want_head, want_score
from transformers_neuronx.errors import EngineError, InputError
from transformers_neuronx.layers.rotary import rotation_group
from transformers_neuronx.runtimes.base import want_devices
from transformers_neuronx.serving.adapters import HostAdapter
from transformers_neuronx.serving.guesses import PromptLookup
from transformers_neuronx.serving.handles import WATCH, Handle, Task, await_news, await_others, wake
from transformers_neuronx.serving.kv_cache import KVCache
from transformers_neuronx.serving.limits import Limits
from transformers_neuronx.serving.loop import Loop
from transformers_neuronx.serving.pages import Pages
from transformers_neuronx.serving.parts import (
    adapters_of,
    check,
    compile_parts,
    content_of,
    drafts_of,
    guesser_for,
    measured,
    paged_cache,
    pictured_in,
    steps_of,
)
from transformers_neuronx.serving.records import EngineMetrics, Records
from transformers_neuronx.serving.request import NO_SOURCE, Array, Request, SamplingParams
from transformers_neuronx.serving.scheduler import Scheduler
from transformers_neuronx.serving.structured import Grammars
from transformers_neuronx.serving.text import TextStream
from transformers_neuronx.support.turns import take_all

_LOG = logging.getLogger(__name__)

GATHER = 0.02  # of a mean step: so long each request that comes while nothing runs waits for another
POOLINGS = ("last", "mean", "cls")


class Engine:
    """Answers requests of any number of threads with one model, which must be on its devices (`to_neuron`).

    - `rows`: most requests that run at once. Default 32; without pages, the model's `batch_size`, and at most that.
    - `step_tokens`: most tokens of a step; longer prompts are computed in chunks. Default 256.
    - `joined_tokens`: most tokens of a step while some requests wait for their next token. Fewer make their tokens come
      more evenly, and prompts slower. Default: as many as take at most 2.5 times as long as eight rows, which is
      measured; fewer far into a prompt, where they take longer.
    - `cache_tokens`: positions that the cache has room for, in all sequences together. Default: `rows` times a quarter
      of the model's `n_positions`, but at least one sequence of that length.
    - `waiting`, `waiting_tokens`: most requests, and tokens of prompts, that wait. More raise QueueFullError.
    - `tokenizer`: a tokenizer of Transformers, for `Handle.text` and stop strings. Default: none.
    - `draft`: what proposes draft tokens, which a step verifies: a `PromptLookup`, a smaller model with the same
      vocabulary, on its devices, or an `EagleDraft` for this model. Tokens are the same as without it. Default: none.
    - `draft_tokens`: most draft tokens of a request in a step. It gets fewer where these do not pay, by the times that
      are measured, unless `joined_tokens` are given. Default 4.
    - `max_loras`: adapters that running requests may have at once; others wait for a place. Programs with places for
      adapters are made for them. Default 0: none.
    - `max_lora_rank`: the highest rank of an adapter. Default 16.
    - `adjustments`: whether requests may change or see logits: `logit_bias`, `mask`, `structured_outputs`,
      `min_tokens`, presence and frequency penalties, `logprobs`, `prompt_logprobs`; and whether
      prompts may be embedded. They take almost half of the programs. Default True.

    On the CPU, with kernels, the engine has a cache of its own, in pages, and calls of the model stay possible.
    Elsewhere it uses the model's slots, and such calls wait until it is closed. Its thread ends with `close()`, or at
    the end of a `with` block. Raises ConfigError for a model that it cannot run.
    """

    _closed = _recovering = False

    def __init__(
        self, model: Any, *, rows: int | None = None, step_tokens: int = 256, joined_tokens: int | None = None,
        cache_tokens: int | None = None, waiting: int = 4096, waiting_tokens: int = 2**24, tokenizer: Any = None,
        draft: PromptLookup | Any = None, draft_tokens: int = 4, adjustments: bool = True,
        max_loras: int = 0, max_lora_rank: int = 16,
    ) -> None:  # fmt: skip
        decoder: Decoder = model.decoder
        paged = decoder.programs.reads_pages
        rows = (32 if paged else decoder.slots) if rows is None else rows
        check(rows, step_tokens, decoder, paged)
        guesses, longest = 0 if draft is None else draft_tokens, decoder.options.buckets.longest
        limits = Limits(step_tokens, step_tokens, rows, longest, waiting, waiting_tokens, guesses)
        drafts = drafts_of(draft, model, limits)
        cache = paged_cache([decoder, *drafts], cache_tokens, limits) if paged else KVCache([Pages(rows, longest)])
        self._model, self.tokenizer, self._adjustments = model, tokenizer, adjustments
        self.longest, self.vocab_size = longest, decoder.config.vocab_size  # positions of a sequence; tokens
        steps = steps_of(model, draft, cache, limits, adjustments, adapters_of(decoder, max_loras, max_lora_rank))
        called = [] if paged else [model, draft] if drafts else [model]
        self._within = take_all([each.turns for each in called], "an engine")
        self._ends = frozenset(model.eos_token_ids)
        self._ids, self._records = itertools.count(), Records()
        self._handles: dict[int, Handle] = {}
        self._turn = threading.Condition()  # who has it may change the scheduler
        self._untold: list[Request] = []  # they have tokens that their handles do not know yet
        self._moved = monotonic()  # when a step ended, or the first request came
        compile_parts(model.tag, steps, guesser := guesser_for(draft, drafts if paged else [], cache, limits))
        self._max_lora_rank = max_lora_rank
        self.scheduler = Scheduler(cache, measured(limits, steps, guesser, joined_tokens), max_loras)
        self._loop = Loop(steps, self.scheduler, guesser, self._turn)
        self._thread = threading.Thread(target=self._serve, name="engine", daemon=True)
        self._thread.start()
        atexit.register(self.close)  # a thread must not be inside a program when the interpreter goes

    def submit(
        self, prompt: Sequence[int], params: SamplingParams | None = None, source: Any = None, *,
        pixel_values: Any = None, image_grid_thw: Any = None,
    ) -> Handle:  # fmt: skip
        """Let a prompt, token ids, be continued. Return at once. For a model with an encoder it is the source.

        If a model's sources are numbers, `source` is one of them, such as f32[mel bins, frames]. The prompt is then
        what the decoder begins with, by default its start token. The last two arguments are the images of a prompt, for
        models that read some: see `VisionForSampling`.

        Raises InputError for a prompt, a source or images that the model cannot serve, and QueueFullError if too much
        is waiting.
        """
        params = params or SamplingParams()
        want_head(self._model.decoder.options, self._model.tag, "generate")
        tokens = self._checked(prompt, [*params.logit_bias, *params.stop_token_ids])
        if params.sees_logits and not self._adjustments:
            raise InputError("this engine was made with adjustments=False: its requests cannot change or see logits")
        if (params.stop or params.structured_outputs) and self.tokenizer is None:
            what = "stop strings" if params.stop else "structured_outputs"
            raise InputError(f"{what} need an engine with a tokenizer: Engine(model, tokenizer=…)")
        ends = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else self._ends)
        adapter = self.scheduler.adapters.named(params.adapter)
        salt = self._salt(tokens, params.cache_salt, adapter)
        source, tokens = _divided(self._model.decoder, tokens, source)
        images = pictured_in(self._model, tokens, pixel_values, image_grid_thw)
        outputs = params.structured_outputs
        parsers = self._grammars.parsers(outputs, params.n) if outputs else [None] * params.n

        def request(stream: int) -> Request:
            how = params.stop, params.include_stop_str_in_output, not params.skip_special_tokens
            text = TextStream(self.tokenizer, tokens, *how) if self.tokenizer else None
            own = ends, salt, source, adapter, images, text, parsers[stream], stream
            return Request(next(self._ids), list(tokens), params, *own)

        return self._take([request(stream) for stream in range(params.n)])

    def load_adapter(self, name: str, directory: str | os.PathLike[str]) -> None:
        """Let requests choose the LoRA adapter of a directory, as PEFT saves it, by a name. Nothing is compiled.

        It stays in the memory of the host; running requests bring it to the devices. Raises InputError if the name is
        taken, and CheckpointError for an adapter that is damaged, is not for this model or has too high a rank.
        """
        self.scheduler.adapters.want_new(name)
        content = content_of(directory, self._model.decoder, self._max_lora_rank)
        with self._turn:
            self.scheduler.adapters.add(name, content)

    def unload_adapter(self, name: str) -> None:
        """Let no more requests choose an adapter. Those that have it keep it. Raises InputError if there is none."""
        with self._turn:
            self.scheduler.adapters.remove(name)

    @property
    def adapters(self) -> list[str]:
        """The names of the adapters that requests may choose."""
        return sorted(self.scheduler.adapters.known)

    @cached_property
    def _grammars(self) -> Grammars:
        return Grammars(self.tokenizer, self.vocab_size, self._ends)

    def embed(
        self, prompt: Sequence[int], pooling: str = "last", *,
        priority: int = 0, cache_salt: str = "", adapter: str | None = None,
    ) -> Handle:  # fmt: skip
        """Let the last hidden states of a prompt, token ids, become one vector: `Handle.embedding`. Return at once.

        `pooling` takes that of the "last" token, that of the first one ("cls"), or the "mean" of all. Raises
        InputError for a prompt or a model that cannot be served, and QueueFullError if too much is waiting.
        """
        if pooling not in POOLINGS:
            raise InputError(f"pooling must be {', '.join(POOLINGS[:-1])} or {POOLINGS[-1]}, got {pooling!r}")
        if not self._loop.steps.embeds:
            raise InputError("embeddings need a decoder whose cache is in pages, and an engine with adjustments=True")
        tokens = self._checked(prompt)
        params = SamplingParams(max_tokens=1, priority=priority, cache_salt=cache_salt)
        own = self.scheduler.adapters.named(adapter)
        pictured_in(self._model, tokens)  # it must have none
        how: dict[str, Any] = dict(salt=self._salt(tokens, cache_salt, own), adapter=own, pooling=pooling)
        return self._take([Request(next(self._ids), tokens, params, labels=len(self.labels), **how)])

    def classify(self, prompt: Sequence[int], **options: Any) -> Handle:
        """Let a score head, that of a classifier or a reward model, make logits of a prompt's last token:
        `Handle.logits`. Return at once. Options are `priority`, `cache_salt` and `adapter`, as those of `embed`.

        Raises InputError for a model without a score head, and otherwise as `embed` does.
        """
        want_score(self._model.decoder.options, self._model.tag)
        return self.embed(prompt, **options)

    @cached_property
    def labels(self) -> list[str]:
        """The names of the labels of the model's score head, as its configuration has them; none without a head."""
        return labels_of(self._model.decoder.options, vars(self._model.config))

    @property
    def problem_type(self) -> str | None:
        """What a classifier was trained for, as its configuration says: "regression", "single_label_classification",
        "multi_label_classification", or None.
        """
        return getattr(self._model.config, "problem_type", None)

    def _checked(self, prompt: Sequence[int], others: Sequence[int] = ()) -> list[int]:
        """Return a prompt as a list. Raises InputError for ids, there or among others, that the model does not have."""
        tokens, vocab = [int(token) for token in prompt], self.vocab_size
        if wrong := [token for token in (*tokens, *others) if not 0 <= token < vocab]:
            raise InputError(f"token ids must be from 0 to {vocab - 1}, got {wrong[0]}")
        return tokens

    def _salt(self, tokens: list[int], salt: str, adapter: HostAdapter | None = None) -> bytes:
        own = f"{adapter.number} " if adapter else ""
        return f"{own}{rotation_group(self._model.decoder.config, len(tokens))} {salt}".encode()

    def _take(self, requests: list[Request]) -> Handle:
        with self._turn:
            if self._closed:
                raise EngineError("the engine is closed")
            if self._loop.idle:
                self._moved = monotonic()
            for number, request in enumerate(requests):
                try:
                    self.scheduler.add(request)
                except InputError:
                    for earlier in requests[:number]:
                        self._end(earlier)
                    raise
                self._handles[request.id] = Handle(request, self._cancel)
            choices = tuple(self._handles[request.id] for request in requests)
            for handle in choices:
                handle.choices = choices
            self._turn.notify_all()
        return choices[0]

    def healthy(self, patience: float) -> bool:
        """Whether it is open, and has nothing to do, or has finished a step or lost workers in the last `patience`
        seconds.
        """
        if self._closed or not self._thread.is_alive():
            return False
        return (self._loop.idle and not self._recovering) or monotonic() - self._moved < patience

    @property
    def ready(self) -> bool:
        """Whether a request that comes now can start: not while lost worker processes start again."""
        return not (self._closed or self._recovering)

    @property
    def metrics(self) -> EngineMetrics:
        """What it does now, and totals of all requests."""
        return EngineMetrics(self._model.tag, self._records, self.scheduler)

    def close(self) -> None:
        """End all requests, and the thread. A closed engine takes no requests."""
        with self._turn:
            self._closed = True
            self._turn.notify_all()
        if threading.current_thread() is not self._thread:
            self._thread.join()
        atexit.unregister(self.close)

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _serve(self) -> None:
        """Be the engine's thread: answer requests until the engine is closed."""
        failed = None
        try:
            with self._within:
                self._answer()
        except BaseException as error:
            failed = error
            raise
        finally:
            with self._turn:
                self._closed = True
                self._end_all("error" if failed else "abort", failed)

    def _answer(self) -> None:
        while True:
            await_news(self._turn, self._has_news, self._model.decoder.store.load_one)
            if self._closed:
                break
            try:
                want_devices(self._model.decoder.runtime)
                with self._turn:
                    if self.scheduler.waiting and not self.scheduler.running:
                        self._tell(self._untold)  # whoever was answered may ask again
                        self._untold = []
                        await_others(self._turn, GATHER * self._records.steps.mean)
                self._loop.start()
                self._tell(self._untold)  # while the devices compute, and this thread has nothing else to do
                self._untold = self._loop.finish()
                before, self._moved = self._moved, monotonic()
                self._records.steps.add(self._moved - before)
                self._loop.took(self._moved - before)
            except BaseException as error:
                self._recover(error)

    def _has_news(self) -> bool:
        return bool(self._closed or self._untold or not self._loop.idle or self._model.decoder.runtime.lost)

    def _recover(self, error: BaseException) -> None:
        """Let all requests fail, and empty the caches. This takes long if worker processes must start again.

        Meanwhile others may submit requests, which wait. While workers do not come back, these fail, too.
        """
        self._untold, self._recovering, self._moved = [], True, monotonic()
        while not self._closed:
            with self._turn:
                self._loop.forget()
                self._end_all("error", error)
            try:
                self._loop.reset()
                break
            except EngineError as another:
                _LOG.error("the engine cannot go on yet: %s", another)
                error = another
                with self._turn:
                    self._turn.wait_for(lambda: self._closed, WATCH)
        self._recovering, self._moved = False, monotonic()

    def _tell(self, sampled: list[Request]) -> None:
        """Let those know who wait for these requests, whose tokens came when the last step ended."""
        tasks: list[Task] = []
        records, now = self._records, monotonic()
        with self._turn:
            for work in self._loop.begun:
                if work.of_prompt and (handle := self._handles.get(work.request.id)):
                    records.start(handle.times, now)
            for request in sampled:
                if handle := self._handles.get(request.id):
                    records.tell(handle.times, request, self._moved)
                    tasks += self._end(request) if request.reason is not None else handle.tell(ended=False)
        wake(tasks)

    def _cancel(self, request: Request) -> None:
        with self._turn:
            wake(self._end(request))

    def _end(self, request: Request, reason: str = "abort", error: BaseException | None = None) -> Sequence[Task]:
        """End a request, if it has not ended. Return who must be woken."""
        self.scheduler.abort(request, reason)
        handle = self._handles.pop(request.id, None)
        if handle is None:
            return ()
        self._records.end(handle.times, request, monotonic())
        return handle.tell(True, error or request.error)

    def _end_all(self, reason: str, error: BaseException | None = None) -> None:
        requests = [handle.request for handle in self._handles.values()]
        wake([task for request in requests for task in self._end(request, reason, error)])


def _divided(decoder: Decoder, tokens: list[int], source: Any) -> tuple[Array, list[int]]:
    """Return what an encoder reads, and what the decoder continues."""
    config, reads = cast(EncoderDecoderConfig, decoder.config), decoder.memory.layout is not None
    if reads and config.source_sizes:
        numbers = read_numbers(torch.zeros(0) if source is None else torch.as_tensor(source)[None], config.source_sizes)
        return numbers[0], tokens or [config.decoder_start_token_id]
    if source is not None:
        raise InputError("source is for models whose encoder reads numbers: pass what is read as the prompt")
    if not reads:
        return NO_SOURCE, tokens
    if not 1 <= len(tokens) <= (longest := decoder.options.buckets.sources[-1]):
        raise InputError(f"a source must have from 1 to {longest} tokens (context_length_estimate), got {len(tokens)}")
    return np.array(tokens, np.int32), [config.decoder_start_token_id]
