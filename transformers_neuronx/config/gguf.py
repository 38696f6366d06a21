"""The configuration of a model in a GGUF file: Hugging Face's attributes, from the file's metadata.

What the metadata leaves out is what llama.cpp takes for it. A key of the model that is not known here is refused, since
it may change results.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

from transformers_neuronx.config.gguf_gemma import CAPS_OF_GEMMA2, KNOWN_OF_GEMMA4, of_gemma, of_gemma4
from transformers_neuronx.config.gguf_metadata import OTHER, Described
from transformers_neuronx.config.gguf_positions import positions

GGUF = "gguf"  # the quant_method of such a configuration


def storage(
    dtype: str, group: int | None, scales: str, minima: bool, block: int | None = None, by_group: bool = False
) -> str:
    """Return how a matrix is stored, as `weights.quantization` reads it: "s4/32, f16 with minima, by group".

    With a `block`, scales are whole numbers times units, one for each `block` inputs: "s4/32, s8 x f16/256".
    """
    of = "" if group is None else f"/{group}"
    levels = scales if block is None else f"s8 x {scales}/{block}"
    return f"{dtype}{of}, {levels}{' with minima' if minima else ''}{', by group' if by_group else ''}"


class Stored(NamedTuple):
    """How matrices of a ggml type are stored here: the type of their values, and how many inputs share a scale.

    `scales` is the type that holds scales exactly, and the minima of groups, if they have `minima`. In the K types,
    that is the type of their units, one for each `block` of inputs.
    """

    dtype: str
    group: int
    scales: str
    minima: bool = False
    block: int | None = None

    def __str__(self) -> str:
        return storage(*self)


STORED: Mapping[str, Stored] = {
    "Q4_0": Stored("s4", 32, "f16"),
    "Q4_1": Stored("s4", 32, "f16", True),
    "Q5_0": Stored("s5", 32, "f16"),
    "Q5_1": Stored("s5", 32, "f16", True),
    "Q8_0": Stored("s8", 32, "f16"),
    "Q2_K": Stored("s4", 16, "f16", True, 256),
    "Q3_K": Stored("s4", 16, "f16", block=256),
    "Q4_K": Stored("s4", 32, "f16", True, 256),
    "Q5_K": Stored("s5", 32, "f16", True, 256),
    "Q6_K": Stored("s6", 16, "f16", block=256),
    "MXFP4": Stored("e2m1", 32, "bf16"),  # powers of two
}

_SIZES = dict(
    context_length="max_position_embeddings",
    embedding_length="hidden_size",
    feed_forward_length="intermediate_size",
)
_SIZES_OF_GPT2 = dict(
    context_length="n_positions", block_count="n_layer", embedding_length="n_embd", feed_forward_length="n_inner"
)
_SCALES_OF_GRANITE = {
    "attention.scale": "attention_multiplier",
    "embedding_scale": "embedding_multiplier",
    "residual_scale": "residual_multiplier",
    "logit_scale": "logits_scaling",
}
_SIZES_OF_DELTA = {
    "ssm.conv_kernel": "linear_conv_kernel_dim",
    "ssm.state_size": "linear_key_head_dim",
    "ssm.group_count": "linear_num_key_heads",
    "ssm.time_step_rank": "linear_num_value_heads",
}
_KNOWN_OF_DELTA = (
    *_SIZES_OF_DELTA,
    "attention.recurrent_layers",
    "ssm.inner_size",
    "full_attention_interval",
    "nextn_predict_layers",
    "rope.dimension_sections",  # of images: all sections of a text have the same positions
)
_KNOWN = frozenset(
    """
    attention.head_count attention.head_count_kv attention.key_length attention.layer_norm_epsilon
    attention.layer_norm_rms_epsilon attention.sliding_window attention.value_length block_count
    context_length embedding_length expert_count expert_used_count feed_forward_length rope.dimension_count
    rope.freq_base rope.scale_linear rope.scaling.attn_factor rope.scaling.factor rope.scaling.finetuned
    rope.scaling.original_context_length rope.scaling.type rope.scaling.yarn_attn_factor rope.scaling.yarn_beta_fast
    rope.scaling.yarn_beta_slow tensor_data_layout vocab_size
    """.split()
)
_MAY_HAVE_BIASES = (
    "llama", "qwen3", "qwen3_5_text", "qwen3_5_moe_text", "qwen3_moe", "granite", "olmo2", "olmo3", "seed_oss",
    "smollm3",
)  # fmt: skip
_KNOWN_OF_EXPERTS = (*_KNOWN_OF_DELTA, "expert_feed_forward_length", "expert_shared_feed_forward_length")
_KNOWN_OF: Mapping[str, Collection[str]] = dict(
    gemma2=CAPS_OF_GEMMA2,
    gemma3=["rope.freq_base_swa"],
    gemma4=KNOWN_OF_GEMMA4,
    granite=_SCALES_OF_GRANITE,
    lfm2=["shortconv.l_cache"],
    mistral3=["attention.temperature_scale", "rope.scaling.yarn_log_multiplier"],
    olmo2=["attention.sliding_window_pattern"],
    qwen35=_KNOWN_OF_DELTA,
    qwen35moe=_KNOWN_OF_EXPERTS,
    qwen3moe=["expert_feed_forward_length"],
    qwen3next=_KNOWN_OF_EXPERTS,
) | {"gpt-oss": ["expert_feed_forward_length"]}


def attributes(file: Described) -> dict[str, Any]:
    """Return the attributes that config.json would have. CheckpointError if one is missing or not supported."""
    ends = file.ends
    return of_weights(file) | dict(
        bos_token_id=file.token("bos"),
        eos_token_id=ends if len(ends) > 1 else next(iter(ends), None),
        pad_token_id=file.token("padding"),
    )


def of_weights(file: Described) -> dict[str, Any]:
    """Return the attributes but those of tokens, which weights do not depend on."""
    start = f"{file.architecture}."
    own = [key.removeprefix(start) for key in file.metadata if key.startswith(start)]
    if unknown := [start + key for key in own if key not in _KNOWN.union(_KNOWN_OF.get(file.architecture, ()))]:
        raise file.refused(f"the metadata has keys that are not supported: {', '.join(unknown)}", OTHER)
    embeddings = file.shapes.get("token_embd.weight", ())
    if len(embeddings) != 2:
        raise file.refused(f"expected a matrix token_embd.weight, got sizes {list(embeddings)}")
    layers, count = {name.split(".")[1] for name in file.shapes if name.startswith("blk.")}, file.whole("block_count")
    if len(layers) != count or layers != {str(number) for number in range(count)}:
        raise file.refused(
            f"expected tensors of {count} layers, as {start}block_count says, got those of {len(layers)}"
        )
    return dict(
        model_type=file.model_type,
        vocab_size=embeddings[0],  # llama.cpp may have another, of tokens without those that only fill the tensor up
        tie_word_embeddings="output.weight" not in file.shapes,
        **dict(gpt2=_of_gpt2, gemma4=of_gemma4).get(file.architecture, _of_a_rotated)(file),
    )


def _of_gpt2(file: Described) -> dict[str, Any]:
    return {name: file.whole(key) for key, name in _SIZES_OF_GPT2.items()} | dict(
        n_head=file.whole("attention.head_count"),
        layer_norm_epsilon=file.real("attention.layer_norm_epsilon"),
        activation_function="gelu_new",
    )


def _of_a_rotated(file: Described) -> dict[str, Any]:
    """The attributes of a model with rotary positions."""
    heads, hidden = file.whole("attention.head_count"), file.whole("embedding_length")
    # LLaMA's older files have the size of heads as the number of features that rotate.
    rotated = file.whole("rope.dimension_count", 0) if file.architecture == "llama" else 0
    size = file.whole("attention.key_length", rotated or hidden // heads)
    values = file.whole("attention.value_length", size)
    if size < 1 or size != values:
        raise file.refused(f"expected heads with as many features in keys as in values, got {size} and {values}", OTHER)
    without = "feed_forward_length" if file.model_type == "qwen3_5_moe_text" else ""  # all layers have experts
    return {name: file.whole(key) for key, name in _SIZES.items() if key != without} | dict(
        num_hidden_layers=file.layers,
        num_attention_heads=heads,
        head_dim=size,
        **positions(file, size),
        **(_of_lfm2(file) if file.architecture == "lfm2" else _of_attention(file, heads, size)),
    )


def _of_lfm2(file: Described) -> dict[str, Any]:
    """The attributes of LFM2, whose layers without heads of keys are convolutions."""
    of_layers = file.of_layers("attention.head_count_kv")
    counts = {count for count in of_layers if count}
    if len(counts) != 1:
        wanted = "one number of heads of keys in all layers that have some"
        raise file.refused(f"expected {wanted}, got {sorted(counts)}", OTHER)
    return dict(
        num_key_value_heads=counts.pop(),
        layer_types=["full_attention" if count else "conv" for count in of_layers],
        norm_eps=file.real("attention.layer_norm_rms_epsilon"),
        conv_L_cache=file.whole("shortconv.l_cache"),
        conv_bias=any(name.endswith("shortconv.conv.bias") for name in file.shapes),
        block_auto_adjust_ff_dim=False,
    )


def _of_attention(file: Described, heads: int, head_dim: int) -> dict[str, Any]:
    """The attributes of a model with attention in all layers."""
    return dict(
        num_key_value_heads=file.whole("attention.head_count_kv", heads),
        rms_norm_eps=file.real("attention.layer_norm_rms_epsilon"),
        **_of_family(file, head_dim),
    )


def _of_family(file: Described, head_dim: int) -> dict[str, Any]:
    """The attributes that not every model with rotary positions has."""
    family = file.model_type
    if family.startswith("gemma"):
        return of_gemma(file, head_dim)
    own: dict[str, Any] = dict(hidden_act="silu")
    if family in ("mistral", "ministral3", "mixtral", "phi3"):
        own |= dict(sliding_window=file.window)
    if family in ("mixtral", "gpt_oss"):
        own |= dict(num_local_experts=file.whole("expert_count"), num_experts_per_tok=file.whole("expert_used_count"))
    if family in ("qwen3_moe", "qwen3_5_moe_text"):
        own |= dict(num_experts=file.whole("expert_count"), num_experts_per_tok=file.whole("expert_used_count"))
        own |= dict(moe_intermediate_size=file.whole("expert_feed_forward_length"))
    if family == "qwen3_moe":
        own |= dict(norm_topk_prob=True)
    if family == "gpt_oss":
        return own | dict(intermediate_size=file.whole("expert_feed_forward_length"), sliding_window=file.window)
    if family == "granite":
        own |= {name: file.real(key) for key, name in _SCALES_OF_GRANITE.items()}
    if family == "qwen3_5_moe_text":
        own |= dict(shared_expert_intermediate_size=file.whole("expert_shared_feed_forward_length"))
    if family in ("qwen3_5_text", "qwen3_5_moe_text"):
        own |= _of_delta(file)
    if family == "olmo3":
        # Without a pattern, llama.cpp takes every fourth layer for one without a window.
        default = [i % 4 != 3 for i in range(file.whole("block_count"))]
        pattern = file.of_layers("attention.sliding_window_pattern", default)
        kinds = ["sliding_attention" if windowed else "full_attention" for windowed in pattern]
        own |= dict(sliding_window=file.window, layer_types=kinds)
    return own | _biases(file)


def _of_delta(file: Described) -> dict[str, Any]:
    """The attributes of a model whose layers have a gated delta net but for each fourth, or as the file says.

    Newer files have a list of the layers.
    """
    found, inner = {name: file.whole(key) for key, name in _SIZES_OF_DELTA.items()}, file.whole("ssm.inner_size")
    heads, interval = found["linear_num_value_heads"], file.whole("full_attention_interval", 4)
    if inner % heads or heads % found["linear_num_key_heads"]:
        of_keys = found["linear_num_key_heads"]
        raise file.refused(f"{inner} features of {heads} heads of values, for {of_keys} of keys, cannot be divided")
    default = [i % interval < interval - 1 for i in range(file.whole("block_count"))]
    linear = file.of_layers("attention.recurrent_layers", default)[: file.layers]
    kinds = ["linear_attention" if each else "full_attention" for each in linear]
    return found | dict(linear_value_head_dim=inner // heads, layer_types=kinds)


def _biases(file: Described) -> dict[str, Any]:
    """The attributes that say which layers have biases, by what the file has."""
    family, own = file.model_type, dict[str, Any]()
    parts = ("q", "k", "v") if family == "seed_oss" else ("q", "k", "v", "output")
    if family in _MAY_HAVE_BIASES:
        ends = tuple(f".attn_{part}.bias" for part in parts)
        own |= dict(attention_bias=any(name.endswith(ends) for name in file.shapes))
    if family in ("llama", "granite", "seed_oss", "smollm3"):
        own |= dict(mlp_bias="blk.0.ffn_up.bias" in file.shapes)
    if family == "seed_oss":
        own |= dict(attention_out_bias="blk.0.attn_output.bias" in file.shapes)
    return own
