"""Mistral 4: DeepSeek-V3's layers, experts by their probabilities; far on, queries grow with their position."""

from dataclasses import dataclass
from typing import ClassVar

from transformers_neuronx.config import hf
from transformers_neuronx.engine.family import Family
from transformers_neuronx.errors import ConfigError
from transformers_neuronx.layers import ACTIVATIONS, Rotary, Step, growing, rotation
from transformers_neuronx.llama import graph, weights
from transformers_neuronx.llama.latent import LatentLike
from transformers_neuronx.llama.routed import RoutedLike
from transformers_neuronx.models.sampling import ForSampling


@dataclass(frozen=True)
class Mistral4Config(LatentLike, RoutedLike):
    activation: str = hf("hidden_act", among=ACTIVATIONS)
    tied: bool = hf("tie_word_embeddings")
    in_pairs: bool = hf("rope_interleave", True)

    sigmoid = False
    correction = ""

    WITHOUT_EFFECT: ClassVar = frozenset({"pretraining_tp"})

    def __post_init__(self) -> None:
        super().__post_init__()
        most = self.n_expert // self.groups * self.active_groups
        if self.active_experts > most:
            raise ConfigError(
                f"the mistral4 configuration needs num_experts_per_tok of at most {most}, the experts of its best "
                f"groups, got {self.active_experts}"
            )

    @property
    def rotary(self) -> Rotary:
        """The rotation of `head_dim` features, of which rope_parameters have the share of a head, too."""
        others = ("llama_4_scaling_beta", "max_position_embeddings", "partial_rotary_factor")
        return self.rotary_with({name: value for name, value in self.rope.items() if name not in others})


def prepare(config: Mistral4Config, step: Step) -> graph.Rotations:
    grow, rotate = growing(config.rope, step), rotation(config.rotary, step)
    return dict.fromkeys(config.layer_kinds, (grow, rotate) if grow else rotate)


class Mistral4ForSampling(ForSampling):
    """Transformers' `Mistral4ForCausalLM`, with the options of `Model` and the calls of `ForSampling`."""

    family = Family(Mistral4Config.from_hf, weights, graph, prepare=prepare, folder="mistral4")
