"""Embeddings: sums of the last hidden states of a step's tokens, by a program after the step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from transformers_neuronx import hlo
from transformers_neuronx.compiler import compile_py_func
from transformers_neuronx.engine.keys import ProgramKey, Segment
from transformers_neuronx.engine.programs import Programs
from transformers_neuronx.pyhlo import HloModuleProto, HloScribe, Tensor, dtype_named
from transformers_neuronx.serving.scheduler import Work
from transformers_neuronx.serving.steps import TokensKey

HEAD = Segment(embed=False, layers=(), head=True)


@dataclass(frozen=True)
class PoolKey(ProgramKey):
    """Sums of the last hidden states of a step's tokens: tokens, and sums."""

    kind = "pool"
    tokens: int
    sums: int

    def written(self, programs: Programs, segment: Segment) -> HloModuleProto:
        return pool_module(programs, self)


def shares_of(key: TokensKey, step: Sequence[Work], bounds: Sequence[int]) -> np.ndarray[Any, Any]:
    """Return how often the sum of each request that pools has each token of a step: once, or never."""
    shares = np.zeros((key.sequences, key.tokens), np.float32)
    pools = ((work, first) for work, first in zip(step, bounds, strict=False) if work.pools)
    for row, (work, first) in zip(shares, pools, strict=False):
        begin, end = np.clip(work.request.pooled_positions, work.start, work.start + work.count) - work.start
        row[first + begin : first + end] = 1
    return shares


def pool_module(programs: Programs, key: PoolKey) -> HloModuleProto:
    """Write sums of last hidden states, and after each, if the model has a score head, what that makes of it.

    Parameters: how often each sum has each token, f32[sums, tokens]; the hidden states after the last layer,
    [tokens, 1, h]; the weights outside the layers. Result: f32[sums, · + labels].
    """

    def program(scribe: HloScribe) -> Tensor:
        parameters = hlo.Parameters()
        shares = parameters.add(dtype_named("f32")[key.sums, key.tokens], "shares")
        x = programs.declare_hidden(parameters, key.tokens, 1)
        shared, _ = programs.declare_weights(parameters, HEAD)
        last = hlo.convert(programs.last_hidden(scribe, shared, x), "f32")
        sums = hlo.dot(shares, hlo.reshape(last, key.tokens, -1), ([1], [0]))
        if programs.options.score is None:
            return sums
        return hlo.concatenate([sums, hlo.dot(sums, shared.score.tensor, ([1], [1]))], 1)

    return compile_py_func(program)
