"""Hugging Face's `generate()` for a model on the devices.

Generation is Transformers' own; this file gives it a model to call and a cache to ask, whose keys and values stay
where they are.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import Cache
from transformers.generation.utils import GenerationMixin
from transformers.modeling_outputs import CausalLMOutputWithPast

from transformers_neuronx.sampling import ForSampling


class DeviceCache(Cache):
    """Stands for the sequences cached on the devices, of which it knows the number of columns."""

    is_compileable = False

    def __init__(self, model: ForSampling) -> None:
        super().__init__(layers=[])
        self.model = model
        self.columns = 0

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.columns

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Row `i` goes on with the sequence of row `beam_idx[i]`."""
        self.model.reorder_cache(beam_idx)


class HuggingFaceGenerationModelAdapter(PreTrainedModel, GenerationMixin):  # type: ignore[no-untyped-call]
    """A Transformers model whose work a compiled one does: `generate()` with all of its options.

    `config` is the Hugging Face configuration of the checkpoint that `model` was made from. The batch that
    `generate()` works on, prompts times beams or returned sequences, is at most the one compiled.
    """

    main_input_name = "input_ids"
    # Whatever attention or experts the configuration names: none of Transformers' runs here.
    _supports_sdpa = _supports_flash_attn = _supports_flex_attn = True

    @classmethod
    def _can_set_experts_implementation(cls) -> bool:
        return True

    def __init__(self, config: PreTrainedConfig, model: ForSampling) -> None:
        super().__init__(config)
        self.model = model

    @property
    def device(self) -> torch.device:
        """Where ids and logits are: the host."""
        return torch.device("cpu")

    @property
    def dtype(self) -> torch.dtype:
        """That of the logits."""
        return torch.float32

    def reset_generation(self) -> None:
        """Kept for callers of the original, which needed it between calls."""

    def _prepare_cache_for_generation(
        self, generation_config: Any, model_kwargs: dict[str, Any], *args: Any, **kwargs: Any
    ) -> Any:
        model_kwargs.setdefault("past_key_values", DeviceCache(self.model))

    def forward(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        past_key_values: DeviceCache | None = None,
        **_: Any,
    ) -> CausalLMOutputWithPast:
        """Logits after the last token of each row, f32[batch, 1, vocab].

        input_ids [batch, n] follow the columns that `past_key_values` knows of; attention_mask [batch, all columns].
        """
        cache = DeviceCache(self.model) if past_key_values is None else past_key_values
        columns = cache.columns + input_ids.shape[1]
        if attention_mask is None:
            attention_mask = torch.ones(len(input_ids), columns, dtype=torch.long)
        logits = self.model.forward(input_ids, attention_mask=attention_mask[:, :columns])
        cache.columns = columns
        return CausalLMOutputWithPast(logits=logits[:, None], past_key_values=cache)
