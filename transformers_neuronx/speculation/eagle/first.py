"""The forward pass of a head of the first EAGLE (Li et al., arXiv:2401.15077): a layer of LLaMA's after a linear one.

`Step.features` are the hidden states of the token before each one, which the model's head is applied to; and of drafted
tokens, the head's own, which it predicts.
"""

from typing import Any

from transformers_neuronx import hlo
from transformers_neuronx.layers import Step, embedding, logits
from transformers_neuronx.llama.graph import layer as layer, prepare as prepare
from transformers_neuronx.pyhlo import Tensor
from transformers_neuronx.speculation.eagle.config import FirstConfig


def combined(config: FirstConfig, w: Any, hidden: Tensor) -> Tensor:
    return hidden


def embed(config: FirstConfig, w: Any, step: Step) -> Tensor:
    """Make one of embeddings and features. [b, n, h]"""
    assert step.features is not None
    both = hlo.concatenate([embedding(w.embed, step.ids), step.features], 2)
    return hlo.convert(logits(both, w.combined), both.dtype)


def norm(config: FirstConfig, w: Any, x: Tensor) -> Tensor:
    return x


def head(config: FirstConfig, w: Any, x: Tensor) -> Tensor:
    return logits(x, w.head)  # f32[b, n, vocab]
