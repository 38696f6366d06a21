"""Directories of checkpoints: local ones, and those of the hub; the configuration files in them."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

from huggingface_hub import snapshot_download
from huggingface_hub.utils import HFValidationError, validate_repo_id  # type: ignore[attr-defined]

from transformers_neuronx.config import OUTPUTS, completed
from transformers_neuronx.config.multimodal import MODELS, text_half
from transformers_neuronx.errors import CheckpointError
from transformers_neuronx.support.files import explain, kind, read_json
from transformers_neuronx.weights.formats import format_in
from transformers_neuronx.weights.gguf import attributes_of
from transformers_neuronx.weights.gguf_file import PART, begins_as_gguf
from transformers_neuronx.weights.other_formats import ADAPTER_FILE, refuse_other_formats

PathOrName: TypeAlias = str | os.PathLike[str]

GENERATION_CONFIG = "generation_config.json"
CONFIG_FILES = ["config.json", GENERATION_CONFIG]
POOLING_FILE = "1_Pooling/config.json"  # of Sentence Transformers
MODULES_FILE = "modules.json"  # also of Sentence Transformers
SCORE_FILE = "1_LogitScore/config.json"  # of rerankers, also of Sentence Transformers
MODULES = ("Transformer", "Pooling", "Normalize", "LogitScore")  # the server makes all vectors of length 1
POOLINGS = dict(lasttoken="last", mean_tokens="mean", cls_token="cls", mean="mean", cls="cls")
PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json")  # how images are read
TOKENIZER_FILES = ["*token*.json", "vocab*", "merges.txt", "*.model", "chat_template*", *PROCESSOR_FILES]


def resolve(path_or_name: PathOrName, cache_dir: PathOrName | None = None) -> Path:
    """Return the directory of a checkpoint: a local one, or a hub model that is downloaded or found in the cache.

    Safetensors are fetched if the hub model has them, pickles only otherwise. `HF_HUB_OFFLINE` and the hub's cache,
    or another `cache_dir`, are respected. CheckpointError if there is no such directory, and no such hub model can be
    reached.
    """
    directory = _local_directory(path_or_name)
    if directory is not None:
        return directory
    name = os.fspath(path_or_name)
    safetensors = [*CONFIG_FILES, "*.safetensors", "model.safetensors.index.json"]
    directory = _download(name, safetensors, cache_dir, ignore=["*/*", "consolidated*"])
    if "safetensors" in format_in(directory):
        return directory
    return _download(name, [*CONFIG_FILES, "pytorch_model*"], cache_dir)


def resolve_tokenizer(path_or_name: PathOrName, cache_dir: PathOrName | None = None) -> Path:
    """Return the directory of a checkpoint's tokenizer and processor, found as `resolve` does."""
    found = _local_directory(path_or_name)
    return found or _download(os.fspath(path_or_name), [*CONFIG_FILES, *TOKENIZER_FILES], cache_dir, ignore=["*/*"])


def gguf_at(path_or_name: PathOrName) -> Path | None:
    """Return the GGUF file that is meant: a file, or the only model of a directory without a configuration.

    Of a split model, that is the first file. CheckpointError for a directory of several models.
    """
    path = Path(os.path.expanduser(path_or_name))
    if path.is_file():
        return path if path.suffix == ".gguf" or begins_as_gguf(path) else None
    if not path.is_dir() or os.path.lexists(path / "config.json") or format_in(path):
        return None
    names = sorted(file.name for file in path.glob("*.gguf"))
    models = [name for name in names if not (part := PART.fullmatch(name)) or part["number"] == "00001"]
    if len(models) > 1:
        raise CheckpointError(f"{path}: expected one model, found {', '.join(models)}; pass the path of one of them")
    return path / models[0] if models else None


def load_config(
    path_or_name: PathOrName, cache_dir: PathOrName | None = None, images: bool | Callable[[str], bool] = False
) -> dict[str, Any]:  # fmt: skip
    """Parse `config.json`, with the start and end tokens of `generation_config.json` if it has any; or the metadata of
    a GGUF file.

    Of a multimodal model, it is the configuration of the text half, or for a family that reads `images`, of both
    halves; a function tells it of the `model_type`. Nothing else of a hub model is downloaded.
    CheckpointError if it is missing or broken, and ConfigError if Transformers rejects that of a multimodal model.
    """
    if file := gguf_at(path_or_name):
        return attributes_of(file)
    directory = _config_directory(path_or_name, cache_dir)
    if not os.path.lexists(directory / "config.json"):
        refuse_other_formats(directory)
    config, generation = read_json(directory / "config.json"), load_generation_config(directory)
    tokens = {name: generation.get(name) for name in ("eos_token_id", "decoder_start_token_id")}
    config |= {name: value for name, value in tokens.items() if value is not None}
    both = images(str(config.get("model_type"))) if callable(images) else images
    return completed(config, images=True) if both else text_half(config) | _outputs_told(directory / SCORE_FILE)


def is_multimodal(directory: Path) -> bool:
    """Whether a checkpoint has more than the text half that is read. CheckpointError if its configuration is broken."""
    return read_json(directory / "config.json").get("model_type") in MODELS


def load_generation_config(path_or_name: PathOrName, cache_dir: PathOrName | None = None) -> dict[str, Any]:
    """Parse `generation_config.json`; empty if there is none. CheckpointError if it is broken."""
    if gguf_at(path_or_name):
        return {}
    path = _config_directory(path_or_name, cache_dir) / GENERATION_CONFIG
    return read_json(path) if path.exists() else {}


def load_pooling(path_or_name: PathOrName, cache_dir: PathOrName | None = None) -> str:
    """Return how a checkpoint of Sentence Transformers pools hidden states: "last", "mean" or "cls"; "last" if it does
    not say. CheckpointError for another way, and for more that is done to vectors.
    """
    if gguf_at(path_or_name):
        return "last"
    directory = _config_directory(path_or_name, cache_dir)
    path, modules = directory / POOLING_FILE, directory / MODULES_FILE
    kinds = _kinds_in(modules) if modules.exists() else []
    if unknown := [kind for kind in kinds if kind not in MODULES]:
        raise CheckpointError(f"{modules}: vectors need {unknown[0]}: supported are {', '.join(MODULES)}")
    given = read_json(path) if path.exists() else dict(pooling_mode="lasttoken")
    modes = [name.removeprefix("pooling_mode_") for name, used in given.items() if used is True and "_mode_" in name]
    mode = given.get("pooling_mode", ", ".join(modes))
    if mode not in POOLINGS:
        raise CheckpointError(f"{path}: hidden states are pooled by {mode}: supported are {', '.join(POOLINGS)}")
    return POOLINGS[mode]


def _outputs_told(path: Path) -> dict[str, Any]:
    """Return the attribute of a reranker whose score is of the logits of a token for yes, and maybe one for no."""
    if not path.exists():
        return {}
    given = read_json(path)
    yes, no = given.get("true_token_id"), given.get("false_token_id")
    if not isinstance(yes, int) or not isinstance(no, int | None):
        raise CheckpointError(f"{path}: expected token ids true_token_id and maybe false_token_id, got {yes!r}, {no!r}")
    tokens = [yes] if no is None else [yes, no]
    return {OUTPUTS: dict(score_tokens=tokens)}


def _kinds_in(path: Path) -> list[str]:
    """Parse the list of what Sentence Transformers applies one after the other."""
    with explain(f"{path}: expected a list of modules with their types"):
        return [str(each["type"]).rpartition(".")[2] for each in json.loads(path.read_text(encoding="utf-8"))]


def _config_directory(path_or_name: PathOrName, cache_dir: PathOrName | None) -> Path:
    files = [*CONFIG_FILES, POOLING_FILE, MODULES_FILE, SCORE_FILE, ADAPTER_FILE]
    return _local_directory(path_or_name) or _download(os.fspath(path_or_name), files, cache_dir)


def _local_directory(path_or_name: PathOrName) -> Path | None:
    """Return a local directory, or None if the argument can only be a hub name."""
    text = os.fspath(path_or_name)
    path = os.path.expanduser(text)
    if os.path.isdir(path):
        return Path(path)
    if os.path.lexists(path):
        refuse_other_formats(Path(path))
        raise CheckpointError(f"{path}: expected a checkpoint directory, found {kind(path)}; pass the directory")
    if not isinstance(path_or_name, str) or text.startswith((".", "/", "~")) or not _is_hub_name(text):
        wrong = "no such directory, and not a valid hub name such as 'owner/model'"
        raise CheckpointError(f"{path or repr(path)}: {wrong}; check the path")
    return None


def _is_hub_name(text: str) -> bool:
    try:
        validate_repo_id(text)
    except HFValidationError:
        return False
    return True


def _download(name: str, allow: list[str], cache_dir: PathOrName | None, ignore: list[str] | None = None) -> Path:
    wrong = f"{name!r} is neither a local directory nor a hub model that is cached or reachable"
    with explain(wrong, "check the spelling, log in if the model is gated, or go online once to cache it"):
        cache = None if cache_dir is None else os.path.expanduser(os.fspath(cache_dir))
        return Path(snapshot_download(name, allow_patterns=allow, ignore_patterns=ignore, cache_dir=cache))
