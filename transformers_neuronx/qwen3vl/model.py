"""Qwen3-VL for sampling."""

from typing import Any

from transformers_neuronx.config import completed
from transformers_neuronx.engine.family import Family
from transformers_neuronx.models.vision import VisionForSampling
from transformers_neuronx.qwen3vl import graph, tower, weights
from transformers_neuronx.qwen3vl.config import Qwen3VLConfig


def _read_config(attributes: Any) -> Qwen3VLConfig:
    return Qwen3VLConfig.from_hf(completed(attributes, images=True))


class Qwen3VLForSampling(VisionForSampling):
    """Transformers' `Qwen3VLForConditionalGeneration`, with the calls of `VisionForSampling`."""

    family = Family(_read_config, weights, graph, prepare=graph.prepare, tower=tower)
