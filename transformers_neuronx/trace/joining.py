"""Fuse operations into those that have a kernel: attention, and activations of linear layers."""

from __future__ import annotations

from typing import Any, NamedTuple, cast

import torch
from torch.fx import Graph, Node

aten = torch.ops.aten

PRODUCTS = {aten.matmul.default, aten.bmm.default}
# Operations that leave attention weights unchanged. Dropout does so outside training.
KEPT = {aten.dropout.default, aten.contiguous.default, aten.clone.default, aten.detach.default}
# Operations that map equal values to equal values.
SAME = {aten.expand.default, aten._to_copy.default, aten.clone.default, aten.alias.default}
CONVERSIONS = {aten.to.dtype, aten.to.dtype_layout, aten.type_as.default}


class Scores(NamedTuple):
    """The parts of attention scores: q kᵀ scale + biases."""

    q: Node
    transposed: Node  # kᵀ
    scale: float = 1.0
    biases: tuple[Node, ...] = ()


def join_attention(graph: Graph) -> None:
    """Fuse softmax(q kᵀ scale + biases) v into `scaled_dot_product_attention` if nothing else uses its parts."""
    for node in list(graph.nodes):  # these count as other uses of its parts
        if node.target is aten._assert_tensor_metadata.default:
            graph.erase_node(node)
    for node in list(graph.nodes):
        if node.target in PRODUCTS and not _comes_out(node):
            weights, values = node.args
            scores = _scores(weights)
            if scores and _fit(scores, weights, values):
                _join(graph, node, scores, values)
    graph.eliminate_dead_code()


def _scores(weights: Any) -> Scores | None:
    """Return the scores whose softmax along the last axis gives `weights`, or None if there are none."""
    while _between(weights) and weights.target in KEPT | CONVERSIONS:
        if weights.target is aten.dropout.default and weights.args[2]:
            return None
        weights = weights.args[0]
    if not _between(weights) or weights.target is not aten.softmax.int:
        return None
    scores, axis = weights.args[:2]
    return _taken_apart(scores) if axis in (-1, len(_shape(weights)) - 1) else None


def _taken_apart(scores: Any) -> Scores | None:
    if not _between(scores):
        return None
    x, *others = scores.args
    if scores.target in CONVERSIONS:
        return _taken_apart(x) if scores.meta["val"].is_floating_point() else None
    if scores.target in PRODUCTS:
        return Scores(x, others[0])
    if scores.target in (aten.mul.Tensor, aten.div.Tensor) and isinstance(factor := others[0], int | float):
        made = _taken_apart(x)
        if not made or made.biases or not factor:
            return None
        return made._replace(scale=made.scale * (factor if scores.target is aten.mul.Tensor else 1 / factor))
    if scores.target is aten.add.Tensor and not scores.kwargs and isinstance(others[0], Node):
        for first, bias in ((x, others[0]), (others[0], x)):
            if made := _taken_apart(first):
                return made._replace(biases=(*made.biases, bias))
    return None


def _comes_out(node: Node) -> bool:
    """Return whether a node is a result of the function. Such a node must keep its name."""
    return any(user.op == "output" for user in node.users)


def _between(node: Any) -> bool:
    return isinstance(node, Node) and node.op == "call_function" and len(node.users) == 1


def _shape(node: Node) -> tuple[int, ...]:
    return tuple(node.meta["val"].shape)


def _fit(scores: Scores, weights: Node, values: Node) -> bool:
    """Return whether attention takes these operands: one element type, equal leading sizes, and no wider bias."""
    operands = scores.q, scores.transposed, values
    lead = {_shape(each)[:-2] for each in operands}
    sizes = (*_shape(scores.q)[:-1], _shape(scores.transposed)[-1])
    alike = {each.meta["val"].dtype for each in (*operands, *scores.biases)}
    return len(lead) == len(alike) == 1 and len(sizes) > 2 and _shape(weights) == sizes


def _join(graph: Graph, product: Node, scores: Scores, values: Node) -> None:
    def call(target: Any, *args: Any, **options: Any) -> Node:
        node = graph.call_function(target, args, options)
        node.meta = dict(product.meta)
        node.meta["val"] = target(*torch.fx.node.map_arg(args, lambda each: each.meta["val"]), **options)
        return node

    with graph.inserting_before(product):
        keys = call(aten.transpose.int, scores.transposed, -1, -2)
        bias = None
        for each in scores.biases:
            bias = each if bias is None else call(aten.add.Tensor, bias, each)
        joined = call(aten.scaled_dot_product_attention.default, scores.q, keys, values, bias, scale=scores.scale)
    product.replace_all_uses_with(joined)


def narrow_masks(graph: Graph) -> None:
    """Reduce masks that are equal for all queries to one row, so that a kernel reads one row."""
    known: dict[Node, Any] = {}
    for node in list(graph.nodes):
        if node.target is aten.scaled_dot_product_attention.default and len(node.args) > 3:
            mask = node.args[3]
            if isinstance(mask, Node) and _shape(mask)[-2] > 1 and _same_along(mask, -2, known):
                with graph.inserting_before(node):
                    row = graph.call_function(aten.slice.Tensor, (mask, -2, 0, 1))
                row.meta = dict(mask.meta, val=mask.meta["val"][..., :1, :])
                node.update_arg(3, row)


def _same_along(node: Node, axis: int, known: dict[Node, Any]) -> bool:
    """Return whether a node's elements are known to be equal along an axis, counted from the last."""
    if len(_shape(node)) < -axis or _shape(node)[axis] == 1:
        return True
    pointwise = node.target in SAME or torch.Tag.pointwise in getattr(node.target, "tags", ())
    if pointwise and all(_same_along(each, axis, known) for each in node.all_input_nodes):
        return True
    value = constant(node, known)
    return value is not None and bool((value == value.narrow(axis, 0, 1)).all())


def constant(node: Node, known: dict[Node, Any]) -> Any:
    """Return a node's value if it depends only on known values; otherwise None."""
    if node not in known:
        values = {each: constant(each, known) for each in node.all_input_nodes}
        ours = node.op != "call_function" or "activation" in node.kwargs  # PyTorch's operation has no such argument
        if ours or any(value is None for value in values.values()):
            known[node] = None
        else:
            arguments: Any = torch.fx.node.map_arg(node.args, values.__getitem__)
            known[node] = cast(Any, node.target)(*arguments, **node.kwargs)
    return known[node]


def join_activations(graph: Graph) -> None:
    """Fuse an activation into a linear layer if nothing else uses the layer's output."""
    for node in graph.find_nodes(op="call_function", target=aten.linear.default):
        users = list(node.users)
        name = _activation(users[0]) if len(users) == 1 and not _comes_out(users[0]) else None
        if name is not None:
            node.update_kwarg("activation", name)
            users[0].replace_all_uses_with(node)
            graph.erase_node(users[0])


def _activation(node: Node) -> str | None:
    """Return an activation's name in a model configuration, or None."""
    if node.target is aten.gelu.default:
        return "gelu_pytorch_tanh" if node.kwargs.get("approximate") == "tanh" else "gelu"
    names: dict[Any, str] = {aten.silu.default: "silu", aten.relu.default: "relu", aten.tanh.default: "tanh"}
    return names.get(node.target)
