"""Multi-head latent attention (DeepSeek-AI, arXiv:2405.04434): all heads read one compressed key of each position."""

from __future__ import annotations

from typing import Any

from transformers_neuronx import hlo
from transformers_neuronx.layers.attention import Rotate, attended
from transformers_neuronx.layers.linear import linear
from transformers_neuronx.layers.norm import rms_norm
from transformers_neuronx.layers.step import Cache, Step
from transformers_neuronx.pyhlo import Tensor

EPS = 1e-6  # of the norms of compressed queries and keys, whatever that of other norms is


def latent_attention(
    x: Tensor,
    w: Any,
    cache: Cache,
    step: Step,
    rotate: Rotate | tuple[Rotate, Rotate],
    turned: int,
    *,
    scale: float,
) -> tuple[Tensor, Cache]:
    """Do what `attention` does: project, cache, attend, project back. x [b, n, h] -> [b, n, h], and the cache after it.

    The linear layer `kv_a` makes the latent, r features, which `kv_norm` normalizes, and after it `turned` features
    that rotate. The cache has both, once for all heads. What would make keys and values of the latent, `up_k`
    [heads dk, r] and `up_v` [heads dv, r], is applied to queries and to the context instead. Queries come from `q_b`,
    after `q_a` and `q_norm` if there are these; in each head, features that rotate come last. If `rotate` is two
    functions, the first is applied to whole queries, and the second rotates.
    """
    of_queries, rotate = rotate if isinstance(rotate, tuple) else (None, rotate)
    b, n, _ = x.sizes
    compressed = hlo.reshape(_whole(x, w.kv_a), b, n, 1, -1)
    width = compressed.sizes[-1]
    rank = width - turned
    latent = rms_norm(hlo.slice(compressed, -1, 0, rank), w.kv_norm, EPS)
    key = hlo.concatenate([latent, rotate(hlo.slice(compressed, -1, rank, width))], -1)

    queries = linear(rms_norm(_whole(x, w.q_a), w.q_norm, EPS) if hasattr(w, "q_a") else x, w.q_b)
    up_k, up_v = (_by_head(each, rank) for each in (w.up_k, w.up_v))
    fixed = up_k.sizes[1]
    queries = hlo.reshape(queries, b, n, -1, fixed + turned)
    queries = of_queries(queries) if of_queries else queries
    absorbed = _of_heads(hlo.slice(queries, -1, 0, fixed), up_k, 1)
    queries = hlo.concatenate([absorbed, rotate(hlo.slice(queries, -1, fixed, fixed + turned))], -1)

    context, *after = attended(queries, key, None, w, cache, step, None, scale=scale, softcap=None)
    context = _of_heads(hlo.slice(context, -1, 0, rank), up_v, 2)
    return linear(step.needed_rows(hlo.reshape(context, b, n, -1)), w.out), tuple(after)


def _whole(x: Tensor, w: Any) -> Tensor:
    """Apply `linear`, with all outputs on every device, without the padding of the split."""
    y = hlo.all_gather(linear(x, w), w.weight.degree, -1)
    return hlo.slice(y, -1, 0, w.weight.row.shape[0])


def _by_head(weight: Any, rank: int) -> Tensor:
    """Return a matrix of all of a device's heads, [heads d, r], as one for each. -> [heads, d, r]"""
    return hlo.reshape(weight.tensor, -1, weight.row.split.unit, rank)


def _of_heads(x: Tensor, matrices: Tensor, axis: int) -> Tensor:
    """Multiply each head of x [b, n, heads, ·] by its own matrix, of whose `axis` they are. -> [b, n, heads, ·]"""
    b, n, heads, size = x.sizes
    rows = hlo.reshape(hlo.transpose(x, 2, 0, 1, 3), heads, b * n, size)
    y = hlo.dot(rows, matrices, contract=([2], [axis]), batch=([0], [0]), dtype="f32")
    return hlo.convert(hlo.transpose(hlo.reshape(y, heads, b, n, -1), 1, 2, 0, 3), x.dtype)
