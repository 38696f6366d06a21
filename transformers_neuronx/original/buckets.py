"""Helpers of the original's `bucket` and `utils`: sizes that programs are compiled for, and padding of tensors."""

from __future__ import annotations

import bisect
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from transformers_neuronx.config import amp_and_quant
from transformers_neuronx.errors import ConfigError

valid_dtypes = ["float32", "float16", "bfloat16"]


def power_of_two_bucket_sizes(min_bucket_size: int, max_bucket_size: int) -> list[int]:
    """Return the smallest size, doubled as long as it is below the largest, and the largest."""
    doubled = max(0, math.ceil(math.log2(max_bucket_size / min_bucket_size)))
    return [*(min_bucket_size << times for times in range(doubled)), max_bucket_size]


def get_closest_pow2_bucket_size(size: int) -> int:
    """Return the power of two for a prompt: the next one, or the one below if at most 2 % of the tokens are left."""
    return 1 << math.ceil(math.log2((1 - 40 / 2048) * size))


def token_sizes(buckets_or_size: int | Sequence[int]) -> list[int]:
    """Return the sizes for `n_positions`: a list as it is, in order, or 128, 256, … up to a number."""
    if isinstance(buckets_or_size, int):
        return power_of_two_bucket_sizes(128, buckets_or_size)
    return sorted(buckets_or_size)


def context_sizes(buckets_or_size: int | Sequence[int] | None, token_buckets: Sequence[int] | None = None) -> list[int]:
    """Return the sizes for `context_length_estimate`: a list, a number, none for 0, or half of each token bucket."""
    if isinstance(buckets_or_size, int):
        return [buckets_or_size] if buckets_or_size > 0 else []
    if buckets_or_size is None and token_buckets is None:
        raise ConfigError("context_sizes needs sizes, or the token buckets that give them, got neither")
    return [size // 2 for size in token_buckets or ()] if buckets_or_size is None else sorted(buckets_or_size)


def batch_sizes(batch_size: int | Sequence[int]) -> list[int]:
    """Return batch sizes as a list, in order."""
    return [batch_size] if isinstance(batch_size, int) else sorted(batch_size)


def find(buckets: Sequence[int] | None, size: int) -> int | None:
    """Return the smallest bucket of at least `size`, or the largest; None if there are none."""
    return buckets[bisect.bisect_left(buckets, size, hi=len(buckets) - 1)] if buckets else None


def round_up_to_divisor(value: int, divisor: int) -> int:
    """Return the next multiple of `divisor`."""
    return math.ceil(value / divisor) * divisor


def get_pad_size(vocab_size: int, divisor: int) -> int:
    """Return how much is missing to the next multiple of `divisor`."""
    return round_up_to_divisor(vocab_size, divisor) - vocab_size


def pad_sizes(
    shape: Sequence[int], dims: int | Sequence[int], sizes: int | Sequence[int], left: bool = False
) -> tuple[int, ...] | None:
    """Return the padding for `torch.nn.functional.pad` that makes `dims` at least `sizes` long; None for none."""
    named = [dims] if isinstance(dims, int) else list(dims)
    wanted = [sizes] * len(named) if isinstance(sizes, int) else list(sizes)
    missing = dict.fromkeys(range(len(shape)), 0)
    missing |= {dim % len(shape): max(0, size - shape[dim]) for dim, size in zip(named, wanted, strict=True)}
    pairs = [(missing[dim], 0) if left else (0, missing[dim]) for dim in reversed(range(len(shape)))]
    return tuple(side for pair in pairs for side in pair) if any(missing.values()) else None


def pad(
    tensor: torch.Tensor | None, dims: int | Sequence[int], sizes: int | Sequence[int], left: bool = False
) -> torch.Tensor | None:
    """Return a tensor whose `dims` are at least `sizes` long, with zeros after its numbers, or before them."""
    padding = None if tensor is None else pad_sizes(tensor.shape, dims, sizes, left)
    return tensor if tensor is None or padding is None else torch.nn.functional.pad(tensor, padding)


def pad_interleaved(
    tensor: torch.Tensor, dim: int, size: int, source_len_per_group: int, pad_len_per_group: int
) -> torch.Tensor:
    """Return a tensor with zeros after each group of rows: [1, 2] becomes [1, 0, 2, 0] for groups of one and one."""
    first = tensor.movedim(dim, 0)
    rows = first.reshape(-1, source_len_per_group, *first.shape[1:])
    shape = (size // (source_len_per_group + pad_len_per_group), pad_len_per_group, *rows.shape[2:])
    return torch.cat([rows, rows.new_zeros(shape)], 1).flatten(0, 1).movedim(0, dim)


def amp_is_u8(amp: str) -> bool:
    """Whether an `amp` stores weights in eight bits, such as "f32-u8-bf16"."""
    return "-u8-" in amp


def parse_amp(amp: str) -> tuple[str, str | None, str | None]:
    """Return the parts of an `amp`: of activations, of stored weights, and of weights in use."""
    activations, quant = amp_and_quant(amp, None, None)
    return (activations, "u8", quant.dequant_dtype) if quant else (activations, None, None)


def maybe_override_attributes(self: object, kwargs: Mapping[str, Any]) -> None:
    """Assign the values that are not None. Raises KeyError for a name that the object does not have."""
    for key, value in kwargs.items():
        if not hasattr(self, key):
            raise KeyError(f"{type(self).__name__} has no attribute {key!r}")
        if value is not None:
            setattr(self, key, value)
