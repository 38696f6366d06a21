"""What many requests wait for: figures of their times, and the times of requests that an engine here answers."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any, TypeVar

import numpy as np

from transformers_neuronx.cli.engines import STEP, engine_for, has_pages
from transformers_neuronx.errors import ConfigError
from transformers_neuronx.models.sampling import ForSampling
from transformers_neuronx.serving.request import SamplingParams
from transformers_neuronx.support.progress import bar

PROMPTS, NEWS, AT_ONCE = (16, 128), (64,), 8  # by default: tokens, and requests at once
LIMITED = ("ttft", "tpot", "e2el")  # what goodput may limit

T = TypeVar("T")


@dataclass
class Call:
    """One request: when it was sent, when pieces of its answer came, and when it ended, in seconds of one clock.

    With an `error` it failed, and only `sent` and `ended` mean anything.
    """

    sent: float
    came: list[float]
    ended: float
    prompt_tokens: int
    output_tokens: int
    error: str | None = None

    @property
    def ttft(self) -> float:
        """Seconds to the first piece."""
        return self.came[0] - self.sent

    @property
    def tpot(self) -> float:
        """Seconds for each token after the first one; 0 if there is none."""
        return (self.ended - self.came[0]) / (self.output_tokens - 1) if self.output_tokens > 1 else 0.0

    @property
    def e2el(self) -> float:
        """Seconds to the end."""
        return self.ended - self.sent


def figures(calls: Sequence[Call], limits: Mapping[str, float] | None = None) -> dict[str, Any]:
    """Return what the callers waited for and what they got together, by the definitions of `vllm bench serve`.

    TTFT is the time to the first piece of an answer, ITL each time between two pieces, TPOT a request's time for each
    token after the first, E2EL the time to the end: mean and percentiles in ms, None if there are none. Rates are for a
    second between the first request and the last end. Of failed requests only the time counts. With `limits` in ms of
    some of LIMITED, goodput is about the requests that keep all of them; its share is one of all requests.
    """
    done = [call for call in calls if call.error is None]
    waits: dict[str, list[float]] = dict(
        ttft=[call.ttft for call in done],
        tpot=[call.tpot for call in done if call.output_tokens > 1],
        itl=[gap for call in done for gap in np.diff(call.came)],
        e2el=[call.e2el for call in done],
    )
    found: dict[str, Any] = {
        f"{name}_{which}_ms": value for name, waited in waits.items() for which, value in _spread(waited).items()
    }
    seconds = max(call.ended for call in calls) - min(call.sent for call in calls)
    prompt, output = sum(call.prompt_tokens for call in done), sum(call.output_tokens for call in done)
    rates = dict(requests=len(done), tokens=output, total_tokens=prompt + output)
    if limits:
        kept = [all(1e3 * getattr(call, name) <= most for name, most in limits.items()) for call in done]
        rates |= dict(goodput=sum(kept))
        found |= dict(goodput_share=sum(kept) / len(calls))
    found |= {f"{name}_per_second": count / seconds for name, count in rates.items()}
    return found | dict(prompt_tokens=prompt, output_tokens=output, seconds=seconds)


def _spread(seconds: Sequence[float]) -> dict[str, float | None]:
    ms = 1e3 * np.array(seconds)
    values = map(float, (ms.mean(), *np.percentile(ms, [50, 90, 99]))) if seconds else [None] * 4
    return dict(zip(("mean", "p50", "p90", "p99"), values, strict=True))


def at_once(requests: int, concurrency: Sequence[int] | None) -> Sequence[int]:
    """Return the numbers of requests at once that are asked for. Raises ConfigError if there are not as many."""
    found = concurrency or [min(AT_ONCE, requests)]
    if max(found) > requests:
        raise ConfigError(f"--concurrency must be at most --requests {requests}, got {max(found)}: send more requests")
    return found


async def answered(
    answer: Callable[[T], Awaitable[Call]], asked: Sequence[T], at: Sequence[float], most: int | None, shown: Any
) -> list[Call]:
    """Ask for answers, each at its time in seconds from now, but not more than `most` at once. Return their times.

    `shown` is a progress bar. With all at time 0, each starts as soon as one before it ends.
    """
    began, gate = perf_counter(), asyncio.Semaphore(most or len(asked))

    async def one(each: T, when: float) -> Call:
        await asyncio.sleep(began + when - perf_counter())
        async with gate:
            call = await answer(each)
        shown.update()
        return call

    return await asyncio.gather(*map(one, asked, at))


def measured_load(
    model: ForSampling, requests: int, concurrencies: Sequence[int], prompts: Sequence[int], news: Sequence[int]
) -> Iterator[dict[str, Any]]:
    """Yield a result for each number of requests at once, prompt length and number of new tokens.

    One engine answers all of them. Its prompts are random and differ, so that none is in its cache.
    """
    model.to_neuron(ahead=not has_pages(model))
    rows, random = max(concurrencies), np.random.default_rng(0)
    with engine_for(model, rows, rows, dict(step_tokens=max(STEP, rows)), adjustments=False) as engine:

        async def answer(asked: tuple[list[int], SamplingParams]) -> Call:
            sent = perf_counter()
            came = [perf_counter() async for _ in engine.submit(*asked)]
            return Call(sent, came, came[-1], len(asked[0]), len(came))

        for concurrency in concurrencies:
            for prompt in prompts:
                for new in news:
                    ids = random.integers(0, model.config.vocab_size, (requests + 1, prompt)).tolist()
                    params = SamplingParams(max_tokens=new, temperature=0, ignore_eos=True)
                    engine.submit(ids.pop(), params).result()
                    asked = [(each, params) for each in ids]
                    with bar(f"{concurrency} at once: {prompt} + {new}", requests) as shown:
                        calls = asyncio.run(answered(answer, asked, [0.0] * requests, concurrency, shown))
                    yield dict(requests=requests, concurrency=concurrency, prompt=prompt, new=new) | figures(calls)
