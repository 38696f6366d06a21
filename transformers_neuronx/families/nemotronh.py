"""Nemotron H and Nemotron 3 Nano: each layer is Mamba-2, attention that does not rotate, a feed-forward, or experts."""

import sys
from dataclasses import dataclass
from typing import Any, ClassVar

from transformers_neuronx.config import hf
from transformers_neuronx.engine.family import Family
from transformers_neuronx.layers import ACTIVATIONS, Cache, Step, mamba
from transformers_neuronx.llama import alone, weights
from transformers_neuronx.llama.mamba import MambaLike
from transformers_neuronx.llama.routed import RoutedLike
from transformers_neuronx.models.sampling import ForSampling
from transformers_neuronx.pyhlo import Tensor
from transformers_neuronx.weights import Weight, renamed

NAMES = {"model.embed_tokens": "backbone.embeddings", "model.": "backbone."}
PREFIX, ignored = NAMES["model."], weights.ignored


@dataclass(frozen=True)
class NemotronHConfig(alone.AloneLike, MambaLike, RoutedLike):
    attention_kinds: list[str] = hf("layers_block_type", among=alone.KINDS.values())
    n_layer: int = hf("num_hidden_layers", lambda given: len(given["layers_block_type"]))
    rope: dict[str, Any] = hf("rope_parameters", lambda _: {})
    eps: float = hf("layer_norm_epsilon")
    activation: str = hf("mlp_hidden_act", among=ACTIVATIONS)
    mlp_bias: bool = hf("mlp_bias")
    shared_size: int = hf("moe_shared_expert_intermediate_size")
    mamba_heads: int = hf("mamba_num_heads")
    mamba_groups: int = hf("n_groups")
    mamba_head_dim: int = hf("mamba_head_dim")
    mamba_state: int = hf("ssm_state_size")
    mamba_size: int = hf("conv_kernel")
    mamba_conv_bias: bool = hf("use_conv_bias")
    mamba_bias: bool = hf("use_bias")

    tied, mamba_name, final_norm = False, "mixer", "norm_f"
    projections = tuple(f"mixer.{part}_proj" for part in "qkvo")
    feed_forward = ("mixer.up_proj", "mixer.down_proj")
    router_name, correction = "mixer.gate", "mixer.gate.e_score_correction_bias"
    of_expert = ("mixer.experts.#.up_proj", "mixer.experts.#.down_proj")
    of_experts = ("mixer.experts.up_proj", "mixer.experts.down_proj")
    shared = ("mixer.shared_experts.up_proj", "mixer.shared_experts.down_proj")

    FIXED: ClassVar = dict(
        mamba_hidden_act="silu", attention_bias=False, moe_latent_size=None, tie_word_embeddings=False
    )
    # Transformers makes time steps below time_step_min larger, but in prompts only; NVIDIA's own code does not.
    WITHOUT_EFFECT: ClassVar = frozenset(
        "chunk_size expand mamba_proj_bias mamba_ssm_cache_dtype moe_shared_expert_overlap mtp_layers_block_type "
        "num_logits_to_keep rescale_prenorm_residual residual_in_fp32 sliding_window time_step_floor time_step_max "
        "time_step_min use_mamba_kernels rms_norm_eps rope_theta".split()
    )

    @property
    def unread(self) -> list[str]:
        return [r"mtp\..*"]  # layers that guess further tokens

    def rotary_of(self, kind: str) -> None:
        return None

    def mixed(self, x: Tensor, w: Any, cache: Cache, step: Step) -> tuple[Tensor, Cache]:
        return mamba(x, w.mamba, cache, step, self.mamba, self.eps)


def table(config: NemotronHConfig) -> list[Weight]:
    return renamed(alone.table(config), NAMES)


class NemotronHForSampling(ForSampling):
    """Transformers' `NemotronHForCausalLM`, with the options of `Model` and the calls of `ForSampling`."""

    family = Family(NemotronHConfig.from_hf, sys.modules[__name__], alone, prepare=alone.prepare, folder="nemotronh")
