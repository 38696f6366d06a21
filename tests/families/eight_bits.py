"""Weights in 8 bits, as checkpoints are published with them."""

import json

import torch
from safetensors.torch import load_file, save_file

PLAIN = ("embed", "norm", "lm_head", ".gate.", "router")  # parts of names of what is not quantized
TYPES = dict(int=torch.int8, float=torch.float8_e4m3fn)


def store_in_eight_bits(reference, directory, kind, block, end):
    """Make the checkpoint that a model of Transformers has saved one in 8 bits. Return the model with its numbers.

    `block` are the outputs and inputs that share a scale, or None for all; `end` that of the scale's name, or
    "torchao", whose names differ. Numbers are drawn in less than their type's range, so that quantizing them again
    would change them.
    """
    file, generator = directory / "model.safetensors", torch.Generator().manual_seed(0)
    numbers = load_file(file)
    stored = {name: tensor.clone() for name, tensor in numbers.items()}
    for name, tensor in stored.copy().items():
        if tensor.ndim == 2 and not any(part in name for part in PLAIN):
            stored[name], scales, numbers[name] = _drawn(tensor.shape, kind, block, generator)
            if end == "torchao":
                named = name.replace(".weight", "._weight_")
                parts = dict(qdata=stored.pop(name), scale=scales)
                parts |= dict(zero_point=torch.zeros_like(scales, dtype=torch.int8)) if kind == "int" else {}
                stored |= {named + part: tensor for part, tensor in parts.items()}
                continue
            stored[f"{name}{end}"] = scales if scales.numel() > 1 else scales.reshape(())
            stored[name.replace(".weight", ".input_scale")] = torch.ones(())
    save_file(numbers, file, metadata=dict(format="pt"))
    config = json.loads((directory / "config.json").read_text())
    config.pop("quantization_config", None)
    (directory / "config.json").write_text(json.dumps(config))
    changed = type(reference).from_pretrained(directory, dtype=torch.float32).eval()
    save_file(stored, file)
    return changed


def _drawn(shape, kind, block, generator):
    """Return numbers, scales, and the matrix that they are."""
    sizes = [size if part is None else part for size, part in zip(shape, block, strict=True)]
    counts = [-(-size // part) for size, part in zip(shape, sizes, strict=True)]
    scales = (0.5 + torch.rand(counts, generator=generator)) * 0.004
    whole = torch.randint(-90, 90, shape, generator=generator).float()
    values = (whole if kind == "int" else whole / 7).to(TYPES[kind])
    each = scales.repeat_interleave(sizes[0], 0).repeat_interleave(sizes[1], 1)[: shape[0], : shape[1]]
    return values, scales, values.float() * each
