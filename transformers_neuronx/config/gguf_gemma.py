"""What GGUF files say of Gemma's models besides what all models with rotary positions have; and all of Gemma 4."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from transformers_neuronx.config.gguf_metadata import OTHER, Described

GELU = "gelu_pytorch_tanh"
CAPS_OF_GEMMA2 = dict(attn_logit_softcapping=50.0, final_logit_softcapping=30.0)  # by default
# Layers of the models of Gemma 2 and 3 with 27 billion weights, where queries are scaled otherwise, as in llama.cpp.
_LARGEST = dict(gemma2=46, gemma3_text=62)
KNOWN_OF_GEMMA4 = """
    attention.key_length_swa attention.shared_kv_layers attention.sliding_window_pattern attention.value_length_swa
    embedding_length_per_layer_input expert_feed_forward_length final_logit_softcapping rope.dimension_count_swa
    rope.freq_base_swa
""".split()
_FREQUENCIES = "rope_freqs.weight"
_STILL = 1e29  # a factor from which on the features of a frequency do not rotate
SLIDING, FULL = "sliding_attention", "full_attention"


def of_gemma(file: Described, head_dim: int) -> dict[str, Any]:
    """The attributes of Gemma's first three versions that other models have otherwise, or not at all."""
    family = file.model_type
    if family == "gemma":
        return dict(hidden_act=GELU)
    share = file.whole("embedding_length") // file.whole("attention.head_count")
    scale = share if file.whole("block_count") == _LARGEST[family] else head_dim
    own = dict(hidden_activation=GELU, query_pre_attn_scalar=scale, sliding_window=file.window)
    if family == "gemma3_text":
        return own | dict(rope_local_base_freq=file.real("rope.freq_base_swa", 10000.0))
    return own | {name: file.real(name, default) for name, default in CAPS_OF_GEMMA2.items()}


def of_gemma4(file: Described) -> dict[str, Any]:
    """The attributes of Gemma 4, whose layers with windows have heads of another size than those without."""
    windowed = file.of_layers("attention.sliding_window_pattern")
    kinds = [SLIDING if each else FULL for each in windowed]
    readers = file.whole("attention.shared_kv_layers", 0)
    with_keys = kinds[: max(len(kinds) - readers, 0)]
    if set(with_keys) != {SLIDING, FULL}:
        wanted = "layers with and without windows, which have keys of their own"
        raise file.refused(f"expected {wanted}, got {len(with_keys)} with keys, of {len(kinds)}", OTHER)
    values = {f"blk.{n}.attn_v.weight" in file.shapes for n, kind in enumerate(with_keys) if kind == FULL}
    if len(values) != 1:
        raise file.refused("expected values in all layers without windows that have keys, or in none", OTHER)
    heads, inputs = _heads(file, kinds), file.shapes.get("per_layer_token_embd.weight")
    return dict(
        hidden_size=file.whole("embedding_length"),
        num_hidden_layers=len(kinds),
        num_attention_heads=file.whole("attention.head_count"),
        num_key_value_heads=heads[SLIDING],
        num_global_key_value_heads=heads[FULL],
        head_dim=_size(file, "_swa"),
        global_head_dim=_size(file, ""),
        max_position_embeddings=file.whole("context_length"),
        rms_norm_eps=file.real("attention.layer_norm_rms_epsilon"),
        hidden_activation=GELU,
        layer_types=kinds,
        sliding_window=file.whole("attention.sliding_window"),
        rope_parameters=_positions(file),
        final_logit_softcapping=file.real("final_logit_softcapping", 0.0) or None,
        attention_k_eq_v=values == {False},
        num_kv_shared_layers=readers,
        hidden_size_per_layer_input=file.whole("embedding_length_per_layer_input", 0),
        **(dict(vocab_size_per_layer_input=inputs[0]) if inputs else {}),
        **_feed_forward(file, readers),
    )


def _heads(file: Described, kinds: Sequence[str]) -> dict[str, int]:
    """Return how many heads have keys, in each kind of layer."""
    counts = file.of_layers("attention.head_count_kv")
    found = dict(zip(kinds, counts, strict=True))
    if any(found[kind] != count for kind, count in zip(kinds, counts, strict=True)):
        wanted = "as many heads of keys in all layers with windows, and in all others"
        raise file.refused(f"expected {wanted}, got {counts}", OTHER)
    return found


def _size(file: Described, end: str) -> int:
    """Return how many features a head has, in layers with windows or without."""
    size, values = file.whole(f"attention.key_length{end}"), file.whole(f"attention.value_length{end}")
    rotated = file.whole(f"rope.dimension_count{end}", size)
    if not size == values == rotated:
        wanted = "heads with as many features in keys as in values, which all have positions"
        raise file.refused(f"expected {wanted}, got {size}, {values} and {rotated}", OTHER)
    return size


def _positions(file: Described) -> Mapping[str, Any]:
    """Return the rotary positions of both kinds of layers. Without a window, only the first features rotate."""
    if (kind := file.text("rope.scaling.type", "none")) != "none":
        raise file.refused(f"rope.scaling.type = {kind!r} is not supported with this architecture", OTHER)
    size = _size(file, "")
    if file.shapes.get(_FREQUENCIES) != (size // 2,):
        raise file.refused(f"expected {_FREQUENCIES} with {size // 2} numbers")
    factors = [float(number) for number in file.numbers(_FREQUENCIES)]
    rotating = factors.count(1.0)
    if not rotating or factors[:rotating] != [1.0] * rotating or any(each < _STILL for each in factors[rotating:]):
        raise file.refused(f"expected ones in {_FREQUENCIES}, and then numbers above {_STILL:g}, got {factors}", OTHER)
    full = dict(rope_type="proportional", partial_rotary_factor=2 * rotating / size)
    return {
        FULL: full | dict(rope_theta=file.real("rope.freq_base", 10000.0)),
        SLIDING: dict(rope_type="default", rope_theta=file.real("rope.freq_base_swa", 10000.0)),
    }


def _feed_forward(file: Described, readers: int) -> dict[str, Any]:
    """Return the sizes of feed-forward blocks, which may be twice as large in layers that read others' keys."""
    sizes = file.of_layers("feed_forward_length")
    size, first = sizes[0], len(sizes) - readers
    wide = readers > 0 and sizes[first:] == [2 * size] * readers
    if sizes[:first] != [size] * first or not (wide or sizes[first:] == [size] * readers):
        raise file.refused(f"feed-forward blocks of the sizes {sizes} are not supported", OTHER)
    found: dict[str, Any] = dict(intermediate_size=size, use_double_wide_mlp=wide)
    if not (experts := file.whole("expert_count", 0)):
        return found
    return found | dict(
        enable_moe_block=True,
        num_experts=experts,
        top_k_experts=file.whole("expert_used_count"),
        moe_intermediate_size=file.whole("expert_feed_forward_length"),
    )
