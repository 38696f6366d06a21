"""Whether a model fits, where, and how fast it can be at best, from its configuration alone.

What a device needs is counted by `inspection` from the programs written for it; no weights are read, and nothing is
compiled.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from transformers_neuronx.analysis.inspection import ModelFacts, Row, facts_of_model
from transformers_neuronx.analysis.planning.places import CPU, Core, Place
from transformers_neuronx.analysis.planning.text import plan_text
from transformers_neuronx.config import Buckets
from transformers_neuronx.engine.decoder import Decoder
from transformers_neuronx.engine.encoding import EncodeKey
from transformers_neuronx.engine.keys import ProgramKey, program_name
from transformers_neuronx.engine.rectangles import HeadKey, StepKey
from transformers_neuronx.models.base import Model
from transformers_neuronx.runtimes import get_runtime
from transformers_neuronx.runtimes.absent import absent_runtime
from transformers_neuronx.runtimes.base import Runtime
from transformers_neuronx.runtimes.collectives import pays
from transformers_neuronx.serving.steps import LogitsKey, TokensKey

HOSTS = (1, 2, 4, 8, 16)
GATHER, REDUCE = "all-gather", "all-reduce"
OVERHEAD = 0.26e-3  # seconds that two processes need for a sum, as benchmarks/between_hosts.py measured on two cores


@dataclass(frozen=True)
class Network:
    """What is between hosts: the seconds of a message to another one and back, and bytes a second into each."""

    round_trip: float
    bandwidth: float


@dataclass(frozen=True)
class Work:
    """Bytes that a device's operations move in one step, and FLOPs of its products, as `inspection` counts them.

    `sums` is the number of operations that need other devices, and `received` the bytes that they bring.
    """

    bytes: int
    flops: int
    sums: int = 0
    received: int = 0

    def seconds(self, core: Core) -> float | None:
        """Return the roofline time: memory or arithmetic at full speed, whichever takes longer. None if unknown."""
        if core.bandwidth is None or core.peak is None:
            return None
        return max(self.bytes / core.bandwidth, self.flops / core.peak)

    def seconds_between(self, hosts: int, network: Network) -> float:
        """Return the time of its sums over so many hosts: a round trip to each other one, and the bytes."""
        return self.sums * (hosts - 1) * (network.round_trip + OVERHEAD) + self.received / network.bandwidth


@dataclass(frozen=True)
class Needs:
    """What each device must hold, in bytes, and compute: for one token of each sequence, and for prompts."""

    weights: int
    caches: int
    temporaries: int
    token: Work
    prompt: Work | None  # None if prompts go in token by token

    @property
    def total(self) -> int:
        """All bytes."""
        return self.weights + self.caches + self.temporaries


@dataclass(frozen=True)
class Fit:
    """A model at a place and a degree. Bytes are for one device, which has `memory`. Seconds are roofline times.

    `needs` is None if the place does not support the degree. `sum_seconds` is the part of a token's for sums of hosts.
    That is not at the limit of a roof, but as it was measured.
    """

    place: str
    degree: int
    memory: int
    needs: Needs | None
    token_seconds: float | None = None
    prompt_seconds: float | None = None
    sum_seconds: float | None = None

    @property
    def fits(self) -> bool:
        """Whether the place supports the degree, and has enough memory."""
        return self.needs is not None and self.needs.total <= self.memory

    def as_dict(self) -> dict[str, Any]:
        """Return a dictionary for JSON."""
        return asdict(self) | dict(fits=self.fits)


@dataclass(frozen=True)
class Plan:
    """A model at several places, and divided among `hosts` like this machine, if there is a `network` between them.

    `prompts` are the number of prompts read at once, and the most tokens of each. `heads_by_degree` is the number of
    heads at each degree: the model's `heads`, padded with zeros so that the degree divides them.
    """

    family: str
    parameters: int
    amp: str
    quant: str | None
    batch_size: int
    positions: int
    prompts: tuple[int, int]
    heads: int
    heads_by_degree: dict[int, int]
    places: list[Place]
    fits: list[Fit]
    network: Network | None = None
    hosts: Sequence[Fit] = ()

    def as_dict(self) -> dict[str, Any]:
        """Return a dictionary for JSON."""
        fits, hosts = ([fit.as_dict() for fit in each] for each in (self.fits, self.hosts))
        return asdict(self) | dict(fits=fits, hosts=hosts)

    def __str__(self) -> str:
        return plan_text(self.as_dict())


class Planner:
    """Makes plans for one model, which has no weights and is on no device."""

    def __init__(self, model: Model) -> None:
        self.model = model
        buckets = model.options.buckets
        largest = Buckets(buckets.positions[-1:], buckets.context[-1:], buckets.sources[-1:])
        self.options = replace(model.options, buckets=largest)  # smaller programs need less
        self._written = functools.cache(self._write)

    def plan(
        self,
        places: Sequence[Place],
        degree: int | None = None,
        all_degrees: bool = False,
        network: Network | None = None,
    ) -> Plan:
        """Plan for each place at this degree, at all its degrees with `all_degrees`, or at the smallest that fits.

        With a `network`, also for hosts like this machine, if it is one of the places.
        """
        fits = [fit for place in places for fit in self._fits(place, degree, all_degrees)]
        options, heads = self.options, self.model.model_config.attention_heads
        degrees = sorted({each for place in places for each in (place.degrees if degree is None else [degree])})
        facts = self._written(1)[1]
        return Plan(
            family=facts.family,
            parameters=facts.weight_count,
            amp=options.amp,
            quant=options.quant.quant_dtype if options.quant else None,
            batch_size=options.batch_size,
            positions=options.buckets.longest,
            prompts=(options.prompt_batch_size, (options.buckets.sources or options.buckets.context or (1,))[-1]),
            heads=heads.heads,
            heads_by_degree={each: heads.split(0, unit=1).padded(heads.heads, each) for each in degrees},
            places=list(places),
            fits=fits,
            network=network,
            hosts=[
                self.divided(place.core, hosts, network)
                for place in places
                if network and place.name == CPU
                for hosts in HOSTS
            ],
        )

    def divided(self, host: Core, hosts: int, network: Network) -> Fit:
        """Return how it fits on so many hosts, each of them a device."""
        needs = self.needs(hosts, on_cpu=True)

        def seconds(work: Work | None) -> float | None:
            if work is None or (alone := work.seconds(host)) is None:
                return None
            return alone + work.seconds_between(hosts, network)

        times = seconds(needs.token), seconds(needs.prompt), needs.token.seconds_between(hosts, network)
        return Fit(f"{hosts} like cpu", hosts, int(host.memory), needs, *times)

    def fit(self, place: Place, degree: int) -> Fit:
        """Return how it fits at one place, on `degree` devices."""
        core = place.share(degree)
        if degree not in place.degrees and not place.together:
            return Fit(place.name, degree, int(core.memory), None)
        needs = self.needs(degree, place.name == CPU)
        token, prompt = (work.seconds(core) if work else None for work in (needs.token, needs.prompt))
        return Fit(place.name, degree, int(core.memory), needs, token, prompt)

    def _fits(self, place: Place, degree: int | None, all_degrees: bool) -> list[Fit]:
        if degree is not None:
            return [self.fit(place, degree)]
        if all_degrees:
            return [self.fit(place, each) for each in place.degrees]
        found = (fit for each in place.degrees if (fit := self.fit(place, each)).fits)
        return [next(found, None) or self.fit(place, place.degrees[-1])]

    def needs(self, degree: int, on_cpu: bool = False) -> Needs:
        """Return the needs of each of `degree` devices, on this machine's CPU or on devices without kernels."""
        decoder, facts = self._written(degree, on_cpu)
        tokens, prompts = _steps(decoder)
        token, prompt = _work(decoder, facts, tokens[-1:]), _work(decoder, facts, prompts[-1:])
        assert token is not None
        # Logits of all tokens of a prompt are computed on request only.
        rare = {
            program_name(key, segment)
            for key in decoder.planned()
            for segment in key.segments(decoder.programs)
            if isinstance(key, HeadKey | LogitsKey)
        }
        temporaries = max(program.temporaries for program in facts.programs if program.name not in rare)
        return Needs(facts.weight_bytes, facts.caches, temporaries, token, prompt)

    def _write(self, degree: int, on_cpu: bool = False) -> tuple[Decoder, ModelFacts]:
        """Write the programs, and return their decoder and facts."""
        options = replace(self.options, tp_degree=degree)
        runtime: Runtime = get_runtime(CPU, degree) if on_cpu else absent_runtime(degree)
        decoder = self.model.decoder_on(runtime, options)
        return decoder, facts_of_model(decoder)


def _steps(decoder: Decoder) -> tuple[list[ProgramKey], list[ProgramKey]]:
    """Return the keys of steps of single tokens, and of those that read prompts, or sources; the largest come last."""
    tokens, prompts, sources = list[ProgramKey](), list[ProgramKey](), list[ProgramKey]()
    for key in decoder.planned():
        match key:
            case EncodeKey():
                sources.append(key)
            case StepKey():
                (tokens if key.active == 1 else prompts).append(key)
            case TokensKey():
                (tokens if key.rounds else prompts).append(key)
    return tokens, sources or prompts


def _work(decoder: Decoder, facts: ModelFacts, keys: Sequence[ProgramKey]) -> Work | None:
    """Return the work of the programs of one step; None if there are none."""
    names = {program_name(key, segment) for key in keys for segment in key.segments(decoder.programs)}
    programs = [program for program in facts.programs if program.name in names]
    if not programs:
        return None
    totals = [(program.runs, program.total) for program in programs]
    moved = sum(runs * (total.read + total.written) for runs, total in totals)
    sums = [
        (program.runs * op.count, program.runs * _received(op, decoder.programs.degree))
        for program in programs
        for op in program.ops
        if op.name in (GATHER, REDUCE)
    ]
    count, received = map(sum, zip(*sums, strict=True)) if sums else (0, 0)
    return Work(moved, sum(runs * total.products for runs, total in totals), count, received)


def _received(op: Row, devices: int) -> int:
    """Return the bytes that a device gets from the others in an operation, as `runtimes.collectives` does it."""
    if op.name == GATHER:
        return op.written * (devices - 1) // devices
    each = op.written // op.count
    return op.written * (devices - 1) if pays(each, devices) else 2 * op.written * (devices - 1) // devices
