"""Qwen3-VL's forward pass: LLaMA's, with rows of images in place of the embeddings of some tokens."""

from typing import Any

from transformers_neuronx import hlo
from transformers_neuronx.layers import Cache, Step
from transformers_neuronx.llama import graph
from transformers_neuronx.llama.graph import Rotations, head as head, norm as norm, prepare as prepare
from transformers_neuronx.pyhlo import Tensor
from transformers_neuronx.qwen3vl.config import Qwen3VLConfig


def embed(config: Qwen3VLConfig, w: Any, step: Step) -> Tensor:
    x = graph.embed(config, w, step)  # [b, n, h]
    if step.placed is None:
        return x
    return hlo.select(hlo.reshape(step.placed.real, *x.sizes[:2], 1), part(step, 0), x)


def layer(
    config: Qwen3VLConfig, w: Any, x: Tensor, cache: Cache, step: Step, rotate: Rotations, kind: str = ""
) -> tuple[Tensor, Cache]:
    x, cache = graph.layer(config, w, x, cache, step, rotate, kind)
    return x + step.needed_rows(part(step, int(kind))) if kind and step.placed is not None else x, cache


def part(step: Step, number: int) -> Tensor:
    """Return one of the parts of the rows that are placed in a step. [b, n, h]"""
    assert step.placed is not None
    b, n, _, h = step.placed.rows.sizes
    return hlo.reshape(hlo.slice(step.placed.rows, 2, number, number + 1), b, n, h)
