"""Low-rank adapters of linear layers, chosen by row (Hu et al., arXiv:2106.09685): y += x aᵀ b.

Programs with adapters have the matrices of all that are on the devices; a step says which one each row has.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

from transformers_neuronx import hlo
from transformers_neuronx.pyhlo import Tensor
from transformers_neuronx.weights.lora import DOWN, UP
from transformers_neuronx.weights.parameters import Parameter


class Lora(NamedTuple):
    """The adapters of a linear layer, of `rank` each, and which one each row has, negative for none: s32[b], for each
    number of rows that the layer may get.
    """

    a: Parameter
    b: Parameter
    adapters: Mapping[int, Tensor]
    rank: int


def _lora_body(y: Tensor, x: Tensor, a: Tensor, b: Tensor, adapters: Tensor, *, rank: int) -> Tensor:
    """Add x aᵀ b to y [b, ..., out], with the parts of a and b of each row's adapter.

    x [b, ..., in]; a [adapters * rank, in] and b [adapters * rank, out], of x's type; adapters s32[b].

    This defines the result. A kernel reads only the adapters that rows have; here all are multiplied.
    """
    lead = [1] * (len(x.sizes) - 1)
    own = hlo.divide(hlo.iota("s32", [*lead, a.sizes[0]], len(lead)), rank)
    hidden = hlo.dot(x, a, contract=([-1], [1]), dtype="f32")
    hidden = hlo.select(hlo.equal(own, hlo.reshape(adapters, -1, *lead[1:], 1)), hidden, 0.0)
    added = hlo.dot(hlo.convert(hidden, x.dtype), b, contract=([-1], [0]), dtype="f32")
    return hlo.convert(hlo.convert(y, "f32") + added, y.dtype)


_lora = hlo.composite("lora", _lora_body)


def adapted(y: Tensor, x: Tensor, w: Any) -> Tensor:
    """Add to y [b, ..., out], what a linear layer made of x [b, ..., in], what its adapters add, if it has some."""
    lora: Lora | None = getattr(w, "lora", None)
    if lora is None:
        return y
    changed: Tensor = _lora(y, x, lora.a.tensor, lora.b.tensor, lora.adapters[x.sizes[0]], rank=lora.rank)
    return changed


def chosen(weights: Any, adapters: Sequence[Tensor], rank: int) -> Any:
    """Return the weights of a layer, in which linear layers with adapters know which one each row has: s32[b] for all
    rows of a step, and for those that the last layer returns.
    """
    if not isinstance(weights, SimpleNamespace):
        return weights
    known = SimpleNamespace(**{name: chosen(each, adapters, rank) for name, each in vars(weights).items()})
    if hasattr(known, DOWN):
        known.lora = Lora(getattr(known, DOWN), getattr(known, UP), {each.sizes[0]: each for each in adapters}, rank)
    return known
