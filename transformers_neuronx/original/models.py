"""Classes of the original that are models of this package with other calls."""

from __future__ import annotations

from typing import Any

import torch

from transformers_neuronx.engine.inputs import Integers, integers
from transformers_neuronx.gpt2.model import GPT2ForSampling
from transformers_neuronx.huggingface.adapter import HuggingFaceGenerationModelAdapter
from transformers_neuronx.llama.model import LlamaForSampling
from transformers_neuronx.opt.model import OPTForSampling


class GPT2ForHuggingFaceSampling(GPT2ForSampling):
    """`GPT2ForSampling` with Hugging Face's `generate()`, for which `HuggingFaceGenerationModelAdapter` is there."""

    @property
    def wrapper(self) -> HuggingFaceGenerationModelAdapter:
        """The adapter of this model."""
        found: HuggingFaceGenerationModelAdapter | None = self.__dict__.get("_wrapper")
        if found is None:  # not a submodule: it has this model as its own
            found = self.__dict__["_wrapper"] = HuggingFaceGenerationModelAdapter(self.config, self)
        return found

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """Call `generate` of the adapter."""
        return self.wrapper.generate(*args, **kwargs)

    def prepare_inputs_for_generation(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Call `prepare_inputs_for_generation` of the adapter."""
        return self.wrapper.prepare_inputs_for_generation(*args, **kwargs)

    def reset_generation(self) -> None:
        """Call `reset_generation` of the adapter."""
        self.wrapper.reset_generation()


class OPTForGreedySearch(OPTForSampling):
    """`OPTForSampling` that always takes the most likely token."""

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Return the most likely token after each row, s64[batch, 1]. The arguments are those of `ForSampling`."""
        return torch.as_tensor(super().forward(*args, **kwargs)).argmax(1, keepdim=True)

    def sample(
        self, input_ids: Integers, sequence_length: int, start_ids: Integers | None = None, *_: Any, **options: Any
    ) -> Any:
        """Generate greedily up to `sequence_length` columns. Other arguments are those of `ForSampling.sample`."""
        return super().sample(input_ids, sequence_length, start_ids, **options | dict(top_k=1))


class FIDLlamaForSampling(LlamaForSampling):
    """Fusion in decoder: the rows of a call are parts of one prompt, read one after the other."""

    def __init__(self, config: Any, *, batch_size: int = 1, **options: Any) -> None:
        super().__init__(config, batch_size=1, **options)

    def sample(
        self, input_ids: Integers, sequence_length: int, start_ids: Integers | None = None, *rules: Any, **options: Any
    ) -> Any:
        """Generate after all rows. Return one row, s64[1, at most sequence_length], that begins with theirs."""
        one = torch.from_numpy(integers("input_ids", input_ids, 2).reshape(1, -1))
        return super().sample(one, sequence_length, start_ids, *rules, **options)
