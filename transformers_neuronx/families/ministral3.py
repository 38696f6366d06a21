"""Ministral 3: Mistral; far beyond the original length, queries grow with their position."""

from dataclasses import dataclass

from transformers_neuronx.config import hf
from transformers_neuronx.engine.family import Family
from transformers_neuronx.layers import ACTIVATIONS, Rotary, Step, growing, rotation
from transformers_neuronx.llama import graph, weights
from transformers_neuronx.llama.like import LlamaLike
from transformers_neuronx.models.sampling import ForSampling


@dataclass(frozen=True)
class Ministral3Config(LlamaLike):
    activation: str = hf("hidden_act", among=ACTIVATIONS)
    tied: bool = hf("tie_word_embeddings")
    window: int | None = hf("sliding_window", None)

    @property
    def rotary(self) -> Rotary:
        of_queries = ("llama_4_scaling_beta", "max_position_embeddings")
        return self.rotary_with({name: value for name, value in self.rope.items() if name not in of_queries})


def prepare(config: Ministral3Config, step: Step) -> graph.Rotations:
    grow, rotate = growing(config.rope, step), rotation(config.rotary, step)
    return {"": (lambda q: grow(rotate(q)), rotate) if grow else rotate}


class Ministral3ForSampling(ForSampling):
    """Transformers' `Ministral3ForCausalLM`, with the options of `Model` and the calls of `ForSampling`."""

    family = Family(Ministral3Config.from_hf, weights, graph, prepare=prepare, folder="ministral3")
