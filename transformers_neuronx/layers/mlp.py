"""Feed-forward blocks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from transformers_neuronx.layers.linear import linear
from transformers_neuronx.pyhlo import Tensor

Activation = Callable[[Tensor], Tensor]


def mlp(x: Tensor, w: Any, activation: Activation) -> Tensor:
    """`w.down` of the activation of `w.up`. [b, n, h] -> [b, n, h]"""
    return linear(activation(linear(x, w.up)), w.down)


def gated_mlp(x: Tensor, w: Any, activation: Activation) -> Tensor:
    """`w.down` of `w.up` times the activation of `w.gate` (Shazeer, arXiv:2002.05202). [b, n, h] -> [b, n, h]"""
    return linear(activation(linear(x, w.gate)) * linear(x, w.up), w.down)
