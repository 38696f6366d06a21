"""`serve`: answer requests over HTTP, with OpenAI's interface."""

from __future__ import annotations

import logging
from typing import Annotated, Any

from transformers_neuronx import env
from transformers_neuronx.cli import options as o
from transformers_neuronx.cli.engines import ROWS, SLOTS, engine_for, has_pages, open_for_engine
from transformers_neuronx.cli.sampling import SamplingOptions
from transformers_neuronx.errors import ConfigError
from transformers_neuronx.serving.engine import Engine

SERVER = "Server"
ALL = 0  # top-k, unless the checkpoint sets one

Host = Annotated[str, o.option("--host", help="Address to listen at; 0.0.0.0 is all.", panel=SERVER, default=True)]
Port = Annotated[int, o.option("--port", help="Port; 0 is any free one.", panel=SERVER, default=True, least=0)]
Names = Annotated[
    list[str] | None,
    o.option("--served-model-name", help="Name of the model in requests; may be repeated.", panel=SERVER),
]
Keys = Annotated[
    list[str] | None,
    o.option("--api-key", help="Key that requests must have; may be repeated.", panel=SERVER),
]
Origins = Annotated[
    list[str] | None,
    o.option("--allowed-origin", help="Origin whose pages may send requests; may be repeated.", panel=SERVER),
]
Drain = Annotated[
    int,
    o.option("--drain", help="Seconds that requests get to end, after SIGTERM.", panel=SERVER, default=True, least=0),
]
AtOnce = Annotated[
    int | None,
    o.option("--batch-size", help="Most requests that run at once; 16 by default.", panel=o.HOW, least=1),
]


def serve(
    model: o.Model,
    host: Host = "127.0.0.1",
    port: Port = 8000,
    served_model_name: Names = None,
    api_key: Keys = None,
    allowed_origin: Origins = None,
    drain: Drain = 60,
    cache_dir: o.CacheDir = None,
    batch_size: AtOnce = None,
    n_positions: o.Positions = None,
    amp: o.Amp = None,
    tp: o.Degree = None,
    quant: o.Quant = None,
    rounded: o.Rounded = False,
    runtime: o.Runtime = None,
) -> None:
    """Answer requests over HTTP, with OpenAI's interface.

    Ctrl-C or SIGTERM stops it: it takes no more requests, and lets those that run end.
    """
    try:
        from transformers_neuronx.server.app import Server
        from transformers_neuronx.server.running import Running
        from transformers_neuronx.server.settings import Settings
    except ModuleNotFoundError as error:
        raise ConfigError(f'serve needs {error.name}: pip install "transformers-neuronx[serve]"') from error
    logging.basicConfig(format="%(asctime)s %(levelname)s %(message)s", level=logging.INFO)
    source = o.Source(model, cache_dir)
    how = o.How(amp, tp, quant, rounded, runtime)
    names = tuple(served_model_name or [model])
    defaults = SamplingOptions(None, None, None, None, None).rules(source, ALL, None)
    with _engine(source, how, batch_size, n_positions) as engine:
        keys = api_key or env.API_KEYS.get().split()
        settings = Settings(names, keys, allowed_origin or (), defaults, pooling=source.pooling)
        Running(Server(engine, settings), host, port, drain).run()


def _engine(source: o.Source, how: o.How, rows: int | None, positions: int | None) -> Engine:
    tokenizer = source.tokenizer()
    sizes: dict[str, Any] = o.said(n_positions=positions)
    opened = open_for_engine(source, how, rows, sizes)
    opened.to_neuron(ahead=not has_pages(opened))
    rows = rows or ROWS
    return engine_for(opened, rows, min(rows, SLOTS), {}, tokenizer=tokenizer)
