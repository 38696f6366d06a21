"""Activation functions by the names that Hugging Face configurations use."""

from __future__ import annotations

import math
from collections.abc import Callable

from transformers_neuronx import hlo
from transformers_neuronx.pyhlo import Tensor

Gate = Callable[[Tensor, Tensor], Tensor]  # of the products with gate and up


def _gelu(x: Tensor) -> Tensor:
    """Exact GELU: x Φ(x), with the normal distribution's Φ (Hendrycks and Gimpel, arXiv:1606.08415)."""
    return x * (hlo.erf(x * math.sqrt(0.5)) + 1.0) * 0.5


def _gelu_tanh(x: Tensor) -> Tensor:
    """Approximate GELU with a hyperbolic tangent, as in the same paper."""
    inner = (x + x * x * x * 0.044715) * math.sqrt(2 / math.pi)
    return x * (hlo.tanh(inner) + 1.0) * 0.5


def relu(x: Tensor) -> Tensor:
    return hlo.maximum(x, 0.0)


def relu2(x: Tensor) -> Tensor:
    """Square of ReLU (So et al., arXiv:2109.08668)."""
    return relu(x) * relu(x)


def _silu(x: Tensor) -> Tensor:
    return x * hlo.logistic(x)


def _softmax(x: Tensor) -> Tensor:
    """Softmax over the last axis."""
    e = hlo.exp(x - hlo.max(x, -1, keep=True))
    return e / hlo.sum(e, -1, keep=True)


gelu, gelu_tanh = hlo.composite("gelu", _gelu), hlo.composite("gelu_tanh", _gelu_tanh)
silu, softmax = hlo.composite("silu", _silu), hlo.composite("softmax", _softmax)


def softmax_with_sinks(scores: Tensor, sinks: Tensor | None) -> Tensor:
    """Softmax over the last axis, and one more score if there are sinks: the head's, which takes its share.

    Xiao et al., arXiv:2309.17453. scores f32[b, heads, n, width], sinks f32[heads] -> f32[b, heads, n, width]
    """
    if sinks is None:
        weights: Tensor = softmax(scores)
        return weights
    sinks = hlo.reshape(sinks, -1, 1, 1)
    top = hlo.maximum(hlo.max(scores, -1, keep=True), sinks)
    e = hlo.exp(scores - top)
    return e / (hlo.sum(e, -1, keep=True) + hlo.exp(sinks - top))


def clamped_swiglu(alpha: float, limit: float) -> Gate:
    """Return the gated activation (up + 1) · gate · σ(alpha · gate) of limited products (OpenAI, arXiv:2508.10925).

    Those of the gate are at most `limit`, and those of up are between -`limit` and `limit`.
    """

    def gated(gate: Tensor, up: Tensor) -> Tensor:
        dtype = gate.dtype
        gate, up = hlo.minimum(hlo.convert(gate, "f32"), limit), hlo.clamp(-limit, hlo.convert(up, "f32"), limit)
        return hlo.convert((up + 1.0) * gate * hlo.logistic(gate * alpha), dtype)

    return gated


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": gelu,
    "gelu_fast": gelu_tanh,
    "gelu_new": gelu_tanh,
    "gelu_pytorch_tanh": gelu_tanh,
    "relu": relu,
    "relu2": relu2,
    "silu": silu,
    "swish": silu,
    "tanh": hlo.tanh,
}
