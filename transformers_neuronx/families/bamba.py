"""Bamba: most layers have Mamba-2 in place of attention, which rotates half of each head."""

from dataclasses import dataclass
from typing import ClassVar

from transformers_neuronx.config import hf
from transformers_neuronx.engine.family import Family
from transformers_neuronx.layers import ACTIVATIONS
from transformers_neuronx.llama import graph, weights
from transformers_neuronx.llama.hybrid import HYBRID_KINDS
from transformers_neuronx.llama.mamba import MambaLike
from transformers_neuronx.models.sampling import ForSampling


@dataclass(frozen=True)
class BambaConfig(MambaLike):
    activation: str = hf("hidden_act", among=ACTIVATIONS)
    tied: bool = hf("tie_word_embeddings")
    attention_bias: bool = hf("attention_bias")
    mlp_bias: bool = hf("mlp_bias")
    attending: list[int] = hf("attn_layer_indices", lambda attributes: [])

    norms: ClassVar = {"attn_norm": "input_layernorm", "mlp_norm": "pre_ff_layernorm"}
    final_norm = "final_layernorm"
    feed_forward = tuple(f"feed_forward.{part}_proj" for part in ("gate", "up", "down"))

    WITHOUT_EFFECT: ClassVar = frozenset({"num_logits_to_keep", "z_loss_coefficient"})

    @property
    def layer_kinds(self) -> list[str]:
        return [HYBRID_KINDS[n in self.attending] for n in range(self.n_layer)]


class BambaForSampling(ForSampling):
    """Transformers' `BambaForCausalLM`, with the options of `Model` and the calls of `ForSampling`."""

    family = Family(BambaConfig.from_hf, weights, graph, prepare=graph.prepare, folder="bamba")
