"""Qwen3-VL's weight table: LLaMA's for text, and its tower's."""

from transformers_neuronx.llama import weights
from transformers_neuronx.llama.weights import PREFIX as PREFIX, ignored as ignored
from transformers_neuronx.qwen3vl import tower
from transformers_neuronx.qwen3vl.config import Qwen3VLConfig
from transformers_neuronx.weights import Weight


def table(config: Qwen3VLConfig) -> list[Weight]:
    return weights.table(config) + tower.rows(config.tower)
