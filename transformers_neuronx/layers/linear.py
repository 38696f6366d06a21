"""Linear layers: the only graph code that knows a weight may be split over devices, or stored in fewer bits."""

from __future__ import annotations

from typing import Any

from transformers_neuronx import hlo
from transformers_neuronx.layers.storage import numbers
from transformers_neuronx.pyhlo import Tensor
from transformers_neuronx.weights import Parameter


def _product(x: Tensor, weight: Tensor, *scale: Tensor) -> Tensor:
    """x [..., in] times weight [out, in], summed in f32. -> f32[..., out]

    A scale f32[out] is of the outputs, f32[out, groups] of groups of a row of the weight. Integers of 8 bits are exact
    in every type that activations may have.
    """
    if weight.dtype is not x.dtype:  # XLA would widen the weights of all layers beforehand, and keep them so
        x, weight = hlo.optimization_barrier(x, weight)
    if scale and len(scale[0].sizes) == 2:
        return _product(x, numbers(weight, scale[0], x.dtype.name))
    *lead, features = x.sizes
    rows, weight = hlo.reshape(x, -1, features), hlo.convert(weight, x.dtype)
    count = rows.sizes[0]
    # For one row XLA:CPU has a fast product only if it is a vector and f32, or, in bf16, if there is a second row:
    # with the 124M shape 12 and 13 ms a token, where a matrix of one row takes 130 ms.
    if count == 1 and x.dtype.name == "f32":
        rows = hlo.reshape(rows, features)
    elif count == 1:
        rows = hlo.pad(rows, 0, 0, 1)
    y = hlo.dot(rows, weight, contract=([-1], [1]), dtype="f32")
    y = hlo.reshape(y if len(y.sizes) == 1 else hlo.slice(y, 0, 0, count), *lead, weight.sizes[0])
    return y * scale[0] if scale else y


_linear = hlo.composite("linear", _product)


def product(x: Tensor, w: Any) -> Tensor:
    """X [..., in] times `w.weight` [out, in] alone. -> f32[..., out]

    Of a weight split by outputs, each device has its own; of one split by inputs, its part of the sum.
    """
    scale = [] if w.weight.scale is None else [w.weight.scale]
    y: Tensor = _linear(x, w.weight.tensor, *scale)
    return y


def summed(y: Tensor, weight: Parameter) -> Tensor:
    """The devices' products with `weight`, or whatever was made linearly of them, as one."""
    return hlo.all_reduce(y, weight.degree) if weight.row.reduces else y


def linear(x: Tensor, w: Any) -> Tensor:
    """X [..., in] times `w.weight` [out, in] plus `w.bias` [out]. -> [..., out]

    Of a weight split by outputs, each device returns its own; of one split by inputs, the sum over the devices.
    """
    y = summed(product(x, w), w.weight)
    if hasattr(w, "bias"):
        y = y + hlo.convert(w.bias.tensor, "f32")
    return hlo.convert(y, x.dtype)


def logits(x: Tensor, w: Any) -> Tensor:
    """The head: `linear` in f32 with all outputs on every device, without what was added to divide them."""
    y = product(x, w)
    if hasattr(w, "bias"):
        y = y + hlo.convert(w.bias.tensor, "f32")
    y = hlo.all_gather(y, w.weight.degree, -1)
    return hlo.slice(y, -1, 0, w.weight.row.shape[0])
