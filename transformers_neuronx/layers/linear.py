"""Linear layers: the only graph code that knows a weight may be split over devices."""

from __future__ import annotations

import math
from typing import Any

from transformers_neuronx import hlo
from transformers_neuronx.pyhlo import Tensor
from transformers_neuronx.weights import Parameter


def _product(x: Tensor, weight: Tensor) -> Tensor:
    """X [..., in] times weight [out, in], summed in f32. -> f32[..., out]"""
    *lead, features = x.sizes
    count = math.prod(lead)
    # A single row goes as a vector: XLA:CPU streams the weight for a vector, and crawls for a matrix of one row.
    flat = hlo.reshape(x, features) if count == 1 else hlo.reshape(x, count, features)
    axis = len(flat.sizes) - 1
    return hlo.reshape(hlo.dot(flat, weight, contract=([axis], [1]), dtype="f32"), *lead, weight.sizes[0])


product = hlo.composite("linear", _product)


def linear(x: Tensor, w: Any) -> Tensor:
    """X [..., in] times `w.weight` [out, in] plus `w.bias` [out]. -> [..., out]

    Of a weight split by outputs, each device returns its own; of one split by inputs, the sum over the devices.
    """
    weight: Parameter = w.weight
    y = product(x, weight.tensor)
    if weight.reduces:
        y = hlo.all_reduce(y, weight.degree)
    if hasattr(w, "bias"):
        y = y + hlo.convert(w.bias.tensor, "f32")
    return hlo.convert(y, x.dtype)


def logits(x: Tensor, w: Any) -> Tensor:
    """The head: `linear` in f32 with all outputs on every device, without what was added to divide them."""
    y = product(x, w.weight.tensor)
    if hasattr(w, "bias"):
        y = y + hlo.convert(w.bias.tensor, "f32")
    y = hlo.all_gather(y, w.weight.degree, -1)
    return hlo.slice(y, -1, 0, w.weight.row.shape[0])
