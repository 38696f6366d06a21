"""Qwen3-VL's tower for images: its sizes, its rows of the weight table, and its forward pass (arXiv:2511.21631)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from transformers_neuronx import hlo
from transformers_neuronx.config import Completed, ModelConfig, hf
from transformers_neuronx.engine.family import Patches
from transformers_neuronx.errors import ConfigError
from transformers_neuronx.layers import (
    ACTIVATIONS,
    attention_over,
    layer_norm,
    linear,
    lookup,
    mlp,
    remembered,
    turning,
)
from transformers_neuronx.pyhlo import Tensor
from transformers_neuronx.weights import (
    COLUMNS,
    ROWS,
    Heads,
    Weight,
    as_is,
    attention,
    inputs_flattened,
    linear as linear_rows,
    mlp as mlp_rows,
    norm,
    parts_of,
)

EPS = 1e-6
PREFIX = "model.visual."
BLOCK = PREFIX + "blocks.{}."


@dataclass(frozen=True)
class TowerConfig(ModelConfig):
    n_layer: int = hf("depth")
    hidden_size: int = hf("hidden_size")
    inner_size: int = hf("intermediate_size")
    n_head: int = hf("num_heads")
    activation: str = hf("hidden_act", among=ACTIVATIONS)
    channels: int = hf("in_channels")
    patch: int = hf("patch_size")
    times: int = hf("temporal_patch_size")
    merged: int = hf("spatial_merge_size")
    out_size: int = hf("out_hidden_size")
    positions: int = hf("num_position_embeddings")
    deep: list[int] = hf("deepstack_visual_indexes")  # the layers whose features are added after layers for text
    rope: dict[str, Any] = hf("rope_parameters")

    @classmethod
    def of(cls, vision: Mapping[str, Any], hidden_size: int) -> "TowerConfig":
        """Read a vision_config. Raises ConfigError if it does not go with text layers of this hidden size."""
        read = cls.from_hf(Completed(vision))
        numbers = dict(patch_size=read.patch, temporal_patch_size=read.times)
        wrong: dict[str, Any] = {name: value for name, value in numbers.items() if not isinstance(value, int)}
        if read.out_size != hidden_size:
            wrong["out_hidden_size"] = read.out_size
        if sorted({*read.deep}) != [*read.deep] or not {*read.deep} <= {*range(read.n_layer)}:
            wrong["deepstack_visual_indexes"] = read.deep
        if read.rope.keys() - {"rope_type", "rope_theta"} or read.rope["rope_type"] != "axial":
            wrong["rope_parameters"] = read.rope
        if wrong:
            raise ConfigError(f"the vision_config has values that are not supported: {wrong}")
        return read

    @property
    def side(self) -> int:
        return int(self.positions**0.5)

    @property
    def numbers(self) -> int:
        return self.channels * self.times * self.patch**2

    @property
    def attention_heads(self) -> Heads:
        return Heads(self.n_head, self.n_head, self.hidden_size // self.n_head)


def rows(config: TowerConfig) -> list[Weight]:
    h, inner, patch = config.hidden_size, config.inner_size, PREFIX + "patch_embed.proj."
    qkv = parts_of(BLOCK, ["attn.qkv"] * 3 + ["attn.proj"], [h] * 4)
    return [
        Weight("source.patch.weight", patch + "weight", (h, config.numbers), inputs_flattened),
        Weight("source.patch.bias", patch + "bias", (h,)),
        Weight("source.positions", PREFIX + "pos_embed.weight", (config.positions, h)),
        *norm("encoder.attn_norm", BLOCK + "norm1", h),
        *attention("encoder.attn", config.attention_heads, h, qkv, bias=True, out_bias=True),
        *norm("encoder.mlp_norm", BLOCK + "norm2", h),
        *mlp_rows("encoder.mlp", [(f"{BLOCK}mlp.linear_fc{n}", as_is) for n in (1, 2)], inner, h, bias=True),
        *_merger(config, "source.merger", PREFIX + "merger.", h),
        *(
            row
            for n in range(len(config.deep))
            for row in _merger(config, f"source.deep{n}", f"{PREFIX}deepstack_merger_list.{n}.", h * config.merged**2)
        ),
    ]


def _merger(config: TowerConfig, name: str, source: str, normed: int) -> list[Weight]:
    inner = config.hidden_size * config.merged**2
    return [
        *norm(f"{name}.norm", source + "norm", normed),
        *linear_rows(f"{name}.up", source + "linear_fc1", inner, inner, COLUMNS),
        *linear_rows(f"{name}.down", source + "linear_fc2", config.out_size, inner, ROWS),
    ]


def tower(config: Any, w: Any, layers: Sequence[Any], image: Patches) -> Tensor:
    sizes: TowerConfig = config.tower
    head_dim = sizes.attention_heads.head_dim
    x, rotate = embedded(w, image), turning(head_dim, angles(sizes, image))
    deep = []
    for number, layer in enumerate(layers):
        h = layer_norm(x, layer.attn_norm, EPS)
        memory = remembered(h, layer.attn, image.length, head_dim, rotate)
        x = x + attention_over(h, layer.attn, memory, head_dim, rotate)
        x = x + mlp(layer_norm(x, layer.mlp_norm, EPS), layer.mlp, sizes.activation)
        if number in sizes.deep:
            place = sizes.deep.index(number)
            deep.append(merge(sizes, getattr(w.source, f"deep{place}"), x))
    return hlo.concatenate([merge(sizes, w.source.merger, x), *deep], 1)  # [m, parts, h]


def embedded(w: Any, image: Patches) -> Tensor:
    """Project patches, and add positions from between corners of the table. -> [1, n, h]"""
    x = linear(image.numbers, w.source.patch)
    corners = hlo.convert(lookup(w.source.positions, image.corners), "f32")  # [n, 4, h]
    found = hlo.sum(corners * hlo.reshape(image.shares, -1, 4, 1), 1)
    return hlo.reshape(x + hlo.convert(found, x.dtype), 1, *x.sizes)


def angles(config: TowerConfig, image: Patches) -> Tensor:
    """Return what features of heads turn by: half of them by the row of a patch, half by its column. f32[1, n, 1, ·]"""
    spatial = config.attention_heads.head_dim // 2
    exponents = np.arange(0, spatial, 2, dtype=np.float32) / np.float32(spatial)
    frequencies = hlo.constant((1 / np.float32(config.rope["rope_theta"]) ** exponents).astype(np.float32), "f32")
    n, count = image.places.sizes[0], len(exponents)
    return hlo.reshape(hlo.reshape(image.places, n, 2, 1) * frequencies, 1, n, 1, 2 * count)


def merge(config: TowerConfig, w: Any, x: Tensor) -> Tensor:
    """Make rows for the text half of neighbouring patches x [1, n, h]. A norm is of each patch, or of all of a row."""
    together = config.hidden_size * config.merged**2
    if w.norm.weight.sizes[0] == together:
        x = hlo.reshape(x, -1, together)
    x = hlo.reshape(layer_norm(x, w.norm, EPS), -1, together)
    y = mlp(x, w, "gelu")
    return hlo.reshape(y, -1, 1, config.out_size)
