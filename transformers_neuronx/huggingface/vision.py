"""What `generate()` of Transformers needs to be different for prompts with images."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers.generation.utils import GenerationMixin

from transformers_neuronx.engine.images import Image, of_each
from transformers_neuronx.errors import InputError
from transformers_neuronx.huggingface.device_cache import DeviceCache, cache_of
from transformers_neuronx.models.vision import VisionForSampling


class VisionGeneration(GenerationMixin):
    """Takes images with prompts, and gives those of a prompt to all of its sequences."""

    model: VisionForSampling

    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        past_key_values: DeviceCache | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | torch.Tensor = 0,
        return_dict: bool | None = None,
        pixel_values: torch.Tensor | None = None,
        image_grid_thw: torch.Tensor | None = None,
        mm_token_type_ids: torch.Tensor | None = None,
        images: Sequence[Image] = (),
        cache: DeviceCache | None = None,
        **others: Any,
    ) -> Any:
        """Feed tokens, as `HuggingFaceGenerationModelAdapter.forward` does; new sequences with images.

        - `pixel_values`, `image_grid_thw`: the images of all rows, as `VisionForSampling` describes them.
        - `mm_token_type_ids`: accepted and ignored, since ids tell where images are.
        - `images`: the same as what `read_images` of the model returned; they replace the first two.
        """
        cache = cache_of(self.model, cache, past_key_values)
        if isinstance(cache, DeviceCache) and not cache.columns:
            cache.images = images or self.model.read_images(pixel_values, image_grid_thw)
        elif pixel_values is not None:
            raise InputError("images must come with the call that starts a sequence")
        theirs: Any = super()
        return theirs.forward(input_ids, attention_mask, cache, use_cache, logits_to_keep, return_dict, **others)

    def _expand_inputs_for_generation(
        self,
        expand_size: int = 1,
        is_encoder_decoder: bool = False,
        input_ids: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[Any, dict[str, Any]]:
        """Repeat each row `expand_size` times, with its images: tensors have those of all rows side by side."""
        images = self.model.read_images(kwargs.pop("pixel_values", None), kwargs.pop("image_grid_thw", None))
        if images and input_ids is not None:
            each = of_each(input_ids.tolist(), images, self.model.model_config)
            kwargs["images"] = [image for own in each for _ in range(expand_size) for image in own]
        theirs: Any = super()
        expanded: tuple[Any, dict[str, Any]]
        expanded = theirs._expand_inputs_for_generation(expand_size, is_encoder_decoder, input_ids, **kwargs)
        return expanded
