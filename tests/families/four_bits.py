"""Weights in words of 32 bits, as checkpoints of compressed-tensors, GPTQ and AWQ have them."""

import json

import torch
from eight_bits import PLAIN
from safetensors.torch import load_file, save_file

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # the outputs of a word, from its lowest bits on


def in_words(numbers, bits, order=None):
    """Pack numbers [..., n] into words s32[..., n * bits / 32], filled up with zeros, the first in the lowest bits."""
    each = 32 // bits
    numbers = torch.nn.functional.pad(numbers.long(), (0, -numbers.shape[-1] % each)).unflatten(-1, (-1, each))
    if order:
        numbers = numbers[..., list(order)]
    words = (numbers << torch.arange(0, 32, bits)).sum(-1)
    return torch.where(words >= 2**31, words - 2**32, words).int()


def store_in_words(reference, directory, packing, bits, group, zeros, shuffled=False, change=lambda stored: None):
    """Make the checkpoint that a model of Transformers has saved one in words. Return the model with its numbers.

    With `zeros`, a number of each group stands for zero. If it is `shuffled`, groups have inputs from anywhere.
    `change` may change what is stored. Matrices of GPT-2, which are [in, out], are packed as others are.
    """
    file, generator = directory / "model.safetensors", torch.Generator().manual_seed(0)
    numbers, turned = load_file(file), reference.config.model_type == "gpt2"
    stored = {name: tensor.clone() for name, tensor in numbers.items()}
    for name, tensor in stored.copy().items():
        if tensor.ndim == 2 and not any(part in name for part in (*PLAIN, "wte", "wpe")):
            del stored[name]
            shape = tensor.shape[::-1] if turned else tensor.shape
            parts, matrix = _drawn(shape, packing, bits, group or shape[1], zeros, shuffled, generator)
            numbers[name] = matrix.T.contiguous() if turned else matrix
            stored |= {name.replace(".weight", end): part for end, part in parts.items()}
    config = json.loads((directory / "config.json").read_text())
    config.pop("quantization_config", None)
    (directory / "config.json").write_text(json.dumps(config))
    save_file(numbers, file, metadata=dict(format="pt"))
    changed = type(reference).from_pretrained(directory, dtype=torch.float32).eval()
    change(stored)
    save_file({name: tensor.contiguous() for name, tensor in stored.items()}, file)
    return changed


def _drawn(shape, packing, bits, group, zeros, shuffled, generator):
    """Return the parts of a matrix by the ends of their names, and the matrix that they are."""
    (outputs, inputs), middle = shape, 1 << (bits - 1)
    count = -(-inputs // group)
    values = torch.randint(0, 2 * middle, shape, generator=generator)
    scales = ((0.5 + torch.rand(outputs, count, generator=generator)) * 0.6 / middle).half()
    low, high = (middle // 2, 3 * middle // 2) if zeros else (middle, middle + 1)
    zero = torch.randint(low, high, (outputs, count), generator=generator)
    of_each = torch.arange(inputs) // group
    if shuffled:
        of_each = of_each[torch.randperm(inputs, generator=generator)]
    matrix = (values - zero[:, of_each]) * scales[:, of_each].float()
    if packing == "compressed":
        parts = {".weight_packed": in_words(values, bits), ".weight_scale": scales}
        parts[".weight_shape"] = torch.tensor(shape)
        parts |= {".weight_g_idx": of_each.int()} if shuffled else {}
        return parts | ({".weight_zero_point": in_words(zero.T, bits).T} if zeros else {}), matrix
    if packing == "awq":
        whole, others = in_words(values.T, bits, AWQ_ORDER), in_words(zero.T, bits, AWQ_ORDER)
        return {".qweight": whole, ".qzeros": others, ".scales": scales.T}, matrix
    written = in_words((zero - int(packing == "gptq")).T, bits)
    parts = {".qweight": in_words(values, bits).T, ".qzeros": written, ".scales": scales.T}
    return parts | {".g_idx": of_each.int()}, matrix
