"""What a GGUF file says of its model, read with the type that each value must have."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from transformers_neuronx.errors import CheckpointError

# Architectures, and the model types of Transformers that they are. Mistral's and Mixtral's are llama, too, and OLMo 3's
# is olmo2. Qwen3-Next is Qwen 3.5 with experts, with the same matrices in fewer tensors.
ARCHITECTURES = dict(
    gemma="gemma", gemma2="gemma2", gemma3="gemma3_text", gemma4="gemma4_text", gpt2="gpt2", granite="granite",
    lfm2="lfm2", llama="llama", mistral3="ministral3", olmo2="olmo2", phi3="phi3", qwen2="qwen2", qwen3="qwen3",
    qwen35="qwen3_5_text", qwen35moe="qwen3_5_moe_text", qwen3moe="qwen3_moe", qwen3next="qwen3_5_moe_text",
    seed_oss="seed_oss", smollm3="smollm3",
) | {"gpt-oss": "gpt_oss"}  # fmt: skip
# Texts of tokens that end a text, a turn, or a call of a tool, also in llama.cpp: files name one or two of these.
ENDS = frozenset(
    """
    <eos> </s> <|endoftext|> <|end_of_text|> <|im_end|> <|eot_id|> <|eom_id|> <|end|> <|return|> <|call|> <end_of_turn>
    <turn|> <|tool_response>
    """.split()
)
AGAIN = "download or convert it again"
OTHER = "take another model"
_REQUIRED: Any = object()


@dataclass(frozen=True)
class Described:
    """What a file says of its model: metadata, shapes of tensors, what reads the numbers of a small tensor, and what
    finds tokens by their texts.
    """

    path: str
    metadata: Mapping[str, Any]
    shapes: Mapping[str, tuple[int, ...]]
    numbers: Callable[[str], Sequence[float]]
    find_tokens: Callable[[Collection[str]], Sequence[int]]

    def refused(self, wrong: str, advice: str = AGAIN) -> CheckpointError:
        return CheckpointError(f"{self.path}: {wrong}; {advice}")

    @property
    def architecture(self) -> str:
        kind, name = self._value("general.type", str, "model"), self._value("general.architecture", str)
        if kind != "model":
            raise self.refused(f"expected a model, found a file of type {kind!r}", "pass the model's own file")
        if name not in ARCHITECTURES:
            listed = ", ".join(ARCHITECTURES)
            raise self.refused(f"the architecture {name!r} cannot be read: supported are {listed}", OTHER)
        return str(name)

    @property
    def model_type(self) -> str:
        """The model type in Transformers."""
        if self.architecture == "llama" and self.whole("expert_count", 0):
            return "mixtral"
        name = ARCHITECTURES[self.architecture]
        if name == "ministral3" and self.text("rope.scaling.type", "none") != "yarn":
            return "mistral"
        return dict(llama="mistral", olmo2="olmo3").get(name, name) if self.window else name

    @property
    def layers(self) -> int:
        """The model's layers. Files may have some more at the end, which guess tokens."""
        all_layers, guessing = self.whole("block_count"), self.whole("nextn_predict_layers", 0)
        if guessing >= all_layers:
            raise self.refused(f"the metadata has {guessing} layers that guess tokens, of {all_layers}")
        return all_layers - guessing

    @property
    def window(self) -> int | None:
        """The most positions that attention reads, with a token's own; None: no limit."""
        return self.whole("attention.sliding_window", 4096 if self.architecture == "gemma2" else 0) or None

    def whole(self, key: str, default: int = _REQUIRED) -> int:
        """Return a number of the model's metadata: a positive one, or the default."""
        full = f"{self.architecture}.{key}"
        found = self._value(full, int, default)
        if not (1 <= found < 1 << 40 or found == default):
            raise self.refused(f"the metadata has {full!r} = {found}, expected a positive number")
        return int(found)

    def of_layers(self, key: str, default: Sequence[int] = _REQUIRED) -> list[int]:
        """Return a number of each layer, zero or more: one of the metadata for all, or a list; or the default."""
        full, count = f"{self.architecture}.{key}", self.whole("block_count")
        found = self._value(full, (int, list), default)
        numbers = found if isinstance(found, Sequence) else [found] * count
        if len(numbers) != count or not all(isinstance(number, int) and number >= 0 for number in numbers):
            raise self.refused(f"the metadata has {full!r} = {str(found)[:60]}, expected {count} numbers")
        return [int(number) for number in numbers]

    def real(self, key: str, default: float = _REQUIRED) -> float:
        """Return a number of the model's metadata as it was before it was rounded to f32: positive, or the default."""
        full = f"{self.architecture}.{key}"
        found = self._value(full, (float, int), default)
        if not (found == default or (math.isfinite(found) and found > 0)):
            raise self.refused(f"the metadata has {full!r} = {found}, expected a positive number")
        return _decimal(found)

    def text(self, key: str, default: str) -> str:
        return str(self._value(f"{self.architecture}.{key}", str, default))

    def token(self, name: str) -> int | None:
        """Return the number of a special token, if the file has it."""
        found = self._value(f"tokenizer.ggml.{name}_token_id", int, -1)
        return int(found) if found >= 0 else None

    @property
    def ends(self) -> list[int]:
        """The tokens that end a text, a turn, or a call of a tool: by the metadata, and then by their texts."""
        named = [end for end in map(self.token, ("eos", "eot", "eom")) if end is not None]
        texts = ENDS - {"<|end|>"} if self.architecture == "gpt-oss" else ENDS  # there, it ends a part of an answer
        return list(dict.fromkeys([*named, *self.find_tokens(texts)]))

    def _value(self, key: str, kind: type | tuple[type, ...], default: Any = _REQUIRED) -> Any:
        found = self.metadata.get(key, default)
        if found is _REQUIRED:
            raise self.refused(f"the metadata lacks {key!r}")
        if not isinstance(found, kind) or isinstance(found, bool):
            wanted = "text" if kind is str else "numbers" if kind == (int, list) else "one number"
            raise self.refused(f"the metadata has {key!r} = {str(found)[:60]}, expected {wanted}")
        return found


def _decimal(number: float) -> float:
    """Return the shortest decimal number with the same f32; the number itself if it is not one in f32."""
    if abs(number) > 3e38 or struct.unpack("f", struct.pack("f", number))[0] != number:
        return float(number)
    shorter = (float(f"{number:.{digits}g}") for digits in range(1, 10))
    return next(each for each in shorter if struct.pack("f", each) == struct.pack("f", number))
