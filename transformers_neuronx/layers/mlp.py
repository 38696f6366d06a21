"""Feed-forward blocks."""

from __future__ import annotations

from typing import Any

from transformers_neuronx.layers.linear import activated, linear
from transformers_neuronx.pyhlo import Tensor


def mlp(x: Tensor, w: Any, activation: str) -> Tensor:
    """Apply `w.down` to the activation of `w.up`. [b, n, h] -> [b, n, h]"""
    return linear(activated(x, activation, w.up), w.down)


def gated_mlp(x: Tensor, w: Any, activation: str) -> Tensor:
    """Apply `w.down` to `w.up` times the activation of `w.gate` (Shazeer, arXiv:2002.05202). [b, n, h] -> [b, n, h]"""
    return linear(activated(x, activation, w.gate, w.up), w.down)
