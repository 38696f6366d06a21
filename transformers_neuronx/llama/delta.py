"""What hybrids with gated delta nets can have different, and the rows of a delta net."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from transformers_neuronx.config import hf
from transformers_neuronx.layers import Cache, DeltaNet, State, Step, delta_net
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
    def delta(self) -> DeltaNet:
        sizes = self.delta_key_dim, self.delta_value_dim, self.delta_size
        return DeltaNet(self.delta_key_heads, self.delta_value_heads, *sizes)

    @property
    def states(self) -> Sequence[State]:
        return self.delta.states

    def mixed(self, x: Tensor, w: Any, cache: Cache, step: Step) -> tuple[Tensor, Cache]:
        return delta_net(x, w.delta, cache, step, self.delta, self.eps)

    def rows(self, block: str) -> list[Weight]:
        sizes, h, prefix = self.delta, self.hidden_size, block + "linear_attn."
        heads = sizes.heads
        keys, values = sizes.key_heads * sizes.key_dim, sizes.value_heads * sizes.value_dim
        of_keys, of_values = heads.split(0, keys=True, unit=sizes.key_dim), heads.split(0)
        splits = of_keys, of_keys, of_values, of_values, heads.split(0, unit=1), heads.split(0, unit=1)
        outputs = keys, keys, values, values, sizes.value_heads, sizes.value_heads
        rows = []
        names = "q", "k", "v", "gate", "beta", "decay"
        found = parts_of(block, self.delta_projections, outputs, sizes.key_heads if self.delta_by_head else 1)
        for part, split, size, (source, layout) in zip(names, splits, outputs, found, strict=True):
            rows += linear(f"delta.{part}", source, size, h, split, layout=layout, bias=False)
        for index, part in enumerate("qkv"):
            how: dict[str, Any] = dict(split=replace(splits[index], axis=1), dtype="f32")
            layout = taps(section(index, outputs[:3]))
            shape = sizes.size, outputs[index]
            rows.append(Weight(f"delta.conv_{part}", prefix + "conv1d.weight", shape, layout, **how))
        for name, source in (("rate", "A_log"), ("decay_bias", "dt_bias")):
            rows.append(Weight(f"delta.{name}", prefix + source, (sizes.value_heads,), split=splits[-1], dtype="f32"))
        return [
            *rows,
            *norm("delta.norm", prefix + "norm", sizes.value_dim, bias=False),
            *linear("delta.out", prefix + "out_proj", h, values, heads.split(1), bias=False),
        ]
