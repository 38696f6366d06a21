"""`serve`: answer requests over HTTP, with OpenAI's interface."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from transformers_neuronx import env
from transformers_neuronx.cli import options as o
from transformers_neuronx.cli.engines import ROWS, SLOTS, engine_for, has_pages, open_for_engine
from transformers_neuronx.cli.sampling import SamplingOptions
from transformers_neuronx.errors import ConfigError
from transformers_neuronx.serving.engine import Engine

ALL = 0  # top-k, unless the checkpoint sets one

Host = Annotated[str, o.option("--host", help="Address to listen at; 0.0.0.0 is all.", panel=o.SERVER, default=True)]
Port = Annotated[int, o.option("--port", help="Port; 0 is any free one.", panel=o.SERVER, default=True, least=0)]
Names = Annotated[
    list[str] | None,
    o.option("--served-model-name", help="Name of the model in requests; may be repeated.", panel=o.SERVER),
]
Keys = Annotated[
    list[str] | None,
    o.option("--api-key", help="Key that requests must have; may be repeated.", panel=o.SERVER),
]
Origins = Annotated[
    list[str] | None,
    o.option("--allowed-origin", help="Origin whose pages may send requests; may be repeated.", panel=o.SERVER),
]
Drain = Annotated[
    int,
    o.option("--drain", help="Seconds that requests get to end, after SIGTERM.", panel=o.SERVER, default=True, least=0),
]
Waiting = Annotated[
    int, o.option("--max-waiting", help="Requests that may wait; more get 503.", panel=o.SERVER, default=True, least=1)
]
WaitingTokens = Annotated[
    int | None,
    o.option(
        "--max-waiting-tokens", help="Tokens of prompts that may wait; 16 million by default.", panel=o.SERVER, least=1
    ),
]
PerKey = Annotated[
    int | None,
    o.option("--max-per-key", help="Requests of one key at a time; more get 429.", panel=o.SERVER, least=1),
]
Seconds = Annotated[
    float | None,
    o.option(
        "--max-seconds", help="Time of a request, with waiting, after which it ends.", panel=o.SERVER, least=0.001
    ),
]
LogFormat = Annotated[
    str, o.option("--log-format", help="lines for people, or json for programs.", panel=o.SERVER, default=True)
]
LogPrompts = Annotated[bool, o.option("--log-prompts", help="Log the text of prompts.", panel=o.SERVER)]
AtOnce = Annotated[
    int | None,
    o.option("--batch-size", help="Most requests that run at once; 16 by default.", panel=o.HOW, least=1),
]


def serve(
    model: o.Model,
    host: Host = "127.0.0.1", port: Port = 8000, served_model_name: Names = None, api_key: Keys = None,
    allowed_origin: Origins = None, drain: Drain = 60,
    max_waiting: Waiting = 4096, max_waiting_tokens: WaitingTokens = None, max_per_key: PerKey = None,
    max_seconds: Seconds = None,
    log_format: LogFormat = "lines", log_prompts: LogPrompts = False,
    cache_dir: o.CacheDir = None,
    batch_size: AtOnce = None, n_positions: o.Positions = None,
    amp: o.Amp = None, tp: o.Degree = None, quant: o.Quant = None, rounded: o.Rounded = False,
    runtime: o.Runtime = None,
) -> None:  # fmt: skip
    """Answer requests over HTTP, with OpenAI's interface.

    Ctrl-C or SIGTERM stops it: it takes no more requests, and lets those that run end.
    """
    try:
        from transformers_neuronx.server import logs
        from transformers_neuronx.server.app import Server
        from transformers_neuronx.server.running import Running
        from transformers_neuronx.server.settings import Settings
    except ModuleNotFoundError as error:
        raise ConfigError(f'serve needs {error.name}: pip install "transformers-neuronx[serve]"') from error
    if log_format not in ("lines", "json"):
        raise ConfigError(f"--log-format must be lines or json, got {log_format!r}")
    logs.begin(log_format == "json")
    source = o.Source(model, cache_dir)
    how = o.How(amp, tp, quant, rounded, runtime)
    names = tuple(served_model_name or [model])
    defaults = SamplingOptions(None, None, None, None, None).rules(source, ALL, None)
    queue = dict(waiting=max_waiting) | o.said(waiting_tokens=max_waiting_tokens)
    with _engine(source, how, batch_size, n_positions, queue) as engine:
        keys = api_key or env.API_KEYS.get().split()
        settings = Settings(
            names, keys, allowed_origin or (), defaults, most_per_key=max_per_key, pooling=source.pooling,
            most_seconds=max_seconds, logs_prompts=log_prompts,
        )  # fmt: skip
        Running(Server(engine, settings), host, port, drain).run()


def _engine(source: o.Source, how: o.How, rows: int | None, positions: int | None, queue: Mapping[str, int]) -> Engine:
    tokenizer = source.tokenizer()
    sizes: dict[str, Any] = o.said(n_positions=positions)
    opened = open_for_engine(source, how, rows, sizes)
    opened.to_neuron(ahead=not has_pages(opened))
    rows = rows or ROWS
    return engine_for(opened, rows, min(rows, SLOTS), {}, tokenizer=tokenizer, **queue)
