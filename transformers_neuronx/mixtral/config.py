"""The fields of a Mixtral configuration that its graph and weights need."""

from dataclasses import dataclass
from typing import ClassVar

from transformers_neuronx.config import hf
from transformers_neuronx.layers import ACTIVATIONS
from transformers_neuronx.llama.mixture import MixtureLike


@dataclass(frozen=True)
class MixtralConfig(MixtureLike):
    activation: str = hf("hidden_act", among=ACTIVATIONS)
    tied: bool = hf("tie_word_embeddings")
    window: int | None = hf("sliding_window", None)
    n_expert: int = hf("num_local_experts")
    active_experts: int = hf("num_experts_per_tok")

    router_name = "block_sparse_moe.gate|mlp.gate"
    of_expert = tuple(f"block_sparse_moe.experts.#.w{part}" for part in (1, 3, 2))

    # For training.
    WITHOUT_EFFECT: ClassVar = frozenset({"output_router_logits", "router_aux_loss_coef", "router_jitter_noise"})
