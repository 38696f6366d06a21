"""Operations over windows that slide along the last axes. Tensors are [b, channels, ...]."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from transformers_neuronx.errors import GraphError
from transformers_neuronx.hlo.contraction import combiner
from transformers_neuronx.hlo.elementwise import as_dtype, constant
from transformers_neuronx.pyhlo import DType, Tensor

Edges = Sequence[tuple[int, int]]  # elements to add before and after each axis; negative numbers cut elements off


def _positions(size: int, window: int, step: int, edge: tuple[int, int], spread: int, dilation: int) -> int:
    """Count the positions of a window along an axis."""
    reach = (window - 1) * dilation + 1
    whole = (size - 1) * spread + 1 + sum(edge) if size else sum(edge)
    return max((whole - reach) // step + 1, 0)


def _window(
    kernel: Sequence[int], stride: Sequence[int], edges: Edges, dilation: Sequence[int], spread: Sequence[int]
) -> dict[str, Any]:
    return dict(
        dimensions=[
            dict(size=k, stride=s, padding_low=low, padding_high=high, window_dilation=d, base_dilation=w)
            for k, s, (low, high), d, w in zip(kernel, stride, edges, dilation, spread, strict=True)
        ]
    )


def convolution(
    x: Tensor,
    kernel: Tensor,
    stride: Sequence[int],
    edges: Edges,
    dilation: Sequence[int],
    spread: Sequence[int],
    groups: int = 1,
    dtype: DType | str | None = None,
) -> Tensor:
    """Convolve x [b, in, ...] with `kernel` [out, in / groups, ...]. -> [b, out, ...]

    The kernel's elements are `dilation` apart, windows are `stride` apart, and `spread - 1` zeros separate the elements
    of x. `dtype` is the type of the sums. It defaults to the type of the operands, which must be equal.
    """
    if x.dtype is not kernel.dtype or len(x.sizes) != len(kernel.sizes) or len(x.sizes) < 3:
        raise GraphError(f"convolution needs a kernel of the type and rank of {x!r}, got {kernel!r}")
    if x.sizes[1] != kernel.sizes[1] * groups or kernel.sizes[0] % groups:
        raise GraphError(
            f"convolution in {groups} groups needs a kernel [out, in / groups, ...] for {x!r}, got {kernel!r}"
        )
    axes = range(2, len(x.sizes))
    sizes = [
        _positions(*facts) for facts in zip(x.sizes[2:], kernel.sizes[2:], stride, edges, spread, dilation, strict=True)
    ]
    return as_dtype(dtype or x.dtype)[x.sizes[0], kernel.sizes[0], *sizes].Convolution(
        x,
        kernel,
        window=_window(kernel.sizes[2:], stride, edges, dilation, spread),
        convolution_dimension_numbers=dict(
            input_feature_dimension=1,
            kernel_input_feature_dimension=1,
            output_feature_dimension=1,
            **{f"{of}_spatial_dimensions": axes for of in ("input", "kernel", "output")},
        ),
        feature_group_count=groups,
        batch_group_count=1,
    )


def reduce_window(
    x: Tensor,
    op: str,
    initial: float,
    kernel: Sequence[int],
    stride: Sequence[int],
    edges: Edges,
    dilation: Sequence[int],
) -> Tensor:
    """Reduce windows of `kernel` along the last axes with `op`, such as "Add". `initial` is used past the edges."""
    lead = len(x.sizes) - len(kernel)
    if lead < 0:
        raise GraphError(f"reduce_window needs an axis for each axis of the window {list(kernel)}, got {x!r}")
    ones = [1] * len(kernel)
    sizes = [_positions(*facts) for facts in zip(x.sizes[lead:], kernel, stride, edges, ones, dilation, strict=True)]
    computation, _ = x.scribe.computation(combiner(op, x.dtype), op.lower(), key=("combiner", op, x.dtype.name))
    one = [1] * lead
    return x.dtype[*x.sizes[:lead], *sizes].ReduceWindow(
        x,
        constant(initial, x.dtype),
        window=_window(
            [*one, *kernel], [*one, *stride], [(0, 0)] * lead + list(edges), [*one, *dilation], [1] * len(x.sizes)
        ),
        to_apply=computation,
    )
