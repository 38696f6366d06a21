"""The fields of a Mixtral configuration that its graph and weights need."""

from dataclasses import dataclass
from typing import ClassVar

from transformers_neuronx.config import hf
from transformers_neuronx.layers import ACTIVATIONS, RotaryConfig, Router


@dataclass(frozen=True)
class MixtralConfig(RotaryConfig):
    activation: str = hf("hidden_act", among=ACTIVATIONS)
    tied: bool = hf("tie_word_embeddings")
    window: int | None = hf("sliding_window", None)
    n_expert: int = hf("num_local_experts")
    active_experts: int = hf("num_experts_per_tok")

    # For training.
    WITHOUT_EFFECT: ClassVar = frozenset({"output_router_logits", "router_aux_loss_coef", "router_jitter_noise"})

    @property
    def router(self) -> Router:
        return Router(self.active_experts)

    def window_of(self, kind: str) -> int | None:
        return self.window
