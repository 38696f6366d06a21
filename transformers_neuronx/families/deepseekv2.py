"""DeepSeek-V2: latent attention, and experts by their probabilities, of all or of the best groups."""

from dataclasses import dataclass, replace
from typing import ClassVar

from transformers_neuronx.config import hf
from transformers_neuronx.engine.family import Family
from transformers_neuronx.errors import ConfigError
from transformers_neuronx.layers import ACTIVATIONS, Router
from transformers_neuronx.llama import graph, weights
from transformers_neuronx.llama.latent import LatentLike
from transformers_neuronx.llama.routed import RoutedLike
from transformers_neuronx.models.sampling import ForSampling

BY_GROUP = "group_limited_greedy"


@dataclass(frozen=True)
class DeepseekV2Config(LatentLike, RoutedLike):
    activation: str = hf("hidden_act", among=ACTIVATIONS)
    tied: bool = hf("tie_word_embeddings")
    mlp_bias: bool = hf("mlp_bias")
    normalized: bool = hf("norm_topk_prob", False, among=[False])
    method: str = hf("topk_method", "greedy", among=["greedy", BY_GROUP])

    in_pairs = True
    sigmoid = False
    correction = ""

    WITHOUT_EFFECT: ClassVar = frozenset({"pretraining_tp"})

    def __post_init__(self) -> None:
        super().__post_init__()
        most = self.n_expert // self.groups * self.active_groups
        if self.method == BY_GROUP and self.active_experts > most:
            raise ConfigError(
                f"the deepseek_v2 configuration needs num_experts_per_tok of at most {most}, the experts of its best "
                f"groups, got {self.active_experts}"
            )

    @property
    def router(self) -> Router:
        """A group's rank is its highest score."""
        router = replace(super().router, ranking=1)
        return router if self.method == BY_GROUP else replace(router, groups=1)


class DeepseekV2ForSampling(ForSampling):
    """Transformers' `DeepseekV2ForCausalLM`, with the options of `Model` and the calls of `ForSampling`."""

    family = Family(DeepseekV2Config.from_hf, weights, graph, prepare=graph.prepare, folder="deepseekv2")
