"""Contractions, reductions and sorts along axes."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from transformers_neuronx.errors import GraphError
from transformers_neuronx.hlo.elementwise import (
    as_dtype,
    constant,
    equal,
    greater,
    less,
    logical_and,
    logical_or,
    not_equal,
    select,
)
from transformers_neuronx.hlo.shaping import axis_of, iota
from transformers_neuronx.pyhlo import DType, HloScribe, Tensor, dtype_named
from transformers_neuronx.pyhlo.dtypes import FLOATS, limits


def dot(
    a: Tensor,
    b: Tensor,
    contract: tuple[Sequence[int], Sequence[int]],
    batch: tuple[Sequence[int], Sequence[int]] = ((), ()),
    dtype: DType | str | None = None,
) -> Tensor:
    """Sum products over the `contract` axes, for each index of the `batch` axes.

    The result has the batch axes first, then the free axes of `a`, then those of `b`. `dtype` is the element type of
    the sum and the result. It defaults to the type of the operands, which must be equal.
    """
    if a.dtype is not b.dtype:
        raise GraphError(f"dot needs one element type, got {a!r} and {b!r}: convert one of them")
    contract_a, contract_b = ([axis_of("dot", x, i) for i in axes] for x, axes in zip((a, b), contract, strict=True))
    batch_a, batch_b = ([axis_of("dot", x, i) for i in axes] for x, axes in zip((a, b), batch, strict=True))
    for meaning, axes_a, axes_b in (("contracting", contract_a, contract_b), ("batch", batch_a, batch_b)):
        sizes_a, sizes_b = [a.sizes[i] for i in axes_a], [b.sizes[i] for i in axes_b]
        if sizes_a != sizes_b:
            raise GraphError(f"dot needs equal {meaning} sizes, got {sizes_a} of {a!r} and {sizes_b} of {b!r}")
    for x, axes in ((a, [*contract_a, *batch_a]), (b, [*contract_b, *batch_b])):
        if len(set(axes)) < len(axes):
            raise GraphError(f"dot: axes of {x!r} must not repeat, got {axes}")
    free_a = [size for axis, size in enumerate(a.sizes) if axis not in (*contract_a, *batch_a)]
    free_b = [size for axis, size in enumerate(b.sizes) if axis not in (*contract_b, *batch_b)]
    sizes = [*(a.sizes[i] for i in batch_a), *free_a, *free_b]
    return as_dtype(dtype or a.dtype)[sizes].Dot(
        a,
        b,
        dot_dimension_numbers=dict(
            lhs_contracting_dimensions=contract_a,
            rhs_contracting_dimensions=contract_b,
            lhs_batch_dimensions=batch_a,
            rhs_batch_dimensions=batch_b,
        ),
    )


def combiner(op: str, dtype: DType) -> Callable[[HloScribe], Tensor]:
    """Return the computation `op(a, b)` on two scalars, for reductions and collectives."""

    def combine(_: HloScribe) -> Tensor:
        a, b = dtype.Parameter(parameter_number=0), dtype.Parameter(parameter_number=1)
        return getattr(dtype, op)(a, b)  # type: ignore[no-any-return]

    combine.__name__ = op.lower()
    return combine


def reduce(x: Tensor, op: str, initial: float, axes: int | Sequence[int], keep: bool = False) -> Tensor:
    """Combine elements along `axes` with the binary `op` ("Add", "Maximum", …), starting from `initial`.

    With `keep`, the reduced axes keep size 1, so that the result broadcasts against `x`.
    """
    chosen = sorted({axis_of("reduce", x, axis) for axis in ([axes] if isinstance(axes, int) else axes)})
    sizes = [size for axis, size in enumerate(x.sizes) if axis not in chosen]
    computation, _ = x.scribe.computation(combiner(op, x.dtype), op.lower(), key=("combiner", op, x.dtype.name))
    start = constant(initial, x.dtype)
    out = x.dtype[sizes].Reduce(x, start, dimensions=chosen, to_apply=computation)
    return out if not keep else out.dtype[[1 if i in chosen else s for i, s in enumerate(x.sizes)]].Reshape(out)


def sum(x: Tensor, axes: int | Sequence[int], keep: bool = False) -> Tensor:
    """Sum over `axes`. With `keep`, they keep size 1 instead of being dropped."""
    return reduce(x, "Add", 0, axes, keep)


def max(x: Tensor, axes: int | Sequence[int], keep: bool = False) -> Tensor:
    """Largest element over `axes`; the type's smallest value if there are none. With `keep`, `axes` keep size 1."""
    return reduce(x, "Maximum", limits(x.dtype.name)[0], axes, keep)


def min(x: Tensor, axes: int | Sequence[int], keep: bool = False) -> Tensor:
    """Smallest element over `axes`; the type's largest value if there are none. With `keep`, `axes` keep size 1."""
    return reduce(x, "Minimum", limits(x.dtype.name)[1], axes, keep)


def mean(x: Tensor, axes: int | Sequence[int], keep: bool = False) -> Tensor:
    """Mean of floats over `axes`; NaN if there are none. With `keep`, `axes` keep size 1."""
    if x.dtype.name not in FLOATS:
        raise GraphError(f"mean needs floating-point elements, got {x!r}")
    chosen = {axis_of("mean", x, axis) for axis in ([axes] if isinstance(axes, int) else axes)}
    count = math.prod(x.sizes[axis] for axis in chosen)
    return sum(x, axes, keep) * (1.0 / count if count else math.nan)


def any(x: Tensor, axes: int | Sequence[int], keep: bool = False) -> Tensor:
    """Test whether any predicate over `axes` holds. With `keep`, `axes` keep size 1."""
    return reduce(_predicates("any", x), "Or", False, axes, keep)


def all(x: Tensor, axes: int | Sequence[int], keep: bool = False) -> Tensor:
    """Test whether all predicates over `axes` hold. With `keep`, `axes` keep size 1."""
    return reduce(_predicates("all", x), "And", True, axes, keep)


def _predicates(op: str, x: Tensor) -> Tensor:
    if x.dtype.name != "pred":
        raise GraphError(f"{op} needs predicates, got {x!r}")
    return x


def argmax(x: Tensor, axis: int) -> Tensor:
    """Return the s32 index of the largest element along `axis`: the first of equals, or the first NaN."""
    axis = axis_of("argmax", x, axis)
    largest = logical_or(equal(x, max(x, axis, keep=True)), not_equal(x, x))
    positions = select(largest, iota("s32", x.sizes, axis), x.sizes[axis])
    return min(positions, axis)


def sort(x: Tensor, axis: int = -1, descending: bool = False, payload: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Sort `x` along `axis`, and reorder `payload` (by default the s32 positions) with it.

    Equal elements keep their order. NaN counts as the largest.
    """
    axis = axis_of("sort", x, axis)
    payload = iota("s32", x.sizes, axis) if payload is None else payload
    if payload.sizes != x.sizes:
        raise GraphError(f"sort needs a payload of the sizes of {x!r}, got {payload!r}")

    def in_order(_: HloScribe) -> Tensor:
        a, b = x.dtype.Parameter(parameter_number=0), x.dtype.Parameter(parameter_number=1)
        payload.dtype.Parameter(parameter_number=2), payload.dtype.Parameter(parameter_number=3)
        if descending:
            return logical_or(greater(a, b), logical_and(not_equal(a, a), equal(b, b)))
        return logical_or(less(a, b), logical_and(equal(a, a), not_equal(b, b)))

    both = x.scribe.tuple(x.shape, payload.shape).Sort(x, payload, dimensions=[axis], is_stable=True, to_apply=in_order)
    return element(both, 0), element(both, 1)


def top_k(x: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Return the `k` largest elements along the last axis, largest first, and their s32 positions."""
    if not x.sizes:
        raise GraphError(f"top_k needs at least one axis, got {x!r}")
    if not 0 < k <= x.sizes[-1]:
        raise GraphError(f"top_k: k must be from 1 to {x.sizes[-1]}, the last axis of {x!r}, got {k}")
    sizes = (*x.sizes[:-1], k)
    both = x.scribe.tuple(x.dtype[sizes], dtype_named("s32")[sizes]).TopK(
        x, k=k, largest=True, to_apply=_greater_pairs(x.dtype)
    )
    return element(both, 0), element(both, 1)


def _greater_pairs(dtype: DType) -> Callable[[HloScribe], Tensor]:
    def greater(_: HloScribe) -> Tensor:
        a, b = dtype.Parameter(parameter_number=0), dtype.Parameter(parameter_number=1)
        return dtype_named("pred").Compare(a, b, comparison_direction="GT")

    return greater


def element(x: Tensor, index: int) -> Tensor:
    """Element `index` of a tuple."""
    shapes: Any = getattr(x.shape, "shapes", ())
    if not 0 <= index < len(shapes):
        raise GraphError(f"element needs a tuple with more than {index} elements, got {x!r}")
    return shapes[index].GetTupleElement(x, tuple_index=index)  # type: ignore[no-any-return]
