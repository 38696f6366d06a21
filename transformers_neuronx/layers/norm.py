"""Normalizations, computed in f32 for all types of activations."""

from __future__ import annotations

from typing import Any

from transformers_neuronx import hlo
from transformers_neuronx.pyhlo import Tensor


def _layer_norm_body(x: Tensor, weight: Tensor, bias: Tensor, *, eps: float) -> Tensor:
    y = hlo.convert(x, "f32")
    y = y - hlo.mean(y, -1, keep=True)
    y = y * hlo.rsqrt(hlo.mean(y * y, -1, keep=True) + eps)
    return hlo.convert(y * weight + bias, x.dtype)


_layer_norm = hlo.composite("layer_norm", _layer_norm_body)


def layer_norm(x: Tensor, w: Any, eps: float) -> Tensor:
    """Normalize the last axis (Ba et al., arXiv:1607.06450). x [..., h], w.weight and w.bias f32[h] -> [..., h]"""
    y: Tensor = _layer_norm(x, w.weight.tensor, w.bias.tensor, eps=eps)
    return y


def _rms_norm_body(x: Tensor, weight: Tensor, *, eps: float) -> Tensor:
    y = hlo.convert(x, "f32")
    return hlo.convert(y * hlo.rsqrt(hlo.mean(y * y, -1, keep=True) + eps) * weight, x.dtype)


_rms_norm = hlo.composite("rms_norm", _rms_norm_body)


def rms_norm(x: Tensor, w: Any, eps: float) -> Tensor:
    """Normalize the last axis (Zhang and Sennrich, arXiv:1910.07467). x [..., h], w.weight f32[h] -> [..., h]"""
    y: Tensor = _rms_norm(x, w.weight.tensor, eps=eps)
    return y
