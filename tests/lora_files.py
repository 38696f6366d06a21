"""Random LoRA adapters of the bundled checkpoint, in files as PEFT writes them."""

import json

import torch
from safetensors.torch import save_file

RANK, HIDDEN, LAYERS = 4, 128, 4
MATRICES = {"attn.c_attn": (HIDDEN, 3 * HIDDEN), "attn.c_proj": (HIDDEN, HIDDEN), "mlp.c_fc": (HIDDEN, 4 * HIDDEN),
            "mlp.c_proj": (4 * HIDDEN, HIDDEN)}  # fmt: skip


def write_adapter(directory, seed, rank=RANK, more=None, **config):
    """Write a random adapter of the bundled checkpoint, large enough to change what it says."""
    generator, tensors = torch.Generator().manual_seed(seed), {}
    for layer in range(seed % 2, LAYERS):  # some adapters leave the first layer as it is
        for name, (inputs, outputs) in MATRICES.items():
            start = f"base_model.model.transformer.h.{layer}.{name}"
            tensors[f"{start}.lora_A.weight"] = torch.randn(rank, inputs, generator=generator) * 0.1
            tensors[f"{start}.lora_B.weight"] = torch.randn(outputs, rank, generator=generator) * 0.1
    directory.mkdir()
    save_file(tensors | (more or {}), directory / "adapter_model.safetensors")
    facts = dict(peft_type="LORA", r=rank, lora_alpha=2 * rank, fan_in_fan_out=True) | config
    (directory / "adapter_config.json").write_text(json.dumps(facts))
    return directory
