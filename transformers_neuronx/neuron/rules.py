"""Find what `neuronx-cc` would refuse in a module, according to public documents, and the source lines that wrote it.

The rules were never compared with a Neuron compiler. It may refuse what they accept, and newer compilers may accept
what they report.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from transformers_neuronx.errors import GraphError
from transformers_neuronx.neuron.conditions import CONDITIONS, Site, type_of
from transformers_neuronx.neuron.supported import (
    ANY_TYPE,
    FLOAT8,
    LARGEST,
    REFUSED,
    TAKEN,
    TYPE_REFUSED,
    TYPES,
    UNKNOWN,
    Refusal,
)
from transformers_neuronx.neuron.targets import Target, target_named
from transformers_neuronx.pyhlo import HloModuleProto
from transformers_neuronx.pyhlo.computations import reached
from transformers_neuronx.pyhlo.dtypes import ELEMENT_TYPES
from transformers_neuronx.pyhlo.hlo_pb2 import HloComputationProto, HloInstructionProto, ShapeProto
from transformers_neuronx.pyhlo.shapes import arrays_of, nbytes, shape_text

_SEEN = frozenset({"get-tuple-element", "tuple"})  # other instructions have made their arrays
_ANY_OPERATION = frozenset({"element type", "64-bit integers", "64-bit id", "dynamic shape"})  # can break these rules
_UNKNOWN = "Write it with operations that are known to be supported"
_RENUMBER = "Renumber instructions and computations from 1 on, as HloScribe does"

Computations = Mapping[int, HloComputationProto]
Found = tuple[HloInstructionProto, Refusal]


@dataclass(frozen=True)
class Finding:
    """Something that the compiler would refuse: an instruction, or `count` of them that one line of code has written.

    `rule` is a short name, and `code` the compiler's own code for it (NCC_…) if one is public. `where` is `file:line`,
    or "" if the module does not have it. `scope` is a scope such as "layer.3/attention". `message` says what is wrong,
    and `advice` what to write instead.
    """

    rule: str
    computation: str
    instruction: str
    opcode: str
    where: str
    scope: str
    message: str
    advice: str
    code: str = ""
    count: int = 1

    def __str__(self) -> str:
        file, _, line = self.where.rpartition(":")
        where = f"{Path(file).name}:{line}" if self.where else self.instruction
        scope = f" ({self.scope})" if self.scope else ""
        code = f" [{self.code}]" if self.code else ""
        count = f" ({self.count} instructions)" if self.count > 1 else ""
        return f"{where}: {self.opcode}{scope}: {self.message}{code}. {self.advice}.{count}"


def check(module: HloModuleProto, target: str = "neuron") -> list[Finding]:
    """Return what `neuronx-cc` would refuse in `module`, unchanged, for a `target`: neuron, trn1, inf2 or trn2.

    The same problem of one line of code is reported once. Raises ConfigError for an unknown target, and GraphError for
    a module without an entry computation.
    """
    wanted, computations = target_named(target), {each.id: each for each in module.computations}
    if module.entry_computation_id not in computations:
        raise GraphError(f"check needs a module with an entry computation, got {len(computations)} without one")
    found: dict[tuple[str, ...], Finding] = {}
    for computation in reversed(reached(module)):  # callers first
        by_id = {instruction.id: instruction for instruction in computation.instructions}
        for instruction, refusal in _of_computation(module, computation, by_id, computations, wanted):
            finding = _finding(refusal, computation, instruction)
            opcode = "" if finding.rule in _ANY_OPERATION else finding.opcode
            key = finding.rule, finding.where, opcode, finding.message
            known = found.get(key)
            found[key] = replace(known, count=known.count + 1) if known else finding
    return list(found.values())


def _finding(refusal: Refusal, computation: HloComputationProto, instruction: HloInstructionProto) -> Finding:
    metadata = instruction.metadata
    return Finding(
        rule=refusal.rule,
        computation=computation.name,
        instruction=instruction.name,
        opcode=instruction.opcode,
        where=f"{metadata.source_file}:{metadata.source_line}" if metadata.source_file else "",
        scope=metadata.op_name.rpartition("/")[0],
        message=refusal.message,
        advice=refusal.advice,
        code=refusal.code,
    )


def _of_computation(
    module: HloModuleProto,
    computation: HloComputationProto,
    by_id: Mapping[int, HloInstructionProto],
    computations: Computations,
    target: Target,
) -> Iterator[Found]:
    for instruction in computation.instructions:
        for refusal in _of_instruction(Site(instruction, by_id, computations, target)):
            yield instruction, refusal
    root = by_id.get(computation.root_id, HloInstructionProto())
    if not _fits(computation.id, computation.root_id):
        yield root, Refusal("64-bit id", "its computation has an id of more than 32 bits", _RENUMBER)
    if computation.id == module.entry_computation_id:
        yield from _of_aliases(module, root, by_id)


def _of_instruction(site: Site) -> Iterator[Refusal]:
    opcode = site.instruction.opcode
    if opcode in REFUSED:
        yield REFUSED[opcode]
    elif opcode not in TAKEN:
        yield Refusal(UNKNOWN, "is not in any list of supported operations", _UNKNOWN, "NCC_EVRF001")
    for condition in CONDITIONS.get(opcode, ()):
        yield from condition(site)
    if opcode not in _SEEN:
        yield from _of_shape(site)
    yield from _of_ids(site.instruction)


def _of_shape(site: Site) -> Iterator[Refusal]:
    arrays = arrays_of(site.instruction.shape)
    for name in dict.fromkeys(map(type_of, arrays)):
        if name not in TYPES and not (name in FLOAT8 and site.target.float8):
            refusal = TYPE_REFUSED.get(name, ANY_TYPE)
            yield refusal._replace(message=f"{name} {refusal.message}")
    if any(any(shape.is_dynamic_dimension) or min(shape.dimensions, default=0) < 0 for shape in arrays):
        advice = "Make all sizes fixed: pad to the largest, and mask"
        yield Refusal("dynamic shape", "has a shape that is known only at run time", advice, "NCC_EMOD025")
    for shape in arrays:
        if type_of(shape) in ELEMENT_TYPES and nbytes(shape) > LARGEST:
            advice = "Split it over more devices, or use a smaller batch"
            yield Refusal("large array", f"makes {shape_text(shape)}, which is more than 4 GB", advice, "NCC_EVRF024")


def _of_ids(instruction: HloInstructionProto) -> Iterator[Refusal]:
    own = (instruction.id, instruction.parameter_number, *instruction.operand_ids)
    if not _fits(*own, *instruction.called_computation_ids, *instruction.control_predecessor_ids):
        yield Refusal("64-bit id", "has or uses an id of more than 32 bits", _RENUMBER)


def _fits(*numbers: int) -> bool:
    return all(-(1 << 31) <= number < 1 << 31 for number in numbers)


def _of_aliases(
    module: HloModuleProto, root: HloInstructionProto, by_id: Mapping[int, HloInstructionProto]
) -> Iterator[Found]:
    """Yield what is wrong with results that take the memory of parameters, and with those that are parameters."""
    results = [by_id.get(number, root) for number in root.operand_ids] if root.opcode == "tuple" else [root]
    parameters = {each.parameter_number: each for each in by_id.values() if each.opcode == "parameter"}
    entries = module.input_output_alias.entries
    outputs = Counter(tuple(entry.output_shape_index) for entry in entries)
    inputs = Counter((entry.parameter_number, *entry.parameter_shape_index) for entry in entries)
    for entry in entries:
        place, taken = tuple(entry.output_shape_index), (entry.parameter_number, *entry.parameter_shape_index)
        number = place[0] if place else 0
        result = results[number] if 0 <= number < len(results) else root
        made = _part(root.shape, place)
        given = _part(parameters[taken[0]].shape, taken[1:]) if taken[0] in parameters else None
        if outputs.pop(place, 0) > 1:
            advice = "Let it take the memory of one parameter only"
            yield result, Refusal("aliasing", "takes the memory of several parameters", advice)
        if inputs.pop(taken, 0) > 1:
            advice = "Let only one result take it"
            yield result, Refusal("aliasing", f"parameter {taken[0]} gives its memory to several results", advice)
        if made is None or given is None or not _alike(made, given):
            message = f"is {_text(made)} in the memory of parameter {taken[0]}, which is {_text(given)}"
            yield result, Refusal("aliasing", message, "Let a result take the memory of a parameter of its shape")
    for result in results:
        if result.opcode == "parameter":
            advice = "Leave it out of the results, or return a copy"
            yield result, Refusal("aliasing", "is a result of the program unchanged", advice)


def _part(shape: ShapeProto, index: tuple[int, ...]) -> ShapeProto | None:
    """Return the element of a tuple at an index, or None if there is none."""
    for number in index:
        if not 0 <= number < len(shape.tuple_shapes):
            return None
        shape = shape.tuple_shapes[number]
    return shape


def _alike(a: ShapeProto, b: ShapeProto) -> bool:
    return a.element_type == b.element_type and a.dimensions == b.dimensions


def _text(shape: ShapeProto | None) -> str:
    return shape_text(shape) if shape is not None and type_of(shape) in ELEMENT_TYPES else "no array"
