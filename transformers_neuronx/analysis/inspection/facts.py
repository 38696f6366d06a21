"""Facts of a program without compiling or running it: shapes, memory, operations. All are for one device."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from transformers_neuronx.analysis.inspection.costs import Cost, costs_of
from transformers_neuronx.analysis.inspection.flow import Flows
from transformers_neuronx.analysis.inspection.temporaries import temporaries
from transformers_neuronx.analysis.inspection.text import program_text
from transformers_neuronx.pyhlo import HloModuleProto
from transformers_neuronx.pyhlo.hlo_pb2 import TUPLE, ShapeProto
from transformers_neuronx.pyhlo.shapes import nbytes, shape_text
from transformers_neuronx.weights.rows import Weight

WEIGHT, CACHE, INPUT = "weight", "cache", "input"


@dataclass(frozen=True)
class Output:
    """A result of a program: its shape, as f32[1,16], its bytes, and the parameter whose memory it takes, or None."""

    shape: str
    bytes: int
    takes: str | None


@dataclass(frozen=True)
class Parameter:
    """A parameter of a program, as one device has it.

    `kind` is weight for a row of the weight table, cache if a result takes its memory, or else input. A weight has the
    shape `share`, as a matrix. It is one of `degree` shares of the shape `whole` along `axis`, which is None if every
    device has the whole weight. `same_as` is another parameter in the same memory.
    """

    name: str
    shape: str
    bytes: int
    kind: str
    share: list[int] | None = None
    whole: list[int] | None = None
    axis: int | None = None
    degree: int = 1
    same_as: str | None = None


@dataclass(frozen=True)
class Row:
    """A sum of costs: of a kind of operation, a layer, or each of `repeats` equal layers from `name` to `last`."""

    name: str
    last: str = ""
    repeats: int = 1
    count: int = 0
    flops: int = 0
    products: int = 0
    read: int = 0
    written: int = 0

    @staticmethod
    def of(name: str, costs: Iterable[Cost]) -> Row:
        """Return the sum of costs."""
        costs = list(costs)
        keys = ("count", "flops", "products", "read", "written")
        return Row(name, **{key: sum(getattr(cost, key) for cost in costs) for key in keys})


@dataclass(frozen=True)
class ModuleFacts:
    """A program. FLOPs and bytes are counted by `inspection.costs`, for one device and one iteration of each loop.

    `runs` is how often a step runs it: groups of equal layers share one program. `temporaries` is an estimate in bytes.
    `layers` folds neighbours with equal costs into one row, so sums must multiply rows by their `repeats`.
    """

    name: str
    parameters: list[Parameter]
    outputs: list[Output]
    costs: list[Cost]
    temporaries: int
    runs: int = 1
    module: HloModuleProto = field(repr=False, compare=False, default_factory=HloModuleProto)

    @property
    def ops(self) -> list[Row]:
        """Costs by kind of operation, the most expensive first."""
        rows = _summed(self.costs, lambda cost: cost.op)
        return sorted(rows, key=lambda row: (-row.flops, -row.read - row.written))

    @property
    def layers(self) -> list[Row]:
        """Costs by layer, in the order of the program."""
        folded: list[Row] = []
        for row in _summed(self.costs, lambda cost: cost.layer):
            last = folded[-1] if folded else row
            numbered = "." in row.name and row.name.rpartition(".")[0] == last.name.rpartition(".")[0]
            if folded and numbered and row == replace(last, name=row.name, last="", repeats=1):
                folded[-1] = replace(last, last=row.name, repeats=last.repeats + 1)
            else:
                folded.append(row)
        return folded

    @property
    def total(self) -> Row:
        """Sum of all costs."""
        return Row.of("total", self.costs)

    @property
    def loops(self) -> int:
        """The depth of nested loops. Costs in a loop are for one iteration."""
        return max((cost.loops for cost in self.costs), default=0)

    @property
    def held(self) -> dict[str, int]:
        """Bytes of the parameters of each kind, with shared memory counted once."""
        own = [parameter for parameter in self.parameters if parameter.same_as is None]
        return {kind: sum(each.bytes for each in own if each.kind == kind) for kind in (WEIGHT, CACHE, INPUT)}

    def as_dict(self) -> dict[str, Any]:
        """Return a dictionary for JSON."""
        facts = {name: plain(getattr(self, name)) for name in ("name", "runs", "loops", "temporaries", "held")}
        tables = ("total", "layers", "ops", "parameters", "outputs", "costs")
        return facts | {name: plain(getattr(self, name)) for name in tables}

    def __str__(self) -> str:
        return program_text(self.as_dict())


def plain(value: Any) -> Any:
    """Convert to the types of JSON."""
    if isinstance(value, list):
        return [plain(each) for each in value]
    return asdict(value) if hasattr(value, "__dataclass_fields__") else value


def _summed(costs: Iterable[Cost], name_of: Callable[[Cost], str]) -> list[Row]:
    groups: dict[str, list[Cost]] = {}
    for cost in costs:
        groups.setdefault(name_of(cost), []).append(cost)
    return [Row.of(name, group) for name, group in groups.items()]


def facts_of(
    module: HloModuleProto,
    rows: Mapping[str, Weight] | None = None,
    degree: int = 1,
    *,
    same: Mapping[str, str] | None = None,
    kernels: bool = True,
    runs: int = 1,
) -> ModuleFacts:
    """Return the facts of `module`.

    `rows` maps names of parameters to rows of the weight table, which `degree` devices share. `same` maps the name of a
    parameter to an earlier one in the same memory. With `kernels`, memory is estimated for a CPU with kernels.
    """
    flow, signature = Flows(module, kernels).entry, module.host_program_shape
    aliases = {entry.parameter_number: entry.output_shape_index for entry in module.input_output_alias.entries}
    rows, same = rows or {}, same or {}
    names = [_given_name(name) for name in signature.parameter_names]
    parameters = [
        _parameter(name, shape, rows.get(name), degree, number in aliases, same.get(name))
        for number, (name, shape) in enumerate(zip(names, signature.parameters, strict=True))
    ]
    result = signature.result
    shapes = list(result.tuple_shapes) if result.element_type == TUPLE else [result]
    taken = {index[0] if index else 0: names[number] for number, index in aliases.items()}
    outputs = [Output(shape_text(shape), nbytes(shape), taken.get(index)) for index, shape in enumerate(shapes)]
    costs = costs_of(flow)
    return ModuleFacts(module.name, parameters, outputs, costs, temporaries(flow, aliases), runs, module)


def _given_name(name: str) -> str:
    """Return a parameter's name without the number that the scribe added."""
    given, _, number = name.rpartition(".")
    return given if given and number.isdecimal() else name


def _parameter(
    name: str, shape: ShapeProto, row: Weight | None, degree: int, is_given: bool, same_as: str | None
) -> Parameter:
    if row is None:
        return Parameter(name, shape_text(shape), nbytes(shape), CACHE if is_given else INPUT)
    return Parameter(name, shape_text(shape), nbytes(shape), WEIGHT, **split_of(row, degree), same_as=same_as)


def split_of(row: Weight, degree: int) -> dict[str, Any]:
    """Return the fields of a `Parameter` that come from a row of the weight table."""
    axis = row.split.axis if row.split else 0 if row.whole_experts else None
    return dict(share=list(row.share(degree)), whole=list(row.shape), axis=axis, degree=1 if axis is None else degree)
