"""Copies weights to the devices, with only a few in host memory at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from itertools import groupby
from typing import Any

import numpy as np
import torch

from transformers_neuronx.pyhlo.dtypes import element_type, numpy_to_torch, to_torch, torch_to_numpy
from transformers_neuronx.runtimes.base import DeviceTensor, Runtime
from transformers_neuronx.weights.reading import Key, Sharded

Progress = Callable[[str], object]

LOADERS = 2  # weights that are loaded at a time


def put_all(runtime: Runtime, weights: Iterable[Sharded], progress: Progress) -> dict[Key, DeviceTensor]:
    """Put weights on the devices. Return the tensors by layer and name.

    At most LOADERS sources of weights are in host memory at a time. `progress` is called with the name of each weight.
    """

    def put(of_one: list[Sharded]) -> list[DeviceTensor]:
        return [
            runtime.put([on_host(runtime, piece, weight.element) for piece in weight.pieces()], donate=True)
            for weight in of_one
        ]

    tensors: dict[Key, DeviceTensor] = {}
    by_source = groupby(weights, lambda weight: id(weight.keys) if weight.source is None else weight.source)
    jobs = [list(of_one) for _, of_one in by_source]
    with ThreadPoolExecutor(LOADERS) as pool:
        for of_one, made in zip(jobs, pool.map(put, jobs), strict=True):
            for weight, tensor in zip(of_one, made, strict=True):
                for key in weight.keys:
                    tensors[key] = tensor
                    progress(key[1])
    return tensors


def on_host(runtime: Runtime, piece: torch.Tensor, element: str) -> np.ndarray[Any, Any]:
    """Return an array that the runtime can use in place. Most are mapped from a file, and read when used."""
    if piece.dtype == to_torch(element) and piece.is_contiguous():
        array = torch_to_numpy(piece)
        if runtime.usable(array):
            return array
    array = runtime.empty(piece.shape, element_type(element).numpy)
    numpy_to_torch(array).copy_(piece)
    return array
