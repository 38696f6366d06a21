"""Multimodal models of Transformers: the configuration of their text half, and the names of its tensors.

For text alone, such a model is a decoder of another family. Its tower for images, and what projects the tower's output
to the decoder's hidden states, are left out. Rotary positions in three parts (mrope) are plain ones for text. A family
that reads images has both halves: see `both_halves`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from transformers_neuronx.config.attributes import with_defaults
from transformers_neuronx.errors import ConfigError

# Types of models whose text half was compared with Transformers, or is once there is a folder of its family. Others
# are refused: text alone may be read in another way, as by PaliGemma, which attends to a prompt in both directions.
MODELS = frozenset(
    "gemma3 gemma4 idefics2 idefics3 internvl llama4 llava llava_next llava_onevision mistral3 qwen2_5_vl qwen2_vl "
    "qwen3_5 qwen3_5_moe qwen3_vl smolvlm vipllava".split()
)
FAMILIES = dict(qwen2_vl_text="qwen2", qwen2_5_vl_text="qwen2", qwen3_vl_text="qwen3")  # where the name differs

# What the whole model decides for its text half, if its configuration has it.
_OUTER = ("bos_token_id", "eos_token_id", "pad_token_id", "dtype", "torch_dtype", "quantization_config")
_IGNORED = ("ignore", "modules_to_not_convert", "llm_int8_skip_modules")  # lists of modules that are not quantized

# How names of the text half begin, and how those of a text model do. Bare models lack the first part.
_PREFIXES = {
    "model.language_model.": "model.",
    "language_model.model.": "model.",
    "language_model.lm_head.": "lm_head.",
    "language_model.": "model.",
    "model.text_model.": "model.",
    "text_model.": "model.",
}
_LEFT_OUT = re.compile(
    r"(?:model\.)?(visual|(?:vision|audio)_tower|vision_model|multi_modal_projector|connector|image_newline"
    r"|embed_vision|embed_audio)(\..*)?"
)


def text_half(attributes: Mapping[str, Any]) -> dict[str, Any]:
    """Return the attributes of a multimodal model's text half, as a configuration of its family; others as they are.

    Of what both halves have, the whole model decides on tied embeddings, types, special tokens and quantization.
    Raises ConfigError if Transformers rejects the configuration.
    """
    if attributes.get("model_type") not in MODELS:
        return dict(attributes)
    whole = with_defaults(attributes)
    text = whole.get("text_config")
    if not isinstance(text, dict):
        raise ConfigError(f"the {attributes['model_type']} configuration has no text_config; download it again")
    half = {name: value for name, value in text.items() if name != "architectures"}
    half |= {name: attributes[name] for name in _OUTER if attributes.get(name) is not None}
    half["model_type"] = FAMILIES.get(text["model_type"], text["model_type"])
    half["tie_word_embeddings"] = bool(whole.get("tie_word_embeddings"))
    if isinstance(half.get("rope_parameters"), dict):
        half["rope_parameters"] = _of_text(half["rope_parameters"])
    if isinstance(how := half.get("quantization_config"), dict):
        names = {part: [text_name(name) for name in how[part]] for part in _IGNORED if how.get(part)}
        half["quantization_config"] = how | names
    return half


def both_halves(attributes: Mapping[str, Any]) -> dict[str, Any]:
    """Return the attributes of a multimodal model with those of its text half beside them, for a family of the whole.

    Raises ConfigError as `text_half` does, and for a model that is not multimodal.
    """
    model_type = attributes.get("model_type")
    if model_type not in MODELS:
        raise ConfigError(f"a model of model_type={model_type!r} has no tower for images: load it as one for text")
    whole = {name: value for name, value in with_defaults(attributes).items() if value is not None}
    return whole | text_half(attributes) | dict(model_type=model_type)


def _of_text(rope: Mapping[str, Any]) -> dict[str, Any]:
    """Return rotary parameters for positions whose three parts are the same number."""
    return {name: "default" if value == "mrope" else value for name, value in rope.items()}


def text_name(name: str) -> str:
    """Return the name that a tensor or a module of a multimodal model's text half has in a text model."""
    prefix = next((prefix for prefix in _PREFIXES if name.startswith(prefix)), "")
    return _PREFIXES.get(prefix, "") + name.removeprefix(prefix)


def tower_name(name: str) -> str:
    """Return the name that a tensor of a part that is not the text half has: bare models lack the first part."""
    return "model." + name.removeprefix("model.")


def left_out(name: str) -> str | None:
    """Return the part of a multimodal model that a tensor belongs to, if it is not the text half."""
    match = _LEFT_OUT.fullmatch(name)
    return match and match[1]
