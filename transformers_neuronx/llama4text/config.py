"""The fields of a Llama 4 configuration that its graph and weights need."""

from dataclasses import dataclass, replace
from typing import ClassVar

from transformers_neuronx.config import hf
from transformers_neuronx.errors import ConfigError
from transformers_neuronx.layers import ACTIVATIONS, Rotary, Router
from transformers_neuronx.llama.mixture import MixtureLike

CHUNKED, BLOCK = "chunked_attention", "feed_forward."


@dataclass(frozen=True)
class Llama4TextConfig(MixtureLike):
    activation: str = hf("hidden_act", among=ACTIVATIONS)
    tied: bool = hf("tie_word_embeddings")
    attention_bias: bool = hf("attention_bias")
    attention_kinds: list[str] = hf("layer_types", among=(CHUNKED, "full_attention"))
    window: int = hf("attention_chunk_size")
    rotates: list[int] = hf("no_rope_layers")  # 1 if a layer does
    normed: bool = hf("use_qk_norm")  # queries and keys that rotate
    grows: bool = hf("attn_temperature_tuning")  # queries that do not rotate, with their position
    growth: float = hf("attn_scale")
    growth_each: int = hf("floor_scale")
    inner_size: int = hf("intermediate_size_mlp")
    expert_size: int = hf("intermediate_size")
    shared_size: int = hf("intermediate_size")
    n_expert: int = hf("num_local_experts")
    active_experts: int = hf("num_experts_per_tok")
    sparse: list[int] = hf("moe_layers")

    chunked = True
    in_pairs = True
    qk_norm_last = True
    sigmoid = True
    normalized = False
    router_name = BLOCK + "router"
    of_expert = ()
    of_experts = (BLOCK + "experts.gate_up_proj", BLOCK + "experts.down_proj")
    shared = tuple(f"{BLOCK}shared_expert.{part}_proj" for part in ("gate", "up", "down"))
    feed_forward = tuple(f"{BLOCK}{part}_proj" for part in ("gate", "up", "down"))

    # Lists of layers follow from the first two; the rest is for training, or for Transformers' caches.
    WITHOUT_EFFECT: ClassVar = frozenset(
        "interleave_moe_layer_step no_rope_layer_interval output_router_logits router_aux_loss_coef "
        "router_jitter_noise cache_implementation".split()
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if [kind == CHUNKED for kind in self.attention_kinds] != [bool(each) for each in self.rotates[: self.n_layer]]:
            kinds = f"got {self.attention_kinds} and no_rope_layers={self.rotates}"
            raise ConfigError(f"llama4_text needs layer_types that are {CHUNKED!r} where layers rotate, {kinds}")

    @property
    def dense_layers(self) -> set[int]:
        return {*range(self.n_layer)}.difference(self.sparse)

    @property
    def router(self) -> Router:
        return replace(super().router, of_inputs=True)

    def window_of(self, kind: str) -> int | None:
        return self.window if kind.startswith(CHUNKED) else None

    def rotary_of(self, kind: str) -> Rotary | None:
        return self.rotary if kind.startswith(CHUNKED) else None
