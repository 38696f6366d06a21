"""Rotary position embeddings (Su et al., arXiv:2104.09864), with the types of scaling that Transformers has.

Frequencies are computed once, in f32, when a program is written. Only those of `dynamic` and `longrope` depend on the
length of a sequence, row by row.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import numpy as np

from transformers_neuronx import hlo
from transformers_neuronx.config import ModelConfig, hf
from transformers_neuronx.errors import ConfigError
from transformers_neuronx.layers.attention import Rotate
from transformers_neuronx.layers.step import Placed, Step
from transformers_neuronx.pyhlo import Tensor
from transformers_neuronx.weights.splits import Heads

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Rotary:
    """How queries and keys are rotated.

    The first `dim` features of each head are rotated. `parameters` are Transformers' `rope_parameters`;
    `max_positions` is the longest sequence of the configuration. A parameter that the rope type does not have is
    refused, because it might change the results.
    """

    dim: int
    parameters: Mapping[str, Any]
    max_positions: int

    def __post_init__(self) -> None:
        if self.kind not in ROPE_TYPES:
            raise ConfigError(f"rope_parameters has rope_type={self.kind!r}; supported: {', '.join(ROPE_TYPES)}")
        known = {*OF_EVERY_TYPE, *ROPE_TYPES[self.kind].keys}
        given = {name: value for name, value in self.parameters.items() if value is not None}
        if unknown := [f"{name}={value!r}" for name, value in given.items() if name not in known]:
            listed = ", ".join(unknown)
            raise ConfigError(f"rope_parameters of type {self.kind!r} have keys that are not supported: {listed}")
        if self.dim < 2 or self.dim % 2:
            raise ConfigError(f"rotary positions need an even number of a head's features, at least 2, got {self.dim}")

    @property
    def kind(self) -> str:
        return str(self.parameters.get("rope_type", "default"))

    @property
    def base(self) -> float:
        return self.of("rope_theta", 10000.0)

    def of(self, name: str, default: float | None = None) -> float:
        value = self.parameters.get(name)
        if value is None:
            value = default
        if value is None:
            raise ConfigError(f"rope_parameters of type {self.kind!r} lack {name!r}")
        return float(value)

    @property
    def original_positions(self) -> float:
        """Longest sequence before scaling."""
        return self.of("original_max_position_embeddings", self.max_positions)

    @property
    def stretch(self) -> float:
        return self.of("factor", self.max_positions / self.original_positions)

    def exponents(self) -> Array:
        return np.arange(0, self.dim, 2, dtype=np.float32) / np.float32(self.dim)

    def plain(self) -> Array:
        """Frequencies without scaling, f32[dim / 2]."""
        return (1.0 / np.float32(self.base) ** self.exponents()).astype(np.float32)


@dataclass(frozen=True)
class RotaryConfig(ModelConfig):
    """Common fields of the configurations of decoders with rotary positions."""

    vocab_size: int = hf("vocab_size")
    max_positions: int = hf("max_position_embeddings")
    hidden_size: int = hf("hidden_size")
    n_layer: int = hf("num_hidden_layers")
    n_head: int = hf("num_attention_heads")
    n_kv_head: int = hf("num_key_value_heads", lambda attributes: attributes["num_attention_heads"])
    head_dim: int = hf("head_dim", lambda attributes: attributes["hidden_size"] // attributes["num_attention_heads"])
    inner_size: int = hf("intermediate_size")
    eps: float = hf("rms_norm_eps")
    rope: dict[str, Any] = hf("rope_parameters")

    # Transformers also has them in rope_parameters.
    WITHOUT_EFFECT: ClassVar = frozenset({"original_max_position_embeddings", "partial_rotary_factor"})
    n_positions: ClassVar[int | None] = None  # no embeddings of positions are learned

    def __post_init__(self) -> None:
        rotaries(self)  # refuses unsupported parameters

    @property
    def attention_heads(self) -> Heads:
        return Heads(self.n_head, self.n_kv_head, self.head_dim)

    @property
    def rotary(self) -> Rotary:
        return self.rotary_with(self.rope)

    def rotary_with(self, parameters: Mapping[str, Any]) -> Rotary:
        """Return the rotation with these `rope_parameters`."""
        return Rotary(int(self.head_dim * parameters.get("partial_rotary_factor", 1.0)), parameters, self.max_positions)

    def rotary_of(self, kind: str) -> Rotary | None:
        """The rotation in layers of this kind; None if these have none."""
        return self.rotary


def rotaries(config: Any) -> dict[str, Rotary | None]:
    """Return how layers of each kind rotate queries and keys; None for kinds that do not."""
    kinds = dict.fromkeys(getattr(config, "layer_kinds", [""]))
    if isinstance(config, RotaryConfig):
        return {kind: config.rotary_of(kind) for kind in kinds}
    return dict.fromkeys(kinds, getattr(config, "rotary", None))


def frequencies_in_checkpoints(config: Any) -> list[str]:
    """Patterns of the names under which older checkpoints of models with rotary positions store frequencies.

    They follow from the configuration, so they are not read.
    """
    return [r"(.*\.)?rotary_emb\.inv_freq"] if any(rotaries(config).values()) else []


def rotation_group(config: Any, length: int) -> int:
    """Return a number that is the same for prompts of two lengths if their keys are rotated alike."""
    kept = {rotary.kind: rotary for rotary in rotaries(config).values() if rotary}
    if "dynamic" in kept:
        return max(length, kept["dynamic"].max_positions)
    return int("longrope" in kept and length > kept["longrope"].original_positions)


def _default(r: Rotary, end: Tensor) -> Array | Tensor:
    return r.plain()


def _linear(r: Rotary, end: Tensor) -> Array | Tensor:
    return r.plain() / np.float32(r.of("factor"))


def _llama3(r: Rotary, end: Tensor) -> Array | Tensor:
    """Scale long wavelengths, keep short ones, and blend those in between, if there are any."""
    low, high = r.of("low_freq_factor"), r.of("high_freq_factor")
    turns = r.original_positions * r.plain() / (2 * math.pi)
    kept = np.clip((turns - low) / (high - low), 0, 1) if high > low else np.float32(turns > low)
    return np.asarray(r.plain() * (kept + (1 - kept) / r.of("factor")), np.float32)


def _yarn(r: Rotary, end: Tensor) -> Array | Tensor:
    """YaRN (Peng et al., arXiv:2309.00071)."""

    def dimension(turns: float) -> float:
        return r.dim * math.log(r.original_positions / (turns * 2 * math.pi)) / (2 * math.log(r.base))

    low, high = dimension(r.of("beta_fast", 32)), dimension(r.of("beta_slow", 1))
    if r.parameters.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, r.dim - 1)
    span = high - low or 0.001
    stretched = np.clip((np.arange(r.dim // 2, dtype=np.float32) - low) / span, 0, 1)
    return np.asarray(r.plain() * (1 - stretched + stretched / r.stretch), np.float32)


def _dynamic(r: Rotary, end: Tensor) -> Array | Tensor:
    """Grow the base with the sequence, once it is longer than those in training."""
    longest = float(r.max_positions)
    length = hlo.maximum(hlo.convert(end, "f32"), longest)  # [b]
    factor = r.of("factor")
    growth = hlo.power(length * (factor / longest) - (factor - 1), r.dim / (r.dim - 2))
    exponents = hlo.constant(-r.exponents(), "f32")
    return hlo.exp(hlo.reshape(hlo.log(growth * r.base), -1, 1) * exponents)  # [b, dim / 2]


def _longrope(r: Rotary, end: Tensor) -> Array | Tensor:
    """Use different frequencies for long and for short sequences (Ding et al., arXiv:2402.13753)."""
    short, long = (
        hlo.constant(r.plain() / np.asarray(r.parameters[name], np.float32), "f32")
        for name in ("short_factor", "long_factor")
    )
    beyond = hlo.reshape(end > int(r.original_positions), -1, 1)
    return hlo.select(beyond, hlo.reshape(long, 1, -1), hlo.reshape(short, 1, -1))  # [b, dim / 2]


def _proportional(r: Rotary, end: Tensor) -> Array | Tensor:
    """Rotate the share of the features that turns fastest, as they would turn without the others, which do not."""
    turning = np.arange(r.dim // 2) < int(r.of("partial_rotary_factor", 1.0) * r.dim // 2)
    return np.where(turning, r.plain() / np.float32(r.of("factor", 1.0)), np.float32(0))


class RopeType(NamedTuple):
    """The function of the frequencies, f32[dim / 2] or [b, dim / 2], and the `rope_parameters` that it reads."""

    frequencies: Callable[[Rotary, Tensor], Array | Tensor]
    keys: tuple[str, ...] = ()


# `type` is an older name of `rope_type`; Transformers adds the newer one and keeps both. `mrope_…` says how positions
# with three parts rotate features: for text, the parts are the same.
OF_EVERY_TYPE = ("rope_type", "type", "rope_theta", "partial_rotary_factor", "mrope_section", "mrope_interleaved")
_FROM, _MAGNITUDE = "original_max_position_embeddings", "attention_factor"
ROPE_TYPES = {
    "default": RopeType(_default),
    "linear": RopeType(_linear, ("factor",)),
    "dynamic": RopeType(_dynamic, ("factor",)),
    # `finetuned` is in the files of YaRN's authors; it says how the checkpoint was made.
    "yarn": RopeType(
        _yarn,
        ("factor", _FROM, _MAGNITUDE, "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate", "finetuned"),
    ),
    "llama3": RopeType(_llama3, ("factor", _FROM, "low_freq_factor", "high_freq_factor")),
    "longrope": RopeType(_longrope, ("factor", _FROM, _MAGNITUDE, "short_factor", "long_factor")),
    "proportional": RopeType(_proportional, ("factor",)),
}


def _magnitude(r: Rotary) -> float:
    """The factor of scaled embeddings that keeps attention equally sharp."""
    if r.kind not in ("yarn", "longrope"):
        return 1.0
    if r.parameters.get("attention_factor") is not None:
        return r.of("attention_factor")
    if r.stretch <= 1:
        return 1.0
    if r.kind == "longrope":
        return math.sqrt(1 + math.log(r.stretch) / math.log(r.original_positions))
    over, under = r.of("mscale", 0), r.of("mscale_all_dim", 0)
    over, under = (over, under) if over and under else (1.0, 0.0)
    return (0.1 * over * math.log(r.stretch) + 1) / (0.1 * under * math.log(r.stretch) + 1)


SECTIONS = (24, 20, 20)  # frequencies of each part of a position, if a configuration does not say


def rotation(r: Rotary, step: Step) -> Rotate:
    """Return the function that rotates queries or keys, [b, n, heads, head_dim], by the positions of a step."""
    frequencies = ROPE_TYPES[r.kind].frequencies(r, step.end)
    if not isinstance(frequencies, Tensor):
        frequencies = hlo.reshape(hlo.constant(frequencies, "f32"), 1, -1)
    b, n = step.ids.sizes
    positions = hlo.reshape(hlo.convert(step.positions, "f32"), b, n, 1, 1)
    if step.placed is not None:
        positions = positions + _offsets(r, step.placed)
    return turning(r.dim, positions * hlo.reshape(frequencies, -1, 1, 1, r.dim // 2), _magnitude(r))


def _offsets(r: Rotary, placed: Placed) -> Tensor:
    """Return what the position of each token is more, for each frequency. f32[b, n, 1, dim / 2]

    Of the frequencies in turns of three, so many as `mrope_section` says are of height, as many of width, and the
    others of time (Bai et al., arXiv:2511.21631).
    """
    b, n, _ = placed.offsets.sizes
    sections, parts = r.parameters.get("mrope_section") or SECTIONS, np.zeros(r.dim // 2, np.int64)
    for part in (1, 2):
        parts[part : 3 * sections[part] : 3] = part
    chosen = hlo.constant(np.asarray(parts[:, None] == np.arange(3), np.float32).T, "f32")
    offsets = hlo.reshape(hlo.convert(placed.offsets, "f32"), b, n, 3, 1) * hlo.reshape(chosen, 1, 1, 3, -1)
    return hlo.sum(offsets, 2, keep=True)


def grown(step: Step, growth: float, each: int, ahead: int = 0) -> Rotate:
    """Return the function that multiplies queries [b, n, heads, ·] by 1 + growth ln(1 + ⌊(position + ahead) / each⌋).

    Nakanishi, arXiv:2501.19399.
    """
    positions = step.positions + ahead if ahead else step.positions
    times = hlo.log(hlo.convert(hlo.divide(positions, each), "f32") + 1.0) * growth + 1.0
    factor = hlo.reshape(times, *times.sizes, 1, 1)  # [b, n, 1, 1]
    return lambda q: hlo.convert(hlo.convert(q, "f32") * factor, q.dtype)


def growing(parameters: Mapping[str, Any], step: Step) -> Rotate | None:
    """Return how queries grow with these `rope_parameters` of Mistral's models; None if they do not."""
    growth, length = parameters.get("llama_4_scaling_beta"), parameters.get("original_max_position_embeddings")
    return grown(step, growth, int(length)) if growth and length else None


def turning(dim: int, angles: Tensor, magnitude: float = 1.0) -> Rotate:
    """Return the function that rotates the first `dim` features of x [b, n, heads, ·] by angles [b, n, 1, dim / 2]."""
    cos, sin = hlo.cos(angles) * magnitude, hlo.sin(angles) * magnitude

    def rotate(x: Tensor) -> Tensor:
        first, second, rest = (
            hlo.slice(x, -1, low, high) for low, high in ((0, dim // 2), (dim // 2, dim), (dim, x.sizes[-1]))
        )
        a, c = hlo.convert(first, "f32"), hlo.convert(second, "f32")
        turned = [hlo.convert(part, x.dtype) for part in (a * cos - c * sin, c * cos + a * sin)]
        return hlo.concatenate([*turned, rest] if rest.sizes[-1] else turned, -1)

    return rotate
