"""A.X-K1: DeepSeek-V3 with one more norm, of what a mixture of experts returns."""

import sys
from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar

import torch

from transformers_neuronx.config import hf
from transformers_neuronx.engine.family import Family
from transformers_neuronx.layers import ACTIVATIONS
from transformers_neuronx.llama import graph, weights
from transformers_neuronx.llama.latent import LatentLike
from transformers_neuronx.llama.mixture import DENSE
from transformers_neuronx.llama.routed import RoutedLike
from transformers_neuronx.models.sampling import ForSampling
from transformers_neuronx.weights import Weight, norm, of_kinds

NORMS = ("post_mlp_layernorm", "mlp.post_mlp_layernorm")  # in checkpoints, and as Transformers has it in memory


@dataclass(frozen=True)
class AXK1Config(LatentLike, RoutedLike):
    activation: str = hf("hidden_act", among=ACTIVATIONS)
    tied: bool = hf("tie_word_embeddings")
    in_pairs: bool = hf("rope_interleave", True)
    blocks: list[str] = hf("mlp_layer_types", among=("dense", "sparse"))

    # Transformers reads mlp_layer_types alone, which follow from moe_layer_freq and first_k_dense_replace.
    WITHOUT_EFFECT: ClassVar = frozenset({"moe_layer_freq", "pretraining_tp"})

    @property
    def unread(self) -> list[str]:
        """Checkpoints have the norm in layers without experts, too, where it is not applied."""
        return [*super().unread, *(rf"model\.layers\.{n}\.(mlp\.)?{NORMS[0]}\.weight" for n in self.dense_layers)]


PREFIX, ignored = weights.PREFIX, weights.ignored


def table(config: AXK1Config) -> list[Weight]:
    """LLaMA's with the norm. Published checkpoints have no correction, which is zero then."""
    name = ".weight|".join(weights.BLOCK + name for name in NORMS)
    kinds = {kind for kind in config.layer_kinds if not kind.endswith(DENSE)}
    zeros = partial(torch.zeros, config.n_expert)
    rows = (replace(row, absent=zeros) if row.name == "moe.router.correction" else row for row in weights.table(config))
    return [*rows, *of_kinds(kinds, norm("mlp_out_norm", name, config.hidden_size, bias=False))]


class AXK1ForSampling(ForSampling):
    """Transformers' `AXK1ForCausalLM`, with the options of `Model` and the calls of `ForSampling`."""

    family = Family(AXK1Config.from_hf, sys.modules[__name__], graph, prepare=graph.prepare, folder="axk1")
