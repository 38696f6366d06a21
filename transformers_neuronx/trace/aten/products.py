"""Matrix products, attention and convolution.

If the right side of a product is a weight, `Lowering` has made it a `Parameter`, [out, in] and laid out for the
runtime. The product is then a linear layer, as in the model families.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from types import SimpleNamespace

import torch

from transformers_neuronx import hlo, layers
from transformers_neuronx.pyhlo import Shape, Tensor
from transformers_neuronx.trace.aten.table import converted, lowers, of_training, wide, widened
from transformers_neuronx.weights.parameters import Parameter
from transformers_neuronx.weights.rows import Weight

aten = torch.ops.aten

# The multiplied operands of each operation, which `--auto-cast matmult` narrows.
MULTIPLIED = {
    aten.linear.default: (0, 1),
    aten.mm.default: (0, 1),
    aten.bmm.default: (0, 1),
    aten.addmm.default: (1, 2),
    aten.convolution.default: (0, 1),
    aten.scaled_dot_product_attention.default: (0, 1, 2),
}


def parameter(tensor: Tensor, name: str, sizes: tuple[int, ...], word: int | None) -> Parameter:
    """Return a weight as a `Parameter` on one device. With a `word` it is in panels."""
    return Parameter(tensor, Weight(name, "", sizes, word=word), 1, tensor.dtype.name)


def _layer(out: Shape, x: Tensor, weight: Parameter, bias: Tensor | None, activation: str | None = None) -> Tensor:
    w = SimpleNamespace(weight=weight)
    if bias is not None:
        w.bias = SimpleNamespace(tensor=bias)
    if x.dtype is not out.dtype:
        y = layers.logits(x, w)
        return layers.ACTIVATIONS[activation](y) if activation else y
    return layers.activated(x, activation, w) if activation else layers.linear(x, w)


Axes = tuple[Sequence[int], Sequence[int]]


def _dot(out: Shape, a: Tensor, b: Tensor, contract: Axes, batch: Axes = ((), ())) -> Tensor:
    return hlo.convert(hlo.dot(a, b, contract, batch, wide(a.dtype)), out.dtype)


@lowers(aten.linear.default)
def linear(
    out: Shape, x: Tensor, weight: Tensor | Parameter, bias: Tensor | None = None, activation: str | None = None
) -> Tensor:
    """Lower x weightᵀ + bias, followed by the activation that `joining` has fused, if any."""
    if isinstance(weight, Parameter):
        return _layer(out, x, weight, bias, activation)
    y = _dot(out, x, weight, ([-1], [1]))
    y = y if bias is None else y + converted(bias, out.dtype)
    return y if activation is None else hlo.convert(layers.ACTIVATIONS[activation](widened(y)), out.dtype)


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
    """Lower softmax(q kᵀ scale + mask) v, with q [..., n, d], k and v [..., m, d]. A boolean mask is true where seen.

    Heads of k and v are shared among groups of q's heads, whatever `enable_gqa` is.
    """
    if dropout_p:
        raise of_training("attention with dropout_p")
    lead, n, m = out.sizes[:-2], q.sizes[-2], k.sizes[-2]
    if is_causal:
        mask = hlo.iota("s32", [n, m], 0) >= hlo.iota("s32", [n, m], 1)
    if mask is not None:
        zeros = hlo.full(0.0, "f32", mask.sizes)
        mask = hlo.select(mask, zeros, -math.inf) if mask.dtype.name == "pred" else hlo.convert(mask, "f32")
        mask = _with_heads(hlo.broadcast_to(mask, (*mask.sizes[:-1], m)), lead)
    q, k, v = (_with_heads(x, lead) for x in (q, k, v))
    q, k, v = (hlo.transpose(hlo.broadcast_to(x, (q.sizes[0], *x.sizes[1:])), 0, 2, 1, 3) for x in (q, k, v))
    memory, bias = layers.Memory(k, v, hlo.full(m, "s32", q.sizes[:1])), None
    if mask is not None:
        bias = hlo.transpose(mask, 0, 1, 3, 2)
    return hlo.reshape(hlo.transpose(layers.attend_to(q, memory, scale=scale, bias=bias), 0, 2, 1, 3), *out.sizes)


def _with_heads(x: Tensor, lead: Sequence[int]) -> Tensor:
    """Broadcast x [..., n, d] to `lead`, and return [b, heads, n, d]. `heads` is 1 unless `lead` has two axes."""
    if len(lead) != 2 and len(x.sizes) > 2:
        x = hlo.reshape(hlo.broadcast_to(x, (*lead, *x.sizes[-2:])), -1, 1, *x.sizes[-2:])
    return hlo.reshape(x, *[1] * (4 - len(x.sizes)), *x.sizes)


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
    """Lower x [b, in, ...], weight [out, in / groups, ...], or [in, out / groups, ...] if transposed."""
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
    """Convert a transposed convolution's weight, [in, out / groups, ...], for a convolution of a dilated input."""
    inputs, outputs, *kernel = weight.sizes
    weight = hlo.reverse(weight, *range(2, 2 + len(kernel)))
    weight = hlo.reshape(weight, groups, inputs // groups, outputs, *kernel)
    weight = hlo.transpose(weight, 0, 2, 1, *range(3, 3 + len(kernel)))
    return hlo.reshape(weight, groups * outputs, inputs // groups, *kernel)
