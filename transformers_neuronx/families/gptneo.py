"""GPT-Neo: GPT-2's graph, with windows in some layers, and scores that are not divided."""

import sys
from dataclasses import dataclass
from typing import ClassVar

from transformers_neuronx.config import hf
from transformers_neuronx.engine.family import Family
from transformers_neuronx.gpt2 import graph, weights
from transformers_neuronx.gpt2.config import GPT2Config
from transformers_neuronx.models.sampling import ForSampling
from transformers_neuronx.weights import Weight, as_is

PREFIX, ignored = weights.PREFIX, weights.ignored


@dataclass(frozen=True)
class GPTNeoConfig(GPT2Config):
    n_positions: int = hf("max_position_embeddings")
    hidden_size: int = hf("hidden_size")
    n_layer: int = hf("num_layers")
    n_head: int = hf("num_heads")
    inner_size: int = hf("intermediate_size", lambda attributes: 4 * attributes["hidden_size"])
    scaled: bool = hf("scale_attn_weights", False, among=[False])
    kinds: list[str] = hf("attention_layers", among=("global", "local"))
    window: int = hf("window_size")

    # attention_layers follows from attention_types.
    WITHOUT_EFFECT: ClassVar = frozenset({"attention_types", "embed_dropout", "resid_dropout"})

    @property
    def layer_kinds(self) -> list[str]:
        return self.kinds

    def window_of(self, kind: str) -> int | None:
        return self.window if kind == "local" else None

    def scale(self, kind: str) -> float:
        return 1.0


def table(config: GPTNeoConfig) -> list[Weight]:
    """GPT-2's, with `Linear` layers for each of queries, keys and values, which have no biases."""
    projections = [(f"attn.attention.{name}_proj", as_is) for name in ("q", "k", "v", "out")]
    return weights.table(config, projections, as_is, qkv_bias=False)


class GPTNeoForSampling(ForSampling):
    """Transformers' `GPTNeoForCausalLM`, with the options of `Model` and the calls of `ForSampling`."""

    family = Family(GPTNeoConfig.from_hf, sys.modules[__name__], graph, folder="gptneo")
