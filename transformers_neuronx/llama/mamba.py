"""What hybrids with Mamba-2 layers can have different, and the rows of such a layer."""

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch

from transformers_neuronx.config import hf
from transformers_neuronx.layers import Cache, LinearAttention, State, Step, mamba
from transformers_neuronx.llama.hybrid import HybridLike
from transformers_neuronx.pyhlo import Tensor
from transformers_neuronx.weights import Weight, linear, norm, parts_of, section, taps


@dataclass(frozen=True)
class MambaLike(HybridLike):
    """A `HybridLike` with Mamba-2 in layers of "linear_attention". The values here are those of Bamba."""

    mamba_heads: int = hf("mamba_n_heads")
    mamba_groups: int = hf("mamba_n_groups")
    mamba_head_dim: int = hf("mamba_d_head")
    mamba_state: int = hf("mamba_d_state")
    mamba_size: int = hf("mamba_d_conv")
    mamba_conv_bias: bool = hf("mamba_conv_bias")
    mamba_bias: bool = hf("mamba_proj_bias")
    # No others: Transformers limits time steps in prompts, but not where tokens come one by one.
    time_step_limit: list[float] = hf("time_step_limit", among=(0.0, math.inf))

    mamba_name: ClassVar[str] = "mamba"
    mamba_norm = True  # of groups

    # Configurations whose heads do not have the expanded size are refused; chunks have the same sums as single tokens.
    WITHOUT_EFFECT: ClassVar = frozenset({"mamba_expand", "mamba_chunk_size"})

    @property
    def mamba(self) -> LinearAttention:
        sizes = self.mamba_state, self.mamba_head_dim, self.mamba_size
        return LinearAttention(self.mamba_groups, self.mamba_heads, *sizes)

    @property
    def states(self) -> Sequence[State]:
        return self.mamba.states

    def mixed(self, x: Tensor, w: Any, cache: Cache, step: Step) -> tuple[Tensor, Cache]:
        return mamba(x, w.mamba, cache, step, self.mamba, self.eps, self.activation)

    def rows(self, block: str) -> list[Weight]:
        sizes, h, name, biased = self.mamba, self.hidden_size, self.mamba_name, self.mamba_bias
        parts = "gate", "v", "k", "q", "delta"
        outputs = [sizes.part(part)[0] for part in parts]
        rows = []
        for part, (source, layout) in zip(parts, parts_of(block, [f"{name}.in_proj"] * 5, outputs), strict=True):
            size, split = sizes.part(part)
            rows += linear(f"mamba.{part}", source, size, h, split, layout=layout, bias=biased)
        for index, part in enumerate("vkq"):
            size, split = sizes.part(part)
            how, source = section(index, tuple(outputs[1:4])), f"{block}{name}.conv1d"
            along, shape = replace(split, axis=1), (sizes.size, size)
            rows.append(Weight(f"mamba.conv_{part}", f"{source}.weight", shape, taps(how), along, "f32"))
            if self.mamba_conv_bias:
                rows.append(Weight(f"mamba.bias_{part}", f"{source}.bias", (size,), how, split, "f32"))
        heads, split = sizes.part("delta")
        for part, source in (("rate", "A_log"), ("delta_bias", "dt_bias"), ("skip", "D")):
            rows.append(Weight(f"mamba.{part}", f"{block}{name}.{source}", (heads,), split=split, dtype="f32"))
        features, of = sizes.part("v")
        groups, shape = functools.partial(_groups, heads, self.mamba_groups), (heads, self.mamba_groups)
        return [
            *rows,
            Weight("mamba.groups", f"{block}{name}.D", shape, split=split, dtype="f32", value=groups),
            *(norm("mamba.norm", f"{block}{name}.norm", features, bias=False, split=of) if self.mamba_norm else []),
            *linear("mamba.out", f"{block}{name}.out_proj", h, features, sizes.heads.split(1), bias=biased),
        ]


def _groups(heads: int, groups: int) -> torch.Tensor:
    """Return ones where a head is in a group. f32[heads, groups]"""
    return torch.eye(groups).repeat_interleave(heads // groups, 0)
