"""What hybrids with gated short convolutions have in common, and the rows of one."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from transformers_neuronx.config import hf
from transformers_neuronx.layers import Cache, State, Step, gated_convolution
from transformers_neuronx.llama.hybrid import HybridLike
from transformers_neuronx.pyhlo import Tensor
from transformers_neuronx.weights import Heads, Weight, as_is, linear, parts_of, taps

CONVOLUTION_KINDS = ("conv", "full_attention")


@dataclass(frozen=True)
class ConvolutionLike(HybridLike):
    """A `HybridLike` with a gated short convolution in layers of "conv". The values here are those of LFM2."""

    conv_size: int = hf("conv_L_cache")
    conv_bias: bool = hf("conv_bias")

    activation = "silu"
    qk_norm = True
    qk_norms = ("self_attn.q_layernorm", "self_attn.k_layernorm")
    norms: ClassVar = {"attn_norm": "operator_norm", "mlp_norm": "ffn_norm"}
    final_norm = "embedding_norm"
    projections = tuple(f"self_attn.{part}_proj" for part in ("q", "k", "v", "out"))
    feed_forward = tuple(f"feed_forward.{part}" for part in ("w1", "w3", "w2"))

    @property
    def channels(self) -> Heads:
        """The features, of which devices get as many together as a head has, and groups of few bits stay whole."""
        count = self.hidden_size // self.head_dim
        return Heads(count, count, self.head_dim)

    @property
    def states(self) -> Sequence[State]:
        return [State("conv", (self.conv_size - 1, self.hidden_size), split=self.channels.split(1))]

    def mixed(self, x: Tensor, w: Any, cache: Cache, step: Step) -> tuple[Tensor, Cache]:
        return gated_convolution(x, w.conv, cache, step)

    def rows(self, block: str) -> list[Weight]:
        h, split, how = self.hidden_size, self.channels.split(0), dict[str, Any](bias=self.conv_bias)
        parts = parts_of(block, ["conv.in_proj"] * 3, [h] * 3)
        rows = [
            row
            for name, (source, layout) in zip(("before", "after", "inputs"), parts, strict=True)
            for row in linear(f"conv.{name}", source, h, h, split, layout=layout, **how)
        ]
        name, along = f"{block}conv.conv", self.channels.split(1)
        rows.append(Weight("conv.taps", f"{name}.weight", (self.conv_size, h), taps(as_is), along, "f32"))
        if self.conv_bias:
            rows.append(Weight("conv.bias", f"{name}.bias", (h,), split=split, dtype="f32"))
        return [*rows, *linear("conv.out", f"{block}conv.out_proj", h, h, along, **how)]
