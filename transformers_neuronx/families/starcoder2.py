"""StarCoder2: layer norms, a feed-forward without a gate, biases, a window."""

from dataclasses import dataclass
from typing import ClassVar

from transformers_neuronx.config import hf
from transformers_neuronx.engine.family import Family
from transformers_neuronx.layers import ACTIVATIONS
from transformers_neuronx.llama import graph, weights
from transformers_neuronx.llama.like import LlamaLike
from transformers_neuronx.models.sampling import ForSampling


@dataclass(frozen=True)
class Starcoder2Config(LlamaLike):
    activation: str = hf("hidden_act", among=ACTIVATIONS)
    tied: bool = hf("tie_word_embeddings")
    eps: float = hf("norm_epsilon")
    attention_bias: bool = hf("use_bias")
    mlp_bias: bool = hf("use_bias")
    window: int | None = hf("sliding_window", None)

    layer_norm = True
    norm_bias = True
    feed_forward = ("mlp.c_fc", "mlp.c_proj")

    # The 15B has rms_norm_eps, though its norms subtract the mean.
    WITHOUT_EFFECT: ClassVar = frozenset({"residual_dropout", "embedding_dropout", "rms_norm_eps"})


class Starcoder2ForSampling(ForSampling):
    """Transformers' `Starcoder2ForCausalLM`, with the options of `Model` and the calls of `ForSampling`."""

    family = Family(Starcoder2Config.from_hf, weights, graph, prepare=graph.prepare, folder="starcoder2")
