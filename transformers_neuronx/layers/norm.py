"""Normalizations, computed in f32 whatever the activations are."""

from __future__ import annotations

from typing import Any

from transformers_neuronx import hlo
from transformers_neuronx.pyhlo import Tensor


def _layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    y = hlo.convert(x, "f32")
    y = y - hlo.mean(y, -1, keep=True)
    y = y * hlo.rsqrt(hlo.mean(y * y, -1, keep=True) + eps)
    return hlo.convert(y * weight + bias, x.dtype)


_layer_norm_composite = hlo.composite("layer_norm", _layer_norm)


def layer_norm(x: Tensor, w: Any, eps: float) -> Tensor:
    """Over the last axis (Ba et al., arXiv:1607.06450). x [..., h], w.weight and w.bias f32[h] -> [..., h]"""
    y: Tensor = _layer_norm_composite(x, w.weight.tensor, w.bias.tensor, eps=eps)
    return y
