"""MPT: layer norms without biases, and scores that fall with distance in place of rotations."""

import sys
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

from transformers_neuronx.config import hf
from transformers_neuronx.engine.family import Family
from transformers_neuronx.errors import ConfigError
from transformers_neuronx.layers import alibi_slopes
from transformers_neuronx.llama import graph, weights
from transformers_neuronx.llama.like import LlamaLike
from transformers_neuronx.models.sampling import ForSampling
from transformers_neuronx.weights import Weight, renamed

PREFIX, ignored = "transformer.", weights.ignored
NAMES = {weights.BLOCK: "transformer.blocks.{}.", "model.embed_tokens": "transformer.wte", "model.": PREFIX}
# Of attn_config. MPT's own code would read others, which Transformers does not: it has only these.
SUPPORTED = dict(alibi=True, alibi_bias_max=8, attn_type="multihead_attention", prefix_lm=False, qk_ln=False)


@dataclass(frozen=True)
class MptConfig(LlamaLike):
    max_positions: int = hf("max_seq_len")
    hidden_size: int = hf("d_model")
    n_layer: int = hf("n_layers")
    n_head: int = hf("n_heads")
    n_kv_head: int = hf("n_heads")
    head_dim: int = hf("head_dim", lambda given: given["d_model"] // given["n_heads"])
    inner_size: int = hf("intermediate_size", lambda given: 4 * given["d_model"])
    eps: float = hf("layer_norm_epsilon")
    rope: dict[str, Any] = hf("rope_parameters", {})
    tied: bool = hf("tie_word_embeddings")
    attn: dict[str, Any] = hf("attn_config")

    activation = "gelu"
    layer_norm = True
    norms: ClassVar = {"attn_norm": "norm_1", "mlp_norm": "norm_2"}
    final_norm = "norm_f"
    projections = (*["attn.Wqkv"] * 3, "attn.out_proj")
    feed_forward = ("ffn.up_proj", "ffn.down_proj")

    FIXED: ClassVar = {"expansion_ratio": 4, "logit_scale": None, "no_bias": True}
    WITHOUT_EFFECT: ClassVar = frozenset(
        {"emb_pdrop", "embedding_fraction", "init_device", "learned_pos_emb", "norm_type"}
    )

    def __post_init__(self) -> None:
        for name, only in SUPPORTED.items():
            if self.attn.get(name, only) != only:
                found = f"{name}={self.attn[name]!r}"
                raise ConfigError(f"attn_config of the mpt configuration has {found}; supported: {only!r}")

    @property
    def clip(self) -> float | None:  # type: ignore[override]
        return self.attn.get("clip_qkv") or None

    @property
    def attention_scale(self) -> float | None:  # type: ignore[override]
        return self.attn.get("softmax_scale")

    def rotary_of(self, kind: str) -> None:
        return None


def table(config: MptConfig) -> list[Weight]:
    """LLaMA's with other names, and slopes."""
    heads = config.attention_heads
    slopes = partial(alibi_slopes, heads.heads)
    split = heads.split(0, unit=1)
    alibi = Weight("attn.alibi", weights.BLOCK, (heads.heads,), split=split, dtype="f32", value=slopes)
    return renamed([*weights.table(config), alibi], NAMES)


class MptForSampling(ForSampling):
    """Transformers' `MptForCausalLM`, with the options of `Model` and the calls of `ForSampling`."""

    family = Family(MptConfig.from_hf, sys.modules[__name__], graph, prepare=graph.prepare, folder="mpt")
