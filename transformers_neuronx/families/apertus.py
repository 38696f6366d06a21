"""Apertus: a feed-forward without a gate, whose activation has two learned numbers in each layer."""

import sys
from dataclasses import dataclass
from typing import Any, ClassVar

from transformers_neuronx import hlo
from transformers_neuronx.config import hf
from transformers_neuronx.engine.family import Family
from transformers_neuronx.layers import Cache, Step, linear, softplus
from transformers_neuronx.llama import graph, weights
from transformers_neuronx.llama.graph import embed as embed, head as head, norm as norm, prepare as prepare
from transformers_neuronx.llama.like import LlamaLike
from transformers_neuronx.models.sampling import ForSampling
from transformers_neuronx.pyhlo import Tensor
from transformers_neuronx.weights import Weight, flattened

PREFIX, ignored = weights.PREFIX, weights.ignored


@dataclass(frozen=True)
class ApertusConfig(LlamaLike):
    tied: bool = hf("tie_word_embeddings")
    attention_bias: bool = hf("attention_bias")

    norms: ClassVar = {"attn_norm": "attention_layernorm", "mlp_norm": "feedforward_layernorm"}
    qk_norm = True
    feed_forward = ("mlp.up_proj", "mlp.down_proj")

    FIXED: ClassVar = {"hidden_act": "xielu", "post_norm": False}


def table(config: ApertusConfig) -> list[Weight]:
    """LLaMA's, and the numbers of activations."""
    source = weights.BLOCK + "mlp.act_fn."
    numbers = ("alpha_p", "alpha_n", "beta", "eps")  # the last two are not learned, but checkpoints have them
    return [
        *weights.table(config),
        *(Weight(f"mlp.{name}", source + name, (1,), flattened, dtype="f32") for name in numbers),
    ]


def layer(
    config: ApertusConfig, w: Any, x: Tensor, cache: Cache, step: Step, rotate: graph.Rotations, kind: str = ""
) -> tuple[Tensor, Cache]:
    y, cache = graph.mix(config, w, graph.normed(config, w, "attn_norm", x), cache, step, rotate[kind], None)
    x = step.needed_rows(x) + y
    y = linear(graph.normed(config, w, "mlp_norm", x), w.mlp.up)
    return x + linear(xielu(y, w.mlp), w.mlp.down), cache


def xielu(x: Tensor, w: Any) -> Tensor:
    """A parabola for positive x, and an exponential function minus x for others (Huang, arXiv:2411.13010)."""
    dtype, x = x.dtype, hlo.convert(x, "f32")
    rising, falling = softplus(w.alpha_p.tensor), w.beta.tensor + softplus(w.alpha_n.tensor)
    half = hlo.tanh(hlo.minimum(x, w.eps.tensor) * 0.5)
    below = (half * 2.0 / (1.0 - half) - x) * falling  # exp(x) - 1 loses small x, and Neuron has no expm1
    return hlo.convert(hlo.select(x > 0.0, x * x * rising, below) + x * w.beta.tensor, dtype)


class ApertusForSampling(ForSampling):
    """Transformers' `ApertusForCausalLM`, with the options of `Model` and the calls of `ForSampling`."""

    family = Family(
        ApertusConfig.from_hf, sys.modules[__name__], sys.modules[__name__], prepare=prepare, folder="apertus"
    )
