"""Options that are not specific to one model, named as in the original's configurations.

docs/compatibility.md tells users which of them work, have no effect, or are refused.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

import numpy as np

from transformers_neuronx.config.constants import GQA, Layout
from transformers_neuronx.config.declarations import (
    TRUTH,
    Switches,
    Wanted,
    each,
    idle,
    made_of,
    one_of,
    or_none,
    real,
    refused,
    whole,
    works,
)
from transformers_neuronx.config.sparse_attention import SparseAttnConfig
from transformers_neuronx.config.workers import Workers
from transformers_neuronx.errors import ConfigError
from transformers_neuronx.support.arguments import forgiving

_LOG = logging.getLogger(__name__)
_MENTIONED: set[str] = set()  # switches that were logged

_NAMES = Wanted(
    "a list of names",
    lambda value: isinstance(value, list | tuple) and all(isinstance(name, str) for name in value),
)
_STORAGES = Wanted(
    "storages of matrices, and the layers of each",
    lambda value: isinstance(value, Mapping) and all(isinstance(plan, Mapping) and plan for plan in value.values()),
)
_DTYPE = one_of("float32", "float16", "bfloat16")
_TILES = Wanted(
    "an order of the axes 0 to 3 that has 2 before 3",
    lambda value: isinstance(value, list | tuple) and sorted(value) == [0, 1, 2, 3] and value.index(2) < value.index(3),
)


@dataclass(frozen=True)
class Blocks:
    """A cache in `count` blocks of `size` positions each, which callers give to sequences. With `chunked`, a call may
    have chunks of prompts and running rows. With `all_logits`, it returns the logits of all tokens.
    """

    size: int
    count: int
    chunked: bool = False
    all_logits: bool = False


@forgiving()
@dataclass
class ContinuousBatchingConfig(Switches):
    """Requests that join and leave a batch: calls of `forward` give the cache slot of the sequence in each row.

    `max_num_seqs` sequences fit, of `max_model_len` tokens each; `batch_size_for_shared_caches` is an older name. After
    `init_cache_engine` with blocks that are shorter than a sequence, calls give the blocks of each sequence instead, in
    `input_metadata`. With `enable_chunked_prefill`, a call may have chunks of prompts and running rows.
    """

    max_num_seqs: int | None = works(None, or_none(whole(1)))
    batch_size_for_shared_caches: int | None = works(None, or_none(whole(1)))
    max_model_len: int | None = works(None, or_none(whole(1)))
    optimized_paged_attention: bool = works(False, TRUTH)
    enable_chunked_prefill: bool = works(False, TRUTH)
    block_size: int | None = works(None, or_none(whole(1)))
    num_blocks: int | None = works(None, or_none(whole(1)))

    def settle(self, changed: str = "") -> None:
        if self.enable_chunked_prefill and not self.optimized_paged_attention:
            raise ConfigError("enable_chunked_prefill needs optimized_paged_attention=True: pass both")
        both = ("max_num_seqs", "batch_size_for_shared_caches")
        given = {getattr(self, name) for name in ([changed] if changed in both else both)} - {None}
        if len(given) != 1:
            raise ConfigError(
                "ContinuousBatchingConfig needs max_num_seqs, or batch_size_for_shared_caches with the same meaning, "
                f"got {self.max_num_seqs} and {self.batch_size_for_shared_caches}"
            )
        self.__dict__.update(dict.fromkeys(both, *given))

    def init_cache_engine(self, block_size: int, num_blocks: int) -> None:
        """Divide the cache into `num_blocks` blocks of `block_size` positions each, for models that are made after it.

        A block of `max_model_len` positions or more is the slot of a sequence. With `optimized_paged_attention`, raises
        ConfigError without a `max_model_len`.
        """
        if self.optimized_paged_attention and self.max_model_len is None:
            raise ConfigError("init_cache_engine needs max_model_len with optimized_paged_attention, got None")
        self.block_size, self.num_blocks = block_size, num_blocks

    @property
    def blocks(self) -> Blocks | None:
        """The blocks of the cache, or None if each sequence has one slot."""
        if self.block_size is None or self.num_blocks is None or self.block_size >= (self.max_model_len or 0):
            return None
        return Blocks(self.block_size, self.num_blocks, self.enable_chunked_prefill)

    def batch_size(self, asked: int | None) -> int:
        """Return the number of slots; `asked` must equal it, if given."""
        assert self.max_num_seqs is not None
        if asked not in (None, self.max_num_seqs):
            raise ConfigError(f"batch_size must be max_num_seqs={self.max_num_seqs}, got {asked}")
        return self.max_num_seqs


@forgiving()
@dataclass(kw_only=True)
class GenerationConfig(Switches):
    """How `forward` samples tokens on the devices: each option is one value for all slots, or a list with one per slot.

    Without `do_sample` or `dynamic` it takes the most likely token; so do slots whose `temperature` is 0.
    `global_top_k` limits every `top_k`. With a list of `seed`, one for each slot, a slot's draws depend only on its
    seed and its own sequence. With one `seed` (0 by default with `deterministic`), draws repeat in every run, and rows
    differ by their place in the call. Without a seed, each call draws differently.
    """

    max_length: int | None = idle(None, or_none(whole(1)))
    do_sample: bool = works(False, TRUTH)
    top_k: int | Sequence[int] | None = works(50, or_none(each(whole(0))))
    top_p: float | Sequence[float] = works(1.0, each(real("in (0, 1]", lambda p: 0 < p <= 1)))
    top_p_min_tokens: int | Sequence[int] = works(1, each(one_of(0, 1)))
    global_top_k: int | None = works(None, or_none(whole(1)))
    eos_token_id: int | Sequence[int] | None = works(None, or_none(each(whole(-1))))
    temperature: float | Sequence[float] | None = works(1.0, or_none(each(real("of at least 0", lambda t: t >= 0))))
    dynamic: bool = works(False, TRUTH)
    deterministic: bool = works(False, TRUTH)
    seed: int | Sequence[int] | None = works(None, or_none(each(whole(0))))
    per_batch_line: bool = idle(False)

    def rules(self) -> dict[str, Any]:
        """Return the same rules as keywords of `sample`."""
        temperature = np.asarray(1.0 if self.temperature is None else self.temperature)
        top_k = np.asarray(0 if self.top_k is None else self.top_k)
        if self.global_top_k is not None:
            top_k = np.where(top_k == 0, self.global_top_k, np.minimum(top_k, self.global_top_k))
        greedy = (temperature == 0) | (not (self.do_sample or self.dynamic))
        return dict(
            top_k=np.where(greedy, 1, top_k),
            top_p=self.top_p,
            temperature=np.where(temperature == 0, 1.0, temperature),
            seed=0 if self.deterministic and self.seed is None else self.seed,
        )


@forgiving()
@dataclass
class QuantizationConfig(Switches):
    """Quantizes the weights of linear layers to `s8`, `s4` or `f8e4m3fn` while they are loaded.

    Each output has a scale, or each group of `group_size` of its inputs has one; for s4 the default group is 32. With
    `quantize_method="direct_cast"`, for f8e4m3fn only, there is no scale. `no_quantize_list` names matrices that are
    not quantized in any layer, as the graph calls them ("mlp.down") or as the checkpoint does ("o_proj").
    `stored` replaces all of this: for each matrix as the graph calls it, its storages ("s4/32, f16 with minima": type,
    inputs of a group, type of scales), each with the numbers of its layers. Models of checkpoints that have several
    fill it in.
    With `activation_dtype="s8"`, each step also rounds the activations that are multiplied by them, in the groups of
    the weights, or of 32. This is faster where products take the time, not the reading of weights.
    """

    quant_dtype: str = works("s8", one_of("s8", "s4", "f8e4m3fn"))
    dequant_dtype: str = idle("f16", one_of("f32", "f16", "bf16"))
    quantize_method: str = works("vector_dynamic", one_of("vector_dynamic", "direct_cast"))
    quantize_attn: bool = works(True, TRUTH)
    no_quantize_list: Sequence[str] = works((), _NAMES)
    group_size: int | None = works(None, or_none(whole(2)))
    quantize_head: bool = works(False, TRUTH)
    quantize_embedding: bool = works(False, TRUTH)
    activation_dtype: str | None = works(None, or_none(one_of("s8")))
    stored: Mapping[str, Mapping[str, Sequence[int]]] | None = works(None, or_none(_STORAGES))

    def settle(self, changed: str = "") -> None:
        if self.activation_dtype and self.quant_dtype not in ("s8", "s4"):
            raise ConfigError(f"activation_dtype='s8' needs quant_dtype='s8' or 's4', got {self.quant_dtype!r}")
        self.__dict__["no_quantize_list"] = tuple(self.no_quantize_list)
        _check_cast(self)
        if self.group_size is not None and (self.quantize_method == "direct_cast" or self.group_size % 2):
            raise ConfigError(f"group_size must be even and needs quantize_method='vector_dynamic', got {self}")

    def is_unit_scale(self, layer_num: int) -> bool:
        """Whether a layer is named in `no_quantize_list`."""
        return f"model.layers.{layer_num}" in self.no_quantize_list

    @property
    def group(self) -> int | None:
        """Number of inputs that share a scale; None means all of an output."""
        return 32 if self.group_size is None and self.quant_dtype == "s4" else self.group_size


@forgiving()
@dataclass
class KVCacheQuantizationConfig(Switches):
    """Quantizes the KV cache to `s8` or `f8e4m3fn`, with a scale for each head at each position.

    With `quantize_method="direct_cast"`, for f8e4m3fn only, there is no scale.
    """

    quant_dtype: str = works("s8", one_of("s8", "f8e4m3fn"))
    dequant_dtype: str = idle("bf16", one_of("f32", "f16", "bf16"))
    quantize_method: str = works("vector_dynamic", one_of("vector_dynamic", "direct_cast"))

    def settle(self, changed: str = "") -> None:
        _check_cast(self)

    @property
    def scaled(self) -> bool:
        """Whether the cache also has scales."""
        return self.quantize_method == "vector_dynamic"


def _check_cast(config: QuantizationConfig | KVCacheQuantizationConfig) -> None:
    if config.quantize_method == "direct_cast" and config.quant_dtype != "f8e4m3fn":
        raise ConfigError(
            "quantize_method='direct_cast' needs quant_dtype='f8e4m3fn', since as integers most numbers would be 0, "
            f"got {config.quant_dtype!r}"
        )


def _padding_side(on_the_right: bool) -> dict[str, Any]:
    return dict(padding_side="right" if on_the_right else "left")


@forgiving(dict.fromkeys(("use_2d_cache_ids", "lhs_aligned"), _padding_side))
@dataclass(kw_only=True)
class NeuronConfig(Switches):
    """Options that are not specific to one model.

    `runtime` is where programs run: "cpu", "cuda" or "neuron"; None leaves it to NEURONX_RUNTIME. With `workers`,
    processes of their own have the devices. With
    `output_all_logits`, `forward` returns the logits of every token it gets; with `log_softmax_scores` also their
    log-softmax; with `on_device_generation` the sampled token instead. `continuous_batching` lets requests join and
    leave. It implies `padding_side="right"`, where calls give positions and slots row by row.
    `compilation_worker_count` programs are compiled at once. `sample` makes `tokens_per_dispatch` tokens in a loop on
    the devices before the host sees them; with 0, and on Neuron, the loop runs on the host. With `expert_parallel`,
    each device has some experts of a mixture as a whole, not a part of each.
    """

    runtime: str | None = works(None, made_of(str, "a name"))
    workers: Workers | None = works(None, made_of(Workers, "Workers"))
    output_all_logits: bool = works(False, TRUTH)
    log_softmax_scores: bool = works(False, TRUTH)
    on_device_generation: GenerationConfig | None = works(None, made_of(GenerationConfig, "a GenerationConfig"))
    continuous_batching: ContinuousBatchingConfig | None = works(
        None, made_of(ContinuousBatchingConfig, "a ContinuousBatchingConfig")
    )
    padding_side: str = works("left", one_of("left", "right"))
    compilation_worker_count: int | None = works(None, or_none(whole(1)))
    tokens_per_dispatch: int = works(32, whole(0))

    quant: QuantizationConfig | None = works(None, made_of(QuantizationConfig, "a QuantizationConfig"))
    kv_cache_quant: KVCacheQuantizationConfig | None = works(
        None, made_of(KVCacheQuantizationConfig, "a KVCacheQuantizationConfig")
    )
    sparse_attn: SparseAttnConfig | None = works(None, made_of(SparseAttnConfig, "a SparseAttnConfig"))
    cast_logits_dtype: str = works("float32", _DTYPE)
    shard_over_sequence: bool = works(False, TRUTH)
    expert_parallel: bool = works(False, TRUTH)
    is_eagle_target: bool = idle(False)
    is_eagle_draft: bool = refused(False, "a head is opened by EagleDraft.from_pretrained, without a NeuronConfig")
    has_pre_attention_norm: bool = refused(True, "EagleDraft.from_pretrained opens heads without it, too")

    on_device_embedding: bool = idle(False)
    group_query_attention: GQA | str | None = idle(None, or_none(one_of(*GQA)))
    attention_layout: Layout | str = idle(Layout.HSB, one_of(Layout.HSB, Layout.BSH))
    collectives_layout: Layout | str = idle(Layout.HSB, one_of(Layout.HSB, Layout.BSH))
    cache_layout: Layout | str = idle(Layout.SBH, one_of(Layout.SBH, Layout.BSH))
    all_reduce_dtype: str | None = idle(None, or_none(_DTYPE))
    bf16_rms_norm: bool = idle(False)
    sequence_parallel_norm: bool = idle(False)
    sequence_parallel_norm_threshold: int = idle(2048, whole(1))
    duplicate_q_weight_sos: bool = idle(False)
    fuse_qkv: bool = idle(False)
    qkv_tiling: bool = idle(False)
    weight_tiling: bool = idle(False)
    mlp_in_weight_tiling_permute_order: Sequence[int] = idle((1, 2, 0, 3), _TILES)
    mlp_out_weight_tiling_permute_order: Sequence[int] = idle((1, 2, 0, 3), _TILES)
    mlp_out_weight_transpose: bool = idle(False)
    attn_output_transposed: bool = idle(False)
    fused_rmsnorm_qkv: bool = idle(False)
    fused_rmsnorm_mlp: bool = idle(False)
    fuse_mlp: bool = idle(False)

    def settle(self, changed: str = "") -> None:
        for name in ("output_all_logits", "log_softmax_scores"):
            if self.on_device_generation is not None and getattr(self, name):
                raise ConfigError(f"{name} needs logits, but on_device_generation returns tokens: pass only one")
        if self.continuous_batching is not None:
            self.__dict__["padding_side"] = "right"
        _mention([f.name for f in fields(self) if "idle" in f.metadata and _frozen(getattr(self, f.name)) != f.default])

    @property
    def use_2d_cache_ids(self) -> bool:
        """Whether `cache_ids` are positions of each row."""
        return self.padding_side == "right"

    lhs_aligned = vectorize_last_token_id = use_2d_cache_ids

    @property
    def paged_attention(self) -> bool:
        """Whether the cache is in blocks that callers give to sequences."""
        return self.continuous_batching is not None and self.continuous_batching.blocks is not None

    @property
    def optimized_paged_attention(self) -> bool:
        """Whether it is, and continuous batching says `optimized_paged_attention`."""
        batching = self.continuous_batching
        return batching is not None and batching.blocks is not None and batching.optimized_paged_attention

    @property
    def enable_chunked_prefill(self) -> bool:
        """Whether it is, and calls may have chunks of prompts."""
        return self.optimized_paged_attention and self.continuous_batching.enable_chunked_prefill  # type: ignore[union-attr]

    def to_json(self) -> dict[str, Any]:
        """Return the fields in the types of JSON."""
        told: dict[str, Any] = json.loads(json.dumps(asdict(self), default=str))
        return told


def _frozen(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _mention(names: Sequence[str]) -> None:
    """Log once for each switch that it has no effect."""
    if new := [name for name in names if name not in _MENTIONED]:
        _MENTIONED.update(new)
        _LOG.warning("These switches of NeuronConfig tuned AWS's compiler and change nothing here: %s.", ", ".join(new))
