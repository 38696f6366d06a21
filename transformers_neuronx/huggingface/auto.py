"""Finds the family of a checkpoint by import, so there is no list to edit."""

from __future__ import annotations

import functools
import importlib
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers_neuronx.errors import ConfigError
from transformers_neuronx.families import SAME_AS
from transformers_neuronx.models.encoder_decoder import EncoderDecoderForSampling
from transformers_neuronx.models.sampling import ForSampling
from transformers_neuronx.models.vision import VisionForSampling
from transformers_neuronx.support.arguments import path_in
from transformers_neuronx.weights.directories import PathOrName, load_config


def families() -> list[str]:
    """List the folders of the package that hold a family, and the files in `families`, which are one each."""
    return sorted(_modules())


@functools.cache
def _modules() -> dict[str, str]:
    """Return the module with the class of each family."""
    package = Path(__file__).parents[1]
    folders = (path.parent for path in package.glob("*/model.py"))
    files = (path for path in package.glob("families/*.py") if path.stem != "__init__")
    return {path.name: f"{path.name}.model" for path in folders} | {
        path.stem: f"families.{path.stem}" for path in files
    }


def _module_name(model_type: str) -> str:
    name = re.sub(r"[^a-z0-9]", "", model_type.lower())
    return SAME_AS.get(name, name)


def family_of(model_type: str) -> type[ForSampling]:
    """Return the sampling class of a configuration's `model_type`; "gpt_neox" is in the folder gptneox."""
    name = _module_name(model_type)
    if name not in _modules():
        known = ", ".join(sorted([*families(), *SAME_AS]))
        raise ConfigError(f"model_type {model_type!r} is not supported; expected one of {known}")
    module = importlib.import_module(f"transformers_neuronx.{_modules()[name]}")
    return next(
        value
        for value in vars(module).values()
        if isinstance(value, type) and issubclass(value, ForSampling) and value.__module__ == module.__name__
    )


def reads_images(model_type: str) -> bool:
    """Whether there is a family of this `model_type` that reads images."""
    return _module_name(model_type) in _modules() and family_of(model_type).family.images


class NeuronAutoModelForCausalLM:
    """Makes models from checkpoints of decoder-only families."""

    @staticmethod
    def from_pretrained(path_or_name: PathOrName | None = None, *values: Any, **options: Any) -> ForSampling:
        """Call `from_pretrained` of the family's class, with its options."""
        path_or_name = path_in(path_or_name, options)
        cls = class_of(load_config(path_or_name, options.get("cache_dir")), path_or_name)
        if issubclass(cls, EncoderDecoderForSampling):
            raise ConfigError(f"{cls.__name__} has an encoder; use NeuronAutoModelForSeq2SeqLM")
        return cls.from_pretrained(path_or_name, *values, **options)


class NeuronAutoModelForSeq2SeqLM:
    """Makes models from checkpoints of encoder-decoder families."""

    @staticmethod
    def from_pretrained(
        path_or_name: PathOrName | None = None, *values: Any, **options: Any
    ) -> EncoderDecoderForSampling:
        """Call `from_pretrained` of the family's class, with its options."""
        path_or_name = path_in(path_or_name, options)
        cls = class_of(load_config(path_or_name, options.get("cache_dir")), path_or_name)
        if not issubclass(cls, EncoderDecoderForSampling):
            raise ConfigError(f"{cls.__name__} has no encoder; use NeuronAutoModelForCausalLM")
        return cls.from_pretrained(path_or_name, *values, **options)


class NeuronAutoModelForImageTextToText:
    """Makes models from checkpoints of families that read images.

    `NeuronAutoModelForCausalLM` makes one of their text half, without the tower for images.
    """

    @staticmethod
    def from_pretrained(path_or_name: PathOrName | None = None, *values: Any, **options: Any) -> VisionForSampling:
        """Call `from_pretrained` of the family's class, with its options."""
        path_or_name = path_in(path_or_name, options)
        attributes = load_config(path_or_name, options.get("cache_dir"), images=True)
        cls = class_of(attributes, path_or_name)
        if not issubclass(cls, VisionForSampling):
            raise ConfigError(f"{cls.__name__} reads no images; use NeuronAutoModelForCausalLM")
        return cls.from_pretrained(path_or_name, *values, **options)


def class_of(attributes: Mapping[str, Any], path_or_name: PathOrName) -> type[ForSampling]:
    """Return the sampling class for the configuration of a checkpoint or an artifact."""
    model_type = attributes.get("model_type")
    if not isinstance(model_type, str):
        raise ConfigError(f"the configuration of {os.fspath(path_or_name)} has no model_type")
    return family_of(model_type)
