"""Models that read images as users call them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from transformers_neuronx.engine.family import VisionConfig
from transformers_neuronx.engine.images import Image, pictured, read_images
from transformers_neuronx.engine.inputs import Integers, Rows
from transformers_neuronx.errors import ConfigError, InputError
from transformers_neuronx.models.block_calls import INSTEAD
from transformers_neuronx.models.sampling import ForSampling

PATCHES = (256, 1024, 4096)  # of an image; 16 rows of 16 patches are 256 by 256 pixels for Qwen3-VL


class VisionForSampling(ForSampling):
    """A language model that reads images in its prompts. One more option than those of `Model`:

    - `image_patches`: the most patches of an image, or a list of the sizes that the tower is compiled for. Default 256,
      1024 and 4096.

    Calls that take a prompt also take its images, as a processor of Transformers returns them:

    - `pixel_values`: f32[patches of all images, numbers of a patch].
    - `image_grid_thw`: integers [images, 3], the times (1), rows and columns of patches of each image, in the order of
      the rows of the batch.

    In a prompt, each image has as many tokens `image_token_id` as the tower makes rows of it. Videos are refused.
    Calls raise InputError for images that do not fit the prompt, have another form, or are too large. ConfigError for
    `prefixed_length`, and for a cache of blocks.
    """

    model_config: VisionConfig
    _whole = "sample() of images"
    _images: Sequence[Image] = ()  # those of the call of `sample`

    def __init__(
        self, config: Any, *values: Any, image_patches: int | Sequence[int] | None = None, **options: Any
    ) -> None:  # fmt: skip
        sizes = PATCHES if image_patches is None else image_patches
        self._patches = tuple(sorted({sizes} if isinstance(sizes, int) else {*sizes}))
        super().__init__(config, *values, **options)

    def _settle(self) -> None:
        super()._settle()
        unit = self.model_config.tower.merged**2
        if not self._patches or self._patches[0] < unit or any(size % unit for size in self._patches):
            raise ConfigError(f"image_patches must be positive multiples of {unit}, got {list(self._patches)}")
        if self.prefixed_length:
            raise ConfigError(f"prefixed_length must be 0 for a model with images, got {self.prefixed_length}")
        if self.options.blocks is not None:
            raise ConfigError(f"{self.tag} reads images, which calls over a cache of blocks cannot bring: {INSTEAD}")
        self.options = replace(self.options, patches=self._patches)

    def read_images(self, pixel_values: Any, image_grid_thw: Any) -> list[Image]:
        """Read images as a call gets them. The tower does not run yet. Raises InputError as calls do."""
        return read_images(pixel_values, image_grid_thw, self.model_config, self.options.patches[-1])

    def forward(
        self,
        input_ids: Integers,
        cache_ids: Integers | None = None,
        start_ids: Integers | None = None,
        attention_mask: Integers | None = None,
        output_all_logits: bool | None = None,
        input_metadata: Any = None,
        pixel_values: Any = None,
        image_grid_thw: Any = None,
    ) -> Any:
        """Return the logits after the last token of each row, as `ForSampling.forward` does, for prompts with images.

        The class describes the last two arguments. Images come with the call that starts a sequence.
        """
        self.takes_blocks(input_metadata)
        where: dict[str, Any] = dict(cache_ids=cache_ids, start_ids=start_ids, attention_mask=attention_mask)
        images = self.read_images(pixel_values, image_grid_thw)
        with self.turns.take("forward()"):
            return self.run(input_ids, output_all_logits, **where, images=images)

    def sample(self, *arguments: Any, pixel_values: Any = None, image_grid_thw: Any = None, **options: Any) -> Any:
        """Generate tokens after prompts with images. The rest is as in `ForSampling.sample`."""
        images = self.read_images(pixel_values, image_grid_thw)
        if not images:
            return super().sample(*arguments, **options)
        with self.turns.take(self._whole):
            self._images = images
            return super().sample(*arguments, **options)

    def _read(self, input_ids: Integers, images: Sequence[Image] = (), **where: Integers | None) -> Rows:  # type: ignore[override]
        """Return the rows of a call with its images, which are those of `sample` inside that."""
        rows = super()._read(input_ids, **where)
        left = [*images]
        if self.turns.within(self._whole):
            left, self._images = [*self._images], []
        if left and rows.start.any():
            raise InputError("images must come with the call that starts a sequence")
        begun = zip(rows.tokens, rows.start, strict=True)  # a token that was generated is none for images
        prompts = [None if start else pictured(tokens.tolist(), left, self.model_config) for tokens, start in begun]
        if left:
            raise InputError(f"the prompts have no tokens for {len(left)} of the images")
        return replace(rows, prompts=prompts)
