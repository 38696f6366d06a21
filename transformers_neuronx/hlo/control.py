"""Operations that call other computations, and collectives between devices."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from transformers_neuronx.errors import GraphError
from transformers_neuronx.hlo.contraction import combiner, element
from transformers_neuronx.hlo.shaping import axis_of
from transformers_neuronx.pyhlo import (
    HloModuleProto,
    HloScribe,
    Scribe,
    Shape,
    Tensor,
    TupleShape,
    active_scribe,
    dtype_named,
)
from transformers_neuronx.pyhlo.computations import entry_of
from transformers_neuronx.pyhlo.hlo_pb2 import HloInstructionProto

COMPOSITE_NAME = "composite.name"
COMPOSITE_OPERANDS = "composite.operands"  # their names in order, with spaces between
COMPOSITE_ATTRIBUTES = "composite.attributes"  # as JSON
ROUNDS = "while.rounds"  # attribute of a loop: the number of iterations, if known
WEIGHT = "weight"  # attribute of a parameter: "true" if it is a weight


class Parameters:
    """Writes and numbers the parameters of the open computation."""

    def __init__(self) -> None:
        self.count = 0

    def add(self, shape: Shape, name: str, weight: bool = False) -> Tensor:
        """Write the next parameter. A `weight` has the same value in every call."""
        self.count += 1
        attributes = dict(map={WEIGHT: "true"} if weight else {})
        return shape.Parameter(parameter_number=self.count - 1, name=name, frontend_attributes=attributes)


def weights_of(module: HloModuleProto) -> list[int]:
    """Return the numbers of the parameters that were declared as weights, ascending."""
    parameters = (each for each in entry_of(module).instructions if each.opcode == "parameter")
    return sorted(each.parameter_number for each in parameters if WEIGHT in each.frontend_attributes.map)


def _parameters(shapes: Sequence[Shape]) -> list[Tensor]:
    parameters = Parameters()
    return [parameters.add(shape, f"operand.{number}") for number, shape in enumerate(shapes)]


def _array_shapes(op: str, tensors: Sequence[Tensor]) -> list[Shape]:
    for tensor in tensors:
        if not isinstance(tensor.shape, Shape):
            raise GraphError(f"{op} needs arrays, got the tuple {tensor!r}")
    return [tensor.shape for tensor in tensors if isinstance(tensor.shape, Shape)]


class CompositeCall(NamedTuple):
    """What a module says about a call of a composite: its name, the ids of its operands by name, and its attributes."""

    name: str
    operands: Mapping[str, int]
    attributes: Mapping[str, Any]


def composite_call(instruction: HloInstructionProto) -> CompositeCall | None:
    """Read a call of a composite. None for other instructions, and if operands have no names, as in older modules."""
    said = instruction.frontend_attributes.map
    if COMPOSITE_OPERANDS not in said:
        return None
    operands = dict(zip(said[COMPOSITE_OPERANDS].split(), instruction.operand_ids, strict=True))
    return CompositeCall(said[COMPOSITE_NAME], operands, json.loads(said[COMPOSITE_ATTRIBUTES]))


def composite(name: str, body: Callable[..., Tensor | tuple[Tensor, ...]]) -> Callable[..., Any]:
    """Make `body` a named operation: a call that carries its name and that a runtime may replace.

    `composite("linear", body)(x, w, scale=2)` runs `body(x, w, scale=2)` in a separate computation and returns what
    `body` returns. Arguments with tensors are operands: a replacement finds them by the names of the body's parameters.
    An argument may be a group: the tensors of a sequence `cache` are `cache.0`, `cache.1`, …, and `parts.0.weight` is a
    field in a sequence of named tuples. If a parameter that is not keyword-only is None, its operand is absent. All
    other arguments, and the body's defaults, are attributes, which a replacement reads as JSON.

    The call raises GraphError if it has no tensor, or if its arguments do not fit the body.
    """
    signature = inspect.signature(body)

    def call(*positional: Any, **named: Any) -> Any:
        try:
            bound = signature.bind(*positional, **named)
        except TypeError as error:
            raise GraphError(f"{name}: {error}") from error
        bound.apply_defaults()
        operands, attributes = _divided(name, bound)
        shapes = _array_shapes(name, [*operands.values()])

        def within(_: HloScribe) -> Any:
            tensors = iter(_parameters(shapes))
            arguments = _replaced(bound.args, tensors)
            return body(*arguments, **{key: _replaced(value, tensors) for key, value in bound.kwargs.items()})

        names, scribe = " ".join(operands), next(iter(operands.values())).scribe
        key = ("composite", name, body, names, tuple(map(repr, shapes)), attributes)
        computation, out = scribe.computation(within, name, key)
        said = {COMPOSITE_NAME: name, COMPOSITE_OPERANDS: names, COMPOSITE_ATTRIBUTES: attributes}
        result = out.Call(*operands.values(), to_apply=computation, name=name, frontend_attributes=dict(map=said))
        if isinstance(out, Shape):
            return result
        return tuple(element(result, index) for index in range(len(out.shapes)))

    return call


def _divided(name: str, bound: inspect.BoundArguments) -> tuple[dict[str, Tensor], str]:
    """Return the tensors in a composite's arguments by name, and its attributes as JSON."""
    kinds = {key: parameter.kind for key, parameter in bound.signature.parameters.items()}
    given = {key: value for key, value in bound.arguments.items() if kinds[key] < inspect.Parameter.KEYWORD_ONLY}
    given = {key: value for key, value in given.items() if value is not None}
    operands: dict[str, Tensor] = {}
    attributes = {}
    for argument, value in (given | bound.kwargs).items():
        parts = dict(_parts(argument, value))
        tensors = {key: part for key, part in parts.items() if isinstance(part, Tensor)}
        operands |= tensors
        if not tensors:
            attributes[argument] = value
        elif others := [part for key, part in parts.items() if key not in tensors and part is not None]:
            raise GraphError(f"{name}: {argument} must be tensors alone, got {others[0]!r} among them")
    if not operands:
        raise GraphError(f"{name} needs at least one tensor, got none")
    try:
        return operands, json.dumps(attributes, sort_keys=True)
    except TypeError as error:
        raise GraphError(f"{name}: attributes must be JSON values, got {attributes}") from error


def _parts(name: str, argument: Any) -> Iterator[tuple[str, Any]]:
    """Yield the parts of an argument, through groups in groups, by name."""
    if not isinstance(argument, list | tuple):
        yield name, argument
        return
    keys = getattr(argument, "_fields", range(len(argument)))
    for key, part in zip(keys, argument, strict=True):
        yield from _parts(f"{name}.{key}", part)


def _replaced(argument: Any, tensors: Iterator[Tensor]) -> Any:
    """Return an argument with the next `tensors` in the places of its own."""
    if isinstance(argument, Tensor):
        return next(tensors)
    if not isinstance(argument, list | tuple):
        return argument
    parts = [_replaced(part, tensors) for part in argument]
    return type(argument)(*parts) if hasattr(argument, "_fields") else type(argument)(parts)


class _Closure:
    """A computation with one tuple parameter: the operands, then the tensors captured from enclosing computations.

    With `carry`, the captured tensors are returned after the results.
    """

    def __init__(
        self, function: Callable[..., Any], operands: Sequence[Tensor], name: str, carry: bool = False
    ) -> None:
        self.operands = list(operands)
        self.captured: dict[int, Tensor] = {}  # id outside -> tensor inside
        scribe = operands[0].scribe if operands else active_scribe()

        def run(_: HloScribe) -> Any:
            self._parameter = self._whole(scribe).Parameter(parameter_number=0)
            result = function(*(element(self._parameter, index) for index in range(len(operands))))
            if not carry:
                return result
            result = [scribe.inside(name, tensor) for tensor in result]
            return [*result, *self.captured.values()]

        self.id, self.result = scribe.computation(run, name, capture=self._capture)
        self.shape = self._whole(scribe)

    def _whole(self, scribe: Scribe) -> TupleShape:
        return scribe.tuple(*(operand.shape for operand in self.operands))

    def _capture(self, outer: Tensor) -> Tensor:
        if outer.proto.id not in self.captured:
            index = len(self.operands)
            self.operands.append(outer)
            self._parameter.proto.shape.tuple_shapes.add().CopyFrom(outer.shape_proto)
            self.captured[outer.proto.id] = outer.shape.GetTupleElement(self._parameter, tuple_index=index)
        return self.captured[outer.proto.id]


def while_loop(
    condition: Callable[..., Tensor],
    body: Callable[..., Sequence[Tensor]],
    state: Sequence[Tensor],
    rounds: int | None = None,
) -> list[Tensor]:
    """Apply `body(*state)` while `condition(*state)`, a pred scalar, holds; the state keeps its shapes.

    The body may use tensors from outside the loop, which stay constant. The condition sees the state only. `rounds` is
    the number of iterations, if known: where loops are not supported, the body is unrolled that many times.
    """
    shapes = _array_shapes("while_loop", state)

    def checked_body(*carried: Tensor) -> Sequence[Tensor]:
        after = body(*carried)
        if [repr(t.shape) for t in after] != [repr(s) for s in shapes]:
            raise GraphError(f"while_loop: body must keep the shapes {shapes}, got {list(after)}")
        return after

    loop = _Closure(checked_body, state, "body", carry=True)

    def checked_condition(_: HloScribe) -> Tensor:
        carried = loop.shape.Parameter(parameter_number=0)
        holds = condition(*(element(carried, index) for index in range(len(shapes))))
        if holds.dtype.name != "pred" or holds.sizes:
            raise GraphError(f"while_loop: condition must be a pred scalar, got {holds!r}")
        return holds

    known = {} if rounds is None else {ROUNDS: str(rounds)}
    result = loop.shape.While(
        loop.shape.Tuple(*loop.operands),
        body=loop.id,
        condition=checked_condition,
        frontend_attributes=dict(map=known),
    )
    return [element(result, index) for index in range(len(shapes))]


def conditional(
    predicate: Tensor, on_true: Callable[..., Tensor], on_false: Callable[..., Tensor], *operands: Tensor
) -> Tensor:
    """Run either `on_true(*operands)` or `on_false(*operands)`; both must return the same shape.

    The branches may also use tensors from outside.
    """
    if predicate.dtype.name != "pred" or predicate.sizes:
        raise GraphError(f"conditional: predicate must be a pred scalar, got {predicate!r}")
    _array_shapes("conditional", operands)
    true, false = _Closure(on_true, operands, "on_true"), _Closure(on_false, operands, "on_false")
    if repr(true.result) != repr(false.result):
        raise GraphError(f"conditional: branches must return one shape, got {true.result} and {false.result}")
    packed = [branch.shape.Tuple(*branch.operands) for branch in (true, false)]
    result: Tensor = true.result.Conditional(predicate, *packed, branch_computations=[true.id, false.id])
    return result


def custom_call(
    target: str, shape: Shape, *operands: Tensor, attributes: str = "", alias: dict[int, int] | None = None
) -> Tensor:
    """Call `target`, native code of the runtime, through XLA's typed FFI.

    `attributes` is the text of an MLIR dictionary; `alias` maps output 0 to the operand whose memory it reuses.
    """
    return shape.CustomCall(
        *operands,
        custom_call_target=target,
        custom_call_api_version="API_VERSION_TYPED_FFI",
        backend_config=attributes,
        output_operand_aliasing=[dict(operand_index=operand) for operand in (alias or {}).values()],
    )


def replica_id() -> Tensor:
    """Return the rank of the device that runs the program, a u32 scalar."""
    return dtype_named("u32").ReplicaId()


def _groups(replicas: int, among: int | None) -> list[dict[str, Any]]:
    """List groups of `replicas` devices that follow each other: one, or all of the `among` devices."""
    return [dict(replica_ids=range(first, first + replicas)) for first in range(0, among or replicas, replicas)]


def all_reduce(x: Tensor, replicas: int, op: str = "Add", among: int | None = None) -> Tensor:
    """Combine `x` over all devices, or each group of `replicas` `among` them; each device of it gets the result."""
    if replicas == 1:
        return x
    computation, _ = x.scribe.computation(combiner(op, x.dtype), op.lower(), key=("combiner", op, x.dtype.name))
    return x.shape.AllReduce(x, replica_groups=_groups(replicas, among), to_apply=computation)


def all_gather(x: Tensor, replicas: int, axis: int, among: int | None = None) -> Tensor:
    """Concatenate `x` along `axis` over all devices, or each group of `replicas` `among` them; each gets the result."""
    axis = axis_of("all_gather", x, axis)
    if replicas == 1:
        return x
    sizes = [size * replicas if i == axis else size for i, size in enumerate(x.sizes)]
    return x.dtype[sizes].AllGather(x, dimensions=[axis], replica_groups=_groups(replicas, among))


def reduce_scatter(x: Tensor, replicas: int, axis: int, among: int | None = None) -> Tensor:
    """Sum `x` over all devices, or each group of `replicas` `among` them; each keeps its piece of the sum on `axis`."""
    axis = axis_of("reduce_scatter", x, axis)
    if replicas == 1:
        return x
    if x.sizes[axis] % replicas:
        raise GraphError(
            f"reduce_scatter: axis {axis} of {x!r} must be divisible by the number of devices, got {replicas}"
        )
    sizes = [size // replicas if i == axis else size for i, size in enumerate(x.sizes)]
    computation, _ = x.scribe.computation(combiner("Add", x.dtype), "add", key=("combiner", "Add", x.dtype.name))
    groups = _groups(replicas, among)
    return x.dtype[sizes].ReduceScatter(x, dimensions=[axis], replica_groups=groups, to_apply=computation)


def optimization_barrier(*tensors: Tensor) -> list[Tensor]:
    """Return the tensors behind a barrier: the compiler moves nothing across it, and a use of one waits for all."""
    shapes = _array_shapes("optimization_barrier", tensors)
    if not tensors:
        raise GraphError("optimization_barrier needs at least one tensor, got none")
    whole = tensors[0].scribe.tuple(*shapes)
    result = whole.OptimizationBarrier(whole.Tuple(*tensors))
    return [element(result, index) for index in range(len(tensors))]
