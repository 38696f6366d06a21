"""`bench`: how long prompts and tokens take, in batches of each size, or for many requests of an engine or a server."""

from __future__ import annotations

import io
import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from transformers_neuronx.cli import nodes as n, options as o, traffic as t
from transformers_neuronx.cli.engines import open_for_engine
from transformers_neuronx.cli.load import NEWS, PROMPTS, at_once, measured_load
from transformers_neuronx.cli.text import complete, encodable, room
from transformers_neuronx.errors import ConfigError, TransformersNeuronxError
from transformers_neuronx.models.sampling import ForSampling
from transformers_neuronx.support import files
from transformers_neuronx.support.progress import bar

REQUESTS = 100  # of a server
Batches = Annotated[
    list[int] | None, o.option("--batch-size", "-b", help="Sequences per batch; may be repeated.", default="1", least=1)
]
Prompts = Annotated[
    list[int] | None,
    o.option("--prompt", "-p", help="Tokens per prompt; may be repeated.", default="16, 128", least=1),
]
News = Annotated[
    list[int] | None, o.option("--new", "-n", help="Tokens to generate; may be repeated.", default="64", least=1)
]
Rounds = Annotated[
    int | None, o.option("--rounds", help="Measurements of each size; medians are shown.", default="5", least=1)
]
Requests = Annotated[
    int | None,
    o.option(
        "--requests",
        help="Send an engine this many requests instead of batches; a server gets 100 if not set.",
        least=1,
    ),
]
Concurrency = Annotated[
    list[int] | None, o.option("--concurrency", help="Requests at once; may be repeated.", default="8", least=1)
]
Plot = Annotated[str | None, o.option("--plot", help="Also draw a plot to this .svg or .png file; needs matplotlib.")]
Url = Annotated[
    str | None, o.option("--url", help="Measure a server with OpenAI's interface: http://HOST:PORT/v1.", panel=o.SERVER)
]
ModelName = Annotated[
    str | None, o.option("--model-name", help="Model in requests; by default the server's first one.", panel=o.SERVER)
]
Key = Annotated[
    str | None, o.option("--api-key", help="Key in requests; by default that in OPENAI_API_KEY.", panel=o.SERVER)
]
Vocabulary = Annotated[
    int | None,
    o.option(
        "--vocab", help="Draw token ids below this; by default those that /tokenize gives.", panel=o.SERVER, least=1
    ),
]

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
    rate=("rate", "g"),
    concurrency=("concurrency", "d"),
    prompt=("prompt", "d"),
    new=("new", "d"),
    ttft_p50_ms=("TTFT p50 ms", ".1f"),
    ttft_p99_ms=("p99 ms", ".1f"),
    itl_p50_ms=("ITL p50 ms", ".2f"),
    itl_p99_ms=("p99 ms", ".2f"),
    tokens_per_second=("tokens/s", ".1f"),
    goodput_share=("good", ".0%"),
)
# What plots are over, the first of these that results have: its title, and the time to first token.
AXES = dict(
    rate=("requests per second", "ttft_p50_ms"),
    concurrency=("concurrency", "ttft_p50_ms"),
    batch=("batch size", "first_ms"),
)


def bench(
    model: o.MaybeModel = None,
    batch_size: Batches = None, prompt: Prompts = None, new: News = None, rounds: Rounds = None,
    requests: Requests = None, concurrency: Concurrency = None, plot: Plot = None,
    cache_dir: o.CacheDir = None,
    amp: o.Amp = None, tp: o.Degree = None, quant: o.Quant = None, rounded: o.Rounded = False,
    runtime: o.Runtime = None, expert_parallel: o.Experts = False,
    processes: n.Processes = False, nnodes: n.Nodes = 1, node_rank: n.NodeRank = 0,
    master_addr: n.Address = None, master_port: n.Port = n.PORT,
    url: Url = None, model_name: ModelName = None, api_key: Key = None, vocab: Vocabulary = None,
    load: t.Load = None, prefixes: t.Prefixes = None, prefix: t.Prefix = None,
    rate: t.Rates = None, burstiness: t.Burstiness = None, goodput: t.Goodput = None, seed: t.Seed = None,
    as_json: o.Json = False,
) -> None:  # fmt: skip
    """Measure time to first token, latency and throughput.

    A MODEL is opened here, or the server at --url has one. Prompts are random tokens.
    Programs are compiled once for each batch size, or for all requests.
    Of requests, TTFT is the time to first token, and ITL the time between tokens.
    """
    of_model = o.said(
        batch_size=batch_size or None, rounds=rounds, cache_dir=cache_dir, amp=amp, tp=tp, quant=quant,
        round_activations=rounded or None, runtime=runtime, processes=processes or None,
        nnodes=None if nnodes == 1 else nnodes, master_addr=master_addr,
    )  # fmt: skip
    of_server = o.said(
        model_name=model_name, api_key=api_key, vocab=vocab, load=load, prefixes=prefixes, prefix=prefix,
        rate=rate or None, burstiness=burstiness, goodput=goodput or None, seed=seed,
    )  # fmt: skip
    _check_subject(model, url, of_model, of_server)
    if plot is not None:
        _check_plot(plot)  # fail before minutes of compiling
    if model is not None:
        others = n.workers(tp, processes, nnodes, node_rank, master_addr, master_port)
        source, how = o.Source(model, cache_dir), o.How(amp, tp, quant, rounded, runtime, others, expert_parallel)
        lengths = prompt or PROMPTS, new or NEWS
        results = list(_of_model(source, how, *lengths, batch_size, rounds, requests, concurrency))
    else:
        results = _of_server(url or "", prompt, new, requests, concurrency, **of_server)
    _show(results, plot, as_json)


def _check_subject(model: str | None, url: str | None, of_model: Iterable[str], of_server: Iterable[str]) -> None:
    """Raise ConfigError unless there is either a model or a server, and all options are about it."""
    if model is None and url is None:
        raise ConfigError("bench needs a MODEL, or --url with the address of a server")
    about = [f"--{name.replace('_', '-')}" for name in (of_server if url is None else of_model)]
    if url is None and about:
        raise ConfigError(f"{about[0]} needs --url, the address of the server to measure")
    if url is not None and (model is not None or about):
        given = about[0] if model is None else f"MODEL {model}"
        raise ConfigError(
            f"{given} does not go with --url: leave it out, the server has a model and options of its own"
        )


def _of_model(
    source: o.Source, how: o.How, prompt: Sequence[int], new: Sequence[int], batch_size: Sequence[int] | None,
    rounds: int | None, requests: int | None, concurrency: Sequence[int] | None,
) -> Iterator[dict[str, Any]]:  # fmt: skip
    """Yield results of a model's batches, or of requests of its engine."""
    sizes = source.fitting(max(prompt), max(new))
    if requests is not None:
        if batch_size or rounds:
            given = f"--batch-size {batch_size[0]}" if batch_size else f"--rounds {rounds}"
            raise ConfigError(f"{given} does not go with --requests: --concurrency sets how many run at once")
        most = at_once(requests, concurrency)
        opened = _fitting(open_for_engine(source, how, max(most), sizes), prompt, new)
        yield from measured_load(opened, requests, most, prompt, new)
    elif concurrency:
        raise ConfigError(f"--concurrency {concurrency[0]} needs --requests, the number of requests to send")
    else:
        for batch in batch_size or [1]:
            opened = _fitting(source.open(how, batch_size=batch, **sizes), prompt, new)
            yield from _measured(opened, prompt, new, rounds or 5)


def _of_server(
    url: str, prompt: Sequence[int] | None, new: Sequence[int] | None, requests: int | None,
    concurrency: Sequence[int] | None, model_name: str | None = None, api_key: str | None = None,
    vocab: int | None = None, **options: Any,
) -> list[dict[str, Any]]:  # fmt: skip
    """Return results of requests to a server; `options` are those of its traffic."""
    try:
        from transformers_neuronx.cli.clients import measured_server
    except ModuleNotFoundError as error:
        raise ConfigError(f'bench --url needs {error.name}: pip install "transformers-neuronx[serve]"') from error
    traffic = t.traffic_of(requests or REQUESTS, concurrency, prompt, new, **options)
    return measured_server(url, model_name and encodable(model_name, "--model-name"), api_key, vocab, traffic)


def _show(results: Sequence[dict[str, Any]], plot: str | None, as_json: bool) -> None:
    """Print results, and tell which requests failed. Raises an error if all did."""
    if plot is not None:
        _draw(results, plot)
    typer.echo(json.dumps(results) if as_json else _table(results))
    failures = [result for result in results if result.get("failed")]
    for result in failures:
        first = f"{result['failed']} of {result['requests']} requests failed, the first one: {result['error']}"
        typer.echo(first, err=True)
    if failures and all(result["failed"] == result["requests"] for result in results):
        raise TransformersNeuronxError("no request was answered")


def _fitting(model: ForSampling, prompt: Sequence[int], new: Sequence[int]) -> ForSampling:
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
    known = OF_REQUESTS if "requests" in results[0] else COLUMNS
    columns = {name: about for name, about in known.items() if name in results[0]}
    rows = [[_cell(result[name], how) for name, (_, how) in columns.items()] for result in results]
    lines = [[heading for heading, _ in columns.values()], *rows]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join("  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) for line in lines)


def _cell(value: float | None, how: str) -> str:
    return "-" if value is None else format(value, how)


def _draw(results: Sequence[dict[str, Any]], path: str) -> None:
    """Plot throughput and time to first token, a line for each pair of lengths.

    They are over the rate of requests if there is one, otherwise over concurrency or the batch size.
    """
    figure = _figure(figsize=(9, 3.5), layout="constrained")
    left, right = figure.subplots(1, 2)
    over = next(name for name in AXES if name in results[0])
    xlabel, first = AXES[over]
    for prompt, new in sorted({(result.get("prompt"), result.get("new")) for result in results}):
        line = [result for result in results if (result.get("prompt"), result.get("new")) == (prompt, new)]
        places = [result[over] for result in line]
        label = line[0]["load"] if prompt is None else f"{prompt} + {new}"
        left.plot(places, [result["tokens_per_second"] for result in line], "o-", label=label)
        right.plot(places, [result[first] for result in line], "o-", label=label)
    for axes, title in ((left, "tokens per second"), (right, "ms to first token")):
        axes.set(title=title, xlabel=xlabel, ylim=(0, None))
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
