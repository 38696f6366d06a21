"""`bench`: how long prompts and tokens take, in batches of each size, or for many requests of an engine."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from transformers_neuronx.cli import options as o
from transformers_neuronx.cli.engines import open_for_engine
from transformers_neuronx.cli.load import measured_load
from transformers_neuronx.cli.text import complete, room
from transformers_neuronx.errors import ConfigError, TransformersNeuronxError
from transformers_neuronx.models.sampling import ForSampling
from transformers_neuronx.support import files
from transformers_neuronx.support.progress import bar

AT_ONCE = 8  # requests
Batches = Annotated[
    list[int] | None, o.option("--batch-size", "-b", help="Sequences per batch; may be repeated.", default="1", least=1)
]
Prompts = Annotated[
    list[int], o.option("--prompt", "-p", help="Tokens per prompt; may be repeated.", default=True, least=1)
]
News = Annotated[list[int], o.option("--new", "-n", help="Tokens to generate; may be repeated.", default=True, least=1)]
Rounds = Annotated[
    int | None, o.option("--rounds", help="Measurements of each size; medians are shown.", default="5", least=1)
]
Requests = Annotated[
    int | None, o.option("--requests", help="Send an engine this many requests instead of batches.", least=1)
]
Concurrency = Annotated[
    list[int] | None,
    o.option("--concurrency", help="Requests at once, with --requests; may be repeated.", default="8", least=1),
]
Plot = Annotated[str | None, o.option("--plot", help="Also draw a plot to this .svg or .png file; needs matplotlib.")]

# Columns of a result of batches, and of requests: their headings, and how they are formatted.
COLUMNS = dict(
    batch=("batch", "d"),
    prompt=("prompt", "d"),
    new=("new", "d"),
    first_ms=("first ms", ".1f"),
    token_p50_ms=("token p50 ms", ".2f"),
    token_p99_ms=("token p99 ms", ".2f"),
    tokens_per_second=("tokens per second", ".1f"),
)
OF_REQUESTS = dict(
    concurrency=("concurrency", "d"),
    prompt=("prompt", "d"),
    new=("new", "d"),
    ttft_p50_ms=("TTFT p50 ms", ".1f"),
    ttft_p99_ms=("p99 ms", ".1f"),
    itl_p50_ms=("ITL p50 ms", ".2f"),
    itl_p99_ms=("p99 ms", ".2f"),
    tokens_per_second=("tokens/s", ".1f"),
)


def bench(
    model: o.Model,
    batch_size: Batches = None,
    prompt: Prompts = [16, 128],  # noqa: B006 - typer only reads it
    new: News = [64],  # noqa: B006
    rounds: Rounds = None,
    requests: Requests = None,
    concurrency: Concurrency = None,
    plot: Plot = None,
    cache_dir: o.CacheDir = None,
    amp: o.Amp = None,
    tp: o.Degree = None,
    quant: o.Quant = None,
    rounded: o.Rounded = False,
    runtime: o.Runtime = None,
    as_json: o.Json = False,
) -> None:
    """Measure time to first token, latency and throughput.

    Prompts are random tokens. Programs are compiled once for each batch size, or for all requests.
    With --requests, TTFT is the time to first token, and ITL the time between tokens.
    """
    source, how = o.Source(model, cache_dir), o.How(amp, tp, quant, rounded, runtime)
    if plot is not None:
        _check_plot(plot)  # fail before minutes of compiling
    sizes, results = source.fitting(max(prompt), max(new)), list[dict[str, Any]]()
    if requests is not None:
        at_once = _checked(requests, concurrency, batch_size, rounds)
        opened = _fitting(open_for_engine(source, how, max(at_once), sizes), prompt, new)
        results += list(measured_load(opened, requests, at_once, prompt, new))
    elif concurrency:
        raise ConfigError(f"--concurrency {concurrency[0]} needs --requests, the number of requests to send")
    else:
        for batch in batch_size or [1]:
            opened = _fitting(source.open(how, batch_size=batch, **sizes), prompt, new)
            results += list(_measured(opened, prompt, new, rounds or 5))
    if plot is not None:
        _draw(results, plot)
    typer.echo(json.dumps(results) if as_json else _table(results))


def _checked(
    requests: int, concurrency: list[int] | None, batch_size: list[int] | None, rounds: int | None
) -> list[int]:
    """Return the numbers of requests at once. Raises ConfigError for options that do not go with --requests."""
    if batch_size or rounds:
        given = f"--batch-size {batch_size[0]}" if batch_size else f"--rounds {rounds}"
        raise ConfigError(f"{given} does not go with --requests: --concurrency sets how many run at once")
    at_once = concurrency or [min(AT_ONCE, requests)]
    if max(at_once) > requests:
        raise ConfigError(
            f"--concurrency must be at most --requests {requests}, got {max(at_once)}: send more requests"
        )
    return at_once


def _fitting(model: ForSampling, prompt: list[int], new: list[int]) -> ForSampling:
    """Return the model. Raises ConfigError if the sequences are too long for it."""
    if max(prompt) > room(model, max(new)):
        longest = f"n_positions={model.options.buckets.longest} is the longest sequence this model takes"
        raise ConfigError(f"{longest}, got {max(prompt)} prompt tokens and {max(new)} new ones")
    return model


def _measured(
    compiled: ForSampling, prompts: Sequence[int], news: Sequence[int], rounds: int
) -> Iterator[dict[str, Any]]:
    compiled.to_neuron()
    batch = compiled.options.batch_size
    random = np.random.default_rng(0)
    for prompt in prompts:
        for new in news:
            rows = random.integers(0, compiled.config.vocab_size, (batch, prompt)).tolist()
            metrics = []
            with bar(f"{batch} x {prompt} + {new}", rounds + 1) as shown:
                for turn in range(rounds + 1):
                    complete(compiled, rows, new, top_k=1, eos_token_override=-1)
                    metrics += [compiled.metrics] * bool(turn)  # the first one may compile
                    shown.update()
            calls = [each.call for each in metrics]
            latencies = [latency for call in calls for latency in call.token_latencies] or [0.0]
            first = [call.time_to_first_token or 0.0 for call in calls]
            p50, p99 = np.percentile(latencies, [50, 99])
            rate = np.median([each.tokens_per_second for each in metrics])
            values = batch, prompt, new, 1e3 * np.median(first), 1e3 * p50, 1e3 * p99, rate
            yield {
                name: value if isinstance(value, int) else float(value)
                for name, value in zip(COLUMNS, values, strict=True)
            }


def _table(results: Sequence[dict[str, Any]]) -> str:
    columns = OF_REQUESTS if "requests" in results[0] else COLUMNS
    rows = [[format(result[name], how) for name, (_, how) in columns.items()] for result in results]
    lines = [[heading for heading, _ in columns.values()], *rows]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join("  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) for line in lines)


def _draw(results: Sequence[dict[str, Any]], path: str) -> None:
    """Plot throughput and time to first token over the batch size or concurrency, a line for each pair of lengths."""
    figure = _figure(figsize=(9, 3.5), layout="constrained")
    left, right = figure.subplots(1, 2)
    over, first = ("concurrency", "ttft_p50_ms") if "requests" in results[0] else ("batch", "first_ms")
    for prompt, new in sorted({(result["prompt"], result["new"]) for result in results}):
        line = [result for result in results if (result["prompt"], result["new"]) == (prompt, new)]
        places, label = [result[over] for result in line], f"{prompt} + {new}"
        left.plot(places, [result["tokens_per_second"] for result in line], "o-", label=label)
        right.plot(places, [result[first] for result in line], "o-", label=label)
    for axes, title in ((left, "tokens per second"), (right, "ms to first token")):
        axes.set(title=title, xlabel="batch size" if over == "batch" else over, ylim=(0, None))
        axes.grid(alpha=0.3)
    left.legend(title="prompt + new tokens", fontsize="small")
    picture = io.BytesIO()
    figure.savefig(picture, format=Path(path).suffix[1:])
    files.save(Path(path).expanduser(), picture.getvalue(), "the plot")


def _check_plot(path: str) -> None:
    """Raise ConfigError if a plot cannot be drawn or written there."""
    kinds = _figure().canvas.get_supported_filetypes()
    if Path(path).suffix[1:].lower() not in kinds:
        raise ConfigError(f"--plot must end in one of .{', .'.join(sorted(kinds))}, got {path!r}")
    files.want_writable(Path(path).expanduser())


def _figure(**options: Any) -> Any:
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise TransformersNeuronxError('--plot needs matplotlib: pip install "transformers-neuronx[plot]"') from error
    return Figure(**options)
