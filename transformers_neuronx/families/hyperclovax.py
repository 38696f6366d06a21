"""HyperCLOVA X SEED: factors as Granite has them, and norms after both blocks, too."""

from dataclasses import dataclass

from transformers_neuronx.config import hf
from transformers_neuronx.engine.family import Family
from transformers_neuronx.layers import ACTIVATIONS
from transformers_neuronx.llama import graph, weights
from transformers_neuronx.llama.like import LlamaLike
from transformers_neuronx.models.sampling import ForSampling


@dataclass(frozen=True)
class HyperCLOVAXConfig(LlamaLike):
    activation: str = hf("hidden_act", among=ACTIVATIONS)
    tied: bool = hf("tie_word_embeddings")
    attention_bias: bool = hf("attention_bias")
    mlp_bias: bool = hf("mlp_bias")
    embedding_scale: float = hf("embedding_multiplier")
    residual_scale: float = hf("residual_multiplier")
    attention_scale: float = hf("attention_multiplier")
    logit_scale: float = hf("logits_scaling")
    post_norm: bool = hf("use_post_norm")

    @property
    def norms(self) -> dict[str, str]:  # type: ignore[override]
        after = {"attn_out_norm": "post_norm1", "mlp_out_norm": "post_norm2"} if self.post_norm else {}
        return {"attn_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"} | after


class HyperCLOVAXForSampling(ForSampling):
    """Transformers' `HyperCLOVAXForCausalLM`, with the options of `Model` and the calls of `ForSampling`."""

    family = Family(HyperCLOVAXConfig.from_hf, weights, graph, prepare=graph.prepare, folder="hyperclovax")
