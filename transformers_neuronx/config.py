"""What a user may ask for, frozen and checked when made, and how a Hugging Face configuration is read."""

from __future__ import annotations

import copy
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar, Self

from transformers_neuronx.attributes import may_be_read, mention, quantized_with
from transformers_neuronx.errors import ConfigError
from transformers_neuronx.switches import (
    ContinuousBatchingConfig as ContinuousBatchingConfig,
    GenerationConfig as GenerationConfig,
    KVCacheQuantizationConfig as KVCacheQuantizationConfig,
    NeuronConfig as NeuronConfig,
    QuantizationConfig as QuantizationConfig,
)

WHOLE = "whole"  # a context length estimate: as long as the longest sequence
AMP = ("f32", "bf16", "f16")
# As many as a trn2 instance has cores, and no place has more. Virtual devices are threads of one processor that wait
# for each other at every sum: 64 begin in seconds, and with a thousand XLA ends the process after a minute and a half.
MOST_DEVICES = 64


@dataclass(frozen=True)
class Buckets:
    """The sizes that programs are compiled for.

    `positions`: how far back a program can look, ascending; the last is the longest sequence. `context`: how many
    prompt tokens one program takes, ascending; empty means one by one. `sources`: those of an encoder.
    """

    positions: tuple[int, ...]
    context: tuple[int, ...]
    sources: tuple[int, ...] = ()

    @staticmethod
    def of(n_positions: int | Sequence[int], context_length_estimate: int | Sequence[int] | str | None) -> Buckets:
        """A number of positions stands for 128, 256, … up to it, a list for itself.

        A context length estimate is a number or a list; None means half of each position bucket, 0 none at all,
        and WHOLE one as long as the longest sequence.
        """
        if isinstance(n_positions, int):
            powers = [1 << i for i in range(7, n_positions.bit_length()) if 1 << i < n_positions]
            positions = (*powers, n_positions)
        else:
            positions = tuple(sorted(set(n_positions)))
        if context_length_estimate is None:
            context = tuple(sorted({-(-size // 2) for size in positions}))
        elif isinstance(context_length_estimate, str):
            context = positions[-1:]
        elif isinstance(context_length_estimate, int):
            context = (context_length_estimate,) if context_length_estimate > 0 else ()
        else:
            context = tuple(sorted(set(context_length_estimate)))
        return Buckets(positions, context)

    def __post_init__(self) -> None:
        if not self.positions or self.positions[0] < 1:
            raise ConfigError(f"n_positions wants one or more positive sizes, got {list(self.positions)}")
        if self.context and not 1 <= self.context[0] <= self.context[-1] <= self.positions[-1]:
            raise ConfigError(
                f"context_length_estimate wants sizes from 1 to n_positions={self.positions[-1]}, "
                f"got {list(self.context)}"
            )

    @property
    def longest(self) -> int:
        return self.positions[-1]

    def width(self, needed: int) -> int:
        """The smallest position bucket with `needed` positions."""
        return next(size for size in self.positions if size >= needed)

    def active(self, tokens: int) -> int:
        """The context bucket for `tokens` prompt tokens: the smallest that takes them, or the largest there is."""
        return next((size for size in self.context if size >= tokens), self.context[-1] if self.context else 1)


@dataclass(frozen=True)
class CompileOptions:
    """What programs are compiled for: sequences and prompts at once, element type, devices, layers per program, and
    tokens of one loop on the devices, 0 for none; and how many are compiled at once, None for one per processor.
    """

    buckets: Buckets
    batch_size: int = 1
    prompt_batch_size: int = 1
    amp: str = "f32"
    tp_degree: int = 1
    unroll: int | None = None
    context_unroll: int | None = None
    chunk: int = 32
    workers: int | None = None
    quant: QuantizationConfig | None = None
    kv_cache_quant: KVCacheQuantizationConfig | None = None

    def __post_init__(self) -> None:
        if self.amp not in AMP:
            raise ConfigError(f"amp wants one of {', '.join(AMP)}, got {self.amp!r}")
        for name in ("batch_size", "prompt_batch_size", "unroll", "context_unroll"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise ConfigError(f"{name} wants a positive number, got {value}")
        check_degree(self.tp_degree)
        if self.batch_size % self.prompt_batch_size:
            raise ConfigError(
                f"batch_size={self.batch_size} wants to be a multiple of prompt_batch_size={self.prompt_batch_size}"
            )

    @property
    def repeats(self) -> int:
        """How many sequences each prompt serves."""
        return self.batch_size // self.prompt_batch_size


def check_degree(degree: int) -> None:
    """Raise ConfigError unless it is a number of devices that a model may be split over."""
    if not 1 <= degree <= MOST_DEVICES:
        most = f"{MOST_DEVICES}, which is as many devices as the largest instance has"
        raise ConfigError(f"tp_degree must be from 1 to {most}, got {degree}")


# Attributes of a Hugging Face configuration that change nothing in the maths of a decoder at inference: those that
# Transformers' code has some other use for, and those that older versions wrote to the files of every model.
INERT = frozenset(
    """
    _commit_hash _name_or_path architectures attention_dropout attn_implementation attn_pdrop bos_token_id
    chunk_size_feed_forward classifier_dropout dtype embd_pdrop gradient_checkpointing hidden_dropout id2label
    initializer_range is_decoder is_encoder_decoder keys_to_ignore_at_inference label2id model_type name_or_path
    output_attentions output_hidden_states pad_token_id problem_type resid_pdrop return_dict summary_activation
    summary_first_dropout summary_proj_to_labels summary_type summary_use_proj torch_dtype transformers_version
    use_cache

    _attn_implementation_autoset auto_map finetuning_task predict_special_tokens prefix sep_token_id
    task_specific_params tokenizer_class torchscript use_bfloat16
    """.split()
)
_REQUIRED = object()


def hf(attribute: str, default: Any = _REQUIRED, among: Collection[Any] | None = None) -> Any:
    """A field of a `ModelConfig` that is read from a Hugging Face attribute, of which `among` may list the values.

    `default` is for configurations that have None there; a function gets the attributes.
    """
    return field(metadata=dict(attribute=attribute, default=default, among=among))


class Completed(dict[str, Any]):
    """Attributes as Transformers reads them: defaults filled in, and today's names in place of older ones."""


def completed(attributes: Mapping[str, Any]) -> Completed:
    """The attributes, completed if they are not."""
    if isinstance(attributes, Completed):
        return attributes
    from transformers import CONFIG_MAPPING  # seconds to import, and not needed to write graphs or to load artifacts

    model_type = str(attributes.get("model_type"))
    if model_type not in CONFIG_MAPPING:
        raise ConfigError(f"the configuration has model_type={model_type!r}, which Transformers does not know")
    try:
        # a copy, since Transformers writes into what it is given
        return Completed(CONFIG_MAPPING[model_type].from_dict(copy.deepcopy(dict(attributes))).to_dict())
    except Exception as error:  # whatever Transformers' checks raise
        raise ConfigError(f"Transformers does not take the {model_type} configuration: {error}") from error


@dataclass(frozen=True)
class ModelConfig:
    """What a family needs to know of a Hugging Face configuration: fields made with `hf`.

    FIXED are attributes supported at one value only; WITHOUT_EFFECT are further ones that change nothing. Both add to
    those of the base classes.
    """

    eos_token_id: int | list[int] | None = hf("eos_token_id", None)

    # Here they are for what other code than Transformers' gives a meaning.
    FIXED: ClassVar[Mapping[str, Any]] = {"is_causal": True, "dual_chunk_attention_config": None}
    WITHOUT_EFFECT: ClassVar[frozenset[str]] = frozenset()

    @classmethod
    def from_hf(cls, attributes: Mapping[str, Any]) -> Self:
        """Read the attributes. One that is unknown here is refused, unless Transformers' own code does not read it
        either: that is mentioned in the log.
        """
        attributes = completed(attributes)
        family = str(attributes["model_type"])
        if stored := quantized_with(attributes):
            raise ConfigError(
                f"the {family} checkpoint is quantized ({stored}), and weights in that form cannot be read; load the "
                "checkpoint that it was made from, with a QuantizationConfig for weights in fewer bits"
            )
        values = {f.name: _read(family, attributes, **f.metadata) for f in fields(cls)}
        fixed = {name: only for base in reversed(cls.__mro__) for name, only in vars(base).get("FIXED", {}).items()}
        inert = INERT.union(*(vars(base).get("WITHOUT_EFFECT", ()) for base in cls.__mro__))
        for name, only in fixed.items():
            _read(family, attributes, name, only, [only])
        known = {f.metadata["attribute"] for f in fields(cls)}.union(fixed, inert)
        unknown = {n: v for n, v in sorted(attributes.items()) if n not in known and v is not None}
        if refused := {name: value for name, value in unknown.items() if may_be_read(family, name)}:
            listed = ", ".join(f"{name}={value!r}" for name, value in refused.items())
            raise ConfigError(f"the {family} configuration has attributes that are not supported: {listed}")
        read = cls(**values)
        mention(family, unknown)
        return read


def _read(
    family: str, attributes: Mapping[str, Any], attribute: str, default: Any, among: Collection[Any] | None
) -> Any:
    value = attributes.get(attribute)
    if value is None:
        value = default(attributes) if callable(default) else default
    if value is _REQUIRED:
        raise ConfigError(f"the {family} configuration lacks {attribute!r}")
    if among is not None and any(one not in among for one in (value if isinstance(value, list) else [value])):
        raise ConfigError(
            f"the {family} configuration has {attribute}={value!r}; supported: {', '.join(map(repr, among))}"
        )
    return value


def token_ids(value: int | Sequence[int] | None) -> list[int]:
    """Token ids as configurations have them: none, one or several; -1 is none."""
    return [i for i in ([] if value is None else [value] if isinstance(value, int) else value) if i >= 0]
