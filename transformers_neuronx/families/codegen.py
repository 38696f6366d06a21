"""CodeGen: GPT-J's graph; queries, values and keys are one layer, in four sections with a part of each."""

import sys
from dataclasses import dataclass

from transformers_neuronx.engine.family import Family
from transformers_neuronx.errors import ConfigError
from transformers_neuronx.gptj import graph, weights
from transformers_neuronx.gptj.config import GPTJConfig
from transformers_neuronx.models.sampling import ForSampling
from transformers_neuronx.weights import Weight, as_is, part_per_head

PREFIX, ignored = weights.PREFIX, weights.ignored
SECTIONS = 4  # devices that the models were trained on


@dataclass(frozen=True)
class CodeGenConfig(GPTJConfig):
    def __post_init__(self) -> None:
        super().__post_init__()
        if self.n_head % SECTIONS:
            raise ConfigError(f"the codegen configuration needs a multiple of {SECTIONS} as n_head, got {self.n_head}")


def table(config: CodeGenConfig) -> list[Weight]:
    """GPT-J's, with parts of one layer."""
    parts = [("attn.qkv_proj", part_per_head(i, 3, config.hidden_size // SECTIONS)) for i in (0, 2, 1)]
    return weights.table(config, [*parts, ("attn.out_proj", as_is)])


class CodeGenForSampling(ForSampling):
    """Transformers' `CodeGenForCausalLM`, with the options of `Model` and the calls of `ForSampling`."""

    family = Family(CodeGenConfig.from_hf, sys.modules[__name__], graph, prepare=graph.prepare, folder="codegen")
