"""`bench`: how long prompts and tokens take, for each batch size and prompt length."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from transformers_neuronx.cli import options as o
from transformers_neuronx.cli.text import complete, room
from transformers_neuronx.errors import ConfigError, TransformersNeuronxError
from transformers_neuronx.models.sampling import ForSampling
from transformers_neuronx.support import files
from transformers_neuronx.support.progress import bar

Batches = Annotated[
    list[int], o.option("--batch-size", "-b", help="Sequences per batch; may be repeated.", default=True, least=1)
]
Prompts = Annotated[
    list[int], o.option("--prompt", "-p", help="Tokens per prompt; may be repeated.", default=True, least=1)
]
News = Annotated[list[int], o.option("--new", "-n", help="Tokens to generate; may be repeated.", default=True, least=1)]
Rounds = Annotated[
    int, o.option("--rounds", help="Measurements of each size; medians are shown.", default=True, least=1)
]
Plot = Annotated[str | None, o.option("--plot", help="Also draw a plot to this .svg or .png file; needs matplotlib.")]

# Columns of a result, and how they are formatted.
COLUMNS = dict(
    batch="d", prompt="d", new="d", first_ms=".1f", token_p50_ms=".2f", token_p99_ms=".2f", tokens_per_second=".1f"
)


def bench(
    model: o.Model,
    batch_size: Batches = [1],  # noqa: B006 - typer only reads it
    prompt: Prompts = [16, 128],  # noqa: B006
    new: News = [64],  # noqa: B006
    rounds: Rounds = 5,
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

    Prompts are random tokens. Programs are compiled once for each batch size.
    """
    source, how = o.Source(model, cache_dir), o.How(amp, tp, quant, rounded, runtime)
    if plot is not None:
        _check_plot(plot)  # fail before minutes of compiling
    sizes, results = source.fitting(max(prompt), max(new)), list[dict[str, Any]]()
    for batch in batch_size:
        model_of_size = source.open(how, batch_size=batch, **sizes)
        if max(prompt) > room(model_of_size, max(new)):
            longest = f"n_positions={model_of_size.options.buckets.longest} is the longest sequence this model takes"
            raise ConfigError(f"{longest}, got {max(prompt)} prompt tokens and {max(new)} new ones")
        results += list(_measured(model_of_size, prompt, new, rounds))
    if plot is not None:
        _draw(results, plot)
    typer.echo(json.dumps(results) if as_json else _table(results))


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
    names = [name.replace("_", " ") for name in COLUMNS]
    rows = [[format(result[name], how) for name, how in COLUMNS.items()] for result in results]
    widths = [max(map(len, column)) for column in zip(names, *rows, strict=True)]
    lines = [names, *rows]
    return "\n".join("  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) for line in lines)


def _draw(results: Sequence[dict[str, Any]], path: str) -> None:
    """Plot throughput and time to first token over the batch size, a line per prompt length and token count."""
    figure = _figure(figsize=(9, 3.5), layout="constrained")
    left, right = figure.subplots(1, 2)
    for prompt, new in sorted({(result["prompt"], result["new"]) for result in results}):
        line = [result for result in results if (result["prompt"], result["new"]) == (prompt, new)]
        batches, label = [result["batch"] for result in line], f"{prompt} + {new}"
        left.plot(batches, [result["tokens_per_second"] for result in line], "o-", label=label)
        right.plot(batches, [result["first_ms"] for result in line], "o-", label=label)
    for axes, title in ((left, "tokens per second"), (right, "ms to first token")):
        axes.set(title=title, xlabel="batch size", ylim=(0, None))
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
