"""`inspect`: what programs contain, and what they cost."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from transformers_neuronx.analysis.inspection import (
    ModelFacts,
    ModuleFacts,
    facts_of,
    facts_of_artifact,
    facts_of_model,
    hlo_text,
    page,
)
from transformers_neuronx.cli import options as o
from transformers_neuronx.engine.artifacts import holds_artifact
from transformers_neuronx.errors import ConfigError
from transformers_neuronx.pyhlo import HloModuleProto
from transformers_neuronx.runtimes import get_runtime
from transformers_neuronx.support import files
from transformers_neuronx.weights.directories import gguf_at

ModelOrModule = Annotated[
    str,
    typer.Argument(metavar="WHAT", help="An artifact, a checkpoint, a name on the hub, a GGUF file or an HLO module."),
]
Html = Annotated[str | None, o.option("--html", help="Write an HTML page to this file.")]
Hlo = Annotated[str | None, o.option("--hlo", help="Show only the HLO of the program with this name.")]


def inspect(
    model: ModelOrModule,
    html: Html = None,
    hlo: Hlo = None,
    cache_dir: o.CacheDir = None,
    n_positions: o.Positions = None,
    batch_size: o.Batch = None,
    amp: o.Amp = None,
    tp: o.Degree = None,
    quant: o.Quant = None,
    rounded: o.Rounded = False,
    runtime: o.Runtime = None,
    as_json: o.Json = False,
) -> None:
    """Show what the programs of a model contain and cost.

    That is their weights and memory, and FLOPs and bytes by layer and by
    operation. Nothing is compiled or run. For a checkpoint, the options below
    set how its programs are written.
    """
    target = None if html is None else files.want_writable(Path(html).expanduser())
    how = o.How(amp, tp, quant, rounded, runtime)
    facts = _facts(model, cache_dir, how, n_positions=n_positions, batch_size=batch_size)
    if target is not None:
        files.save(target, page(facts).encode(), "the page")
    if hlo is not None:
        typer.echo(hlo_text(_program(facts, hlo).module))
    elif as_json:
        typer.echo(json.dumps(facts.as_dict()))
    else:
        typer.echo(f"written to {html}" if html else str(facts))


def _facts(source: str, cache_dir: str | None, how: o.How, **options: Any) -> ModelFacts | ModuleFacts:
    path = Path(source).expanduser()
    if path.is_file() and not gguf_at(path):
        with files.explain(f"{source}: not a module", "expected an HloModuleProto, as NEURONX_DUMP_TO writes them"):
            return facts_of(HloModuleProto.FromString(path.read_bytes()))
    if holds_artifact(source):
        return facts_of_artifact(source)
    model = o.Source(source, cache_dir).open(how, without_weights=True, **options)
    runtime = get_runtime(model.switches.runtime, model.options.tp_degree, device=False)
    return facts_of_model(model.decoder_on(runtime))


def _program(facts: ModelFacts | ModuleFacts, name: str) -> ModuleFacts:
    programs = facts.programs if isinstance(facts, ModelFacts) else [facts]
    found = [program for program in programs if program.name == name]
    if not found:
        raise ConfigError(f"--hlo must be one of {', '.join(program.name for program in programs)}, got {name!r}")
    return found[0]
