"""LFM3: LFM2 with norms after both blocks, windows in some layers with their own rotation, and a gate for each head."""

import sys
from collections.abc import Mapping
from dataclasses import dataclass

from transformers_neuronx.config import hf
from transformers_neuronx.engine.family import Family
from transformers_neuronx.layers import LAYER_KINDS, Rotary
from transformers_neuronx.llama import graph, weights
from transformers_neuronx.llama.convolution import ConvolutionLike
from transformers_neuronx.models.sampling import ForSampling
from transformers_neuronx.weights import Heads, Weight, of_kinds

PREFIX, ignored = weights.PREFIX, weights.ignored


@dataclass(frozen=True)
class Lfm3Config(ConvolutionLike):
    tied: bool = hf("tie_word_embeddings")
    attention_bias: bool = hf("attention_bias")
    layer_kinds: list[str] = hf("layer_types", among=("conv", *LAYER_KINDS))
    window: int | None = hf("sliding_window", None)
    eps: float = hf("norm_eps")
    sandwich: bool = hf("use_sandwich_norm")
    gated: bool = hf("use_attention_gate")

    qk_norms = ("self_attn.q_norm", "self_attn.k_norm")
    projections = tuple(f"self_attn.{part}_proj" for part in "qkvo")

    @property
    def norms(self) -> Mapping[str, str]:  # type: ignore[override]
        after = {"attn_out_norm": "post_operator_norm", "mlp_out_norm": "post_ffn_norm"} if self.sandwich else {}
        return {"attn_norm": "operator_norm", "mlp_norm": "ffn_norm", **after}

    def heads_of(self, kind: str) -> Heads | None:
        return self.attention_heads if kind in LAYER_KINDS else None

    def rotary_of(self, kind: str) -> Rotary | None:
        """All features of a head are in pairs, of which a share may not turn."""
        return Rotary(self.head_dim, self.rope[kind], self.max_positions) if kind in LAYER_KINDS else None


def table(config: Lfm3Config) -> list[Weight]:
    """LLaMA's, and the gates of heads."""
    heads, name = config.attention_heads, f"{weights.BLOCK}self_attn."
    gate = Weight(
        "attn.gate.weight",
        f"{name}g_proj.weight|{name}gate_proj.weight",
        (heads.heads, config.hidden_size),
        split=heads.split(0, unit=1),
    )
    kinds = {kind for kind in config.layer_kinds if config.heads_of(kind)}
    return [*weights.table(config), *(of_kinds(kinds, [gate]) if config.gated else [])]


class Lfm3ForSampling(ForSampling):
    """Transformers' `Lfm3ForCausalLM`, with the options of `Model` and the calls of `ForSampling`."""

    family = Family(Lfm3Config.from_hf, sys.modules[__name__], graph, prepare=graph.prepare, folder="lfm3")
