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
    """Sum the `active` blocks of `w.experts` that `w.router` scores highest for each token. [b, n, h] -> [b, n, h]

    Jiang et al., arXiv:2401.04088. A block that no token is routed to does not run, so its weights are not read.
    """
    scores = hlo.convert(linear(x, w.router), "f32")
    scores = hlo.exp(scores - hlo.max(scores, -1, keep=True))
    chosen, ids = hlo.top_k(scores, active)  # [b, n, active]
    chosen = chosen / hlo.sum(chosen, -1, keep=True)
    y = hlo.full(0.0, "f32", x.sizes)
    for number, block in enumerate(vars(w.experts).values()):
        share = hlo.sum(hlo.select(hlo.equal(ids, number), chosen, 0.0), -1, keep=True)
        y = _with_expert(y, x, block, share, activation)
    return hlo.convert(summed(y, block.down.weight), x.dtype)


def _with_expert(y: Tensor, x: Tensor, w: Any, share: Tensor, activation: str) -> Tensor:
    def added() -> Tensor:
        return y + share * product(activated(x, activation, w.gate, w.up), w.down)

    return hlo.conditional(hlo.any(share > 0.0, [0, 1, 2]), added, lambda: y)
