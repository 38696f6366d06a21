"""Matrix products, attention and convolution.

Where the right side of a product is a weight, the walk has made a `Parameter` of it, [out, in] and laid out for the
runtime, and the product is a layer as the families have it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from types import SimpleNamespace

import torch

from transformers_neuronx import hlo, layers
from transformers_neuronx.pyhlo import Shape, Tensor
from transformers_neuronx.trace.aten.table import converted, lowers, of_training, wide
from transformers_neuronx.weights import Parameter, Weight

aten = torch.ops.aten

# For each operation the operands that are multiplied: those that `--auto-cast matmult` narrows.
MULTIPLIED = {
    aten.linear.default: (0, 1),
    aten.mm.default: (0, 1),
    aten.bmm.default: (0, 1),
    aten.addmm.default: (1, 2),
    aten.convolution.default: (0, 1),
    aten.scaled_dot_product_attention.default: (0, 1, 2),
}


def parameter(tensor: Tensor, name: str, sizes: tuple[int, ...], word: int | None) -> Parameter:
    """A weight as `layers` has it, whole on one device; with a `word` it lies in panels."""
    return Parameter(tensor, Weight(name, "", sizes, word=word), 1, tensor.dtype.name)


def _layer(out: Shape, x: Tensor, weight: Parameter, bias: Tensor | None) -> Tensor:
    w = SimpleNamespace(weight=weight)
    if bias is not None:
        w.bias = SimpleNamespace(tensor=bias)
    return layers.linear(x, w) if x.dtype is out.dtype else layers.logits(x, w)


Axes = tuple[Sequence[int], Sequence[int]]


def _dot(out: Shape, a: Tensor, b: Tensor, contract: Axes, batch: Axes = ((), ())) -> Tensor:
    return hlo.convert(hlo.dot(a, b, contract, batch, wide(a.dtype)), out.dtype)


@lowers(aten.linear.default)
def linear(out: Shape, x: Tensor, weight: Tensor | Parameter, bias: Tensor | None = None) -> Tensor:
    if isinstance(weight, Parameter):
        return _layer(out, x, weight, bias)
    y = _dot(out, x, weight, ([-1], [1]))
    return y if bias is None else y + converted(bias, out.dtype)


@lowers(aten.mm.default)
def mm(out: Shape, a: Tensor, b: Tensor | Parameter) -> Tensor:
    return _layer(out, a, b, None) if isinstance(b, Parameter) else _dot(out, a, b, ([1], [0]))


@lowers(aten.bmm.default)
def bmm(out: Shape, a: Tensor, b: Tensor) -> Tensor:
    return _dot(out, a, b, ([2], [1]), ([0], [0]))


@lowers(aten.addmm.default)
def addmm(out: Shape, bias: Tensor, a: Tensor, b: Tensor | Parameter, beta: float = 1, alpha: float = 1) -> Tensor:
    if isinstance(b, Parameter) and beta == alpha == 1 and len(bias.sizes) == 1 and bias.sizes == out.sizes[1:]:
        return _layer(out, a, b, bias)
    y = mm(out, a, b)
    y = y if alpha == 1 else y * alpha
    return y if beta == 0 else y + (bias if beta == 1 else bias * beta)


@lowers(aten.scaled_dot_product_attention.default)
def attention(
    out: Shape,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """softmax(q kᵀ scale + mask) v. q [..., n, d], k and v [..., m, d]; a mask of predicates says what is seen."""
    if dropout_p:
        raise of_training("attention with dropout_p")
    *lead, n, d = q.sizes
    m, batch = k.sizes[-2], math.prod(lead)
    if enable_gqa and k.sizes[-3] != q.sizes[-3]:
        k, v = (_repeated(x, q.sizes[-3] // x.sizes[-3]) for x in (k, v))
    q, k, v = (hlo.reshape(hlo.broadcast_to(x, (*lead, *x.sizes[-2:])), batch, *x.sizes[-2:]) for x in (q, k, v))
    scores = hlo.dot(q, k, ([2], [2]), ([0], [0]), wide(q.dtype)) * (d**-0.5 if scale is None else scale)
    scores = hlo.reshape(scores, *lead, n, m)
    if is_causal:
        scores = hlo.select(hlo.iota("s32", [n, m], 0) >= hlo.iota("s32", [n, m], 1), scores, -math.inf)
    if mask is not None and mask.dtype.name == "pred":
        scores = hlo.select(mask, scores, -math.inf)
    elif mask is not None:
        scores = scores + hlo.convert(mask, scores.dtype)
    largest = hlo.max(scores, -1, keep=True)
    e = hlo.exp(scores - hlo.select(hlo.equal(largest, -math.inf), 0.0, largest))
    total = hlo.sum(e, -1, keep=True)
    weights = e / hlo.select(hlo.equal(total, 0.0), 1.0, total)  # who sees nothing gets zeros
    weights = hlo.reshape(hlo.convert(weights, q.dtype), batch, n, m)
    return hlo.reshape(_dot(out, weights, v, ([2], [1]), ([0], [0])), *out.sizes)


def _repeated(x: Tensor, times: int) -> Tensor:
    """Each head several times, one after the other. [..., heads, m, d] -> [..., heads * times, m, d]"""
    *lead, heads, m, d = x.sizes
    repeated = hlo.broadcast_to(hlo.reshape(x, *lead, heads, 1, m, d), [*lead, heads, times, m, d])
    return hlo.reshape(repeated, *lead, heads * times, m, d)


@lowers(aten.convolution.default)
def convolution(
    out: Shape,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
) -> Tensor:
    """X [b, in, ...], weight [out, in / groups, ...], or [in, out / groups, ...] of one that is transposed."""
    rank = len(weight.sizes) - 2
    stride, padding, dilation = (list(each) * (rank if len(each) == 1 else 1) for each in (stride, padding, dilation))
    edges = [(width, width) for width in padding]
    spread = [1] * rank
    if transposed:
        more = list(output_padding) * (rank if len(output_padding) == 1 else 1)
        reach = [(size - 1) * step for size, step in zip(weight.sizes[2:], dilation, strict=True)]
        edges = [(far - low, far - low + extra) for far, low, extra in zip(reach, padding, more, strict=True)]
        spread, stride = stride, [1] * rank
        weight = _of_inputs(weight, groups)
    y = hlo.convert(hlo.convolution(x, weight, stride, edges, dilation, spread, groups, dtype=wide(x.dtype)), out.dtype)
    return y if bias is None else y + hlo.reshape(converted(bias, y.dtype), -1, *[1] * rank)


def _of_inputs(weight: Tensor, groups: int) -> Tensor:
    """The weight of a transposed convolution, [in, out / groups, ...], as that of one over a spread input."""
    inputs, outputs, *kernel = weight.sizes
    weight = hlo.reverse(weight, *range(2, 2 + len(kernel)))
    weight = hlo.reshape(weight, groups, inputs // groups, outputs, *kernel)
    weight = hlo.transpose(weight, 0, 2, 1, *range(3, 3 + len(kernel)))
    return hlo.reshape(weight, groups * outputs, inputs // groups, *kernel)
