"""How quantized checkpoints are published, as their configurations say.

Three kinds are read: compressed-tensors with 8 bits, whole numbers or FP8; the FP8 of Qwen, DeepSeek and others, with a
scale for each block of a matrix; and files of GGUF, where each matrix has its own type. What they say of activations is
not followed: these stay in the model's type.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from transformers_neuronx.config.gguf import GGUF

QUANTIZATION = "quantization_config"  # the attribute of a configuration
TYPES = {"int": "s8", "float": "f8e4m3fn"}


@dataclass(frozen=True)
class Form:
    """How matrices are stored: their type, and how many outputs and inputs share a scale; None means all.

    `ignored` are names of modules that are not quantized, or patterns of them after "re:".
    """

    dtype: str
    block: tuple[int | None, int | None]
    ignored: tuple[str, ...]

    def ignores(self, module: str) -> bool:
        """Whether a module is not quantized."""

        def meant(name: str) -> bool:
            if name.startswith("re:"):
                return re.match(name.removeprefix("re:"), module) is not None
            return f"{module}.".startswith(f"{name}.") or f".{module}".endswith(f".{name}")

        return any(map(meant, self.ignored))


@dataclass(frozen=True)
class Mixed:
    """The ggml type of each matrix of a checkpoint, by its name."""

    kinds: Mapping[str, str]


def form_of(attributes: Mapping[str, Any]) -> Form | Mixed | None:
    """Return the form of a configuration's weights; None if they are not quantized, or in a way that is not read."""
    how = attributes.get(QUANTIZATION)
    if not isinstance(how, Mapping):
        return None
    forms = {"compressed-tensors": _compressed, "fp8": _fp8, GGUF: _gguf}
    return forms.get(str(how.get("quant_method")), lambda _: None)(how)


def _gguf(how: Mapping[str, Any]) -> Mixed | None:
    matrices = how.get("matrices")
    return Mixed(matrices) if isinstance(matrices, Mapping) else None


def _compressed(how: Mapping[str, Any]) -> Form | None:
    groups = [group.get("weights") or {} for group in how.get("config_groups", {}).values()]
    sparse = (how.get("sparsity_config") or {}).get("format", "dense") != "dense"
    packed = how.get("format") not in ("int-quantized", "float-quantized", "naive-quantized")
    if not groups or any(group != groups[0] for group in groups) or sparse or packed:
        return None
    weights, size = groups[0], groups[0].get("group_size")
    strategy = weights.get("strategy") or ("tensor" if size is None else "channel" if size < 0 else "group")
    blocks: dict[Any, tuple[int | None, int | None]] = dict(
        tensor=(None, None),
        channel=(1, None),
        group=(1, size),
        block=tuple(weights.get("block_structure") or (None, None)),
    )
    dtype, block = TYPES.get(str(weights.get("type"))), blocks.get(strategy)
    if weights.get("num_bits") != 8 or not weights.get("symmetric", True) or dtype is None or block is None:
        return None
    return Form(dtype, block, tuple(how.get("ignore") or ()))


def _fp8(how: Mapping[str, Any]) -> Form | None:
    if how.get("fmt", "e4m3") != "e4m3":
        return None
    outputs, inputs = how.get("weight_block_size") or (None, None)
    return Form(TYPES["float"], (outputs, inputs), (*(how.get("modules_to_not_convert") or ()), "lm_head"))
