"""Normalizations, computed in f32 for all types of activations."""

from __future__ import annotations

from typing import Any

from transformers_neuronx import hlo
from transformers_neuronx.pyhlo import Tensor
from transformers_neuronx.weights.parameters import Parameter


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


def normalize(x: Tensor, w: Any, eps: float) -> Tensor:
    """Normalize the last axis: a layer norm has a bias, an RMS norm has none. [..., h] -> [..., h]"""
    return layer_norm(x, w, eps) if hasattr(w, "bias") else rms_norm(x, w, eps)


def normalize_heads(x: Tensor, w: Any, eps: float) -> Tensor:
    """Normalize queries or keys [b, n, heads, d] as the weights say. -> [b, n, heads, d]

    A weight f32[d] is that of every head. If it is f32[heads d] and split as the heads are, each head has its own part
    for a layer norm; an RMS norm is that of the features of all heads together, over all devices.
    """
    if w.weight.row.split is None:
        return normalize(x, w, eps)
    if not hasattr(w, "bias"):
        return _rms_norm_together(x, w.weight, eps)
    weight, bias = (hlo.reshape(each.tensor, *x.sizes[2:]) for each in (w.weight, w.bias))
    return _layer_norm_body(x, weight, bias, eps=eps)


def _rms_norm_together(x: Tensor, weight: Parameter, eps: float) -> Tensor:
    """Divide by the root mean square over all heads. Heads of zeros, which fill the devices up, add nothing to it."""
    split = weight.row.split
    assert split is not None
    y = hlo.convert(x, "f32")
    squares = hlo.all_reduce(hlo.sum(y * y, [2, 3], keep=True), weight.degree)
    count = weight.row.shape[0] * split.copies(weight.degree)
    y = y * hlo.rsqrt(squares * (1 / count) + eps) * hlo.reshape(weight.tensor, *x.sizes[2:])
    return hlo.convert(y, x.dtype)
