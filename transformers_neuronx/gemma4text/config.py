"""The fields of a Gemma 4 configuration that its graph and weights need, and what its kinds of layers have."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Self

from transformers_neuronx.config import hf
from transformers_neuronx.errors import ConfigError
from transformers_neuronx.layers import ACTIVATIONS, LAYER_KINDS, Rotary, Router
from transformers_neuronx.llama.like import SANDWICH, LlamaLike
from transformers_neuronx.weights import Heads

READS = ", reads another's keys"  # the end of the kind of a layer that has no keys and values of its own
OF_EXPERTS = {
    "dense_out_norm": "post_feedforward_layernorm_1",
    "moe_norm": "pre_feedforward_layernorm_2",
    "moe_out_norm": "post_feedforward_layernorm_2",
}


@dataclass(frozen=True)
class Gemma4TextConfig(LlamaLike):
    activation: str = hf("hidden_activation", among=ACTIVATIONS)
    tied: bool = hf("tie_word_embeddings")
    attention_bias: bool = hf("attention_bias")
    logit_softcap: float | None = hf("final_logit_softcapping", None)
    attention_kinds: list[str] = hf("layer_types", among=LAYER_KINDS)
    window: int = hf("sliding_window")
    of_layers: dict[str, dict[str, int]] = hf("per_layer_config", {})  # what differs, by the number of the layer
    keys_as_values: bool = hf("attention_k_eq_v")  # in full attention
    readers: int = hf("num_kv_shared_layers", 0)  # so many last layers read the keys of earlier ones
    wide_readers: bool = hf("use_double_wide_mlp")
    input_size: int = hf("hidden_size_per_layer_input", 0)  # of what each layer has of a token, besides hidden states
    input_vocab: int = hf("vocab_size_per_layer_input")
    mixture: bool = hf("enable_moe_block")
    n_expert: int = hf("num_experts", 0)
    active_experts: int = hf("top_k_experts", 0)
    expert_size: int = hf("moe_intermediate_size", 0)
    both_ways: str | None = hf("use_bidirectional_attention", None, among=(None, "vision"))  # between parts of images

    qk_norm = True
    attention_scale = 1.0

    def __post_init__(self) -> None:
        allowed = {"head_dim", "num_key_value_heads"}
        for kind in set(self.attention_kinds):
            found = [self.of_layers.get(str(n), {}) for n, each in enumerate(self.attention_kinds) if each == kind]
            if any(each != found[0] or not each.keys() <= allowed for each in found):
                raise ConfigError(
                    f"gemma4_text needs the same head_dim and num_key_value_heads in all layers of {kind}, and nothing "
                    f"else in per_layer_config, got {found}"
                )
        super().__post_init__()

    @property
    def norms(self) -> Mapping[str, str]:  # type: ignore[override]
        return SANDWICH | (OF_EXPERTS if self.mixture else {})

    @property
    def embedding_scale(self) -> float:  # type: ignore[override]
        return math.sqrt(self.hidden_size)

    @property
    def router(self) -> Router:
        return Router(self.active_experts)

    @property
    def layer_kinds(self) -> list[str]:
        first = self.n_layer - self.readers
        return [kind + READS if n >= first else kind for n, kind in enumerate(self.attention_kinds)]

    @property
    def unread(self) -> list[str]:
        """Checkpoints may have keys and values of layers that read others'."""
        readers = "|".join(str(n) for n in range(self.n_layer - self.readers, self.n_layer))
        return [rf"model\.layers\.({readers})\.self_attn\.(k|v)_(proj|norm)\..*"] if readers else []

    @property
    def undivided(self) -> bool:  # type: ignore[override]
        return bool(self.readers or self.input_size)

    def of_kind(self, kind: str) -> Self:
        """Return the configuration with the sizes that layers of this kind have."""
        own, wide = self._own(kind), self.wide_readers and kind.endswith(READS)
        head_dim, kv_heads = own.get("head_dim", self.head_dim), own.get("num_key_value_heads", self.n_kv_head)
        return replace(self, head_dim=head_dim, n_kv_head=kv_heads, inner_size=self.inner_size * (1 + wide))

    def _own(self, kind: str) -> dict[str, int]:
        return self.of_layers.get(str(self.attention_kinds.index(kind.removesuffix(READS))), {})

    def heads_of(self, kind: str) -> Heads | None:
        return None if kind.endswith(READS) else self.of_kind(kind).attention_heads

    def window_of(self, kind: str) -> int | None:
        return super().window_of(kind.removesuffix(READS))

    def source_of(self, layer: int) -> int:
        own = self.n_layer - self.readers
        if layer < own:
            return layer
        return max(n for n in range(own) if self.attention_kinds[n] == self.attention_kinds[layer])

    @property
    def rotary(self) -> Rotary:
        return self.rotary_of("full_attention")

    def rotary_of(self, kind: str) -> Rotary:
        parameters = self.rope[kind.removesuffix(READS)]
        if (found := parameters.get("rope_type", "default")) not in ("default", "proportional"):
            raise ConfigError(f"gemma4_text needs positions of type 'default' or 'proportional', got {found!r}")
        return Rotary(self._own(kind).get("head_dim", self.head_dim), parameters, self.max_positions)
