"""StableLM: layer norms, also of each head, and attention before the feed-forward or parallel to it."""

from dataclasses import dataclass

from transformers_neuronx.config import hf
from transformers_neuronx.engine.family import Family
from transformers_neuronx.layers import ACTIVATIONS
from transformers_neuronx.llama import graph, weights
from transformers_neuronx.llama.like import LlamaLike
from transformers_neuronx.models.sampling import ForSampling


@dataclass(frozen=True)
class StableLmConfig(LlamaLike):
    activation: str = hf("hidden_act", among=ACTIVATIONS)
    tied: bool = hf("tie_word_embeddings")
    eps: float = hf("layer_norm_eps")
    qkv_bias: bool = hf("use_qkv_bias")
    parallel: bool = hf("use_parallel_residual")
    qk_norm: bool = hf("qk_layernorm")

    layer_norm = True
    norm_bias = True
    qk_norms = ("self_attn.q_layernorm.norms.#", "self_attn.k_layernorm.norms.#")  # a tensor for each head
    qk_norm_of = "each head"

    @property
    def norms(self) -> dict[str, str]:  # type: ignore[override]
        after = {} if self.parallel else {"mlp_norm": "post_attention_layernorm"}
        return {"attn_norm": "input_layernorm"} | after


class StableLmForSampling(ForSampling):
    """Transformers' `StableLmForCausalLM`, with the options of `Model` and the calls of `ForSampling`."""

    family = Family(StableLmConfig.from_hf, weights, graph, prepare=graph.prepare, folder="stablelm")
