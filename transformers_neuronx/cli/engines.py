"""Engines of commands: a model opened for one, an engine sized for a job, and requests whose results come in order."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import Any, TypeVar

from transformers_neuronx.cli import options as o
from transformers_neuronx.errors import EngineError
from transformers_neuronx.models.sampling import ForSampling
from transformers_neuronx.runtimes import get_runtime
from transformers_neuronx.serving.engine import Engine
from transformers_neuronx.serving.handles import Handle
from transformers_neuronx.serving.request import SamplingParams

ROWS = 16  # requests at once by default, over pages
SLOTS = 8  # without pages, and longest sequences in a cache: each takes as much memory
FEW, FEW_STEP = 4, 32  # for jobs of so few requests: rows, and tokens of a step
STEP = 128  # tokens; longer ones cost as much for each token
WINDOW = 8  # submitted requests for each that runs at once, so that the others need not wait for a long one

T = TypeVar("T")
Ask = tuple[list[int], SamplingParams]


def open_for_engine(source: o.Source, how: o.How, rows: int | None, sizes: dict[str, Any], **where: Any) -> ForSampling:
    """Open a model that answers up to `rows` requests at once, by default ROWS or SLOTS; it is not on a device yet.

    Over pages it needs no slots of its own. Otherwise it has one for each request, and programs take one prompt at a
    time, as prompts seldom come together.
    """
    source.want_text()
    if has_pages(source.open(how, without_weights=True, **sizes)):
        return source.open(how, **sizes, **where)
    if not source.is_artifact:
        sizes = sizes | dict(batch_size=rows or SLOTS, prompt_batch_size=1)
    return source.open(how, **dict(batch_size=rows) | sizes, **where)


def has_pages(model: ForSampling) -> bool:
    """Whether an engine of a model that may be on no device yet has a cache in pages, and programs of its own."""
    switches = model.switches
    runtime = get_runtime(switches.runtime, model.options.tp_degree, device=False, workers=switches.workers)
    return model.decoder_on(runtime).programs.reads_pages


def engine_for(model: ForSampling, rows: int, cached: int, steps: dict[str, Any], **options: Any) -> Engine:
    """Return an engine for up to `rows` requests at once, with a cache for `cached` of the longest sequences.

    Sizes that do not depend on a job's prompts let the next job find its programs in the compile cache. Without pages,
    the model's slots are the cache, and set the sizes; `steps` are the sizes of steps over pages.
    """
    if not model.decoder.programs.reads_pages:
        return Engine(model, **options)
    return Engine(model, rows=rows, cache_tokens=cached * model.options.buckets.longest, **steps, **options)


def engine_for_job(model: ForSampling, requests: int, at_once: int | None) -> Engine:
    """Return an engine for this many requests, `at_once` of them, if given. A few of them start faster in a small one.

    Steps are as long as they may be: nobody waits for a single token.
    """
    usual, step = (FEW, FEW_STEP) if requests <= FEW else (ROWS, STEP)
    rows = min(at_once, requests) if at_once else usual
    step = max(step, rows)
    steps = dict(step_tokens=step, joined_tokens=step)
    queue = dict(waiting=WINDOW * rows, waiting_tokens=WINDOW * rows * model.options.buckets.longest)
    return engine_for(model, rows, rows if at_once else min(usual, SLOTS), steps, adjustments=False, **queue)


def in_order(engine: Engine, asked: Iterable[tuple[T, Ask | None]], window: int) -> Iterator[tuple[T, Handle | None]]:
    """Submit requests, and yield each with its handle as soon as it and all before it have ended.

    At most `window` that were not yielded are submitted, so that any number of them takes little memory. What asks for
    nothing, None, has no handle.
    """
    coming, flying = iter(asked), deque[tuple[T, Handle | None]]()
    while True:
        while len(flying) < window and (each := next(coming, None)):
            flying.append((each[0], engine.submit(*each[1]) if each[1] else None))
        if not flying:
            return
        what, handle = flying.popleft()
        if handle:
            with suppress(EngineError):  # the handle raises it again
                handle.result()
        yield what, handle
