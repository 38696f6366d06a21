"""HunYuan with a mixture of experts, and a block for all tokens: norms of queries and keys after the rotation."""

from dataclasses import dataclass
from typing import ClassVar

from transformers_neuronx.config import hf
from transformers_neuronx.engine.family import Family
from transformers_neuronx.errors import ConfigError
from transformers_neuronx.layers import ACTIVATIONS, Rotary
from transformers_neuronx.llama import graph, weights
from transformers_neuronx.llama.mixture import MixtureLike
from transformers_neuronx.models.sampling import ForSampling


@dataclass(frozen=True)
class HunYuanMoeConfig(MixtureLike):
    activation: str = hf("hidden_act", among=ACTIVATIONS)
    tied: bool = hf("tie_word_embeddings")
    attention_bias: bool = hf("attention_bias")
    n_expert: int = hf("num_experts")
    chosen: int | list[int] = hf("moe_topk")
    shared_size: int = hf("intermediate_size")

    qk_norm = True
    qk_norms = ("self_attn.query_layernorm", "self_attn.key_layernorm")
    qk_norm_last = True
    router_name = "mlp.gate.wg"
    shared = tuple(f"mlp.shared_mlp.{part}_proj" for part in ("gate", "up", "down"))

    WITHOUT_EFFECT: ClassVar = frozenset({"pretraining_tp", "eod_token_id", "output_router_logits"})

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.chosen, list) and len(set(self.chosen)) > 1:
            raise ConfigError(f"hunyuan_v1_moe needs as many experts for a token in every layer, got {self.chosen}")

    @property
    def active_experts(self) -> int:  # type: ignore[override]
        return self.chosen[0] if isinstance(self.chosen, list) else self.chosen

    @property
    def rotary(self) -> Rotary:
        """With `alpha`, the base is a larger one, and nothing else of the type "dynamic" is read."""
        alpha, dim = self.rope.get("alpha"), self.head_dim
        if not alpha or self.rope.get("rope_type") != "dynamic":
            return self.rotary_with(self.rope)
        return self.rotary_with(dict(rope_theta=self.rope["rope_theta"] * alpha ** (dim / (dim - 2))))


class HunYuanMoeForSampling(ForSampling):
    """Transformers' `HunYuanMoEV1ForCausalLM`, with the options of `Model` and the calls of `ForSampling`."""

    family = Family(HunYuanMoeConfig.from_hf, weights, graph, prepare=graph.prepare, folder="hunyuanv1moe")
