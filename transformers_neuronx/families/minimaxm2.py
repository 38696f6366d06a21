"""MiniMax M2: norms of all queries and keys together, partial rotation, a mixture of experts."""

from dataclasses import dataclass
from typing import ClassVar

from transformers_neuronx.config import hf
from transformers_neuronx.engine.family import Family
from transformers_neuronx.layers import ACTIVATIONS
from transformers_neuronx.llama import graph, weights
from transformers_neuronx.llama.mixture import MixtureLike
from transformers_neuronx.models.sampling import ForSampling


@dataclass(frozen=True)
class MiniMaxM2Config(MixtureLike):
    activation: str = hf("hidden_act", among=ACTIVATIONS)
    head_dim: int = hf("head_dim")
    tied: bool = hf("tie_word_embeddings")
    n_expert: int = hf("num_local_experts")
    active_experts: int = hf("num_experts_per_tok")

    qk_norm = True
    qk_norm_of = "all heads"
    sigmoid = True
    router_name = "block_sparse_moe.gate|mlp.gate"
    of_expert = tuple(f"block_sparse_moe.experts.#.w{part}" for part in (1, 3, 2))
    correction = "block_sparse_moe.e_score_correction_bias|mlp.e_score_correction_bias"

    # rope_parameters have rotary_dim as a factor; the rest is for training.
    WITHOUT_EFFECT: ClassVar = frozenset(
        {"rotary_dim", "output_router_logits", "router_aux_loss_coef", "router_jitter_noise"}
    )


class MiniMaxM2ForSampling(ForSampling):
    """Transformers' `MiniMaxM2ForCausalLM`, with the options of `Model` and the calls of `ForSampling`."""

    family = Family(MiniMaxM2Config.from_hf, weights, graph, prepare=graph.prepare, folder="minimaxm2")
