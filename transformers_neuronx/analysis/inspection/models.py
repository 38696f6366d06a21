"""Facts of a model: its weight table and all of its programs, from a decoder or an artifact."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from transformers_neuronx.analysis.inspection.facts import WEIGHT, ModuleFacts, Parameter, facts_of, plain, split_of
from transformers_neuronx.analysis.inspection.text import model_text
from transformers_neuronx.engine.artifacts import open_artifact
from transformers_neuronx.engine.decoder import Decoder
from transformers_neuronx.engine.descriptions import description
from transformers_neuronx.engine.family import ENCODER_LAYER
from transformers_neuronx.engine.keys import ProgramKey, Segment, artifact_key, program_name
from transformers_neuronx.engine.programs import Programs
from transformers_neuronx.huggingface.auto import family_of
from transformers_neuronx.pyhlo import HloModuleProto
from transformers_neuronx.pyhlo.dtypes import element_type
from transformers_neuronx.runtimes.absent import absent_runtime
from transformers_neuronx.weights.directories import PathOrName
from transformers_neuronx.weights.rows import Weight, matrix_of

Found = Callable[[str], HloModuleProto | None]


@dataclass(frozen=True)
class WeightFacts(Parameter):
    """A row of the weight table: a `Parameter` of each of `layers` layers. `elements` are numbers in the checkpoint."""

    layers: int = 1
    elements: int = 0


@dataclass(frozen=True)
class ModelFacts:
    """A model: configuration, options, weight table and programs. Bytes are for one of `degree` devices."""

    family: str
    config: dict[str, Any]
    options: dict[str, Any]
    degree: int
    weights: list[WeightFacts]
    caches: int
    programs: list[ModuleFacts]

    @property
    def weight_bytes(self) -> int:
        """Bytes of all weights, with shared memory counted once."""
        return sum(row.bytes * row.layers for row in self.weights if row.same_as is None)

    @property
    def weight_count(self) -> int:
        """Number of parameters in the checkpoint, with shared memory counted once."""
        return sum(row.elements * row.layers for row in self.weights if row.same_as is None)

    @property
    def temporaries(self) -> int:
        """Estimated temporaries of the program that needs most."""
        return max((program.temporaries for program in self.programs), default=0)

    def as_dict(self) -> dict[str, Any]:
        """Return a dictionary for JSON."""
        names = "family config options degree weight_bytes weight_count caches temporaries weights".split()
        facts = {name: plain(getattr(self, name)) for name in names}
        return facts | dict(programs=[program.as_dict() for program in self.programs])

    def __str__(self) -> str:
        return model_text(self.as_dict())


def facts_of_model(decoder: Decoder) -> ModelFacts:
    """Return the facts of a decoder's planned programs. Nothing needs to be compiled or loaded."""

    def built(entry: str) -> HloModuleProto | None:
        program = decoder.store.stored.get(decoder.store.identities.get(entry, ""))
        return program.module if program else None

    def written(key: ProgramKey, segment: Segment) -> HloModuleProto:
        module = key.written(decoder.programs, segment)
        module.name = program_name(key, segment)
        return module

    held = {_name(*key): id(tensor) for key, tensor in decoder.weights.items()}
    modules = ((runs, built(entry) or written(key, segment)) for entry, runs, key, segment in _planned(decoder))
    return _facts(decoder, modules, held)


def facts_of_artifact(directory: PathOrName) -> ModelFacts:
    """Return the facts of all programs in an artifact, from their modules alone, without weights or a compiler.

    Raises CheckpointError if a file is missing or damaged, and ConfigError if this version does not support the model.
    """
    artifact = open_artifact(directory)
    family = family_of(artifact.manifest["family"])
    model = family(artifact.attributes(family.family), **artifact.options())
    panels = artifact.manifest["runtime"].get("kernels", "off") != "off"
    runtime = absent_runtime(model.options.tp_degree, panels)
    decoder = model.decoder_on(runtime)
    groups = [names for tensors in artifact.manifest["weights"].values() for names in tensors.values()]
    held = {name: number for number, names in enumerate(groups) for name in names}
    runs = {entry: runs for entry, runs, _, _ in _planned(decoder)}
    keys = sorted(artifact.manifest["keys"], key=lambda name: list(runs).index(name) if name in runs else len(runs))
    modules = ((runs.get(name, 1), module.message()) for name in keys if (module := artifact.module(name)))
    return _facts(decoder, modules, held)


def _planned(decoder: Decoder) -> Iterator[tuple[str, int, ProgramKey, Segment]]:
    """Yield for each program its `artifact_key`, how often one step runs it, its key and its segment."""
    for key in decoder.planned():
        segments = key.segments(decoder.programs)
        for segment in dict.fromkeys(segments):
            yield artifact_key(key, segment, decoder.programs.cache.pages), segments.count(segment), key, segment


def _facts(decoder: Decoder, modules: Iterator[tuple[int, HloModuleProto]], held: Mapping[str, int]) -> ModelFacts:
    programs, config, options = decoder.programs, decoder.config, decoder.options
    kernels, degree = decoder.runtime.panels, programs.degree
    same = _same_memory(programs, held)
    rows = dict(_by_parameter(programs))
    others = {name: _like(name, row, same[row.name]) for name, row in rows.items() if row.name in same}
    told = [facts_of(module, rows, degree, same=others, kernels=kernels, runs=runs) for runs, module in modules]
    weights = [_weight(row, programs, same.get(row.name)) for row in programs.table]
    described = description(decoder.family, config, options)
    return ModelFacts(**described, degree=degree, weights=weights, caches=_caches(programs), programs=told)


def _name(layer: int | None, name: str) -> str:
    return name if layer is None else f"layer.{layer}.{name}"


def _same_memory(programs: Programs, held: Mapping[str, int]) -> dict[str, str]:
    """Map rows to an earlier row with the same weights: in the same memory, or else read from the same source."""
    first: dict[Any, str] = {}
    same = {}
    for row in programs.table:
        read = row.value or row.source, row.layout, row.store, row.split, row.word, row.dtype or programs.dtype
        where = held.get(_name(next(iter(row.numbers(programs.layers)), None) if row.layered else None, row.name), read)
        if (other := first.setdefault(where, row.name)) != row.name:
            same[row.name] = other
    return same


def _by_parameter(programs: Programs) -> Iterator[tuple[str, Weight]]:
    """Yield the table's rows by the names that programs may use: a scope, the layer, and the row's own name."""
    for row in programs.table:
        scopes = {"layer", row.name.partition(".")[0]} if row.layered else {""}
        for scope in scopes:
            for layer in row.numbers(programs.layers) if row.layered else [None]:
                own = row.name.removeprefix(ENCODER_LAYER)
                yield row.name if layer is None else f"{scope}.{layer}.{own}", row


def _like(name: str, row: Weight, other: str) -> str:
    """Return the parameter name of another row in the same layer."""
    return name.removesuffix(row.name.removeprefix(ENCODER_LAYER)) + other.removeprefix(ENCODER_LAYER)


def _weight(row: Weight, programs: Programs, same_as: str | None) -> WeightFacts:
    dtype, shape = row.dtype or programs.dtype, row.held(programs.degree)
    own = row.value is None and matrix_of(row.name) == row.name
    return WeightFacts(
        row.name,
        f"{dtype}[{','.join(map(str, shape))}]",
        _bytes(dtype, shape),
        WEIGHT,
        **split_of(row, programs.degree),
        same_as=same_as,
        layers=len(row.numbers(programs.layers)) if row.layered else 1,
        elements=math.prod(row.matrix or row.shape) * (row.experts or 1) if own else 0,
    )


def _bytes(dtype: str, shape: tuple[int, ...]) -> int:
    return -(-math.prod(shape) * element_type(dtype).bits // 8)


def _caches(programs: Programs) -> int:
    """Return the bytes of one device's caches, and of the encoder output that cross-attention reads."""
    total = sum(_bytes(a.dtype, a.sizes) for cache in programs.cache.of_layers for a in cache.arrays)
    if memory := programs.cache.memory:
        total += 2 * len(programs.layers) * _bytes(memory.dtype, memory.sizes) + _bytes("s32", (memory.places,))
    return total
