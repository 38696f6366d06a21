"""The weight tables of EAGLE heads."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch

from transformers_neuronx.llama import weights
from transformers_neuronx.llama.feedforward import feed_forward
from transformers_neuronx.speculation.eagle.config import EagleConfig, FirstConfig
from transformers_neuronx.weights import COLUMNS, Weight, also_named, attention, linear, norm, parts_of

BLOCK = weights.BLOCK


def places(vocab_size: int, offsets: torch.Tensor) -> torch.Tensor:
    """Return the place of each token among those that are drafted, and their number for others. -> s32[vocab_size]

    offsets [drafted] are what a token's id is more than its place.
    """
    numbers = torch.arange(len(offsets), device=offsets.device)
    found = torch.full([vocab_size], len(offsets), dtype=torch.int32, device=offsets.device)
    return found.scatter(0, numbers + offsets.long(), numbers.int())


@dataclass(frozen=True)
class FirstTable:
    """The table of a head of the first EAGLE: `shared` rows of the model, its embedding, head or both, and a layer of
    LLaMA's, without the norm before attention, after a linear layer, `biased` or not.
    """

    shared: Sequence[Weight]
    biased: bool

    PREFIX = weights.PREFIX
    __name__ = __name__

    def table(self, config: FirstConfig) -> list[Weight]:
        h, others = config.hidden_size, {"final_norm.weight", *(row.name for row in self.shared)}
        layer = [row for row in weights.table(config) if row.name not in others]
        return [*self.shared, *layer, *linear("combined", self.PREFIX + "fc", h, 2 * h, COLUMNS, bias=self.biased)]

    def ignored(self, config: FirstConfig) -> list[str]:
        return []


@dataclass(frozen=True)
class Table:
    """The table of a head of EAGLE-3: `shared` rows of the model's embedding, unless it has its own. It is `some`
    tokens that are drafted, or all.
    """

    shared: Sequence[Weight]
    some: bool

    PREFIX = weights.PREFIX
    __name__ = __name__

    def table(self, config: EagleConfig) -> list[Weight]:
        h, heads, prefix = config.hidden_size, config.attention_heads, self.PREFIX
        sources = parts_of(BLOCK, config.projections, [])
        inner, vocab = heads.heads * heads.head_dim, config.vocab_size
        rows = [
            *(row for name, source in config.norms.items() for row in norm(name, BLOCK + source, h, bias=False)),
            *attention("attn", heads, 2 * h, sources, bias=config.attention_bias, out_bias=False)[:-1],
            *linear("attn.out", sources[-1][0], h, inner, heads.split(1), bias=config.attention_bias),
            *feed_forward(config, BLOCK),
            *linear("combined", prefix + "fc", h, config.features, COLUMNS, bias=False),
            *(norm("input_norm", prefix + "input_norm", config.features, bias=False) if config.norm_features else []),
            *norm("final_norm", prefix + "norm", h, bias=False),
            *linear("head", "lm_head", config.drafted or vocab, h, COLUMNS, bias=False),
        ]
        mapped = [Weight("places", "d2t", (vocab,), partial(places, vocab), dtype="s32")] if self.some else []
        own = [Weight("embed", prefix + "embed_tokens.weight", (vocab, h), split=COLUMNS)]
        return [
            *(self.shared or own),
            *also_named(rows, {"layers.{}.": "midlayer."}),
            *mapped,
        ]

    def ignored(self, config: EagleConfig) -> list[str]:
        return ["t2d"]
