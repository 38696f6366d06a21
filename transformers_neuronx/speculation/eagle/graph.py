"""The forward pass of an EAGLE-3 head (Li et al., arXiv:2503.01840), a layer of LLaMA's with two inputs.

`Step.features` are what the head knows of the token before each one: at first the model's hidden states of three
depths, `combined`; and of drafted tokens, its own last hidden states.
"""

import math
from typing import Any

from transformers_neuronx import hlo
from transformers_neuronx.layers import Cache, Step, attention, embedding, gated_mlp, logits, normalize
from transformers_neuronx.llama.graph import Rotations, prepare as prepare
from transformers_neuronx.pyhlo import Tensor
from transformers_neuronx.speculation.eagle.config import EagleConfig


def combined(config: EagleConfig, w: Any, hidden: Tensor) -> Tensor:
    """Make features of a model's hidden states, side by side. [b, n, ·] -> [b, n, h]"""
    hidden = normalize(hidden, w.input_norm, config.eps) if config.norm_features else hidden
    return hlo.convert(logits(hidden, w.combined), hidden.dtype)


def embed(config: EagleConfig, w: Any, step: Step) -> Tensor:
    """Return embeddings and features, side by side. [b, n, 2 h]"""
    assert step.features is not None
    return hlo.concatenate([embedding(w.embed, step.ids), step.features], 2)


def layer(
    config: EagleConfig, w: Any, x: Tensor, cache: Cache, step: Step, rotate: Rotations, kind: str = ""
) -> tuple[Tensor, Cache]:
    h = config.hidden_size
    features = hlo.slice(x, 2, h, 2 * h)
    normed = normalize(features, w.features_norm, config.eps)
    both = hlo.concatenate([normalize(hlo.slice(x, 2, 0, h), w.attn_norm, config.eps), normed], 2)
    y, cache = attention(both, w.attn, cache, step, config.head_dim, rotate[kind], scale=config.attention_scale)
    x = step.needed_rows(normed if config.normed_residual else features) + y
    return x + gated_mlp(normalize(x, w.mlp_norm, config.eps), w.mlp, config.activation), cache


def norm(config: EagleConfig, w: Any, x: Tensor) -> Tensor:
    return normalize(x, w.final_norm, config.eps)


def head(config: EagleConfig, w: Any, x: Tensor) -> Tensor:
    """Return logits of all tokens, -inf for those that are not drafted. f32[b, n, vocab]"""
    y = logits(norm(config, w, x), w.head)
    if not hasattr(w, "places"):
        return y
    return hlo.take(hlo.pad(y, -1, 0, 1, -math.inf), w.places.tensor, -1)
