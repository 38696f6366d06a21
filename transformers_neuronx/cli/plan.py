"""`plan`: whether a model fits, where, and how fast it can be there."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Annotated, Any

import typer

from transformers_neuronx.analysis.planning import CPU, NAMES, Network, Place, Planner, place
from transformers_neuronx.cli import options as o
from transformers_neuronx.errors import ConfigError, EngineError

What = Annotated[
    str, typer.Argument(metavar="MODEL", help="A checkpoint, an artifact, a config.json, or a name on the hub.")
]
Instances = Annotated[
    list[str] | None,
    o.option("--instance", help=f"Where to run; may be repeated. By default all: {', '.join(NAMES)}."),
]
Tp = Annotated[int | None, o.option("--tp", help="Devices that share each layer; see above for the default.", least=1)]
RoundTrip = Annotated[
    float | None,
    o.option(
        "--round-trip", help="Milliseconds between hosts: also plan for up to 16 hosts like this machine.", least=0.001
    ),
]
Bandwidth = Annotated[
    float, o.option("--bandwidth", help="Gigabits a second into each host, for --round-trip.", least=0.001)
]


def plan(
    model: What,
    instance: Instances = None,
    tp: Tp = None,
    round_trip: RoundTrip = None,
    bandwidth: Bandwidth = 10,
    cache_dir: o.CacheDir = None,
    n_positions: o.Positions = None,
    context: o.Context = None,
    batch_size: o.Batch = None,
    amp: o.Amp = None,
    quant: o.Quant = None,
    rounded: o.Rounded = False,
    as_json: o.Json = False,
) -> None:
    """Show whether a model fits, where, and how fast it can be.

    Only the configuration is read. Each device holds its share of the weights,
    its share of the KV cache for the whole batch, and temporaries: the working
    memory of the largest program. The model fits if the device has memory for
    all three. By default each place has one line, for the smallest --tp that
    fits. With --instance it has one line for every --tp.

    Temporaries are an estimate. Times are those of a roofline: moving a step's
    bytes at full bandwidth, or its products at peak FLOPs, whichever is slower.
    Bandwidth and peak are as published; those of this CPU are measured.

    Exit status: 0 if it fits in at least one place, 4 if it fits in none.
    """
    how = o.How(amp, None, quant, rounded, None)
    sizes: dict[str, Any] = dict(
        n_positions=n_positions, context_length_estimate=context or None, batch_size=batch_size
    )
    planner = Planner(o.Source(model, cache_dir).open(how, without_weights=True, **sizes))
    places = _places(instance or NAMES, planner.options.amp)
    planned = planner.plan(places, tp, bool(instance), _network(places, round_trip, bandwidth))
    typer.echo(json.dumps(planned.as_dict()) if as_json else str(planned))
    if not any(fit.fits for fit in (*planned.fits, *planned.hosts)):
        raise typer.Exit(o.NO)


def _network(places: Sequence[Place], round_trip: float | None, bandwidth: float) -> Network | None:
    if round_trip is None:
        return None
    if not any(each.name == CPU for each in places):
        raise ConfigError("--round-trip is for hosts like this machine: it needs --instance cpu, or none")
    return Network(round_trip / 1e3, bandwidth * 1e9 / 8)


def _places(names: Sequence[str], amp: str) -> list[Place]:
    if unknown := [name for name in names if name not in NAMES]:
        raise ConfigError(f"--instance must be one of {', '.join(NAMES)}, got {', '.join(map(repr, unknown))}")
    places = [found for name in dict.fromkeys(names) if (found := place(name, amp))]
    if not places:
        raise EngineError("--instance cuda: nvidia-smi finds no GPU here")
    return places
