"""`lint`: what Neuron's compiler would refuse in programs, and the code that wrote it."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from transformers_neuronx.analysis.inspection.text import WIDTH, cut
from transformers_neuronx.cli import options as o
from transformers_neuronx.compiler import Finding, check
from transformers_neuronx.engine.keys import program_name
from transformers_neuronx.neuron.form import neuron_form
from transformers_neuronx.neuron.targets import TARGETS, target_named
from transformers_neuronx.pyhlo import HloModuleProto
from transformers_neuronx.runtimes.absent import absent_runtime
from transformers_neuronx.support import files

ModelOrModule = Annotated[
    str,
    typer.Argument(
        metavar="WHAT", help="An artifact, a checkpoint, a config.json, a name on the hub, or an HLO module (.pb)."
    ),
]
Target = Annotated[str, o.option("--target", help=f"Compilation target: neuron, {', '.join(TARGETS)}.", default=True)]
Form = Annotated[
    bool, o.option("--form", help="Rewrite a module for Neuron first, as is done with a model's programs.")
]

Linted = tuple[str, list[Finding]]  # a program's name, and what is found in it


def lint(
    model: ModelOrModule,
    target: Target = "neuron",
    form: Form = False,
    cache_dir: o.CacheDir = None,
    n_positions: o.Positions = None,
    context: o.Context = None,
    batch_size: o.Batch = None,
    amp: o.Amp = None,
    tp: o.Degree = None,
    quant: o.Quant = None,
    rounded: o.Rounded = False,
    as_json: o.Json = False,
) -> None:
    """Show what Neuron's compiler would refuse.

    Each finding names the line of code that wrote the operation. The rules come
    from AWS's public documents; neither neuronx-cc nor a device is needed. For
    a checkpoint, the options below set how its programs are written. A module
    is checked unchanged, unless --form is given.

    Exit status: 0 if nothing is found, 4 if something is.
    """
    how, name = o.How(amp, tp, quant, rounded, None), target_named(target).name
    sizes = dict(n_positions=n_positions, context_length_estimate=context or None, batch_size=batch_size)
    linted = []
    for program, found in _linted(model, form, name, cache_dir, how, **sizes):
        linted.append((program, found))
        if not as_json:
            typer.echo("\n".join(_text(program, found)))
    if as_json:
        programs = [dict(name=program, findings=[asdict(each) for each in found]) for program, found in linted]
        typer.echo(json.dumps(dict(target=name, programs=programs)))
    else:
        typer.echo(_sum(linted, name))
    if any(found for _, found in linted):
        raise typer.Exit(o.NO)


def _linted(
    source: str, form: bool, target: str, cache_dir: str | None, how: o.How, **options: Any
) -> Iterator[Linted]:
    path = Path(source).expanduser()
    if path.is_file() and path.suffix != ".json":  # .json is a configuration
        with files.explain(f"{source}: not a module", "expected an HloModuleProto, as NEURONX_DUMP_TO writes them"):
            module = HloModuleProto.FromString(path.read_bytes())
            found = check(neuron_form(module) if form else module, target)
        yield module.name, found
        return
    model = o.Source(source, cache_dir).open(how, without_weights=True, **options)
    runtime = absent_runtime(model.options.tp_degree, loops=False)
    decoder = model.decoder_on(runtime)
    for planned in decoder.planned():
        for segment in dict.fromkeys(planned.segments(decoder.programs)):
            yield program_name(planned, segment), check(neuron_form(planned.written(decoder.programs, segment)), target)


def _text(program: str, found: list[Finding]) -> Iterator[str]:
    """Yield a line for a program, and its findings."""
    yield cut(f"{program}: {_count(len(found), 'finding') if found else 'nothing found'}", WIDTH)
    for finding in found:
        yield textwrap.fill(str(finding), WIDTH, initial_indent="  ", subsequent_indent="    ")


def _sum(linted: list[Linted], target: str) -> str:
    count, bad = sum(len(found) for _, found in linted), sum(bool(found) for _, found in linted)
    return f"{_count(count, 'finding')} in {bad} of {_count(len(linted), 'program')}, for {target}"


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"
