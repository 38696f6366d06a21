"""Model formats that only other programs read: how to recognize them, and how to convert them to a checkpoint."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from transformers_neuronx.errors import CheckpointError
from transformers_neuronx.files import read_json

ADAPTER_FILE = "adapter_config.json"  # PEFT's


def refuse_other_formats(path: Path) -> None:
    """Raise CheckpointError for another program's file or directory, and say how to convert it."""
    if (adapter := path / ADAPTER_FILE).is_file():
        base = None
        with suppress(CheckpointError):
            base = read_json(adapter).get("base_model_name_or_path")
        whose, its = (f" for {base}", "that") if base else ("", "its")
        raise CheckpointError(
            f"{path}: expected a model, found an adapter ({ADAPTER_FILE}){whose}; merge it into {its} model with "
            "PEFT's merge_and_unload(), and save the result with save_pretrained(…)"
        )
    for file in sorted(path.glob("*.gguf")) if path.is_dir() else [path]:
        if file.suffix == ".gguf" or (file.is_file() and _begins_with(file, b"GGUF")):
            raise CheckpointError(
                f"{file}: weights in GGUF cannot be read; convert them to a checkpoint with Transformers: "
                f"from_pretrained(…, gguf_file={file.name!r}, quantization_config=GgufConfig(dequantize=True)) and "
                "save_pretrained(…)"
            )


def _begins_with(path: Path, mark: bytes) -> bool:
    with suppress(OSError), open(path, "rb") as file:
        return file.read(len(mark)) == mark
    return False
