"""Rotary positions of a model in a GGUF file: from metadata and tensors of factors to Hugging Face's attributes."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from transformers_neuronx.config.gguf_metadata import OTHER, Described

LONG, SHORT, LLAMA3 = "rope_factors_long.weight", "rope_factors_short.weight", "rope_freqs.weight"
FACTORS = (LONG, SHORT, LLAMA3)  # tensors that belong to the configuration
# What converters take for LLaMA 3; the published models differ in the factor alone.
_LOW, _HIGH, _LENGTH, _LLAMA3_FACTORS = 1.0, 4.0, 8192, (8.0, 32.0)


def positions(file: Described, head_dim: int) -> dict[str, Any]:
    """Return the attributes of rotary positions, for heads of this size."""
    dim, theta = file.whole("rope.dimension_count", head_dim), file.real("rope.freq_base", 10000.0)
    found: dict[str, Any] = dict(rope_theta=theta)
    if file.architecture == "phi3":
        found["original_max_position_embeddings"] = file.whole("rope.scaling.original_context_length", 4096)
    if file.architecture in ("phi3", "qwen35", "qwen35moe", "qwen3next"):
        found |= dict(partial_rotary_factor=dim / head_dim) if dim < head_dim else {}
    if int(head_dim * found.get("partial_rotary_factor", 1.0)) != dim or dim % 2:
        raise file.refused(f"{dim} of the {head_dim} features of a head rotate, which is not supported", OTHER)
    scaling = _scaling(file, dim, theta)
    factor = file.real("rope.scaling.attn_factor", 1.0)
    if factor != 1 and scaling.get("rope_type") != "longrope":
        raise file.refused(f"rope.scaling.attn_factor = {factor} is not supported with these positions", OTHER)
    return found | (dict(rope_scaling=scaling) if scaling else {})


def _scaling(file: Described, dim: int, theta: float) -> dict[str, Any]:
    """Return the attribute `rope_scaling`; empty if positions are not scaled."""
    factor = file.real("rope.scaling.factor", file.real("rope.scale_linear", 0.0))  # the second is an older name
    kind = file.text("rope.scaling.type", "linear")
    before = file.whole("rope.scaling.original_context_length", file.whole("context_length"))
    length = dict(original_max_position_embeddings=before)
    if LLAMA3 in file.shapes:
        return _llama3(file, dim, theta)
    if LONG in file.shapes or kind == "longrope":
        found = dict(rope_type="longrope", long_factor=_factors(file, LONG, dim), **length)
        magnitude = file.real("rope.scaling.attn_factor", 0.0)  # without it, Transformers takes it from the lengths
        found |= dict(attention_factor=magnitude) if magnitude else {}
        return found | dict(short_factor=_factors(file, SHORT, dim))
    if kind == "none" or (kind == "linear" and factor in (0, 1)):
        return {}
    if kind == "linear":
        return dict(rope_type=kind, factor=factor)
    if kind == "yarn" and factor:
        names = dict(yarn_attn_factor="attention_factor", yarn_beta_fast="beta_fast", yarn_beta_slow="beta_slow")
        given = {name: file.real(f"rope.scaling.{key}", 0.0) for key, name in names.items()}
        # gpt-oss was trained without rounding what YaRN interpolates between; files do not say so.
        exact = dict(truncate=False) if file.architecture == "gpt-oss" else {}
        given = {name: value for name, value in given.items() if value} | exact
        if file.architecture == "mistral3":
            given |= _of_ministral(file)
        return dict(rope_type=kind, factor=factor, **length) | given
    raise file.refused(f"rope.scaling.type = {kind!r} with the factor {factor} is not supported", OTHER)


def _of_ministral(file: Described) -> dict[str, Any]:
    """Return what Ministral 3 adds to YaRN: how magnitudes grow, and queries with their position."""
    grow, magnitude = file.real("attention.temperature_scale", 0.0), file.real("rope.scaling.yarn_log_multiplier", 0.0)
    found = dict(mscale=1.0, mscale_all_dim=magnitude) if magnitude else {}
    return found | (dict(llama_4_scaling_beta=grow) if grow else {})


def _llama3(file: Described, dim: int, theta: float) -> dict[str, Any]:
    """Return the scaling of LLaMA 3.1 and later: files have its factors in place of metadata."""
    found = _factors(file, LLAMA3, dim)

    def expected(factor: float) -> Iterator[float]:
        for i in range(0, dim, 2):
            turns = _LENGTH * theta ** (-i / dim) / (2 * math.pi)
            kept = min(max((turns - _LOW) / (_HIGH - _LOW), 0), 1)
            yield 1 / (kept + (1 - kept) / factor)

    for factor in _LLAMA3_FACTORS:
        if all(math.isclose(one, other, rel_tol=1e-5) for one, other in zip(found, expected(factor), strict=True)):
            how = dict(low_freq_factor=_LOW, high_freq_factor=_HIGH, original_max_position_embeddings=_LENGTH)
            return dict(rope_type="llama3", factor=factor, **how)
    wanted = " or ".join(f"{factor:g}" for factor in _LLAMA3_FACTORS)
    raise file.refused(
        f"{LLAMA3} does not have LLaMA 3's factors for scaling by {wanted} from {_LENGTH} positions", OTHER
    )


def _factors(file: Described, name: str, dim: int) -> list[float]:
    if (sizes := file.shapes.get(name)) != (dim // 2,):
        raise file.refused(f"expected {name} with {dim // 2} numbers, got {'none' if sizes is None else list(sizes)}")
    found = [float(number) for number in file.numbers(name)]
    if not all(math.isfinite(number) and number > 0 for number in found):
        raise file.refused(f"expected positive numbers in {name}, got {found}")
    return found
