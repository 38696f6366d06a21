"""Mixtures of experts: a router chooses a few feed-forward blocks for each token."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from transformers_neuronx import hlo
from transformers_neuronx.layers.activation import Gate
from transformers_neuronx.layers.linear import activated, linear, product, summed
from transformers_neuronx.layers.mlp import gated_mlp, mlp
from transformers_neuronx.pyhlo import Tensor


@dataclass(frozen=True)
class Router:
    """How the scores of experts become the shares of those that a token goes to.

    Each score is the probability of an expert, or its `sigmoid`. The `active` highest are chosen, from the best
    `active_groups` of `groups` if there are several: a group's rank is the sum of its `ranking` highest. Shares are the
    scores of those chosen, divided by their sum and `eps` if `normalized`, times `scale`. Normalized probabilities of
    those chosen are a softmax over their own scores: what all experts have in common cancels out. A share multiplies
    what an expert returns, or with `of_inputs`, what it reads. With `by_logits`, experts are chosen by their logits, to
    which a correction is added, and scores are for shares alone.
    """

    active: int
    sigmoid: bool = False
    normalized: bool = True
    scale: float = 1.0
    groups: int = 1
    active_groups: int = 1
    eps: float = 1e-20
    of_inputs: bool = False
    ranking: int = 2
    by_logits: bool = False


def experts(x: Tensor, w: Any, router: Router, activation: str | Gate, routed_by: Tensor | None = None) -> Tensor:
    """Sum the feed-forward blocks that a router chooses for each token. [b, n, h] -> [b, n, h]

    Jiang et al., arXiv:2401.04088. `w` has the linear layers `up` and `down` of all experts, stacked, `gate` if they
    are gated, and `router`; biases are stacked, too. The weights of an expert that no token goes to are not read. All
    tokens go to the block `shared`, if there is one, times the sigmoid of the layer `shared_gate`, if there is that.
    The router reads `routed_by` [b, n, h], by default x.
    """
    y = _chosen(x, w, *routed(x if routed_by is None else routed_by, w.router, router), activation, router.of_inputs)
    if not hasattr(w, "shared"):
        return y
    assert isinstance(activation, str)
    shared = (gated_mlp if hasattr(w.shared, "gate") else mlp)(x, w.shared, activation)
    return y + (shared * hlo.logistic(linear(x, w.shared_gate)) if hasattr(w, "shared_gate") else shared)


def routed(x: Tensor, w: Any, router: Router) -> tuple[Tensor, Tensor]:
    """Return the experts of each token, and their shares. x [b, n, h] -> s32[b, n, active], f32[b, n, active]

    `w` is a linear layer in f32: rounded scores would make other experts the best. `w.correction`, f32[experts], is
    added to scores where experts are chosen, but not to shares (DeepSeek-AI, arXiv:2412.19437). Of equal scores, the
    first is chosen. Shares of an expert are multiplied by its `w.scale`, f32[experts], if there is one.
    """
    logits = linear(hlo.convert(x, "f32"), w)
    if router.sigmoid:
        scores = hlo.logistic(logits)
    else:
        scores = hlo.exp(logits - hlo.max(logits, -1, keep=True))
        scores = scores / hlo.sum(scores, -1, keep=True)
    ranked = logits if router.by_logits else scores
    ranked = ranked + w.correction.tensor if hasattr(w, "correction") else ranked
    ranked = _of_best_groups(ranked, router) if router.groups > 1 else ranked
    shares, ids = hlo.top_k(ranked, router.active)
    if ranked is not scores:
        own = hlo.equal(hlo.reshape(ids, *ids.sizes, 1), hlo.iota("s32", [*ids.sizes, scores.sizes[-1]], 3))
        shares = hlo.sum(hlo.select(own, hlo.reshape(scores, *scores.sizes[:2], 1, -1), 0.0), -1)
    if router.normalized:
        shares = shares / (hlo.sum(shares, -1, keep=True) + router.eps)
    if hasattr(w, "scale"):
        shares = shares * hlo.take(w.scale.tensor, ids)
    return ids, shares * router.scale


def _of_best_groups(scores: Tensor, router: Router) -> Tensor:
    """Return scores that are -inf outside the best groups. [b, n, experts]

    With a correction, a score can be negative, and zero would be better.
    """
    b, n, count = scores.sizes
    groups = hlo.reshape(scores, b, n, router.groups, -1)
    ranks = hlo.sum(hlo.top_k(groups, router.ranking)[0], -1)  # [b, n, groups]
    _, best = hlo.top_k(ranks, router.active_groups)
    best = hlo.reshape(best, b, n, -1, 1)
    chosen = hlo.any(hlo.equal(best, hlo.iota("s32", [b, n, router.active_groups, router.groups], 3)), [2])
    return hlo.reshape(hlo.select(hlo.reshape(chosen, b, n, -1, 1), groups, -math.inf), b, n, count)


def _chosen(x: Tensor, w: Any, ids: Tensor, shares: Tensor, activation: str | Gate, of_inputs: bool) -> Tensor:
    """Sum the blocks of the experts `ids` of each token, times their shares. [b, n, h] -> [b, n, h]

    If devices have whole experts, each adds those of its own: the others' numbers are those of none there.
    """
    b, n, h = x.sizes
    numbers, whole = hlo.reshape(ids, -1), w.down.weight.row.whole_experts
    if whole and w.down.weight.degree > 1:
        numbers = numbers - hlo.convert(hlo.replica_id(), "s32") * w.down.weight.tensor.sizes[0]
    rows = hlo.reshape(hlo.broadcast_to(hlo.reshape(x, b * n, 1, h), [b * n, ids.sizes[-1], h]), -1, h)
    if of_inputs:
        rows, shares = rows * hlo.convert(hlo.reshape(shares, -1, 1), x.dtype), hlo.full(1, "f32", shares.sizes)
    before = (getattr(w, part) for part in ("gate", "up") if hasattr(w, part))
    inner = activated(rows, activation, *before, experts=numbers)
    y = product(inner, w.down, numbers, biased=whole)
    shares = hlo.reshape(shares, *shares.sizes, 1)
    y = summed(hlo.sum(hlo.reshape(y, b, n, -1, h) * shares, 2), w.down.weight)
    if hasattr(w.down, "bias") and not whole:
        y = y + hlo.sum(hlo.convert(hlo.take(w.down.bias.tensor, ids), "f32") * shares, 2)
    return hlo.convert(y, x.dtype)
