"""The tower of a family that reads images: its program, which makes rows of one image, for each number of patches."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np

from transformers_neuronx import hlo
from transformers_neuronx.compiler import compile_py_func
from transformers_neuronx.engine.family import ENCODER_LAYER, WHOLE_ENCODER, Patches, VisionConfig
from transformers_neuronx.engine.images import Image, Pictured
from transformers_neuronx.engine.keys import ProgramKey, Segment
from transformers_neuronx.engine.programs import Programs
from transformers_neuronx.engine.store import ProgramStore
from transformers_neuronx.layers.rows import words
from transformers_neuronx.layers.step import PLACE
from transformers_neuronx.pyhlo import HloModuleProto, HloScribe, Tensor, dtype_named
from transformers_neuronx.pyhlo.dtypes import element_type
from transformers_neuronx.runtimes.base import DeviceTensor, Runtime
from transformers_neuronx.weights.parameters import declare
from transformers_neuronx.weights.reading import Key
from transformers_neuronx.weights.rows import Weight

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class TowerKey(ProgramKey):
    """The rows of an image of up to so many patches."""

    kind = "tower"
    patches: int

    def written(self, programs: Programs, segment: Segment) -> HloModuleProto:
        return tower_module(programs, self.patches)


def tower_rows(programs: Programs) -> tuple[list[Weight], list[Weight]]:
    """Return the rows of the weight table that the tower has, outside its layers and in each."""
    whole, layered = WHOLE_ENCODER, ENCODER_LAYER
    return (
        [row for row in programs.table if row.name.startswith(whole)],
        [row for row in programs.table if row.name.startswith(layered)],
    )


def tower_module(programs: Programs, patches: int) -> HloModuleProto:
    """Write the tower's program.

    Parameters: `Patches`, whose numbers are in f32; the weights. Result: f32[rows, row_parts, h].
    """
    config, graph = cast(VisionConfig, programs.config), programs.family.tower
    assert graph is not None
    whole, layered = tower_rows(programs)

    def program(scribe: HloScribe) -> Tensor:
        parameters = hlo.Parameters()
        kinds = dict(numbers=("f32", config.tower.numbers), corners=("s32", 4), shares=("f32", 4), places=("f32", 2))
        given = {name: parameters.add(dtype_named(of)[patches, size], name) for name, (of, size) in kinds.items()}
        image = Patches(**given, length=parameters.add(dtype_named("s32")[[1]], "length"))
        w = declare(whole, parameters, programs.dtype, programs.degree)
        named = [replace(row, name=row.name.removeprefix(ENCODER_LAYER)) for row in layered]
        scopes = [f"encoder.{layer}." for layer in range(config.encoder_layers)]
        layers = [declare(named, parameters, programs.dtype, programs.degree, scope) for scope in scopes]
        image = image._replace(numbers=hlo.convert(image.numbers, programs.dtype))
        with scribe.scope("tower"):
            return hlo.convert(graph.tower(config, w, layers, image), "f32")

    return compile_py_func(program)


class Tower:
    """Reads images with the weights on the devices. A family without a tower has no keys."""

    def __init__(self, runtime: Runtime, store: ProgramStore, weights: Mapping[Key, DeviceTensor]) -> None:
        self._runtime, self._store, self._weights = runtime, store, weights
        self._nothing: dict[tuple[int, int], list[DeviceTensor]] = {}  # that is placed, in steps of these sizes

    def reset(self) -> None:
        """Forget what is on the devices, besides weights."""
        self._nothing.clear()

    def keys(self) -> list[TowerKey]:
        """Return the keys of its programs, one for each number of patches."""
        return [TowerKey(size) for size in self._programs.options.patches]

    def read(self, image: Image) -> Array:
        """Return the rows of an image, f32[rows, row_parts, h], which keeps them."""
        if image.rows is None:
            config = cast(VisionConfig, self._programs.config)
            key = next(key for key in self.keys() if key.patches >= len(image.numbers))
            [(_, program)] = self._store.parts(key)
            packed = packed_image(image, config.tower.side, config.tower.merged, key.patches)
            [rows] = program(*(self._runtime.put([each]) for each in packed), *self._operands(config))
            image.rows = rows.numpy()[: len(image.numbers) // config.tower.merged**2]
        return image.rows

    def placed(self, b: int, n: int, parts: Iterable[tuple[int, int, int, Pictured | None]]) -> list[Array]:
        """Return what stands in place of tokens in a step of b rows of n, as `declare_placed` wants it; nothing if no
        sequence has images. Reads images that were not read before.

        `parts` are the place of a sequence's first token among b * n, its position, the number of tokens, and images.
        """
        parts = [part for part in parts if part[3]] if self._programs.family.images else []
        if not parts:
            return []
        rows, places = self._empty(b, n)
        for first, start, count, found in parts:
            assert found is not None
            places["offsets"][first : first + count] = found.offsets_of(start, count)
            for image, some, tokens in found.shown(start, count):
                rows[first:][tokens] = self.read(image)[some]
                places["real"][first:][tokens] = 1
        return [rows.reshape(b, n, *rows.shape[1:]), words(places)]

    def put(self, b: int, n: int, placed: Sequence[Array] = ()) -> list[DeviceTensor]:
        """Return these arrays as operands of a step, or those of nothing; without a tower there are none."""
        if placed:
            return [self._runtime.put([each]) for each in placed]
        if self._programs.family.images and (b, n) not in self._nothing:
            rows, places = self._empty(b, n)
            arrays = rows.reshape(b, n, *rows.shape[1:]), words(places)
            self._nothing[b, n] = [self._runtime.put([each]) for each in arrays]
        return self._nothing.get((b, n), [])

    def _empty(self, b: int, n: int) -> tuple[Array, Array]:
        programs = self._programs
        rows = np.zeros((b * n, *programs.row_sizes), element_type(programs.dtype).numpy)
        return rows, np.zeros(b * n, PLACE)

    @property
    def _programs(self) -> Programs:
        return self._store.programs

    def _operands(self, config: VisionConfig) -> list[DeviceTensor]:
        whole, layered = tower_rows(self._programs)
        of_layers = [(layer, row.name) for layer in range(config.encoder_layers) for row in layered]
        return [self._weights[key] for key in [*((None, row.name) for row in whole), *of_layers]]


def packed_image(image: Image, side: int, merged: int, size: int) -> list[Array]:
    """Return the operands of `Patches` for an image, padded to `size` patches.

    A table of positions for `side` times `side` patches is stretched to the image, between four corners of it.
    """
    h, w = image.height, image.width
    order = np.arange(h * w).reshape(h // merged, merged, w // merged, merged).transpose(0, 2, 1, 3).reshape(-1)
    places = np.stack(np.divmod(order, w), 1)
    at = places.astype(np.float32) * np.float32(side - 1) / np.maximum(np.array([h, w], np.float32) - 1, 1)
    low = np.floor(at).astype(np.int64)
    part = at - low
    high = np.minimum(low + 1, side - 1)
    corners = np.stack([row[:, 0] * side + column[:, 1] for row in (low, high) for column in (low, high)], 1)
    shares = np.stack([row[:, 0] * column[:, 1] for row in (1 - part, part) for column in (1 - part, part)], 1)
    whole = [image.numbers, corners.astype(np.int32), shares.astype(np.float32), places.astype(np.float32)]
    padded = [np.pad(each, ((0, size - h * w), (0, 0))) for each in whole]
    return [*padded, np.array([h * w], np.int32)]
