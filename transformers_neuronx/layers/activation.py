"""Activation functions by the names that Hugging Face configurations use."""

from __future__ import annotations

import math
from collections.abc import Callable

from transformers_neuronx import hlo
from transformers_neuronx.pyhlo import Tensor


def gelu(x: Tensor) -> Tensor:
    """X Φ(x), with the normal distribution's Φ itself (Hendrycks and Gimpel, arXiv:1606.08415)."""
    return x * (hlo.erf(x * math.sqrt(0.5)) + 1.0) * 0.5


def gelu_tanh(x: Tensor) -> Tensor:
    """The same paper's approximation of gelu by a hyperbolic tangent."""
    inner = (x + x * x * x * 0.044715) * math.sqrt(2 / math.pi)
    return x * (hlo.tanh(inner) + 1.0) * 0.5


def relu(x: Tensor) -> Tensor:
    return hlo.maximum(x, 0.0)


def silu(x: Tensor) -> Tensor:
    return x * hlo.logistic(x)


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": gelu,
    "gelu_fast": gelu_tanh,
    "gelu_new": gelu_tanh,
    "gelu_pytorch_tanh": gelu_tanh,
    "relu": relu,
    "silu": silu,
    "swish": silu,
    "tanh": hlo.tanh,
}
