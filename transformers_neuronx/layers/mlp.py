"""Feed-forward blocks."""

from __future__ import annotations

from typing import Any

from transformers_neuronx import hlo
from transformers_neuronx.layers.linear import activated, linear, product, summed
from transformers_neuronx.pyhlo import Tensor


def mlp(x: Tensor, w: Any, activation: str) -> Tensor:
    """Apply `w.down` to the activation of `w.up`. [b, n, h] -> [b, n, h]"""
    return linear(activated(x, activation, w.up), w.down)


def gated_mlp(x: Tensor, w: Any, activation: str) -> Tensor:
    """Apply `w.down` to `w.up` times the activation of `w.gate` (Shazeer, arXiv:2002.05202). [b, n, h] -> [b, n, h]"""
    return linear(activated(x, activation, w.gate, w.up), w.down)


def experts(x: Tensor, w: Any, active: int, activation: str) -> Tensor:
    """Sum the `active` experts of `w` that `w.router` scores highest for each token. [b, n, h] -> [b, n, h]

    Jiang et al., arXiv:2401.04088. `w` has the linear layers `gate`, `up` and `down` of all experts, stacked. The
    weights of an expert that no token is routed to are not read.
    """
    scores = hlo.convert(linear(x, w.router), "f32")
    scores = hlo.exp(scores - hlo.max(scores, -1, keep=True))
    chosen, ids = hlo.top_k(scores, active)  # [b, n, active]
    return of_experts(x, w, ids, chosen / hlo.sum(chosen, -1, keep=True), activation)


def of_experts(x: Tensor, w: Any, ids: Tensor, shares: Tensor, activation: str) -> Tensor:
    """Sum gated feed-forward blocks of experts: of each token those of `ids`, times their shares. [b, n, h]

    ids s32[b, n, active], shares f32[b, n, active]
    """
    b, n, h = x.sizes
    numbers = hlo.reshape(ids, -1)
    rows = hlo.reshape(hlo.broadcast_to(hlo.reshape(x, b * n, 1, h), [b * n, ids.sizes[-1], h]), -1, h)
    y = product(activated(rows, activation, w.gate, w.up, experts=numbers), w.down, numbers)
    y = hlo.sum(hlo.reshape(y, b, n, -1, h) * hlo.reshape(shares, *shares.sizes, 1), 2)
    return hlo.convert(summed(y, w.down.weight), x.dtype)
