"""What hybrids with gated delta nets can have different, and the rows of a delta net."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from transformers_neuronx.config import hf
from transformers_neuronx.layers import Cache, LinearAttention, State, Step, delta_net
from transformers_neuronx.llama.hybrid import HybridLike
from transformers_neuronx.pyhlo import Tensor
from transformers_neuronx.weights import Weight, linear, norm, parts_of, section, taps


@dataclass(frozen=True)
class DeltaNetLike(HybridLike):
    """A `HybridLike` with a gated delta net in layers of "linear_attention".

    The values here are those of Qwen 3.5. A family overrides what differs, as with `LlamaLike`.
    """

    delta_key_heads: int = hf("linear_num_key_heads")
    delta_value_heads: int = hf("linear_num_value_heads")
    delta_key_dim: int = hf("linear_key_head_dim")
    delta_value_dim: int = hf("linear_value_head_dim")
    delta_size: int = hf("linear_conv_kernel_dim")

    norm_plus_one = True
    qk_norm = True
    attention_gate = True

    # Queries, keys, values, gates, corrections and decays. Parts of one layer follow each other, or in each head do.
    delta_projections: ClassVar[tuple[str, ...]] = tuple(
        f"linear_attn.in_proj_{part}" for part in ("qkv", "qkv", "qkv", "z", "b", "a")
    )
    delta_by_head: ClassVar[bool] = False

    @property
    def unread(self) -> list[str]:
        return [r"mtp\..*"]

    @property
    def delta(self) -> LinearAttention:
        sizes = self.delta_key_dim, self.delta_value_dim, self.delta_size
        return LinearAttention(self.delta_key_heads, self.delta_value_heads, *sizes)

    @property
    def states(self) -> Sequence[State]:
        return self.delta.states

    def mixed(self, x: Tensor, w: Any, cache: Cache, step: Step) -> tuple[Tensor, Cache]:
        return delta_net(x, w.delta, cache, step, self.delta, self.eps)

    def rows(self, block: str) -> list[Weight]:
        sizes, h, prefix = self.delta, self.hidden_size, block + "linear_attn."
        names = "q", "k", "v", "gate", "beta", "decay"
        outputs = [sizes.part(name)[0] for name in names]
        found = parts_of(block, self.delta_projections, outputs, sizes.key_heads if self.delta_by_head else 1)
        rows = []
        for part, (source, layout) in zip(names, found, strict=True):
            size, split = sizes.part(part)
            rows += linear(f"delta.{part}", source, size, h, split, layout=layout, bias=False)
        for index, part in enumerate("qkv"):
            size, split = sizes.part(part)
            how = taps(section(index, tuple(outputs[:3]))), replace(split, axis=1), "f32"
            rows.append(Weight(f"delta.conv_{part}", f"{prefix}conv1d.weight", (sizes.size, size), *how))
        heads, split = sizes.part("decay")
        for name, source in (("rate", "A_log"), ("decay_bias", "dt_bias")):
            rows.append(Weight(f"delta.{name}", prefix + source, (heads,), split=split, dtype="f32"))
        return [
            *rows,
            *norm("delta.norm", prefix + "norm", sizes.value_dim, bias=False),
            *linear("delta.out", prefix + "out_proj", h, sizes.part("v")[0], sizes.heads.split(1), bias=False),
        ]
