"""Weights in codes of four bits, as checkpoints of compressed-tensors and bitsandbytes have them, byte by byte."""

import copy
import json

import torch
from eight_bits import PLAIN
from safetensors.torch import load_file, save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

_E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
_FP4 = torch.tensor([0, 0.0625, 8, 12, 4, 6, 2, 3]) / 12
_NF4 = """
    -1 -0.6961928009986877 -0.5250730514526367 -0.39491748809814453 -0.28444138169288635 -0.18477343022823334
    -0.09105003625154495 0 0.07958029955625534 0.16093020141124725 0.24611230194568634 0.33791524171829224
    0.44070982933044434 0.5626170039176941 0.7229568362236023 1
"""
NUMBERS = dict(
    e2m1=torch.cat([_E2M1, -_E2M1]),
    nf4=torch.tensor([float(number) for number in _NF4.split()]),
    fp4=torch.cat([_FP4, -_FP4]),
)


def store_in_codes(reference, directory, layout, group, change=lambda stored: None):
    """Make the checkpoint that a model of Transformers has saved one in codes. Return the model with its numbers.

    `layout` is that of `drawn`, or "experts"; `change` may change what is stored.
    """
    if layout == "experts":
        return store_experts(reference, directory)
    file, generator = directory / "model.safetensors", torch.Generator().manual_seed(0)
    numbers = load_file(file)
    stored = {name: tensor.clone() for name, tensor in numbers.items()}
    for name, tensor in stored.copy().items():
        if tensor.ndim == 2 and not any(part in name for part in PLAIN):
            del stored[name]
            parts, numbers[name] = drawn(tensor.shape, layout, group, generator)
            stored |= {name.replace(".weight", end): part for end, part in parts.items()}
    save_file(numbers, file, metadata=dict(format="pt"))
    whole = copy.deepcopy(reference.config)
    whole.__dict__.pop("quantization_config", None)  # or Transformers would want bitsandbytes
    changed = type(reference).from_pretrained(directory, config=whole, dtype=torch.float32).eval()
    change(stored)
    save_file({name: tensor.contiguous() for name, tensor in stored.items()}, file)
    return changed


def store_experts(reference, directory, whole=(), exponents=(121, 125)):
    """Make the checkpoint of gpt-oss that a model has saved one with experts in MXFP4, but for layers `whole`.

    Return the model with the numbers that Transformers makes of these.
    """
    stored, generator = load_file(directory / "model.safetensors"), torch.Generator().manual_seed(1)
    for name in [name for name in sorted(stored) if name.endswith(("gate_up_proj", "down_proj"))]:
        if any(f"layers.{layer}." in name for layer in whole):
            continue
        count, inputs, outputs = stored.pop(name).shape
        sizes = count, outputs, inputs // 32
        blocks = torch.randint(0, 256, (*sizes, 16), generator=generator, dtype=torch.uint8)
        scales = torch.randint(*exponents, sizes, generator=generator, dtype=torch.uint8)
        reference.get_parameter(name).data = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
        stored |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
    save_file(stored, directory / "model.safetensors", metadata=dict(format="pt"))
    return reference


def drawn(shape, layout, group, generator):
    """Return the parts of a matrix by the ends of their names, and the matrix that they are.

    Layouts are "mxfp4", "nvfp4", and "nf4" or "fp4", also with " nested" for scales that have scales.
    """
    kind, _, nested = layout.partition(" ")
    codes = torch.randint(0, 16, shape, generator=generator, dtype=torch.uint8)
    first, second = codes.unflatten(1, (-1, 2)).unbind(-1)
    if kind in ("mxfp4", "nvfp4"):
        parts, scales = _of_groups(kind, (shape[0], shape[1] // group), generator)
        parts[".weight_packed"] = first | second << 4
        numbers = NUMBERS["e2m1"][codes.long()]
    else:
        parts, scales = _of_blocks(kind, shape, group, nested, generator)
        parts[".weight"] = (first << 4 | second).reshape(-1, 1)
        numbers, scales = NUMBERS[kind][codes.long()], scales.view(shape[0], -1)
    return parts, numbers * scales.repeat_interleave(group, 1)


def _of_groups(kind, counts, generator):
    if kind == "mxfp4":
        exponents = torch.randint(121, 125, counts, generator=generator, dtype=torch.uint8)
        return {".weight_scale": exponents}, 2.0 ** (exponents.float() - 127)
    scales = (40 + 300 * torch.rand(counts, generator=generator)).to(torch.float8_e4m3fn)
    divisor = 1500 + 500 * torch.rand(1, generator=generator)
    parts = {".weight_scale": scales, ".weight_global_scale": divisor, ".input_global_scale": torch.ones(1)}
    return parts, scales.float() / divisor


def _of_blocks(kind, shape, size, nested, generator):
    count = shape[0] * shape[1] // size
    state = dict(quant_type=kind, blocksize=size, dtype="bfloat16", shape=list(shape))
    parts = {".weight.quant_map": NUMBERS[kind].clone()}
    scales = parts[".weight.absmax"] = 0.2 + torch.rand(count, generator=generator)
    if nested:
        of_each = torch.arange(count) // 256
        parts[".weight.absmax"] = codes = torch.randint(0, 256, (count,), generator=generator, dtype=torch.uint8)
        parts[".weight.nested_quant_map"] = table = torch.linspace(-1, 1, 256)
        parts[".weight.nested_absmax"] = large = 0.1 + 0.3 * torch.rand(-(-count // 256), generator=generator)
        state |= dict(nested_blocksize=256, nested_dtype="float32", nested_offset=0.7)
        scales = table[codes.long()] * large[of_each] + torch.tensor(0.7)
    told = torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)
    return parts | {f".weight.quant_state.bitsandbytes__{kind}": told}, scales
