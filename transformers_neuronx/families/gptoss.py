"""gpt-oss: LLaMA with attention sinks, windows in every other layer, and a mixture of experts with biases."""

import sys
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from transformers_neuronx.config import hf
from transformers_neuronx.engine.family import Family
from transformers_neuronx.layers import LAYER_KINDS, Gate, clamped_swiglu
from transformers_neuronx.llama import graph, weights
from transformers_neuronx.llama.mixture import MixtureLike
from transformers_neuronx.models.sampling import ForSampling
from transformers_neuronx.weights import Weight, bias_of, in_turns, transposed


@dataclass(frozen=True)
class GptOssConfig(MixtureLike):
    tied: bool = hf("tie_word_embeddings")
    attention_bias: bool = hf("attention_bias")
    attention_kinds: list[str] = hf("layer_types", among=LAYER_KINDS)
    window: int | None = hf("sliding_window", None)
    n_expert: int = hf("num_local_experts")
    active_experts: int = hf("num_experts_per_tok")
    alpha: float = hf("swiglu_alpha", 1.702)  # Transformers' configuration has both since 5.19
    limit: float = hf("swiglu_limit", 7.0)

    router_name = "mlp.router"

    # Experts have their own activation, and rope_parameters the original length; the rest is for training.
    WITHOUT_EFFECT: ClassVar = frozenset({"hidden_act", "output_router_logits", "router_aux_loss_coef"})

    @property
    def activation(self) -> Gate:  # type: ignore[override]
        return clamped_swiglu(self.alpha, self.limit)


PREFIX, ignored = weights.PREFIX, weights.ignored
# Experts are [in, out] in the checkpoint, gate and up as one, with rows in turns; in MXFP4, each has a name, with `#`.
LAYOUTS = dict(gate=in_turns(0, 2, transposed), up=in_turns(1, 2, transposed), down=transposed)


def table(config: GptOssConfig) -> list[Weight]:
    heads, name = config.attention_heads, f"{weights.BLOCK}self_attn.sinks"
    rows = [Weight("attn.sinks", name, (heads.heads,), split=heads.split(0, unit=1), dtype="f32")]
    for row in weights.table(config):
        if row.name == "moe.router.weight":
            rows.append(bias_of(row, row.source.replace(".weight", ".bias")))
        elif row.name.startswith("moe."):
            part, name = row.name.split(".")[1], row.source.split("|")[-1]
            row = replace(row, source=f"{name}|{name.replace('experts', 'experts.#')}", layout=LAYOUTS[part])
            rows.append(bias_of(row, f"{name}_bias"))
        rows.append(row)
    return rows


class GptOssForSampling(ForSampling):
    """Transformers' `GptOssForCausalLM`, with the options of `Model` and the calls of `ForSampling`."""

    itself: ClassVar[Any] = sys.modules[__name__]
    family = Family(GptOssConfig.from_hf, itself, graph, prepare=graph.prepare, folder="gptoss")
