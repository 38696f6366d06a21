"""The weight table of Llama 4: LLaMA's with experts that are [in, out] in the checkpoint, and norms without weights."""

import functools
from dataclasses import replace

import torch

from transformers_neuronx.llama import weights
from transformers_neuronx.llama.weights import BLOCK, PREFIX as PREFIX, ignored as ignored
from transformers_neuronx.llama4text.config import CHUNKED, Llama4TextConfig
from transformers_neuronx.weights import Weight, of_kinds, section, transposed


def table(config: Llama4TextConfig) -> list[Weight]:
    d, inner = config.head_dim, config.expert_size
    layouts = {
        "moe.gate.weight": section(0, (inner, inner), transposed),
        "moe.up.weight": section(1, (inner, inner), transposed),
        "moe.down.weight": transposed,
    }
    rows = [replace(row, layout=layouts.get(row.name, row.layout)) for row in weights.table(config)]
    if not config.normed:
        return rows
    ones = functools.partial(torch.ones, d)
    norms = [Weight(f"attn.{part}_norm.weight", BLOCK, (d,), dtype="f32", value=ones) for part in "qk"]
    return rows + of_kinds({kind for kind in config.layer_kinds if kind.startswith(CHUNKED)}, norms)
