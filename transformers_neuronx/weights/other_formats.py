"""Other formats: those that only other programs read, with how to convert them, and checkpoints of sizes alone."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import torch

from transformers_neuronx.errors import CheckpointError
from transformers_neuronx.support.files import explain, read_json

ADAPTER_FILE = "adapter_config.json"  # PEFT's
EMPTY = ".empty_json"  # the end of a file that has sizes in place of a tensor


def refuse_other_formats(path: Path) -> None:
    """Raise CheckpointError for another program's file or directory, and say how to convert it."""
    if (adapter := path / ADAPTER_FILE).is_file():
        base = None
        with suppress(CheckpointError):
            base = read_json(adapter).get("base_model_name_or_path")
        whose, its = (f" for {base}", "that") if base else ("", "its")
        raise CheckpointError(
            f"{path}: expected a model, found an adapter ({ADAPTER_FILE}){whose}; load {its} model with "
            f"from_pretrained(…, adapter={os.fspath(path)!r})"
        )
    if (path / "DecoderLMHead.safetensors").is_file():
        raise CheckpointError(
            f"{path}: expected a checkpoint, found weights that AWS's library has split for its devices; load the "
            "checkpoint they were made from, and save it with save(…, sharded_weights=True)"
        )


def random_tensor(path: Path) -> Callable[[str], torch.Tensor]:
    """Return the reader of a file that has sizes alone: its tensor is of normal random numbers, always the same."""
    facts = read_json(path)
    with explain(f"{path}: expected shape, torch_dtype and init_std of a tensor"):
        shape, std = [int(size) for size in facts["shape"]], float(facts.get("init_std", 1.0))
        dtype = getattr(torch, facts["torch_dtype"])
        if min(shape, default=0) < 0 or not isinstance(dtype, torch.dtype):
            raise ValueError(f"no sizes and type of a tensor: {facts}")
    return lambda _: (std * torch.randn(shape, generator=torch.Generator().manual_seed(0))).to(dtype)
