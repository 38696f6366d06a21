"""Linear attention: layers with a memory of each head, a matrix that tokens change and read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from transformers_neuronx import hlo
from transformers_neuronx.layers.convolution import short_convolution
from transformers_neuronx.layers.linear import linears
from transformers_neuronx.layers.state import State
from transformers_neuronx.layers.step import Cache, Step
from transformers_neuronx.pyhlo import Tensor
from transformers_neuronx.weights.splits import Heads, Split


@dataclass(frozen=True)
class LinearAttention:
    """Sizes of such a layer: adjacent `value_heads` share one of `key_heads`; convolutions span `size` tokens."""

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    size: int

    @property
    def heads(self) -> Heads:
        """Values are to keys what queries are in attention: several heads share one."""
        return Heads(self.value_heads, self.key_heads, self.value_dim)

    def part(self, name: str) -> tuple[int, Split]:
        """How many features a projection has, and how devices divide them: "q", "k", "v", "gate", or one of a head."""
        if name in ("q", "k"):
            return self.key_heads * self.key_dim, self.heads.split(0, keys=True, unit=self.key_dim)
        if name in ("v", "gate"):
            return self.value_heads * self.value_dim, self.heads.split(0)
        return self.value_heads, self.heads.split(0, unit=1)

    def state_of(self, part: str) -> State:
        """The inputs of a convolution that a sequence keeps. The part is "q", "k" or "v"."""
        features, split = self.part(part)
        return State(f"conv_{part}", (self.size - 1, features), split=replace(split, axis=1))

    @property
    def states(self) -> list[State]:
        memory = State("memory", (self.value_heads, self.key_dim, self.value_dim), split=self.heads.split(0, unit=1))
        return [*(self.state_of(part) for part in "qkv"), memory]


def convolved(
    x: Tensor,
    w: Any,
    cache: Cache,
    step: Step,
    sizes: LinearAttention,
    activation: str = "silu",
    scales: Mapping[str, float] = MappingProxyType({}),
) -> tuple[list[Tensor], list[Tensor]]:
    """Return queries and keys, f32[b, n, key_heads, d], values, f32[b, n, value_heads, e], and what convolutions keep.

    x [b, n, h]; `w` has linear layers `q`, `k` and `v`, and `conv_q`, `conv_k` and `conv_v`, f32[size, ·], with
    optional biases `bias_q`, `bias_k` and `bias_v`, f32[·]. `scales` are factors of projections, by name.
    """
    (b, n, _), made, after = x.sizes, [], []
    for part, y, state in zip("qkv", linears(x, w.q, w.k, w.v), cache, strict=False):
        y = y * scales[part] if part in scales else y
        bias = getattr(w, f"bias_{part}").tensor if hasattr(w, f"bias_{part}") else None
        how = dict(together=step.segments is None, activation=activation)
        y, kept = short_convolution(y, getattr(w, f"conv_{part}").tensor, step.sequences, state, bias, **how)
        made.append(hlo.reshape(y, b, n, -1, sizes.value_dim if part == "v" else sizes.key_dim))
        after.append(kept)
    return made, after


def of_heads(x: Tensor, heads: int) -> Tensor:
    """Repeat queries or keys for the heads that share them. [b, key_heads, d] -> [b, heads, d, 1]"""
    b, count, d = x.sizes
    wide = hlo.broadcast_to(hlo.reshape(x, b, count, 1, d), [b, count, heads // count, d])
    return hlo.reshape(wide, b, heads, d, 1)


def softplus(x: Tensor) -> Tensor:
    """log(1 + exp(x)), for any x."""
    return hlo.maximum(x, 0.0) + hlo.log1p(hlo.exp(hlo.negate(hlo.abs(x))))
