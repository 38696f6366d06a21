"""Finds the family that a checkpoint is of, by import: there is no list to edit."""

from __future__ import annotations

import importlib
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers_neuronx.encoder_decoder import EncoderDecoderForSampling
from transformers_neuronx.errors import ConfigError
from transformers_neuronx.module import PathOrName, load_config
from transformers_neuronx.sampling import ForSampling


def families() -> list[str]:
    """The folders beside this file that hold a family."""
    return sorted(path.parent.name for path in Path(__file__).parent.glob("*/model.py"))


def family_of(model_type: str) -> type[ForSampling]:
    """The sampling class for a configuration's `model_type`: "gpt_neox" is in the folder gptneox."""
    name = re.sub(r"[^a-z0-9]", "", model_type.lower())
    if name not in families():
        raise ConfigError(f"model_type {model_type!r} is of no family here; there are {', '.join(families())}")
    module = importlib.import_module(f"transformers_neuronx.{name}.model")
    return next(
        value
        for value in vars(module).values()
        if isinstance(value, type) and issubclass(value, ForSampling) and value.__module__ == module.__name__
    )


class NeuronAutoModelForCausalLM:
    """Makes the model of whatever family a checkpoint is of."""

    @staticmethod
    def from_pretrained(path_or_name: PathOrName, **options: Any) -> ForSampling:
        """As `from_pretrained` of the family's own class, with its options."""
        cls = class_of(load_config(path_or_name, options.get("cache_dir")), path_or_name)
        if issubclass(cls, EncoderDecoderForSampling):
            raise ConfigError(f"{cls.__name__} has an encoder: NeuronAutoModelForSeq2SeqLM makes it")
        return cls.from_pretrained(path_or_name, **options)


class NeuronAutoModelForSeq2SeqLM:
    """The same for families that have an encoder."""

    @staticmethod
    def from_pretrained(path_or_name: PathOrName, **options: Any) -> EncoderDecoderForSampling:
        """As `from_pretrained` of the family's own class, with its options."""
        cls = class_of(load_config(path_or_name, options.get("cache_dir")), path_or_name)
        if not issubclass(cls, EncoderDecoderForSampling):
            raise ConfigError(f"{cls.__name__} has no encoder: NeuronAutoModelForCausalLM makes it")
        return cls.from_pretrained(path_or_name, **options)


def class_of(attributes: Mapping[str, Any], path_or_name: PathOrName) -> type[ForSampling]:
    """The sampling class for the configuration of a checkpoint or an artifact."""
    model_type = attributes.get("model_type")
    if not isinstance(model_type, str):
        raise ConfigError(f"the configuration of {os.fspath(path_or_name)} has no model_type to go by")
    return family_of(model_type)
