"""Gated delta nets: linear attention over one matrix of a sequence for each head, which tokens correct."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from transformers_neuronx import hlo
from transformers_neuronx.layers.activation import silu
from transformers_neuronx.layers.linear import linear, linears
from transformers_neuronx.layers.linear_attention import LinearAttention, convolved, of_heads, softplus
from transformers_neuronx.layers.norm import rms_norm
from transformers_neuronx.layers.state import scan_sequences
from transformers_neuronx.layers.step import Cache, Step
from transformers_neuronx.pyhlo import Tensor

EPS = 1e-6  # of the norms of queries and keys


def delta_net(x: Tensor, w: Any, cache: Cache, step: Step, sizes: LinearAttention, eps: float) -> tuple[Tensor, Cache]:
    """Project, convolve, correct the memory and read it, norm, gate, project back. x [b, n, h] -> [b, n, h], and states

    Yang et al., arXiv:2412.06464. `w` has what `convolved` takes, linear layers `gate`, `beta` and `decay`, of heads,
    and `out`; `rate` and `decay_bias`, f32[value_heads]; and the norm `norm` of a head. `cache` are the `states` of
    `sizes`.
    """
    inputs, after = convolved(x, w, cache, step, sizes)
    beta, decay = (hlo.convert(y, "f32") for y in linears(x, w.beta, w.decay))
    decay = hlo.negate(hlo.exp(w.rate.tensor)) * softplus(decay + w.decay_bias.tensor)
    how = dict(together=step.segments is None)
    y, memory = gated_delta_rule(*inputs, decay, hlo.logistic(beta), step.sequences, cache[3], **how)
    y = step.needed_rows(y)
    gate = hlo.convert(hlo.reshape(linear(step.needed_rows(x), w.gate), *y.sizes), "f32")
    y = hlo.convert(rms_norm(y, w.norm, eps) * silu(gate), x.dtype)
    return linear(hlo.reshape(y, *y.sizes[:2], -1), w.out), (*after, memory)


def _gated_delta_rule_body(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, table: Tensor, memory: Tensor, *, together: bool
) -> tuple[Tensor, Tensor]:
    """Let each token fade the memory, correct what it has for the token's key, and read it for the token's query.

    q, k f32[b, n, key_heads, d], which are scaled to length 1, and queries by 1 / sqrt(d); v f32[b, n, value_heads, e];
    decay f32[b, n, value_heads], the logarithm of what is left of the memory; beta alike, how much is corrected;
    memory f32[places, value_heads, d, e]; table and `together` as in `scan_sequences`.
    -> f32[b, n, value_heads, e], and the memory after the step
    """
    q, k = (x * hlo.rsqrt(hlo.sum(x * x, -1, keep=True) + EPS) for x in (q, k))
    y, [after] = scan_sequences(_cell, [v, q * q.sizes[-1] ** -0.5, k, decay, beta], [memory], table, together)
    return y, after


gated_delta_rule = hlo.composite("gated_delta_rule", _gated_delta_rule_body)


def _cell(inputs: Sequence[Tensor], states: Sequence[Tensor]) -> tuple[Tensor, list[Tensor]]:
    """Do that for one token of each row. v [b, heads, e]; q, k [b, key_heads, d]; memory [b, heads, d, e]"""
    [v, q, k, decay, beta], [memory] = inputs, states
    b, heads, e = v.sizes
    q, k = (of_heads(x, heads) for x in (q, k))
    faded = memory * hlo.reshape(hlo.exp(decay), b, heads, 1, 1)
    wrong = v - hlo.sum(faded * k, 2)
    new = faded + k * hlo.reshape(wrong * hlo.reshape(beta, b, heads, 1), b, heads, 1, e)
    return hlo.sum(new * q, 2), [new]
