"""Relative positions: score biases that depend on the distance between a query and a key.

Small distances have one bias each. Larger ones share a bias per bucket, and buckets grow logarithmically. Distances
from `furthest` on share the last bias (Raffel et al., arXiv:1910.10683, as in the authors' code).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import torch

from transformers_neuronx import hlo
from transformers_neuronx.pyhlo import Tensor


def _buckets(distances: torch.Tensor, count: int, furthest: int) -> torch.Tensor:
    """Return the bucket, below `count`, of each distance from 0 up. s64[·]"""
    exact = count // 2
    logarithm = torch.log(distances.float() / exact) / math.log(furthest / exact)  # 0 at exact, 1 at furthest
    far = exact + (logarithm * (count - exact)).long()
    return torch.where(distances < exact, distances, far.clamp(max=count - 1))


@functools.cache
def causal_distances(furthest: int) -> Callable[[torch.Tensor], torch.Tensor]:
    """Layout: biases of buckets [buckets, heads] to those of keys 0, 1, …, `furthest` positions before a query.

    -> [heads, furthest + 1]
    """

    def layout(biases: torch.Tensor) -> torch.Tensor:
        indices = _buckets(torch.arange(furthest + 1), len(biases), furthest)
        return biases[indices.to(biases.device)].T

    return layout


@functools.cache
def distances_both_ways(furthest: int) -> Callable[[torch.Tensor], torch.Tensor]:
    """Layout: biases of buckets [buckets, heads] to those of keys from `furthest` positions before a query to
    `furthest` after it. The second half of the buckets is for keys after the query. -> [heads, 2 furthest + 1]
    """

    def layout(biases: torch.Tensor) -> torch.Tensor:
        half = len(biases) // 2
        indices = _buckets(torch.arange(furthest + 1), half, furthest)
        indices = torch.cat([indices.flip(0), half + indices[1:]])
        return biases[indices.to(biases.device)].T

    return layout


def distance_bias(table: Tensor, tokens: int) -> Tensor:
    """Score biases of self-attention. table f32[heads, 2 furthest + 1] -> f32[1, heads, keys, queries]"""
    heads, columns = table.sizes
    furthest = columns // 2
    distance = hlo.iota("s32", [tokens, tokens], 0) - hlo.iota("s32", [tokens, tokens], 1)
    place = hlo.clamp(-furthest, distance, furthest) + furthest
    bias = hlo.take(hlo.transpose(table, 1, 0), place)  # [keys, queries, heads]
    return hlo.reshape(hlo.transpose(bias, 2, 0, 1), 1, heads, tokens, tokens)
