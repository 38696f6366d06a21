"""`serve`: answer requests over HTTP, with OpenAI's interface."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from itertools import chain
from pathlib import Path
from typing import Annotated, Any

import typer

from transformers_neuronx import env
from transformers_neuronx.cli import nodes as n, options as o
from transformers_neuronx.errors import ConfigError

Host = Annotated[str, o.option("--host", help="Address to listen at; 0.0.0.0 is all.", panel=o.SERVER, default=True)]
Port = Annotated[int, o.option("--port", help="Port; 0 is any free one.", panel=o.SERVER, default=True, least=0)]
Models = Annotated[
    list[str], typer.Argument(metavar="[NAME=]MODEL...", help=f"{o.WHAT}; several, with the names of requests for them")
]
Names = Annotated[
    list[str] | None,
    o.option("--served-model-name", help="Name of the only model in requests; may be repeated.", panel=o.SERVER),
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
LoraModules = Annotated[
    list[str] | None,
    o.option(
        "--lora-modules", metavar="NAME=DIR",
        help="LoRA adapter that requests choose by its name; may be repeated.", panel=o.LORA,
    ),
]  # fmt: skip
EnableLora = Annotated[
    bool, o.option("--enable-lora", help="Let requests choose adapters; --lora-modules implies it.", panel=o.LORA)
]
MaxLoras = Annotated[
    int | None,
    o.option("--max-loras", help=f"Adapters of running requests at once; {o.LORAS} by default.", panel=o.LORA, least=1),
]
MaxLoraRank = Annotated[
    int, o.option("--max-lora-rank", help="Highest rank of an adapter.", panel=o.LORA, default=True, least=1)
]
LoraUpdates = Annotated[
    bool,
    o.option(
        "--allow-lora-updates", help="Let clients load and unload adapters, by paths on this machine.", panel=o.LORA
    ),
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
TextOnly = Annotated[
    bool, o.option("--text-only", help="Leave out what reads images, of a model that does.", panel=o.HOW)
]
DraftModel = Annotated[
    str | None,
    o.option(
        "--draft", metavar="MODEL|text", panel=o.HOW,
        help="What proposes draft tokens: a smaller model, an EAGLE head, or the text so far.",
    ),
]  # fmt: skip
DraftTokens = Annotated[
    int,
    o.option("--draft-tokens", help="Most draft tokens of a request in a step.", panel=o.HOW, default=True, least=1),
]
UseRay = Annotated[bool, o.option("--ray", help="Run replicas on Ray Serve, behind its proxy.", panel=o.SERVER)]
Replicas = Annotated[
    int, o.option("--replicas", help="Replicas on Ray; at least so many.", panel=o.SERVER, default=True, least=1)
]
MostReplicas = Annotated[
    int | None, o.option("--max-replicas", help="Most replicas, as load grows.", panel=o.SERVER, least=1)
]


def serve(
    models: Models,
    host: Host = "127.0.0.1", port: Port = 8000, served_model_name: Names = None, api_key: Keys = None,
    allowed_origin: Origins = None, drain: Drain = 60, max_seconds: Seconds = None,
    max_waiting: Waiting = 4096, max_waiting_tokens: WaitingTokens = None, max_per_key: PerKey = None,
    log_format: LogFormat = "lines", log_prompts: LogPrompts = False,
    ray: UseRay = False, replicas: Replicas = 1, max_replicas: MostReplicas = None,
    lora_modules: LoraModules = None, enable_lora: EnableLora = False, max_loras: MaxLoras = None,
    max_lora_rank: MaxLoraRank = o.RANK, allow_lora_updates: LoraUpdates = False, adapter: o.Adapter = None,
    cache_dir: o.CacheDir = None, batch_size: AtOnce = None, n_positions: o.Positions = None,
    text_only: TextOnly = False, draft: DraftModel = None, draft_tokens: DraftTokens = 4,
    amp: o.Amp = None, tp: o.Degree = None, quant: o.Quant = None, rounded: o.Rounded = False,
    runtime: o.Runtime = None, expert_parallel: o.Experts = False,
    processes: n.Processes = False, nnodes: n.Nodes = 1, node_rank: n.NodeRank = 0,
    master_addr: n.Address = None, master_port: n.Port = n.PORT,
) -> None:  # fmt: skip
    """Answer requests over HTTP, with OpenAI's interface.

    Ctrl-C or SIGTERM stops it: it takes no more requests, and lets those that run end.
    """
    _want_packages(ray)
    from transformers_neuronx.cli import service as s
    from transformers_neuronx.server.settings import Settings

    if log_format not in ("lines", "json"):
        raise ConfigError(f"--log-format must be lines or json, got {log_format!r}")
    others = n.workers(tp, processes, nnodes, node_rank, master_addr, master_port)
    how, paths = o.How(amp, tp, quant, rounded, runtime, others, expert_parallel), named(models, served_model_name)
    queue = dict(waiting=max_waiting) | o.said(waiting_tokens=max_waiting_tokens)
    limits: dict[str, Any] = dict(most_per_key=max_per_key, most_seconds=max_seconds)
    limits |= dict(logs_prompts=log_prompts, updates_adapters=allow_lora_updates)
    settings = Settings(api_key or env.API_KEYS.get().split(), allowed_origin or (), **limits)
    modules = _modules(lora_modules or [])
    loras = s.Loras(modules, max_loras or o.LORAS * bool(modules or enable_lora or allow_lora_updates), max_lora_rank)
    sizes, told, proposer = (batch_size, n_positions), log_format == "json", s.Draft(draft, draft_tokens)
    service = s.Service(paths, cache_dir, how, *sizes, queue, settings, told, adapter, loras, text_only, proposer)
    if ray:
        s.run_on_ray(service, host, port, drain, replicas, max_replicas)
    else:
        s.run(service, host, port, drain)


def _modules(texts: Sequence[str]) -> dict[str, str]:
    """Return the directory of each adapter by its name."""
    found: dict[str, str] = {}
    for text in texts:
        name, equals, directory = text.partition("=")
        if not (name and equals and directory) or name in found:
            raise ConfigError(f"--lora-modules must be NAME=DIR, with a name of its own, got {text!r}")
        found[name] = directory
    return found


def _want_packages(ray: bool) -> None:
    extra = "ray" if ray else "serve"
    try:
        import_module(f"transformers_neuronx.server.{'on_ray' if ray else 'running'}")
    except ModuleNotFoundError as error:
        raise ConfigError(f'serve needs {error.name}: pip install "transformers-neuronx[{extra}]"') from error


def named(models: Sequence[str], names: Sequence[str] | None) -> dict[str, list[str]]:
    """Return the names of each model, by its path. Raises ConfigError for names that could mean two models."""
    found: dict[str, list[str]] = {}
    for model in models:
        name, equals, path = model.partition("=")
        name, path = (name, path) if equals and not Path(model).expanduser().exists() else (model, model)
        if name in chain.from_iterable(found.values()):
            raise ConfigError(f"two models have the name {name!r}: give each its own, as in NAME=MODEL")
        found.setdefault(path, []).append(name)
    if names and len(found) > 1:
        raise ConfigError("--served-model-name is for one model: name several as in NAME=MODEL")
    return {path: list(names) for path in found} if names else found
