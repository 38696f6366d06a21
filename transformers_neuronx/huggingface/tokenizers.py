"""Tokenizers of Transformers as its `AutoTokenizer` makes them, without the seconds that it takes.

It imports the class of the model's configuration, and with that most of PyTorch's compiler, only to learn the model's
type. Of a GGUF file, it reads all metadata twice, once with the package gguf, which takes seconds.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers_neuronx.support.files import read_json
from transformers_neuronx.weights.gguf import model_type_of

TOKENIZER_CONFIG = "tokenizer_config.json"


def tokenizer_in(directory: Path) -> Any:
    """Return the tokenizer of a checkpoint's directory."""
    from transformers import AutoTokenizer  # takes a second

    return AutoTokenizer.from_pretrained(directory, config=_config_of(directory))


def tokenizer_of_gguf(file: Path) -> Any:
    """Return the tokenizer in a GGUF file. A configuration of one beside it goes before."""
    from transformers import AutoTokenizer, TokenizersBackend
    from transformers.models.auto.tokenization_auto import TOKENIZER_MAPPING_NAMES, tokenizer_class_from_name

    where: dict[str, Any] = dict(gguf_file=file.name)
    if (file.parent / TOKENIZER_CONFIG).exists():
        return AutoTokenizer.from_pretrained(file.parent, **where)
    name = TOKENIZER_MAPPING_NAMES.get(model_type_of(file))
    kind = tokenizer_class_from_name(name) if name not in (None, "MistralCommonBackend") else None
    return (kind or TokenizersBackend).from_pretrained(file.parent, **where)


def _config_of(directory: Path) -> Any:
    """Return a configuration that says what `AutoTokenizer` reads of it; None if it needs the class of the model's."""
    from transformers import PreTrainedConfig

    files = directory / TOKENIZER_CONFIG, directory / "config.json"
    if not all(file.exists() for file in files):
        return None
    tokenizer, model = map(read_json, files)
    if not tokenizer.get("tokenizer_class") or "auto_map" in tokenizer or not isinstance(model.get("model_type"), str):
        return None
    config = PreTrainedConfig()
    config.name_or_path = str(directory)
    for name in ("model_type", "model_name", "tokenizer_class"):
        if name in model:
            setattr(config, name, model[name])
    return config
