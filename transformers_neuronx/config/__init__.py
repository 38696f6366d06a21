"""Options for compilation, checked when they are made, and the reading of Hugging Face configurations."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, ClassVar, Self

from transformers_neuronx.config.attributes import may_be_read, mention, quantized_with, with_defaults
from transformers_neuronx.config.multimodal import both_halves, text_half
from transformers_neuronx.config.published import form_of
from transformers_neuronx.config.sparse_attention import Pattern
from transformers_neuronx.config.switches import (
    Blocks as Blocks,
    ContinuousBatchingConfig as ContinuousBatchingConfig,
    GenerationConfig as GenerationConfig,
    KVCacheQuantizationConfig as KVCacheQuantizationConfig,
    NeuronConfig as NeuronConfig,
    QuantizationConfig as QuantizationConfig,
)
from transformers_neuronx.config.workers import Workers as Workers
from transformers_neuronx.errors import ConfigError

WHOLE = "whole"  # a context length estimate: as long as the longest sequence
OUTPUTS = "neuronx_outputs"  # the attribute that says what a model has after its last norm, if that is no output layer
AMP = ("f32", "bf16", "f16")
_AMP_OF = {"float32": "f32", "bfloat16": "bf16", "float16": "f16"}
# The cores of a trn2 instance; no machine has more. Virtual devices are threads of one processor that wait for each
# other at every sum: 64 start in seconds, but with a thousand XLA aborts the process after a minute and a half.
MOST_DEVICES = 64


@dataclass(frozen=True)
class Buckets:
    """The sizes that programs are compiled for.

    `positions`: numbers of positions that a program attends to, ascending; the last is the longest sequence.
    `context`: numbers of prompt tokens per program, ascending; empty means one by one. `sources`: those of an encoder.
    """

    positions: tuple[int, ...]
    context: tuple[int, ...]
    sources: tuple[int, ...] = ()

    @staticmethod
    def of(n_positions: int | Sequence[int], context_length_estimate: int | Sequence[int] | str | None) -> Buckets:
        """Make buckets: a number of positions means 128, 256, … up to it; a list is used unchanged.

        A context length estimate is a number or a list. None means half of each position bucket, 0 no context bucket,
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
            raise ConfigError(f"n_positions must be one or more positive sizes, got {list(self.positions)}")
        if self.context and not 1 <= self.context[0] <= self.context[-1] <= self.positions[-1]:
            raise ConfigError(
                f"context_length_estimate must be sizes from 1 to n_positions={self.positions[-1]}, "
                f"got {list(self.context)}"
            )

    @property
    def longest(self) -> int:
        return self.positions[-1]

    def width(self, needed: int) -> int:
        """Return the smallest position bucket with `needed` positions."""
        return next(size for size in self.positions if size >= needed)

    def active(self, tokens: int) -> int:
        """Return the context bucket for `tokens` prompt tokens: the smallest that fits them, else the largest."""
        return next((size for size in self.context if size >= tokens), self.context[-1] if self.context else 1)


@dataclass(frozen=True)
class CompileOptions:
    """Options of compilation: sequences and prompts at once, element type, devices, layers per program, and tokens of
    one loop on the devices (0: no loop). `workers` programs are compiled at once; None means one per processor. With
    `blocks`, the cache has these instead of slots. `head` is whether there is an output layer, and `score` the sizes of
    a score head, [labels, h], if there is one, which is of the output layer's rows of `score_tokens`, if there are any.
    `patches` are the sizes that a tower for images is compiled for.
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
    sparse: Pattern | None = None
    shard_over_sequence: bool = False
    expert_parallel: bool = False
    blocks: Blocks | None = None
    head: bool = True
    score: tuple[int, int] | None = None
    score_tokens: tuple[int, ...] = ()
    patches: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.amp not in AMP:
            raise ConfigError(f"amp must be one of {', '.join(AMP)}, got {self.amp!r}")
        for name in ("batch_size", "prompt_batch_size", "unroll", "context_unroll"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise ConfigError(f"{name} must be a positive number, got {value}")
        check_degree(self.tp_degree)
        if self.batch_size % self.prompt_batch_size:
            raise ConfigError(
                f"batch_size must be a multiple of prompt_batch_size={self.prompt_batch_size}, got {self.batch_size}"
            )

    @property
    def repeats(self) -> int:
        """Number of sequences for each prompt."""
        return self.batch_size // self.prompt_batch_size


def amp_and_quant(
    amp: str | None, dtype: Any, quant: QuantizationConfig | None
) -> tuple[str, QuantizationConfig | None]:
    """Return the types of activations and weights. Without `amp`, activations have the `dtype` of the checkpoint.

    The original's "f32-u8-bf16" means activations in f32 and weights in 8 bits, which are read as bf16. Here such
    weights are s8 with a scale for each output, closer to the checkpoint than one range for a whole matrix.
    """
    if amp is None:
        return _AMP_OF.get(str(dtype).removeprefix("torch."), "f32"), quant
    both = re.fullmatch(rf"({'|'.join(AMP)})-u8-({'|'.join(AMP)})", amp)
    return (both[1], quant or QuantizationConfig(dequant_dtype=both[2])) if both else (amp, quant)


def check_degree(degree: int) -> None:
    """Raise ConfigError unless a model may be split over this number of devices."""
    if not 1 <= degree <= MOST_DEVICES:
        most = f"{MOST_DEVICES}, the number of devices of the largest instance"
        raise ConfigError(f"tp_degree must be from 1 to {most}, got {degree}")


# Attributes of a Hugging Face configuration that do not affect a decoder's inference: those that Transformers' code
# uses for something else, and those that older versions wrote to the files of every model.
INERT = frozenset(
    """
    _commit_hash _name_or_path architectures attention_dropout attn_implementation attn_pdrop bos_token_id
    chunk_size_feed_forward classifier_dropout dtype embd_pdrop gradient_checkpointing hidden_dropout id2label
    initializer_range is_decoder is_encoder_decoder keys_to_ignore_at_inference label2id model_type name_or_path
    output_attentions output_hidden_states pad_token_id problem_type resid_pdrop return_dict summary_activation
    summary_first_dropout summary_proj_to_labels summary_type summary_use_proj torch_dtype transformers_version
    use_cache quantization_config

    _attn_implementation_autoset auto_map finetuning_task predict_special_tokens prefix sep_token_id
    task_specific_params tokenizer_class torchscript use_bfloat16
    """.split()
) | {OUTPUTS}
_REQUIRED = object()


def hf(attribute: str, default: Any = _REQUIRED, among: Collection[Any] | None = None) -> Any:
    """Declare a field of a `ModelConfig` that is read from a Hugging Face attribute; `among` lists supported values.

    `default` replaces None; a function is called with the attributes.
    """
    return field(metadata=dict(attribute=attribute, default=default, among=among))


class Completed(dict[str, Any]):
    """Attributes as Transformers reads them: with defaults, and with current names instead of older ones."""


def completed(config: Any, images: bool = False) -> Completed:
    """Return the attributes of a configuration, completed if they are not yet; of a multimodal model, those of its text
    half, or for a family that reads images, of both halves.
    """
    if isinstance(config, Completed):
        return config
    attributes: Mapping[str, Any] = config if isinstance(config, Mapping) else config.to_dict()
    if images:
        return Completed(both_halves(attributes))
    return Completed(with_defaults(text_half(attributes)))


class Configuration:
    """A model's configuration for its users: Hugging Face's attributes, and the fields that its family reads.

    All can be assigned, and others can be added. A model takes Hugging Face's from here when it is compiled.
    """

    def __init__(self, attributes: Completed) -> None:
        self.__dict__.update(attributes)
        self._names = tuple(attributes)

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...

    def __repr__(self) -> str:
        told = ", ".join(f"{name}={value!r}" for name, value in vars(self).items() if not name.startswith("_"))
        return f"{type(self).__name__}({told})"

    def complete(self, config: object) -> None:
        """Add the fields that a family has read, where there is no such attribute."""
        for name, value in vars(config).items():
            self.__dict__.setdefault(name, value)

    def note(self, name: str, value: Any) -> None:
        """Add an attribute, or give it another value."""
        self.__dict__[name] = value
        self._names = tuple(dict.fromkeys([*self._names, name]))

    def to_dict(self) -> Completed:
        """Return Hugging Face's attributes with the values that they have now."""
        return Completed((name, self.__dict__[name]) for name in self._names)


@dataclass(frozen=True)
class ModelConfig:
    """The fields of a Hugging Face configuration that a family needs, declared with `hf`.

    FIXED are attributes supported at one value only; WITHOUT_EFFECT are others that have no effect. Both add to those
    of the base classes.
    """

    eos_token_id: int | list[int] | None = hf("eos_token_id", None)

    # Attributes that code other than Transformers' uses.
    FIXED: ClassVar[Mapping[str, Any]] = {"is_causal": True, "dual_chunk_attention_config": None}
    WITHOUT_EFFECT: ClassVar[frozenset[str]] = frozenset()

    # What a layer keeps of a sequence. `layer_kinds`, if a family has them, are the kinds of its layers.

    def heads_of(self, kind: str) -> Any:
        """The `Heads` whose keys and values layers of this kind keep, for each position; None without attention."""
        return self.attention_heads  # type: ignore[attr-defined]

    def window_of(self, kind: str) -> int | None:
        """The most positions that attention of layers of this kind reads, with a token's own; None: no limit."""
        return None

    def states_of(self, kind: str) -> Sequence[Any]:
        """Each `State` that layers of this kind keep: arrays of a sequence that each step replaces."""
        return ()

    def source_of(self, layer: int) -> int:
        """The layer whose keys and values a layer reads: itself, or an earlier one; then its own kind keeps none."""
        return layer

    # Whether layers pass each other more than hidden states. Then one program has them all.
    undivided: ClassVar[bool] = False

    # What an encoder reads, if the family has one: token ids, or numbers, which it makes so many positions of.

    @property
    def source_sizes(self) -> tuple[int, ...]:
        """Sizes of a source of numbers; none if it is token ids."""
        return ()

    source_positions: ClassVar[int | None] = None

    @classmethod
    def from_hf(cls, attributes: Mapping[str, Any]) -> Self:
        """Read the attributes. An unknown attribute is refused, unless Transformers' own code does not read it either;
        then it is logged.
        """
        attributes = completed(attributes)
        family = str(attributes["model_type"])
        if (stored := quantized_with(attributes)) and form_of(attributes) is None:
            raise ConfigError(
                f"the {family} checkpoint is quantized ({stored}), and such weights cannot be read; load the original "
                "checkpoint, with a QuantizationConfig to quantize its weights, or one in FP8"
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
    """Return a configuration's token ids as a list; None and -1 mean none."""
    return [i for i in ([] if value is None else [value] if isinstance(value, int) else value) if i >= 0]
