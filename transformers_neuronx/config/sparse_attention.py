"""Sparse attention: which of the tokens before it a token attends to, as a pattern of positions or of blocks of them.

A pattern is about absolute positions, so prompts and single tokens see the same. The original applied a pattern of one
row to single tokens, whatever their position.
"""

from __future__ import annotations

import base64
import random
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from transformers_neuronx.errors import ConfigError

if TYPE_CHECKING:  # graphs are written without torch
    import torch

KINDS = ("blk_sparse", "window", "custom")


@dataclass(frozen=True)
class Pattern:
    """Which positions attend to which: to `window` positions, including a token's own, or by blocks of `block`.

    `blocks` is a square pred matrix as text: row i, column j tells whether positions of block i attend to those of
    block j. All attend to none after their own.
    """

    window: int | None = None
    block: int = 1
    blocks: str = ""

    @staticmethod
    def of(matrix: torch.Tensor, block: int) -> Pattern:
        """Make a pattern of a matrix pred[blocks, blocks]. Each block also attends to itself."""
        packed = np.packbits(np.asarray(matrix, bool) | np.eye(len(matrix), dtype=bool))
        return Pattern(None, block, base64.b64encode(zlib.compress(packed.tobytes(), 9)).decode())

    def matrix(self) -> np.ndarray[Any, Any]:
        """Return the matrix. pred[blocks, blocks]"""
        bits = np.unpackbits(np.frombuffer(zlib.decompress(base64.b64decode(self.blocks)), np.uint8))
        count = int(len(bits) ** 0.5)
        return bits[: count * count].reshape(count, count).astype(bool)

    def config(self) -> SparseAttnConfig:
        """Return a configuration that gives this pattern."""
        if self.window is not None:
            return SparseAttnConfig("window", True, SlidingWindowAttnConfig(self.window - 1))
        import torch

        blocks = torch.from_numpy(self.matrix())
        masks = {(len(blocks), len(blocks)): blocks}
        return SparseAttnConfig("custom", False, BlkSparseAttnConfig(self.block), sparse_mask_dict=masks)

    def rows(self, width: int) -> np.ndarray[Any, Any]:
        """Return for each block of positions whether it attends to each of the first `width`. pred[blocks, width]"""
        rows: np.ndarray[Any, Any] = self.matrix().repeat(self.block, 1)[:, :width]
        return rows


@dataclass
class BlkSparseAttnConfig:
    """A pattern of blocks of `blk_size` positions: the first ones, those around a token's own, and random ones."""

    blk_size: int = 128
    num_global_blks: int = 0
    num_local_blks: int = 1
    num_random_blks: int = 0


@dataclass
class SlidingWindowAttnConfig:
    """A token attends to the `window_size` tokens before it, and to itself."""

    window_size: int = 128


@dataclass
class SparseAttnConfig:
    """Sparse attention of all layers.

    - `attn_type`: "blk_sparse" or "window", which `sparse_attn_config` describes, or "custom".
    - `causal`: whether the pattern itself is. Models attend to no later token either way. A window that is not causal
      reaches back half as far.
    - `sparse_mask_dict`: for "custom", pred[n, n] by its sizes (n, n), with n at least `n_positions`; with a
      `BlkSparseAttnConfig`, of blocks of its `blk_size`.
    - `same_mask_per_layer`: only True is supported.

    Raises ConfigError for a value that is not supported.
    """

    attn_type: str = "blk_sparse"
    causal: bool = False
    sparse_attn_config: BlkSparseAttnConfig | SlidingWindowAttnConfig | None = None
    same_mask_per_layer: bool = True
    sparse_mask_dict: Mapping[Any, torch.Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        kinds = dict(blk_sparse=BlkSparseAttnConfig, window=SlidingWindowAttnConfig, custom=object)
        if self.attn_type not in KINDS:
            raise ConfigError(f"attn_type must be one of {', '.join(KINDS)}, got {self.attn_type!r}")
        if not isinstance(self.sparse_attn_config, kinds[self.attn_type]):
            wanted = kinds[self.attn_type].__name__
            raise ConfigError(f"sparse_attn_config must be a {wanted}, got {self.sparse_attn_config!r}")
        if not self.same_mask_per_layer:
            raise ConfigError("same_mask_per_layer must be True: all layers have the same pattern")

    def pattern(self, positions: int) -> Pattern:
        """Return the pattern of a model with so many positions."""
        given = self.sparse_attn_config
        if isinstance(given, SlidingWindowAttnConfig) and self.attn_type == "window":
            return Pattern(1 + (given.window_size if self.causal else given.window_size // 2))
        if isinstance(given, BlkSparseAttnConfig) and self.attn_type == "blk_sparse":
            count = -(-positions // given.blk_size)
            sizes = given.num_global_blks, given.num_local_blks, given.num_random_blks
            return Pattern.of(create_blk_mask(count, count, *sizes, causal=self.causal), given.blk_size)
        block = given.blk_size if isinstance(given, BlkSparseAttnConfig) else 1
        count = -(-positions // block)
        masks = [mask for mask in self.sparse_mask_dict.values() if mask.dim() == 2 and min(mask.shape) >= count]
        if not masks:
            sizes_given = [list(mask.shape) for mask in self.sparse_mask_dict.values()]
            raise ConfigError(f"sparse_mask_dict needs a mask [{count}, {count}] or larger, got {sizes_given}")
        return Pattern.of(masks[0][:count, :count], block)

    def create_sparse_mask(self, q_seq_len: int, kv_seq_len: int, layer_id: int = 0) -> torch.Tensor:
        """Return the pattern of the last `q_seq_len` of `kv_seq_len` positions. pred[q_seq_len, kv_seq_len]"""
        import torch

        pattern = self.pattern(kv_seq_len)
        own = torch.arange(kv_seq_len - q_seq_len, kv_seq_len)[:, None]
        seen = torch.arange(kv_seq_len) <= own
        if pattern.window is not None:
            return seen & (torch.arange(kv_seq_len) > own - pattern.window)
        return seen & torch.from_numpy(pattern.rows(kv_seq_len))[own[:, 0] // pattern.block]

    create_blk_sparse_mask = create_sliding_window_mask = create_sparse_mask


def create_blk_mask(
    blks_q: int,
    blks_kv: int,
    num_global_blks: int = 0,
    num_local_blks: int = 1,
    num_random_blks: int = 0,
    causal: bool = False,
) -> torch.Tensor:
    """Return which blocks attend to which: all to the first ones and the first ones to all, each to `num_local_blks`
    around its own, and to random ones, the same at each call. pred[blks_q, blks_kv]
    """
    import torch

    mask = torch.zeros(blks_q, blks_kv, dtype=torch.bool)
    mask[:num_global_blks] = mask[:, :num_global_blks] = True
    apart = torch.arange(blks_kv) - torch.arange(blks_q)[:, None]
    if num_local_blks:
        mask |= apart.abs() <= num_local_blks // 2
    draws = random.Random(0)
    for row in range(blks_q) if num_random_blks else ():
        pool = range(min(row + 1, blks_kv) if causal else blks_kv)
        mask[row, draws.sample(pool, min(num_random_blks, len(pool)))] = True
    return mask.tril() if causal else mask


def build_dense_mask(
    q_seq_len: int, k_seq_len: int, mask: torch.Tensor, blk_size: int = 128, causal: bool = False
) -> torch.Tensor:
    """Return a matrix of blocks as one of positions. pred[q_seq_len, k_seq_len]"""
    dense = mask.bool().repeat_interleave(blk_size, 0).repeat_interleave(blk_size, 1)[:q_seq_len, :k_seq_len]
    return dense.tril() if causal else dense


def build_sliding_window_mask(q_seq_len: int, kv_seq_len: int, window_size: int, causal: bool = True) -> torch.Tensor:
    """Return which positions attend to which: `window_size` before them, or half of it to each side. pred[q, kv]"""
    import torch

    before, after = (window_size, 0) if causal else (window_size // 2, window_size // 2)
    apart = torch.arange(kv_seq_len) - torch.arange(q_seq_len)[:, None]
    return (apart >= -before) & (apart <= after)
