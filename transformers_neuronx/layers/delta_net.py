"""Gated delta nets: linear attention over one matrix of a sequence for each head, which tokens correct."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from transformers_neuronx import hlo
from transformers_neuronx.layers.activation import silu
from transformers_neuronx.layers.convolution import short_convolution
from transformers_neuronx.layers.linear import linear, linears
from transformers_neuronx.layers.norm import rms_norm
from transformers_neuronx.layers.state import State, scan_sequences
from transformers_neuronx.layers.step import Cache, Step
from transformers_neuronx.pyhlo import Tensor
from transformers_neuronx.weights.splits import Heads

EPS = 1e-6  # of the norms of queries and keys


@dataclass(frozen=True)
class DeltaNet:
    """Sizes of a gated delta net: adjacent `value_heads` share one of `key_heads`; convolutions span `size` tokens."""

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    size: int

    @property
    def heads(self) -> Heads:
        """Values are to keys what queries are in attention: several heads share one."""
        return Heads(self.value_heads, self.key_heads, self.value_dim)

    def state_of(self, part: str) -> State:
        """The inputs of a convolution that a sequence keeps. The part is "q", "k" or "v"."""
        keys = part != "v"
        count, dim = (self.key_heads, self.key_dim) if keys else (self.value_heads, self.value_dim)
        return State(f"conv_{part}", (self.size - 1, count * dim), split=self.heads.split(1, keys=keys, unit=dim))

    @property
    def states(self) -> list[State]:
        memory = State("memory", (self.value_heads, self.key_dim, self.value_dim), split=self.heads.split(0, unit=1))
        return [*(self.state_of(part) for part in "qkv"), memory]


def delta_net(x: Tensor, w: Any, cache: Cache, step: Step, sizes: DeltaNet, eps: float) -> tuple[Tensor, Cache]:
    """Project, convolve, correct the memory and read it, norm, gate, project back. x [b, n, h] -> [b, n, h], and states

    Yang et al., arXiv:2412.06464. `w` has linear layers `q`, `k`, `v`, `gate`, `beta` and `decay`, of heads, and `out`;
    `conv_q`, `conv_k` and `conv_v`, f32[size, ·]; `rate` and `decay_bias`, f32[value_heads]; and the norm `norm` of a
    head. `cache` are the `states` of `sizes`.
    """
    b, n, _ = x.sizes
    table, how = step.sequences, dict(together=step.segments is None)
    inputs, after = [], []
    for part, y, state in zip("qkv", linears(x, w.q, w.k, w.v), cache, strict=False):
        y, kept = short_convolution(y, getattr(w, f"conv_{part}").tensor, table, state, activation="silu", **how)
        inputs.append(hlo.reshape(y, b, n, -1, sizes.value_dim if part == "v" else sizes.key_dim))
        after.append(kept)
    beta, decay = (hlo.convert(y, "f32") for y in linears(x, w.beta, w.decay))
    decay = hlo.negate(hlo.exp(w.rate.tensor)) * _softplus(decay + w.decay_bias.tensor)
    y, memory = gated_delta_rule(*inputs, decay, hlo.logistic(beta), table, cache[3], **how)
    gate = hlo.convert(hlo.reshape(linear(x, w.gate), *y.sizes), "f32")
    y = hlo.convert(rms_norm(y, w.norm, eps) * silu(gate), x.dtype)
    return linear(hlo.reshape(y, b, n, -1), w.out), (*after, memory)


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
    q, k = (_of_heads(x, heads) for x in (q, k))
    faded = memory * hlo.reshape(hlo.exp(decay), b, heads, 1, 1)
    wrong = v - hlo.sum(faded * k, 2)
    new = faded + k * hlo.reshape(wrong * hlo.reshape(beta, b, heads, 1), b, heads, 1, e)
    return hlo.sum(new * q, 2), [new]


def _of_heads(x: Tensor, heads: int) -> Tensor:
    """Repeat queries or keys for the heads that share them. [b, key_heads, d] -> [b, heads, d, 1]"""
    b, count, d = x.sizes
    wide = hlo.broadcast_to(hlo.reshape(x, b, count, 1, d), [b, count, heads // count, d])
    return hlo.reshape(wide, b, heads, d, 1)


def _softplus(x: Tensor) -> Tensor:
    """log(1 + exp(x)), for any x."""
    return hlo.maximum(x, 0.0) + hlo.log1p(hlo.exp(hlo.negate(hlo.abs(x))))
