"""Falcon H1: every layer has attention and Mamba-2, which read the same; what enters and leaves each has a factor."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from transformers_neuronx.config import hf
from transformers_neuronx.engine.family import Family
from transformers_neuronx.layers import ACTIVATIONS, Cache, Gate, State, Step, attention, mamba
from transformers_neuronx.llama import graph, weights
from transformers_neuronx.llama.mamba import MambaLike
from transformers_neuronx.models.sampling import ForSampling
from transformers_neuronx.pyhlo import Tensor
from transformers_neuronx.weights import Heads, Weight


@dataclass(frozen=True)
class FalconH1Config(MambaLike):
    function: str = hf("hidden_act", among=ACTIVATIONS)
    tied: bool = hf("tie_word_embeddings")
    attention_bias: bool = hf("attention_bias")
    mlp_bias: bool = hf("mlp_bias")
    mamba_norm: bool = hf("mamba_rms_norm")
    norm_first: bool = hf("mamba_norm_before_gate")
    embedding_scale: float = hf("embedding_multiplier")
    logit_scale: float = hf("lm_head_multiplier")
    key_scale: float = hf("key_multiplier")
    to_attention: float = hf("attention_in_multiplier")
    from_attention: float = hf("attention_out_multiplier")
    to_mamba: float = hf("ssm_in_multiplier")
    from_mamba: float = hf("ssm_out_multiplier")
    of_mamba: list[float] = hf("ssm_multipliers")  # gates, values, keys, queries, time steps
    of_mlp: list[float] = hf("mlp_multipliers")  # gates, outputs

    norms: ClassVar = {"attn_norm": "input_layernorm", "mlp_norm": "pre_ff_layernorm"}
    final_norm = "final_layernorm"
    feed_forward = tuple(f"feed_forward.{part}_proj" for part in ("gate", "up", "down"))

    FIXED: ClassVar = {"projectors_bias": False}
    WITHOUT_EFFECT: ClassVar = frozenset({"mamba_d_ssm", "num_logits_to_keep"})  # the size of all heads

    @property
    def activation(self) -> Gate:  # type: ignore[override]
        return lambda gate, up: ACTIVATIONS[self.function](gate * self.of_mlp[0]) * up

    def heads_of(self, kind: str) -> Heads:
        return self.attention_heads

    def states_of(self, kind: str) -> Sequence[State]:
        return self.states


PREFIX, ignored = weights.PREFIX, weights.ignored
embed, norm, head = graph.embed, graph.norm, graph.head


def table(config: FalconH1Config) -> list[Weight]:
    return weights.table(config) + config.rows(weights.BLOCK)


def layer(
    config: FalconH1Config, w: Any, x: Tensor, cache: Cache, step: Step, rotate: graph.Rotations
) -> tuple[Tensor, Cache]:
    before, count = graph.normed(config, w, "attn_norm", x), len(cache) - len(config.states)
    to, scale = before * config.to_attention, config.key_scale * config.head_dim**-0.5
    h, keys = attention(to, w.attn, cache[:count], step, config.head_dim, rotate[""], scale=scale)
    scales = dict(zip(("gate", *"vkq", "delta"), config.of_mamba, strict=True))
    how = config.mamba, config.eps, config.function, scales, config.norm_first
    y, states = mamba(before * config.to_mamba, w.mamba, cache[count:], step, *how)
    x = step.needed_rows(x) + h * config.from_attention + y * config.from_mamba
    h = graph.feed_forward(config, w, graph.normed(config, w, "mlp_norm", x))
    return x + h * config.of_mlp[1], (*keys, *states)


class FalconH1ForSampling(ForSampling):
    """Transformers' `FalconH1ForCausalLM`, with the options of `Model` and the calls of `ForSampling`."""

    itself: ClassVar[Any] = sys.modules[__name__]
    family = Family(FalconH1Config.from_hf, itself, itself, prepare=graph.prepare, folder="falconh1")
