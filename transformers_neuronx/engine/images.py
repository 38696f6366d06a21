"""Images in prompts, on the host: their patches, the tokens that they stand in place of, and turned positions."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch

from transformers_neuronx.engine.family import VisionConfig
from transformers_neuronx.errors import InputError

Array = np.ndarray[Any, Any]


@dataclass(eq=False)
class Image:
    """An image of `height` times `width` patches, f32[patches, ·], and once the tower has read it, its rows."""

    numbers: Array
    height: int
    width: int
    rows: Array | None = None

    @cached_property
    def digest(self) -> bytes:
        """What tells it from others."""
        size = f"{self.height}x{self.width} ".encode()
        return hashlib.sha256(size + np.ascontiguousarray(self.numbers).tobytes()).digest()


@dataclass(frozen=True, eq=False)
class Pictured:
    """A prompt with images, or a sequence that began with one.

    `images[i]` stands in place of `counts[i]` tokens from position `first[i]` on. offsets s32[n, 3] are what the three
    parts of rotary positions are more than positions, for each token of the prompt; for all later ones it is `later`.
    """

    images: Sequence[Image]
    first: Sequence[int]
    counts: Sequence[int]
    offsets: Array
    later: int

    def offsets_of(self, start: int, count: int) -> Array:
        """Return the offsets of so many tokens from position `start` on. s32[count, 3]"""
        found = np.full((count, 3), self.later, np.int32)
        known = self.offsets[start : start + count]
        found[: len(known)] = known
        return found

    def shown(self, start: int, count: int) -> list[tuple[Image, slice, slice]]:
        """Return the images among so many tokens from position `start` on: which of their rows, and of which tokens."""
        found = []
        for image, first, rows in zip(self.images, self.first, self.counts, strict=True):
            low, high = max(first, start), min(first + rows, start + count)
            if low < high:
                found.append((image, slice(low - first, high - first), slice(low - start, high - start)))
        return found

    def contents(self, start: int, count: int) -> dict[int, bytes]:
        """Return what stands for the content of tokens that are of images, by position."""
        return {
            start + place: image.digest + row.to_bytes(8, "little")
            for image, rows, tokens in self.shown(start, count)
            for row, place in zip(range(rows.start, rows.stop), range(tokens.start, tokens.stop), strict=True)
        }


def continued(later: int) -> Pictured | None:
    """Return a sequence whose prompt was fed, given the offset of its later tokens."""
    return Pictured((), (), (), np.zeros((0, 3), np.int32), later) if later else None


def read_images(pixel_values: Any, image_grid_thw: Any, config: VisionConfig, largest: int) -> list[Image]:
    """Read images as processors of Transformers make them: f32[patches of all, ·], and s64[images, 3], the times,
    rows and columns of patches of each. None is none.

    Raises InputError for other shapes, several times (videos), NaN and infinity, and more than `largest` patches.
    """
    if pixel_values is None and image_grid_thw is None:
        return []
    if pixel_values is None or image_grid_thw is None:
        raise InputError("images need both pixel_values and image_grid_thw: pass what the processor returned")
    grids = np.asarray(torch.as_tensor(image_grid_thw).cpu())
    values: Array = torch.as_tensor(pixel_values).detach().cpu().float().numpy()
    if grids.ndim != 2 or grids.shape[1:] != (3,) or grids.dtype.kind not in "iu" or (grids < 1).any():
        raise InputError(f"image_grid_thw must be positive integers [images, 3], got {grids.dtype}{list(grids.shape)}")
    if (grids[:, 0] != 1).any():
        raise InputError(
            f"videos are not supported: image_grid_thw must begin with 1 in each row, got {grids.tolist()}"
        )
    merged, sizes = config.tower.merged, (int(grids.prod(1).sum()), config.tower.numbers)
    if (grids[:, 1:] % merged).any():
        raise InputError(f"image_grid_thw must have multiples of {merged} rows and columns, got {grids.tolist()}")
    if values.shape != sizes or not np.isfinite(values).all():
        raise InputError(f"pixel_values must be finite numbers {list(sizes)}, got {list(values.shape)}")
    if (most := int(grids.prod(1).max(initial=0))) > largest:
        raise InputError(f"image_patches={largest} is the largest image this model takes, got {most} patches")
    bounds = np.cumsum(grids.prod(1))
    parts = np.split(values, bounds[:-1])
    return [Image(part, int(h), int(w)) for part, (_, h, w) in zip(parts, grids, strict=True)]


def of_each(rows: Sequence[Sequence[int]], images: list[Image], config: VisionConfig) -> list[list[Image]]:
    """Divide images among rows of ids, with the number of tokens that each row has for them."""
    left, each = [*images], list[list[Image]]()
    for ids in rows:
        tokens, own = ids.count(config.image_token_id), list[Image]()
        while left and tokens > 0:
            own.append(left.pop(0))
            tokens -= own[-1].height * own[-1].width // config.tower.merged**2
        each.append(own)
    return [*each[:-1], each[-1] + left]


def pictured(ids: Sequence[int], images: list[Image], config: VisionConfig) -> Pictured | None:
    """Return where images stand in a prompt, which takes the first of them from the list; None if it has none.

    Raises InputError if a prompt has other numbers of tokens for images than these have rows, or tokens for videos.
    """
    tokens, merged = np.asarray(ids), config.tower.merged
    if (tokens == config.video_token_id).any():
        raise InputError(f"videos are not supported, and token {config.video_token_id} of the prompt stands for one")
    places = np.flatnonzero(tokens == config.image_token_id)
    if not places.size:
        return None
    taken, first, counts = list[Image](), list[int](), list[int]()
    offsets, later, done = np.zeros((len(tokens), 3), np.int32), 0, 0
    while done < len(places):
        if not images:
            raise InputError(f"the prompt has {len(places)} tokens for images, and its images have {done} rows")
        image, begin = images.pop(0), int(places[done])
        h, w = image.height // merged, image.width // merged
        if not np.array_equal(places[done : done + h * w], np.arange(begin, begin + h * w)):
            raise InputError(f"an image of {h * w} rows needs as many tokens for images side by side, from {begin} on")
        row, column = np.divmod(np.arange(h * w), w)
        offsets[begin : begin + h * w] = later + np.stack([np.zeros(h * w), row, column], 1)
        offsets[begin : begin + h * w] -= np.arange(h * w)[:, None]
        done, later = done + h * w, later + max(h, w) - h * w
        offsets[begin + h * w :] = later
        taken, first, counts = [*taken, image], [*first, begin], [*counts, h * w]
    return Pictured(taken, first, counts, offsets, later)
