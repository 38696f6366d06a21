"""What `serve` serves, and how it runs: in this process, or in replicas on Ray, which open it themselves."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, cast

import typer

from transformers_neuronx.cli import nodes, options as o
from transformers_neuronx.cli.engines import ROWS, SLOTS, engine_for, has_pages, open_for_engine
from transformers_neuronx.cli.sampling import SamplingOptions
from transformers_neuronx.errors import ConfigError
from transformers_neuronx.models.sampling import ForSampling
from transformers_neuronx.models.vision import VisionForSampling
from transformers_neuronx.server import logs
from transformers_neuronx.server.app import Server
from transformers_neuronx.server.models import ServedModel
from transformers_neuronx.server.pictures import Pictures
from transformers_neuronx.server.running import Running
from transformers_neuronx.server.settings import Settings
from transformers_neuronx.serving.engine import Engine
from transformers_neuronx.speculation import EagleDraft, PromptLookup
from transformers_neuronx.speculation.eagle.draft import is_head
from transformers_neuronx.weights.adapters import open_adapter

if TYPE_CHECKING:
    from transformers_neuronx.server.on_ray import Replicas

ALL = 0  # top-k, unless the checkpoint sets one
TEXT = "text"  # draft tokens from the text so far


@dataclass(frozen=True)
class Loras:
    """Adapters that requests choose: directories by name, places on the devices, and the highest rank."""

    modules: Mapping[str, str]
    places: int
    rank: int


@dataclass(frozen=True)
class Draft:
    """What proposes draft tokens: the path or name of a smaller model or an EAGLE head, TEXT or nothing; how many."""

    path: str | None
    tokens: int

    def found(self, cache_dir: str | None) -> PromptLookup | EagleDraft | o.Source | None:
        """Return what proposes, with no weights read yet. Raises CheckpointError if there is no such model."""
        if self.path is None or self.path == TEXT:
            return PromptLookup() if self.path else None
        if is_head(self.path, cache_dir):
            return EagleDraft.from_pretrained(self.path, cache_dir)
        return o.Source(self.path, cache_dir)


def with_draft(found: Any, model: ForSampling, how: o.How, rows: int) -> Any:
    """Return an engine's `draft` for a model, a smaller model on its devices."""
    if not isinstance(found, o.Source):
        return found
    sizes = dict(n_positions=model.options.buckets.longest)
    draft = open_for_engine(found, replace(how, quant=None, rounded=False), rows, sizes)
    draft.to_neuron(ahead=not has_pages(draft))
    return draft


@dataclass(frozen=True)
class Service:
    """Models by path, with their names, and how each is opened and may be used. An `adapter` is merged into it."""

    paths: Mapping[str, Sequence[str]]
    cache_dir: str | None
    how: o.How
    rows: int | None
    positions: int | None
    queue: Mapping[str, int]
    settings: Settings
    logs_json: bool
    adapter: str | None = None
    loras: Loras = Loras({}, 0, 1)
    text_only: bool = False
    draft: Draft = Draft(None, 0)

    def __post_init__(self) -> None:
        if len(self.paths) > 1 and self.draft.path:
            raise ConfigError("a draft is for one model: serve several without --draft")
        if len(self.paths) > 1 and (self.adapter or self.loras.places):
            raise ConfigError("adapters are for one model: serve several without --adapter and --enable-lora")

    @contextmanager
    def opened(self) -> Iterator[Server]:
        """Open all models, and close their engines at the end."""
        logs.begin(self.logs_json)
        for directory in self.loras.modules.values():
            open_adapter(directory)  # fail before minutes of compiling
        with ExitStack() as engines:
            served: dict[str, ServedModel] = {}
            for path, names in self.paths.items():
                source = o.Source(path, self.cache_dir, self.adapter, images=not self.text_only)
                engine, pictures = self._engine(source)
                engines.enter_context(engine)
                for name, directory in self.loras.modules.items():
                    engine.load_adapter(name, directory)
                defaults = SamplingOptions(None, None, None, None, None).rules(source, ALL, None)
                served |= dict.fromkeys(names, ServedModel(engine, names[0], defaults, source.pooling, pictures))
            yield Server(served, self.settings)

    def _engine(self, source: o.Source) -> tuple[Engine, Pictures | None]:
        found = self.draft.found(self.cache_dir)  # fail before minutes of compiling
        tokenizer, processor = source.tokenizer(), source.image_processor() if source.cls.family.images else None
        model = open_for_engine(source, self.how, self.rows, o.said(n_positions=self.positions))
        model.to_neuron(ahead=not has_pages(model))
        rows, loras = self.rows or ROWS, self.loras
        how: dict[str, Any] = dict(tokenizer=tokenizer, max_loras=loras.places, max_lora_rank=loras.rank)
        if found:
            how |= dict(draft=with_draft(found, model, self.how, rows), draft_tokens=self.draft.tokens)
        pictures = Pictures(cast(VisionForSampling, model), processor) if processor else None
        return engine_for(model, rows, min(rows, SLOTS), {}, **how, **self.queue), pictures


def run(service: Service, host: str, port: int, drain: int) -> None:
    """Serve in this process until it is told to stop."""
    with service.opened() as server:
        Running(server, host, port, drain).run()


def run_on_ray(service: Service, host: str, port: int, drain: int, least: int, most: int | None) -> None:
    """Serve with replicas on a Ray cluster, or on this machine if there is none, until this process is told to stop."""
    from transformers_neuronx.server.on_ray import running

    if not port:
        raise ConfigError("--ray needs a --port, as Ray's proxy takes no free one")
    stopped = threading.Event()
    with running(service.opened, _replicas(service, least, most, drain), host, port) as address:
        for number in (signal.SIGINT, signal.SIGTERM):  # Ray has set its own
            signal.signal(number, lambda *_: stopped.set())
        typer.echo(f"running on {address} (Ctrl-C stops it)", err=True)
        stopped.wait()


def _replicas(service: Service, least: int, most: int | None, drain: int) -> Replicas:
    from transformers_neuronx.server.on_ray import Replicas

    workers = service.how.workers
    if workers and workers.nodes > 1:
        raise ConfigError("a replica on Ray is on one host: --ray takes --processes, and not --nnodes")
    return Replicas(least, max(most or least, least), workers.size if workers else 1, service.rows or ROWS, drain)


def application(arguments: Mapping[str, Any]) -> Any:
    """Return Ray's application of one model, for a configuration file of Ray Serve, which has the arguments:

    `model`, its path or name; and if they are wanted, `name`, `amp`, `tp`, `processes`, `quant`, `api_keys`, `rows`,
    `n_positions`, `adapter`, `max_loras`, `max_lora_rank`, `replicas` and `max_replicas`, as the options of `serve`
    with these names, and `lora_modules`, directories by name. Raises ConfigError.
    """
    from transformers_neuronx.server.on_ray import deployment

    known = (
        "model name amp tp processes quant api_keys rows n_positions adapter lora_modules max_loras max_lora_rank "
        "replicas max_replicas"
    ).split()
    if wrong := sorted(arguments.keys() - {*known}) or "model" not in arguments:
        raise ConfigError(f"arguments must be model and others of {', '.join(known[1:])}, got {wrong or 'no model'}")
    got: dict[str, Any] = dict.fromkeys(known) | dict(arguments)
    workers = nodes.workers(got["tp"], bool(got["processes"]), 1, 0, None, 0)
    how = o.How(got["amp"], got["tp"], got["quant"], False, None, workers)
    settings = Settings(got["api_keys"] or ())
    paths = {got["model"]: [got["name"] or got["model"]]}
    modules = got["lora_modules"] or {}
    loras = Loras(modules, got["max_loras"] or o.LORAS * bool(modules), got["max_lora_rank"] or o.RANK)
    service = Service(
        paths, None, how, got["rows"], got["n_positions"], {}, settings, True, got["adapter"], loras
    )  # fmt: skip
    return deployment(service.opened, _replicas(service, got["replicas"] or 1, got["max_replicas"], drain=60))
