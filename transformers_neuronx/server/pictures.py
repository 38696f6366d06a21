"""Images of messages: what data URLs hold, and how a checkpoint's processor divides it into patches."""

from __future__ import annotations

import base64
import io
import re
from collections.abc import Sequence
from typing import Any

import numpy as np
from PIL import Image, ImageOps

from transformers_neuronx.models.vision import VisionForSampling
from transformers_neuronx.server.errors import ApiError

FORMATS = ("BMP", "GIF", "JPEG", "PNG", "WEBP")
MOST_PIXELS = 2**26  # of all images of a request, as they come: a small file may hold a huge one
_URL = re.compile(r"data:image/[\w.+-]+;base64,(?P<data>[A-Za-z0-9+/=\s]+)", re.ASCII)


class Pictures:
    """What makes the images of messages ready for a model, by its checkpoint's image processor, one of Transformers'.

    Images with more patches than the model takes are made smaller.
    """

    def __init__(self, model: VisionForSampling, processor: Any) -> None:
        self._processor, self._token = processor, model.model_config.image_token_id
        self._patches_of_row = model.model_config.tower.merged**2
        most = min(processor.size["longest_edge"], model.options.patches[-1] * processor.patch_size**2)
        self._size = dict(shortest_edge=min(processor.size["shortest_edge"], most), longest_edge=most)  # in pixels

    def read(self, urls: Sequence[tuple[str, str]]) -> dict[str, Any]:
        """Return the images of URLs as the model takes them. With each URL there is where it is, for errors.

        Raises ApiError for another URL than one of data, and for what is no image.
        """
        images, left = [], MOST_PIXELS
        for url, where in urls:
            images.append(_image(url, where, left))
            left -= images[-1].width * images[-1].height
        try:
            read = self._processor(images, size=self._size, return_tensors="np")
        except ValueError as error:  # such as one that is 200 times as high as it is wide
            raise ApiError(400, f"the image processor refuses these images: {error}", param="messages") from error
        return dict(pixel_values=read["pixel_values"], image_grid_thw=read["image_grid_thw"])

    def expanded(self, ids: Sequence[int], grids: Any) -> list[int]:
        """Return the token ids of a prompt with as many tokens for each image as it has rows.

        Raises ApiError if the template did not make one of each.
        """
        counts = np.prod(grids, 1) // self._patches_of_row
        if (found := [*ids].count(self._token)) != len(counts):
            message = f"the chat template and texts make {found} places for images, and there are {len(counts)}"
            raise ApiError(400, message, param="messages")
        left = iter(counts.tolist())
        return [each for token in ids for each in [token] * (next(left) if token == self._token else 1)]


def _image(url: str, where: str, most: int) -> Image.Image:
    """Decode a URL, turn the image as its camera says, and drop transparency. It may have so many pixels."""
    if not (found := _URL.fullmatch(url)):
        message = f"{where} must be a data URL, data:image/…;base64,…: this server fetches no images"
        raise ApiError(400, message, param=where)
    try:
        image = Image.open(io.BytesIO(base64.b64decode(found["data"])), formats=FORMATS)
        pixels = image.width * image.height
        whole = ImageOps.exif_transpose(image).convert("RGB") if pixels <= most else None
    except Exception as error:  # a damaged image may raise anything
        message = f"{where} must be an image in one of {', '.join(FORMATS)}: {error}"
        raise ApiError(400, message, param=where) from error
    if whole is None:
        message = f"{where}: images of a request may have {MOST_PIXELS} pixels together, and this one has {pixels}"
        raise ApiError(400, message, param=where)
    return whole
