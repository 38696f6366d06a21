"""What many requests of an engine wait for: time to first token, time between tokens, and tokens per second."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from time import perf_counter
from typing import Any

import numpy as np

from transformers_neuronx.cli.engines import STEP, engine_for, has_pages
from transformers_neuronx.models.sampling import ForSampling
from transformers_neuronx.serving.engine import Engine
from transformers_neuronx.serving.request import SamplingParams
from transformers_neuronx.support.progress import bar


def measured_load(
    model: ForSampling, requests: int, concurrencies: Sequence[int], prompts: Sequence[int], news: Sequence[int]
) -> Iterator[dict[str, Any]]:
    """Yield a result for each number of requests at once, prompt length and number of new tokens.

    One engine answers all of them. Its prompts are random and differ, so that none is in its cache.
    """
    model.to_neuron(ahead=not has_pages(model))
    rows, random = max(concurrencies), np.random.default_rng(0)
    with engine_for(model, rows, rows, dict(step_tokens=max(STEP, rows)), adjustments=False) as engine:
        for concurrency in concurrencies:
            for prompt in prompts:
                for new in news:
                    sent = random.integers(0, model.config.vocab_size, (requests + 1, prompt)).tolist()
                    engine.submit(sent.pop(), SamplingParams(max_tokens=new, ignore_eos=True)).result()
                    with bar(f"{concurrency} at once: {prompt} + {new}", requests) as shown:
                        times = asyncio.run(_sent(engine, sent, new, concurrency, shown))
                    given = dict(requests=requests, concurrency=concurrency, prompt=prompt, new=new)
                    yield given | _figures(times)


async def _sent(engine: Engine, prompts: Sequence[list[int]], new: int, concurrency: int, shown: Any) -> list[Any]:
    """Send prompts, so many at once. Return for each when it was sent, and when its tokens came, in seconds."""
    left, times = iter(prompts), list[list[float]]()
    params = SamplingParams(max_tokens=new, temperature=0, ignore_eos=True)

    async def one_after_another() -> None:
        for prompt in left:
            sent = perf_counter()
            times.append([sent, *[perf_counter() async for _ in engine.submit(prompt, params)]])
            shown.update()

    await asyncio.gather(*(one_after_another() for _ in range(concurrency)))
    return times


def _figures(times: Sequence[Sequence[float]]) -> dict[str, float]:
    first = [came[1] - came[0] for came in times]
    between = [gap for came in times for gap in np.diff(came[1:])] or [0.0]
    seconds = max(came[-1] for came in times) - min(came[0] for came in times)
    tokens = sum(len(came) - 1 for came in times)
    ttft, itl = (1e3 * np.percentile(values, [50, 99]) for values in (first, between))
    return dict(
        ttft_p50_ms=float(ttft[0]),
        ttft_p99_ms=float(ttft[1]),
        itl_p50_ms=float(itl[0]),
        itl_p99_ms=float(itl[1]),
        tokens_per_second=tokens / seconds,
        seconds=seconds,
    )
