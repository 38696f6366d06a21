"""Operations that call other computations, and those between devices."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

from transformers_neuronx.errors import GraphError
from transformers_neuronx.hlo.contraction import combiner, element
from transformers_neuronx.hlo.shaping import axis_of
from transformers_neuronx.pyhlo import HloScribe, Shape, Tensor, dtype_named

COMPOSITE_NAME = "composite.name"
COMPOSITE_ATTRIBUTES = "composite.attributes"


class Parameters:
    """Hands out the parameters of the computation that is being written, one after the other."""

    def __init__(self) -> None:
        self.count = 0

    def add(self, shape: Shape, name: str) -> Tensor:
        self.count += 1
        return shape.Parameter(parameter_number=self.count - 1, name=name)


def _parameters(shapes: Sequence[Shape]) -> list[Tensor]:
    parameters = Parameters()
    return [parameters.add(shape, f"operand.{number}") for number, shape in enumerate(shapes)]


def _array_shapes(op: str, tensors: Sequence[Tensor]) -> list[Shape]:
    for tensor in tensors:
        if not isinstance(tensor.shape, Shape):
            raise GraphError(f"{op} wants arrays, got the tuple {tensor!r}")
    return [tensor.shape for tensor in tensors if isinstance(tensor.shape, Shape)]


def composite(name: str, body: Callable[..., Tensor | tuple[Tensor, ...]]) -> Callable[..., Any]:
    """`body` as a named operation: a call that says what it means and that a runtime may replace.

    `composite("linear", body)(x, w, scale=2)` runs `body(x, w, scale=2)` in a computation of its own. Tensors are
    positional; keywords are attributes, which a replacement reads as JSON. Returns what `body` returns.
    """

    def call(*operands: Tensor, **attributes: Any) -> Any:
        if not operands:
            raise GraphError(f"{name} wants one tensor or more, got none")
        shapes = _array_shapes(name, operands)
        try:
            text = json.dumps(attributes, sort_keys=True)
        except TypeError as error:
            raise GraphError(f"{name} wants attributes that JSON can say, got {attributes}") from error
        scribe = operands[0].scribe
        key = ("composite", name, body, tuple(map(repr, shapes)), text)
        computation, out = scribe.computation(lambda _: body(*_parameters(shapes), **attributes), name, key)
        result = out.Call(
            *operands,
            to_apply=computation,
            name=name,
            frontend_attributes=dict(map={COMPOSITE_NAME: name, COMPOSITE_ATTRIBUTES: text}),
        )
        if isinstance(out, Shape):
            return result
        return tuple(element(result, index) for index in range(len(out.shapes)))

    return call


def while_loop(
    condition: Callable[..., Tensor], body: Callable[..., Sequence[Tensor]], state: Sequence[Tensor]
) -> list[Tensor]:
    """Apply `body(*state)` while `condition(*state)`, a pred scalar, holds; the state keeps its shapes."""
    shapes = _array_shapes("while_loop", state)
    scribe = state[0].scribe
    whole = scribe.tuple(*shapes)

    def unpacked(function: Callable[..., Any]) -> Callable[[HloScribe], Any]:
        def run(_: HloScribe) -> Any:
            carried = whole.Parameter(parameter_number=0)
            return function(*(element(carried, index) for index in range(len(shapes))))

        return run

    def checked_body(*carried: Tensor) -> Sequence[Tensor]:
        after = body(*carried)
        if [repr(t.shape) for t in after] != [repr(s) for s in shapes]:
            raise GraphError(f"while_loop wants a body that keeps the shapes {shapes}, got {list(after)}")
        return list(after)

    def checked_condition(*carried: Tensor) -> Tensor:
        holds = condition(*carried)
        if holds.dtype.name != "pred" or holds.sizes:
            raise GraphError(f"while_loop wants a condition that is a pred scalar, got {holds!r}")
        return holds

    result = whole.While(whole.Tuple(*state), body=unpacked(checked_body), condition=unpacked(checked_condition))
    return [element(result, index) for index in range(len(shapes))]


def conditional(
    predicate: Tensor, on_true: Callable[..., Tensor], on_false: Callable[..., Tensor], *operands: Tensor
) -> Tensor:
    """`on_true(*operands)` or `on_false(*operands)`, only one of which runs; both return the same shape."""
    if predicate.dtype.name != "pred" or predicate.sizes:
        raise GraphError(f"conditional wants a pred scalar to choose by, got {predicate!r}")
    shapes = _array_shapes("conditional", operands)
    scribe = predicate.scribe
    whole = scribe.tuple(*shapes)

    def branch(function: Callable[..., Tensor], name: str) -> tuple[int, Any]:
        def run(_: HloScribe) -> Tensor:
            carried = whole.Parameter(parameter_number=0)
            return function(*(element(carried, index) for index in range(len(shapes))))

        return scribe.computation(run, name)

    (true_id, true_shape), (false_id, false_shape) = branch(on_true, "on_true"), branch(on_false, "on_false")
    if repr(true_shape) != repr(false_shape):
        raise GraphError(f"conditional wants branches of one shape, got {true_shape} and {false_shape}")
    packed = whole.Tuple(*operands)
    result: Tensor = true_shape.Conditional(predicate, packed, packed, branch_computations=[true_id, false_id])
    return result


def custom_call(
    target: str, shape: Shape, *operands: Tensor, attributes: str = "", alias: dict[int, int] | None = None
) -> Tensor:
    """Code of the runtime's own, called `target`, through XLA's typed FFI.

    `attributes` is the text of an MLIR dictionary; `alias` maps output 0 to the operand whose memory it takes over.
    """
    return shape.CustomCall(
        *operands,
        custom_call_target=target,
        custom_call_api_version="API_VERSION_TYPED_FFI",
        backend_config=attributes,
        output_operand_aliasing=[dict(operand_index=operand) for operand in (alias or {}).values()],
    )


def replica_id() -> Tensor:
    """The rank of the device that runs the program, a u32 scalar."""
    return dtype_named("u32").ReplicaId()


def _groups(replicas: int) -> list[dict[str, Any]]:
    return [dict(replica_ids=range(replicas))]


def all_reduce(x: Tensor, replicas: int, op: str = "Add") -> Tensor:
    """`x` combined over all devices, on every one of them."""
    if replicas == 1:
        return x
    computation, _ = x.scribe.computation(combiner(op, x.dtype), op.lower(), key=("combiner", op, x.dtype.name))
    return x.shape.AllReduce(x, replica_groups=_groups(replicas), to_apply=computation)


def all_gather(x: Tensor, replicas: int, axis: int) -> Tensor:
    """The `x` of every device side by side along `axis`, on every one of them."""
    axis = axis_of("all_gather", x, axis)
    if replicas == 1:
        return x
    sizes = [size * replicas if i == axis else size for i, size in enumerate(x.sizes)]
    return x.dtype[sizes].AllGather(x, dimensions=[axis], replica_groups=_groups(replicas))


def reduce_scatter(x: Tensor, replicas: int, axis: int) -> Tensor:
    """The sum of `x` over all devices, of which each keeps its own piece along `axis`."""
    axis = axis_of("reduce_scatter", x, axis)
    if replicas == 1:
        return x
    if x.sizes[axis] % replicas:
        raise GraphError(f"reduce_scatter wants axis {axis} of {x!r} to divide by {replicas} devices")
    sizes = [size // replicas if i == axis else size for i, size in enumerate(x.sizes)]
    computation, _ = x.scribe.computation(combiner("Add", x.dtype), "add", key=("combiner", "Add", x.dtype.name))
    return x.dtype[sizes].ReduceScatter(x, dimensions=[axis], replica_groups=_groups(replicas), to_apply=computation)


def optimization_barrier(x: Tensor) -> Tensor:
    """`x`, through which the compiler moves nothing."""
    return x.shape.OptimizationBarrier(x)
