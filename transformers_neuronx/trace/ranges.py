"""Check the ranges of indices. PyTorch raises an IndexError for an index out of range, but a program cannot.

An index that is an unchanged input is checked on the host before the program runs. For an index that it computes, the
program returns the smallest and the largest element as an extra output. A constant index is checked during tracing.
Indices inside `torch.cond` are not checked, because both branches are computed for any values.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch.fx import Node

from transformers_neuronx import hlo
from transformers_neuronx.errors import InputError
from transformers_neuronx.pyhlo import Tensor
from transformers_neuronx.trace.export import Exported
from transformers_neuronx.trace.joining import constant
from transformers_neuronx.trace.origin import origin

aten = torch.ops.aten

# Operations with an index along one axis, and whether a negative index counts from the end (or is out of range).
ALONG_AN_AXIS = {
    aten.index_select.default: False,
    aten.gather.default: False,
    aten.index_add.default: False,
    aten.index_copy.default: False,
    aten.index_fill.int_Scalar: True,
    aten.index_fill.int_Tensor: True,
    aten.scatter.src: False,
    aten.scatter.value: False,
    aten.scatter_add.default: False,
    aten.scatter_reduce.two: False,
}
BY_PLACE = {aten.index.Tensor, aten.index_put.default}
# Operations whose results have exactly the elements of the first operand.
KEEPING = {
    aten.alias.default,
    aten.clone.default,
    aten.expand.default,
    aten.flip.default,
    aten.permute.default,
    aten.repeat.default,
    aten.roll.default,
    aten.squeeze.dims,
    aten.unsqueeze.default,
    aten.view.default,
}


class OutOfRangeError(InputError, IndexError):
    """An index is out of range."""


class Range(NamedTuple):
    """The range of an index's elements: from `low` to `high`, inclusive.

    `argument` is the number of the input that is the index, or None if the program computes it. An assertion in the
    function is a range too, from 1 to 1; `asserted` is its message.
    """

    argument: int | None
    low: int
    high: int
    operation: str
    origin: str
    asserted: str = ""

    def check(self, name: str, elements: torch.Tensor) -> None:
        lowest, highest = (int(each) for each in torch.aminmax(elements))
        if lowest < self.low or highest > self.high:
            if self.asserted:
                raise InputError(f"{self.asserted} {self.origin}")
            raise OutOfRangeError(
                f"{name} must be from {self.low} to {self.high} for {self.operation}, got "
                f"{lowest if lowest < self.low else highest}. {self.origin}"
            )


def ranges(exported: Exported) -> list[tuple[Range, Node]]:
    """Return the ranges and nodes of a graph's indices, each once. Constant indices are checked here."""
    arguments = {node: number for number, node in enumerate(exported.inputs.values()) if node}
    given = {*arguments, *exported.states}
    known: dict[Node, Any] = dict(exported.weights)
    found: dict[tuple[Any, ...], tuple[Range, Node]] = {}
    for node in exported.graph.nodes:
        if any(each in given for each in node.all_input_nodes):
            given.add(node)
        for index, size, wraps in _indices(node):
            source = _source(index)
            limits = Range(arguments.get(source), -size if wraps else 0, size - 1, str(node.target), origin(node))
            if index in given:
                found.setdefault((source if source in arguments else index, limits.low, limits.high), (limits, index))
            elif (value := constant(index, known)) is not None:
                limits.check("a constant index", value)
        if node.target is aten._assert_async.msg and node in given:
            found[node,] = Range(None, 1, 1, str(node.target), origin(node), str(node.args[1])), node.all_input_nodes[0]
    return list(found.values())


def _indices(node: Node) -> Iterator[tuple[Node, int, bool]]:
    """Yield a node's indices, the sizes that they index, and whether negative ones count from the end."""
    arguments: Any = node.args
    found: list[tuple[Any, int, bool]] = []
    if node.target is aten.embedding.default:
        found = [(arguments[1], 0, False)]
    elif node.target in ALONG_AN_AXIS:
        found = [(arguments[2], arguments[1], ALONG_AN_AXIS[node.target])]
    elif node.target in BY_PLACE:
        found = [(index, axis, True) for axis, index in enumerate(arguments[1]) if index is not None]
    for index, axis, wraps in found:
        value, sizes = index.meta["val"], arguments[0].meta["val"].shape
        fixed = all(isinstance(size, int) for size in (*value.shape, *sizes))  # the lowering refuses others
        if fixed and value.numel() and value.dtype not in (torch.bool, torch.uint8):
            yield index, sizes[axis] if sizes else 1, wraps


def _source(node: Node) -> Node:
    """Return the earliest node with the same elements, in any order, shape or integer type."""
    while node.target in KEEPING or _widens(node):
        node = node.all_input_nodes[0]
    return node


def _widens(node: Node) -> bool:
    """Return whether a node is a conversion that keeps every integer value."""
    if node.target is not aten._to_copy.default:
        return False
    before, after = (each.meta["val"].dtype for each in (node.all_input_nodes[0], node))
    if before.is_floating_point or after.is_floating_point or torch.bool in (before, after):
        return False
    narrow, wide = torch.iinfo(before), torch.iinfo(after)
    return wide.min <= narrow.min and narrow.max <= wide.max


def extremes(indices: Sequence[Tensor]) -> Tensor:
    """Return the smallest and the largest element of each index, `s64[indices, 2]`."""
    pairs = []
    for index in indices:
        axes = range(len(index.sizes))
        pairs += [hlo.reshape(hlo.convert(of(index, axes), "s64"), 1) for of in (hlo.min, hlo.max)]
    return hlo.reshape(hlo.concatenate(pairs, 0), -1, 2)


def check_given(limits: Sequence[Range], names: Sequence[str], inputs: Sequence[torch.Tensor | None]) -> None:
    """Raise OutOfRangeError for an input that is an index out of range."""
    for each in limits:
        if each.argument is not None and (tensor := inputs[each.argument]) is not None:
            each.check(names[each.argument], tensor)


def check_computed(limits: Sequence[Range], found: torch.Tensor) -> None:
    """Raise OutOfRangeError for computed indices out of range, from the result of `extremes`."""
    computed = [each for each in limits if each.argument is None]
    for each, pair in zip(computed, found, strict=True):
        each.check("an index that the program computes", pair)
