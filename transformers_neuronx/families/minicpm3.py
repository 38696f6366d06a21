"""MiniCPM3: LLaMA with latent attention; factors of the embedding, of what blocks add and of logits."""

import math
from dataclasses import dataclass
from typing import ClassVar

from transformers_neuronx.config import hf
from transformers_neuronx.engine.family import Family
from transformers_neuronx.layers import ACTIVATIONS
from transformers_neuronx.llama import graph, weights
from transformers_neuronx.llama.latent import LatentLike
from transformers_neuronx.models.sampling import ForSampling


@dataclass(frozen=True)
class MiniCPM3Config(LatentLike):
    activation: str = hf("hidden_act", among=ACTIVATIONS)
    tied: bool = hf("tie_word_embeddings")
    mlp_bias: bool = hf("mlp_bias")
    embedding_scale: float = hf("scale_emb")
    depth_scale: float = hf("scale_depth")
    base_size: int = hf("dim_model_base")

    WITHOUT_EFFECT: ClassVar = frozenset({"pretraining_tp"})

    @property
    def residual_scale(self) -> float:  # type: ignore[override]
        return self.depth_scale / math.sqrt(self.n_layer)

    @property
    def logit_scale(self) -> float:  # type: ignore[override]
        return self.base_size / self.hidden_size


class MiniCPM3ForSampling(ForSampling):
    """Transformers' `MiniCPM3ForCausalLM`, with the options of `Model` and the calls of `ForSampling`."""

    family = Family(MiniCPM3Config.from_hf, weights, graph, prepare=graph.prepare, folder="minicpm3")
