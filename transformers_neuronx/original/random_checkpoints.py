"""Checkpoints of random weights: `opt_gen_random_pretrained` and `ckpt_converter`.

An "empty" one has only the sizes of its tensors; they become random numbers when the checkpoint is read.
"""

from __future__ import annotations

import argparse
import json
import os
import re
from pathlib import Path
from typing import Any

import torch

from transformers_neuronx.errors import CheckpointError
from transformers_neuronx.weights.checkpoint import open_checkpoint, save_pretrained_split
from transformers_neuronx.weights.formats import SPLIT_DIRECTORY, SPLIT_LISTING
from transformers_neuronx.weights.other_formats import EMPTY

HELP_DOC_STR = """Write a split checkpoint of random weights with any number of layers, from one with a single layer.

Only the sizes of tensors are written; the weights are made when the checkpoint is read."""


def gen_random_pretrained(model_name: str, save: str, empty: bool = False, print_shapes: bool = False) -> None:
    """Save a model of random weights as a split checkpoint in `save`.

    `model_name` is a config.json, a directory or a model of the hub. With `empty`, only sizes are saved, and nothing is
    made in memory. With `print_shapes`, sizes are printed.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    path = Path(model_name)
    if model_name == "facebook/opt-175b":
        config = AutoConfig.for_model(**opt_175b_config())
    else:
        config = AutoConfig.from_pretrained(path.parent if path.name == "config.json" else model_name)
    torch.manual_seed(0)
    with torch.device("meta" if empty else "cpu"):
        model = AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]
    sizes = {name: list(tensor.shape) for name, tensor in model.state_dict().items()}
    if print_shapes:
        print(*(f"{name}: {size}" for name, size in sizes.items()), sep="\n")
    if not empty:
        save_pretrained_split(model, save)
        return
    std = float(vars(config).get("initializer_range") or vars(config).get("init_std") or 0.02)
    _write_empty(Path(save), {name: (size, 0.0 if len(size) == 1 else std) for name, size in sizes.items()})
    config.save_pretrained(save)


def _write_empty(directory: Path, tensors: dict[str, tuple[list[int], float]]) -> None:
    """Write a listing of tensors that have a size and a standard deviation."""
    folder = directory / SPLIT_DIRECTORY
    folder.mkdir(parents=True, exist_ok=True)
    listing = {}
    for number, (name, (size, std)) in enumerate(tensors.items()):
        listing[name] = f"p{number}.{name}{EMPTY}"
        (folder / listing[name]).write_text(json.dumps(dict(torch_dtype="float32", shape=size, init_std=std)))
    (folder / SPLIT_LISTING).write_text(json.dumps(listing, indent=2))


def opt_175b_config() -> dict[str, Any]:
    """Return the configuration of OPT-175B, which is not on the hub."""
    return dict(
        model_type="opt", vocab_size=50272, hidden_size=12288, word_embed_proj_dim=12288, ffn_dim=49152,
        num_hidden_layers=96, num_attention_heads=96, max_position_embeddings=2048, init_std=0.02,
        activation_function="relu", do_layer_norm_before=True, bos_token_id=2, eos_token_id=2, pad_token_id=1,
        dtype="float16",
    )  # fmt: skip


def opt_main() -> None:
    """Run the command `opt_gen_random_pretrained`."""
    parser = argparse.ArgumentParser(description="Save an OPT model of random weights as a split checkpoint.")
    parser.add_argument("name", help="name of a model, or path of a config.json")
    parser.add_argument("save", help="directory to save to")
    parser.add_argument("--empty", action="store_true", help="save sizes only")
    given = parser.parse_args()
    gen_random_pretrained(given.name, given.save, given.empty)


def convert(input_dir: str, output_dir: str, num_layers: int, init_std: float = 1.0) -> None:
    """Write an empty checkpoint with `num_layers` layers of the sizes of the first layer in `input_dir`."""
    source, target = Path(input_dir), Path(output_dir)
    sizes: dict[str, tuple[list[int], float]] = {}
    with open_checkpoint(source) as checkpoint:
        layered = {name: re.fullmatch(r"(.*\.)0(\..+)", name) for name in checkpoint}
        if not any(layered.values()):
            raise CheckpointError(f"{source}: no tensors of a first layer, whose names have .0. in them")
        for name in checkpoint:
            size, match = list(checkpoint.shape(name)), layered[name]
            copies = [f"{match[1]}{layer}{match[2]}" for layer in range(num_layers)] if match else [name]
            sizes |= dict.fromkeys(copies, (size, init_std))
    _write_empty(target, sizes)
    config = json.loads((source / "config.json").read_text()) | dict(num_hidden_layers=num_layers)
    (target / "config.json").write_text(json.dumps(config, indent=2))
    if (source / "generation_config.json").exists():
        (target / "generation_config.json").write_bytes((source / "generation_config.json").read_bytes())
    count = sum(torch.Size(size).numel() for size, _ in sizes.values())
    print(f"{os.fspath(target)}: {num_layers} layers, {count / 1e9:.3f} billion parameters")


def ckpt_converter() -> None:
    """Run the command `ckpt_converter`."""
    parser = argparse.ArgumentParser(description=HELP_DOC_STR, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("input_dir", help="split checkpoint of a model with one layer")
    parser.add_argument("output_dir", help="directory to save to")
    parser.add_argument("num_layers", type=int, help="number of layers")
    parser.add_argument("--init_std", type=float, default=1.0, help="standard deviation of the weights (default: 1)")
    given = parser.parse_args()
    convert(given.input_dir, given.output_dir, given.num_layers, given.init_std)
