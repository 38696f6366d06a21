"""Families with the factors of Granite: of the embedding, of what blocks add, of scores and of logits."""

from dataclasses import dataclass

from transformers_neuronx.config import hf
from transformers_neuronx.llama.like import LlamaLike


@dataclass(frozen=True)
class ScaledLike(LlamaLike):
    """A `LlamaLike` whose configuration has these factors under Granite's names."""

    embedding_scale: float = hf("embedding_multiplier")
    residual_scale: float = hf("residual_multiplier")
    attention_scale: float = hf("attention_multiplier")
    logits_divisor: float = hf("logits_scaling")

    @property
    def logit_scale(self) -> float:  # type: ignore[override]
        return 1 / self.logits_divisor
