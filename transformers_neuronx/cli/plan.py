"""`plan`: whether a model fits, on what, and how fast it can be there."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Annotated, Any

import typer

from transformers_neuronx.cli import options as o
from transformers_neuronx.errors import ConfigError, EngineError
from transformers_neuronx.planning import NAMES, Place, Planner, place

What = Annotated[
    str, typer.Argument(metavar="MODEL", help="A checkpoint, an artifact, a config.json, or a name on the hub.")
]
Instances = Annotated[
    list[str] | None,
    o.option("--instance", help=f"Where it is to run; may be repeated. By default all: {', '.join(NAMES)}."),
]
Tp = Annotated[
    int | None, o.option("--tp", help="Devices that share each layer; by default as few as will do.", least=1)
]


def plan(
    model: What,
    instance: Instances = None,
    tp: Tp = None,
    cache_dir: o.CacheDir = None,
    n_positions: o.Positions = None,
    context: o.Context = None,
    batch_size: o.Batch = None,
    amp: o.Amp = None,
    quant: o.Quant = None,
    rounded: o.Rounded = False,
    as_json: o.Json = False,
) -> None:
    """Say whether a model fits, on what, and how fast it can be there.

    Only its configuration is read. Each device holds its share of the weights,
    the KV cache of all positions of the whole batch, and temporaries, what the
    largest program works with. It fits if that is no more than the device's
    memory. There is a line for the least --tp with which it fits, or, of an
    --instance that is asked for, for each that there is.

    Temporaries are an estimate. Times are the roofline's: the bytes that the
    operations of a step move at full bandwidth, or their products at the peak.
    Both are as published, but measured for this machine's processor.

    Exit status: 0 if it fits somewhere that is asked about, 4 if it does not.
    """
    how = o.How(amp, None, quant, rounded, None)
    sizes: dict[str, Any] = dict(
        n_positions=n_positions, context_length_estimate=context or None, batch_size=batch_size
    )
    planner = Planner(o.Source(model, cache_dir).open(how, without_weights=True, **sizes))
    places = _places(instance or NAMES, planner.options.amp)
    planned = planner.plan(places, tp, all_degrees=bool(instance))
    typer.echo(json.dumps(planned.as_dict()) if as_json else str(planned))
    if not any(fit.fits for fit in planned.fits):
        raise typer.Exit(o.NO)


def _places(names: Sequence[str], amp: str) -> list[Place]:
    if unknown := [name for name in names if name not in NAMES]:
        raise ConfigError(f"--instance wants one of {', '.join(NAMES)}, got {', '.join(map(repr, unknown))}")
    places = [found for name in dict.fromkeys(names) if (found := place(name, amp))]
    if not places:
        raise EngineError("--instance cuda: nvidia-smi finds no GPU here")
    return places
