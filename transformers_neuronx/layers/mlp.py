"""Feed-forward blocks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from transformers_neuronx.layers.linear import linear
from transformers_neuronx.pyhlo import Tensor


def mlp(x: Tensor, w: Any, activation: Callable[[Tensor], Tensor]) -> Tensor:
    """`w.down` of the activation of `w.up`. [b, n, h] -> [b, n, h]"""
    return linear(activation(linear(x, w.up)), w.down)
