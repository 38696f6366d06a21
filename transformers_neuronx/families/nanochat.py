"""NanoChat: RMS norms without weights, one of them of the embedding; queries and keys turn backwards."""

import functools
import sys
from dataclasses import dataclass, replace
from typing import Any

import torch

from transformers_neuronx.config import hf
from transformers_neuronx.engine.family import Family
from transformers_neuronx.layers import ACTIVATIONS, Step
from transformers_neuronx.llama import graph, weights
from transformers_neuronx.llama.like import LlamaLike
from transformers_neuronx.models.sampling import ForSampling
from transformers_neuronx.pyhlo import Tensor
from transformers_neuronx.weights import Layout, Weight

PREFIX, ignored = weights.PREFIX, weights.ignored
prepare, layer, norm, head = graph.prepare, graph.layer, graph.norm, graph.head


@dataclass(frozen=True)
class NanoChatConfig(LlamaLike):
    activation: str = hf("hidden_act", among=ACTIVATIONS)
    tied: bool = hf("tie_word_embeddings")
    attention_bias: bool = hf("attention_bias")
    logit_softcap: float | None = hf("final_logit_softcapping", None)

    feed_forward = ("mlp.fc1", "mlp.fc2")
    qk_norm = qk_norm_last = True


@functools.cache
def halves_swapped(head_dim: int) -> Layout:
    """Layout: swap the halves of each head. Features that are swapped turn the other way."""
    return lambda tensor: torch.unflatten(tensor, 0, (-1, 2, head_dim // 2)).flip(1).flatten(0, 2)


def table(config: NanoChatConfig) -> list[Weight]:
    rows, swapped = [], halves_swapped(config.head_dim)
    embedding_norm = Weight("embedding_norm.weight", PREFIX + "embedding_norm", (config.hidden_size,), dtype="f32")
    for row in [*weights.table(config), embedding_norm]:
        if row.name.endswith("norm.weight"):
            row = replace(row, value=functools.partial(torch.ones, row.shape))
        if row.name.startswith(("attn.q.", "attn.k.")):
            row = replace(row, layout=swapped)
        rows.append(row)
    return rows


def embed(config: NanoChatConfig, w: Any, step: Step) -> Tensor:
    return graph.normed(config, w, "embedding_norm", graph.embed(config, w, step))


class NanoChatForSampling(ForSampling):
    """Transformers' `NanoChatForCausalLM`, with the options of `Model` and the calls of `ForSampling`."""

    family = Family(
        NanoChatConfig.from_hf, sys.modules[__name__], sys.modules[__name__], prepare=prepare, folder="nanochat"
    )
