"""`compile`: compile a checkpoint into an artifact."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from transformers_neuronx.cli import options as o
from transformers_neuronx.engine.artifact_saving import want_place
from transformers_neuronx.errors import CheckpointError, ConfigError
from transformers_neuronx.models.sampling import ForSampling
from transformers_neuronx.support import files
from transformers_neuronx.weights.directories import GENERATION_CONFIG

Target = Annotated[str, typer.Argument(metavar="ARTIFACT", help="Directory to save to.")]
Weights = Annotated[
    bool, o.option("--weights/--no-weights", help="Save the weights too, or the programs alone.", default=True)
]


def compile(
    model: o.Model,
    artifact: Target,
    weights: Weights = True,
    adapter: o.Adapter = None,
    cache_dir: o.CacheDir = None,
    checkpoint_name: o.CheckpointName = None,
    n_positions: o.Positions = None,
    context: o.Context = None,
    batch_size: o.Batch = None,
    amp: o.Amp = None,
    tp: o.Degree = None,
    quant: o.Quant = None,
    rounded: o.Rounded = False,
    runtime: o.Runtime = None,
    expert_parallel: o.Experts = False,
    as_json: o.Json = False,
) -> None:
    """Compile a checkpoint and save the artifact.

    Use the artifact in place of a model, as in `generate ARTIFACT`. It loads in
    a second if processor and jaxlib are the same. Compiling for Neuron needs
    its compiler, but no device.
    """
    try:
        want_place(artifact)  # fail before minutes of compiling
    except CheckpointError as error:  # ARTIFACT is a checkpoint
        raise ConfigError(str(error)) from error
    if adapter and not weights:
        raise ConfigError("--adapter changes weights, so it needs --weights")
    source, how = o.Source(model, cache_dir, adapter), o.How(amp, tp, quant, rounded, runtime, None, expert_parallel)
    sizes: dict[str, Any] = dict(
        n_positions=n_positions, context_length_estimate=context or None, batch_size=batch_size
    )
    compiled = source.open(how, needs_weights=weights, weights=checkpoint_name, **sizes)
    compiled.cpu_compile(weights)  # nothing runs, so no device is needed
    compiled.save(artifact, sharded_weights=weights)
    _save_beside(source, Path(artifact).expanduser())
    _show(compiled, artifact, as_json)


def _save_beside(source: o.Source, artifact: Path) -> None:
    """Save tokenizer and generation_config.json, if present, into an artifact: both or neither."""
    tokenizer = None
    try:
        tokenizer = source.tokenizer()
    except CheckpointError as error:
        typer.echo(f"the artifact takes token ids only: {error}", err=True)
    with files.staging(artifact, "tokenizer") as stage:
        if tokenizer is not None:
            with files.saving(artifact, "the tokenizer", Exception):  # its library raises its own errors
                tokenizer.save_pretrained(stage)
        if source.generation:
            files.write(stage / GENERATION_CONFIG, json.dumps(source.generation, indent=2).encode())
        files.exchange(stage, artifact, obsolete=[GENERATION_CONFIG])  # of an earlier artifact


def _show(compiled: ForSampling, artifact: str, as_json: bool) -> None:
    metrics, programs = compiled.metrics, compiled.programs
    if as_json:
        facts = dict(artifact=artifact, programs=programs, **metrics.as_dict())
        typer.echo(json.dumps(facts))
    else:
        lines = [f"{len(programs)} programs:", *(f"  {name}" for name in programs)]
        if metrics.held.weights:
            lines.append(f"weights {metrics.held.weights / 2**20:,.1f} MiB")
        lines.append(f"compiled in {metrics.compile_seconds:.1f} s, saved to {artifact}")
        typer.echo("\n".join(lines))
