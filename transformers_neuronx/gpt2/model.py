"""GPT-2 for sampling, under the original's names."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from transformers_neuronx.config import WHOLE
from transformers_neuronx.engine.family import Family
from transformers_neuronx.gpt2 import graph, weights
from transformers_neuronx.gpt2.config import GPT2Config
from transformers_neuronx.models.sampling import ForSampling


class GPT2ForSampling(ForSampling):
    """Transformers' `GPT2LMHeadModel`, with the options of `Model` and the calls of `ForSampling`."""

    family = Family(GPT2Config.from_hf, weights, graph)


class GPT2ForSamplingWithContextBroadcasting(GPT2ForSampling):
    """`GPT2ForSampling` with other defaults: one prompt at a time, with as many tokens as there are positions."""

    def __init__(
        self,
        config: Any,
        *,
        n_positions: int | Sequence[int] | None = None,
        prompt_batch_size: int = 1,
        context_length_estimate: int | Sequence[int] | None = None,
        **options: Any,
    ) -> None:
        super().__init__(
            config,
            n_positions=n_positions,
            prompt_batch_size=prompt_batch_size,
            context_length_estimate=WHOLE if context_length_estimate is None else context_length_estimate,
            **options,
        )
