"""Lower an exported graph to an HLO module, node by node, with the table of `aten`.

The parameters are the inputs, then the weights, then the states. The results are the outputs, then the extremes of the
indices that the program computes, if any, then the new states. New states use the memory of the old ones.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.fx import Graph, GraphModule, Node

from transformers_neuronx import hlo
from transformers_neuronx.errors import GraphError
from transformers_neuronx.pyhlo import DType, HloScribe, Shape, Tensor, dtype_named
from transformers_neuronx.pyhlo.dtypes import to_torch
from transformers_neuronx.trace.aten import MULTIPLIED, TABLE, element_type_of, parameter, refused
from transformers_neuronx.trace.export import Exported, same
from transformers_neuronx.trace.given import resolved
from transformers_neuronx.trace.origin import module_of, origin
from transformers_neuronx.trace.ranges import extremes
from transformers_neuronx.weights import panels

aten = torch.ops.aten

# Arguments for a tensor's device or memory layout, which do not apply to a program.
IGNORED = {"layout", "device", "pin_memory", "memory_format", "non_blocking", "generator"}
COND = torch.ops.higher_order.cond
SKIPPED = {aten._assert_tensor_metadata.default, aten._assert_async.msg}


@dataclass(frozen=True)
class Casting:
    """Which f32 operations use a narrower element type: none, the matrix products, or all."""

    scope: str = "none"
    dtype: str = "bf16"

    def kept(self, dtype: torch.dtype) -> DType:
        """Return the element type in which a PyTorch tensor of `dtype` is stored."""
        return self.narrow(element_type_of(dtype)) if self.scope == "all" else element_type_of(dtype)

    def multiplied(self, dtype: DType) -> DType:
        """Return the element type in which a tensor of `dtype` is multiplied."""
        return dtype if self.scope == "none" else self.narrow(dtype)

    def narrow(self, dtype: DType) -> DType:
        return dtype_named(self.dtype) if dtype.name == "f32" else dtype


class Placement(NamedTuple):
    """How a weight is stored: as in PyTorch, or as a layer's matrix [out, in], which may be in panels."""

    dtype: str
    sizes: tuple[int, ...]
    matrix: bool = False
    transposed: bool = False  # relative to PyTorch's

    @property
    def word(self) -> int | None:
        return panels.WORDS[self.dtype] if self.matrix else None

    def held(self, in_panels: bool) -> tuple[int, ...]:
        """Return the sizes in memory."""
        return panels.sizes(self.sizes, self.word) if in_panels and self.word else self.sizes

    def laid_out(self, tensor: torch.Tensor, in_panels: bool) -> torch.Tensor:
        """Return a copy of the function's weight in this placement."""
        tensor = resolved(tensor.T if self.transposed else tensor).to(to_torch(self.dtype))
        if in_panels and self.word:
            return panels.laid_out(tensor, self.word)
        return tensor.clone(memory_format=torch.contiguous_format)

    def moved(self, tensor: torch.Tensor, in_panels: bool) -> torch.Tensor:
        """Move a stored weight into or out of panels, without a copy if it is so already."""
        if tuple(tensor.shape) == self.held(in_panels):
            return tensor
        assert self.word is not None
        return panels.laid_out(tensor, self.word) if in_panels else panels.as_matrix(tensor, self.sizes).contiguous()


# Operands that are a layer's matrix, and whether they are transposed from [out, in]. An embedding table can be one
# too, in the element type in which it is multiplied.
Use = tuple[Any, int]
LOOKED_UP: Use = (aten.embedding.default, 0)
MATRICES: dict[Use, bool] = {
    LOOKED_UP: False,
    (aten.linear.default, 1): False,
    (aten.mm.default, 1): True,
    (aten.addmm.default, 2): True,
}


def placements(exported: Exported, casting: Casting) -> dict[Node, Placement]:
    """Return the placement of each weight by its placeholder. Uses of one tensor share a placement."""
    uses: dict[tuple[Any, ...], set[Use]] = {}
    for node, tensor in exported.weights.items():
        uses.setdefault(same(tensor), set()).update(_uses(node))
    return {node: _placement(tensor, uses[same(tensor)], casting) for node, tensor in exported.weights.items()}


def _uses(node: Node) -> set[Use]:
    """Return the operations that use a node, with its operand number in each."""
    return {(user.target, place) for user in node.users for place in _operands(user, node)}


def _operands(user: Node, node: Node) -> list[int]:
    """Return a node's operand numbers in a user, or -1 if it is in a list or a keyword argument."""
    return [place for place, each in enumerate(user.args) if each is node] or [-1]


def _placement(tensor: torch.Tensor, uses: set[Use], casting: Casting) -> Placement:
    multiplied = {(target, place) for target, place in uses if place in MULTIPLIED.get(target, ())}
    sizes, dtype = tuple(tensor.shape), casting.kept(tensor.dtype)
    if not multiplied or uses - multiplied - {LOOKED_UP}:
        return Placement(dtype.name, sizes)
    dtype = casting.multiplied(dtype)
    ways = {MATRICES.get(use) for use in uses}
    if len(ways) > 1 or None in ways or dtype.name not in panels.WORDS:
        return Placement(dtype.name, sizes)
    transposed = ways == {True}
    return Placement(dtype.name, sizes[::-1] if transposed else sizes, True, transposed)


class Region(NamedTuple):
    """A state as part of a larger tensor."""

    whole: tuple[int, ...]
    starts: tuple[int, ...]

    def of(self, x: Tensor, sizes: Sequence[int]) -> Tensor:
        for axis, (start, size) in enumerate(zip(self.starts, sizes, strict=True)):
            x = hlo.slice(x, axis, start, start + size)
        return x


@dataclass
class Lowering:
    """A PyHLO function that lowers an exported graph in one pass, with a tensor or a list of them for each node.

    `places` and `regions` say how weights and states are stored. `indices` are those whose range is checked.
    """

    exported: Exported
    places: Mapping[Node, Placement]
    regions: Mapping[Node, Region]
    indices: Sequence[Node]
    casting: Casting
    in_panels: bool

    def __call__(self, scribe: HloScribe) -> list[Tensor]:
        self.scribe = scribe
        self.values: dict[Node, Any] = {}
        self.stored: dict[Node, Tensor] = {}  # the states as parameters
        self._declare(hlo.Parameters())
        self._walk(self.exported.graph)
        return self._results()

    def _walk(self, graph: Graph) -> None:
        for node in graph.nodes:
            if node.op == "get_attr":  # a branch of torch.cond
                self.values[node] = getattr(graph.owning_module, node.target)
            elif node.op == "call_function" and node.target not in SKIPPED:
                self.values[node] = self._lowered(node)

    def _either(self, predicate: Tensor, on_true: GraphModule, on_false: GraphModule, given: Sequence[Any]) -> Any:
        """Compute both branches, and select the results of one."""
        results = []
        for branch in (on_true, on_false):
            self.values.update(zip(branch.graph.find_nodes(op="placeholder"), given, strict=True))
            self._walk(branch.graph)
            outputs: Any = branch.graph.output_node().args[0]
            results.append([self.values[each] for each in outputs])
        return [hlo.select(hlo.broadcast_to(predicate, a.sizes), a, b) for a, b in zip(*results, strict=True)]

    def _declare(self, parameters: hlo.Parameters) -> None:
        exported, names = self.exported, self.exported.names
        for name, node in exported.inputs.items():
            if node:
                self.values[node] = self._kept(parameters.add(shape_of(node.meta["val"]), name))
        for node, placed in self.places.items():
            tensor = parameters.add(dtype_named(placed.dtype)[placed.held(self.in_panels)], names[node], weight=True)
            word = placed.word if self.in_panels else None
            self.values[node] = parameter(tensor, names[node], placed.sizes, word) if placed.matrix else tensor
        for node, state in exported.states.items():
            shape = element_type_of(state.dtype)[self.regions[node].whole]
            self.stored[node] = parameters.add(shape, names[node])
            self.values[node] = self._kept(self.regions[node].of(self.stored[node], state.shape))

    def _results(self) -> list[Tensor]:
        outputs = [hlo.convert(self.values[node], shape_of(node.meta["val"]).dtype) for node in self.exported.outputs]
        if self.indices:
            outputs.append(extremes([self.values[node] for node in self.indices]))
        for state, node in self.exported.updates.items():
            old = self.stored[state]
            new, sizes = hlo.convert(self.values[node], old.dtype), tuple(self.exported.states[state].shape)
            if new.sizes != sizes:
                raise GraphError(
                    f"input_output_aliases needs an output of the state's sizes {list(sizes)}, got {new!r}"
                )
            if sizes != old.sizes:
                new = hlo.dynamic_update_slice(old, new, self.regions[state].starts)
            new = new.shape.Copy(new) if new in outputs else new  # each result needs its own alias
            new.set_alias_to(old, must=True)
            outputs.append(new)
        return outputs

    def _kept(self, x: Tensor) -> Tensor:
        return hlo.convert(x, self.casting.narrow(x.dtype)) if self.casting.scope == "all" else x

    def _lowered(self, node: Node) -> Any:
        target: Any = node.target
        if target not in (operator.getitem, COND) and (refusal := refused(target, node.meta.get("val"))):
            raise GraphError(f"{refusal[0]}. {origin(node)} {refusal[1]}")
        arguments: list[Any] = [torch.fx.node.map_arg(each, self.values.__getitem__) for each in node.args]
        if target is operator.getitem:
            return _result(node, *arguments)
        if target is COND:
            return self._either(*arguments)
        lowering, out = TABLE[target], self._expected(node)
        for place in MULTIPLIED.get(target, ()):
            if isinstance(x := arguments[place], Tensor):
                arguments[place] = hlo.convert(x, self.casting.multiplied(x.dtype))
        given = {name: value for name, value in node.kwargs.items() if name not in IGNORED}
        options: Any = torch.fx.node.map_arg(given, self.values.__getitem__)
        path, _ = module_of(node)
        try:
            with self.scribe.scope(path) if path else nullcontext():
                result = lowering(out, *arguments, **options)
        except GraphError as error:
            raise GraphError(f"{target}: {error}. {origin(node)}") from error
        return _checked(node, out, result)

    def _expected(self, node: Node) -> Any:
        """Return PyTorch's shape, or shapes, of a node's results. An unused result after the first has None."""
        value: Any = node.meta["val"]
        if not isinstance(value, list | tuple):
            return self._shape(value)
        used = {0} | {user.args[1] for user in node.users if user.target is operator.getitem and user.users}
        return [self._shape(each) if number in used else None for number, each in enumerate(value)]

    def _shape(self, value: torch.Tensor) -> Shape:
        return self.casting.kept(value.dtype)[tuple(value.shape)]


def _result(node: Node, results: Sequence[Tensor | None], number: int) -> Tensor | None:
    """Return one result of an operation. Raises GraphError if it is used but not lowered."""
    if results[number] is None and node.users:
        (source,) = node.all_input_nodes
        raise GraphError(f"{source.target} has no lowering to HLO for its result {number}. {origin(node)}")
    return results[number]


def shape_of(value: torch.Tensor) -> Shape:
    return element_type_of(value.dtype)[tuple(value.shape)]


def _checked(node: Node, out: Any, result: Any) -> Any:
    """Return a lowering's result after a check of its shape against PyTorch's."""
    pairs = list(zip(out, result, strict=True)) if isinstance(out, list) else [(out, result)]
    for want, got in pairs:
        if got is not None and want is not None and repr(got.shape) != repr(want):
            raise GraphError(f"the lowering of {node.target} must return {want!r}, got {got!r}. {origin(node)}")
    return result
