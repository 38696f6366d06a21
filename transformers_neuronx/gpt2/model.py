"""GPT-2 for sampling, under the names that the original gave it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from transformers_neuronx.decoder import Family
from transformers_neuronx.gpt2 import graph, weights
from transformers_neuronx.gpt2.config import GPT2Config
from transformers_neuronx.sampling import ForSampling


class GPT2ForSampling(ForSampling):
    family = Family(GPT2Config.from_hf, weights, graph)


class GPT2ForSamplingWithContextBroadcasting(GPT2ForSampling):
    """As `GPT2ForSampling`, but a prompt of any length is one program's work unless told otherwise."""

    def __init__(
        self, config: Any, *, context_length_estimate: int | Sequence[int] | None = None, **options: Any
    ) -> None:
        super().__init__(config, **options)
