"""Operations that move elements without arithmetic: reshapes, slices, joins, lookups and updates."""

from __future__ import annotations

import math
from collections.abc import Sequence

from transformers_neuronx.errors import GraphError
from transformers_neuronx.hlo.elementwise import Operand, as_dtype, clamp, constant, convert
from transformers_neuronx.pyhlo import DType, Tensor
from transformers_neuronx.pyhlo.dtypes import FLOATS, INTEGERS


def axis_of(op: str, x: Tensor, axis: int) -> int:
    """Return `axis` counted from the front; negative axes count from the back."""
    rank = len(x.sizes)
    if not -rank <= axis < rank:
        raise GraphError(f"{op} needs an axis of {x!r}, got {axis}")
    return axis % rank


def iota(dtype: DType | str, sizes: Sequence[int], axis: int = 0) -> Tensor:
    """0, 1, 2, … along `axis`, repeated along the others."""
    if not 0 <= axis < len(sizes):
        raise GraphError(f"iota needs an axis of {list(sizes)}, got {axis}")
    if as_dtype(dtype).name not in INTEGERS | FLOATS:
        raise GraphError(f"iota needs a numeric element type, got {as_dtype(dtype)}")
    return as_dtype(dtype)[sizes].Iota(dimensions=[axis])


def reshape(x: Tensor, *sizes: int) -> Tensor:
    """Reshape to `sizes` in row-major order; one of them may be -1, which is inferred."""
    known = math.prod(size for size in sizes if size != -1)
    count = math.prod(x.sizes)
    if sizes.count(-1) == 1 and known and count % known == 0:
        sizes = tuple(count // known if size == -1 else size for size in sizes)
    if -1 in sizes or math.prod(sizes) != count:
        raise GraphError(f"reshape: sizes must hold the {count} elements of {x!r}, got {list(sizes)}")
    return x if sizes == x.sizes else x.dtype[sizes].Reshape(x)


def transpose(x: Tensor, *axes: int) -> Tensor:
    """Permute the axes: axis `i` of the result is axis `axes[i]` of `x`."""
    if sorted(axes) != list(range(len(x.sizes))):
        raise GraphError(f"transpose: axes must be a permutation of those of {x!r}, got {list(axes)}")
    if list(axes) == sorted(axes):
        return x
    return x.dtype[[x.sizes[axis] for axis in axes]].Transpose(x, dimensions=axes)


def reverse(x: Tensor, *axes: int) -> Tensor:
    """Reverse the order of the elements along each of `axes`."""
    chosen = [axis_of("reverse", x, axis) for axis in axes]
    if len(set(chosen)) < len(chosen):
        raise GraphError(f"reverse: axes of {x!r} must not repeat, got {list(axes)}")
    return x.shape.Reverse(x, dimensions=chosen)


def concatenate(tensors: Sequence[Tensor], axis: int) -> Tensor:
    """Join tensors along `axis`; all other sizes and the element type must be equal."""
    if not tensors:
        raise GraphError("concatenate needs at least one tensor, got none")
    first = tensors[0]
    axis = axis_of("concatenate", first, axis)
    sizes = list(first.sizes)
    for other in tensors[1:]:
        if other.dtype is not first.dtype or _without(other.sizes, axis) != _without(first.sizes, axis):
            raise GraphError(
                f"concatenate on axis {axis} needs equal types and equal other sizes, got {first!r} and {other!r}"
            )
        sizes[axis] += other.sizes[axis]
    return first if len(tensors) == 1 else first.dtype[sizes].Concatenate(*tensors, dimensions=[axis])


def _without(sizes: Sequence[int], axis: int) -> tuple[int, ...]:
    return (*sizes[:axis], *sizes[axis + 1 :])


def slice(x: Tensor, axis: int, start: int, limit: int, stride: int = 1) -> Tensor:
    """Take the elements `start`, `start + stride`, … below `limit` along `axis`."""
    axis = axis_of("slice", x, axis)
    if not (0 <= start <= limit <= x.sizes[axis] and stride > 0):
        raise GraphError(f"slice needs bounds inside axis {axis} of {x!r}, got {start}:{limit}:{stride}")
    if (start, limit, stride) == (0, x.sizes[axis], 1):
        return x
    bounds = [dict(start=0, limit=size, stride=1) for size in x.sizes]
    bounds[axis] = dict(start=start, limit=limit, stride=stride)
    sizes = list(x.sizes)
    sizes[axis] = -(-(limit - start) // stride)
    return x.dtype[sizes].Slice(x, slice_dimensions=bounds)


def split(x: Tensor, parts: int, axis: int = -1) -> list[Tensor]:
    """Split `x` into `parts` equal pieces along `axis`."""
    axis = axis_of("split", x, axis)
    if parts < 1 or x.sizes[axis] % parts:
        raise GraphError(f"split: parts must divide axis {axis} of {x!r}, got {parts}")
    width = x.sizes[axis] // parts
    return [slice(x, axis, i * width, (i + 1) * width) for i in range(parts)]


def pad(x: Tensor, axis: int, low: int, high: int, value: float = 0) -> Tensor:
    """Add `low` elements `value` before and `high` after, along `axis`."""
    axis = axis_of("pad", x, axis)
    if low < 0 or high < 0:
        raise GraphError(f"pad: widths must not be negative, got {low} and {high} for {x!r}")
    if low == high == 0:
        return x
    edges = [dict(edge_padding_low=0, edge_padding_high=0) for _ in x.sizes]
    edges[axis] = dict(edge_padding_low=low, edge_padding_high=high)
    sizes = list(x.sizes)
    sizes[axis] += low + high
    return x.dtype[sizes].Pad(x, constant(value, x.dtype), padding_config=dict(dimensions=edges))


def dynamic_slice(x: Tensor, starts: Sequence[Operand], sizes: Sequence[int]) -> Tensor:
    """Take a block of `sizes` at `starts`, which are runtime values; a block past the edge is moved inside."""
    fits = len(sizes) == len(x.sizes) and all(want <= have for want, have in zip(sizes, x.sizes, strict=True))
    if len(starts) != len(x.sizes) or not fits:
        raise GraphError(f"dynamic_slice needs a start per axis and a block inside {x!r}, got {list(sizes)}")
    return x.dtype[sizes].DynamicSlice(x, *_starts("dynamic_slice", starts), dynamic_slice_sizes=sizes)


def dynamic_update_slice(x: Tensor, block: Tensor, starts: Sequence[Operand]) -> Tensor:
    """Write `block` into `x` at `starts`; a block past the edge is moved inside."""
    if block.dtype is not x.dtype or len(block.sizes) != len(x.sizes) or len(starts) != len(x.sizes):
        raise GraphError(
            f"dynamic_update_slice needs a start per axis and a block of the type and rank of {x!r}, got {block!r}"
        )
    if any(want > have for want, have in zip(block.sizes, x.sizes, strict=True)):
        raise GraphError(f"dynamic_update_slice needs a block that fits into {x!r}, got {block!r}")
    return x.shape.DynamicUpdateSlice(x, block, *_starts("dynamic_update_slice", starts))


def _starts(op: str, starts: Sequence[Operand]) -> list[Tensor]:
    given = [start.dtype for start in starts if isinstance(start, Tensor)]
    dtype = given[0] if given else as_dtype("s32")
    tensors = [start if isinstance(start, Tensor) else constant(start, dtype) for start in starts]
    if any(tensor.sizes or tensor.dtype is not dtype for tensor in tensors) or dtype.name not in INTEGERS:
        raise GraphError(f"{op} needs integer scalars of one type as starts, got {tensors}")
    return tensors


def take(x: Tensor, indices: Tensor, axis: int = 0) -> Tensor:
    """Look up `x[..., indices, ...]`: the sizes of `indices` replace `axis`. Indices are clamped to the axis."""
    axis = axis_of("take", x, axis)
    if indices.dtype.name not in INTEGERS:
        raise GraphError(f"take needs integer indices, got {indices!r}")
    rank = len(indices.sizes)
    before, after = x.sizes[:axis], x.sizes[axis + 1 :]
    return x.dtype[(*before, *indices.sizes, *after)].Gather(
        x,
        indices,
        gather_dimension_numbers=dict(
            offset_dims=[*range(axis), *range(axis + rank, axis + rank + len(after))],
            collapsed_slice_dims=[axis],
            start_index_map=[axis],
            index_vector_dim=rank,
        ),
        gather_slice_sizes=[*before, 1, *after],
    )


def take_rows(x: Tensor, indices: Tensor) -> Tensor:
    """`out[i] = x[i, indices[i]]`: one element of axis 1 per row. x [b, n, ...], indices [b] -> [b, ...]."""
    if len(x.sizes) < 2 or indices.sizes != x.sizes[:1] or indices.dtype.name not in INTEGERS:
        raise GraphError(f"take_rows needs an integer index per row of {x!r}, got {indices!r}")
    rows, width, *rest = x.sizes
    if indices.dtype.element.bits < 32:
        indices = convert(indices, "s32")
    flat = iota("s32", [rows]) * width + convert(clamp(0, indices, width - 1), "s32")
    return take(reshape(x, rows * width, *rest), flat)


def gather_rows(x: Tensor, indices: Tensor, axes: Sequence[int]) -> Tensor:
    """Look up `x` at position `indices[...]` = (i, j, …) of the `axes`, in order. Positions are clamped to the axes.

    x any shape, indices s32[..., axes] -> [..., *sizes of x's other axes].
    """
    _check_places("gather_rows", indices, axes)
    lead = len(indices.sizes) - 1
    rest = [size for axis, size in enumerate(x.sizes) if axis not in axes]
    return x.dtype[(*indices.sizes[:-1], *rest)].Gather(
        x,
        indices,
        gather_dimension_numbers=dict(
            offset_dims=range(lead, lead + len(rest)),
            collapsed_slice_dims=sorted(axes),
            start_index_map=axes,
            index_vector_dim=lead,
        ),
        gather_slice_sizes=[1 if axis in axes else size for axis, size in enumerate(x.sizes)],
    )


def scatter_rows(x: Tensor, indices: Tensor, updates: Tensor, axes: Sequence[int], op: str | None = None) -> Tensor:
    """Write `updates[...]` into `x` at position `indices[...]` = (i, j, …) of the `axes`, unless it is outside.

    x any shape, indices s32[..., axes], updates [..., *sizes of x's other axes]. An `op`, such as "Add",
    combines the old value with all updates of its position. Without one, any of several updates may win.
    """
    _check_places("scatter_rows", indices, axes)
    rest = [size for axis, size in enumerate(x.sizes) if axis not in axes]
    want = (*indices.sizes[:-1], *rest)
    if updates.sizes != want or updates.dtype is not x.dtype:
        raise GraphError(f"scatter_rows needs updates {x.dtype.name}{list(want)} for {x!r}, got {updates!r}")
    lead = len(indices.sizes) - 1
    return x.shape.Scatter(
        x,
        indices,
        updates,
        scatter_dimension_numbers=dict(
            update_window_dims=range(lead, lead + len(rest)),
            inserted_window_dims=sorted(axes),
            scatter_dims_to_operand_dims=axes,
            index_vector_dim=lead,
        ),
        to_apply=lambda _: _combined(x.dtype, op),
    )


def _check_places(name: str, indices: Tensor, axes: Sequence[int]) -> None:
    if indices.sizes[-1:] != (len(axes),) or indices.dtype.name not in INTEGERS:
        raise GraphError(f"{name} needs integer indices [..., {len(axes)}], got {indices!r}")


def _combined(dtype: DType, op: str | None) -> Tensor:
    old, new = dtype.Parameter(parameter_number=0), dtype.Parameter(parameter_number=1)
    return getattr(dtype, op)(old, new) if op else new
