"""LFM2: most layers have a gated short convolution in place of attention."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

from transformers_neuronx.config import hf
from transformers_neuronx.engine.family import Family
from transformers_neuronx.llama import graph, weights
from transformers_neuronx.llama.convolution import CONVOLUTION_KINDS, ConvolutionLike
from transformers_neuronx.models.sampling import ForSampling


@dataclass(frozen=True)
class Lfm2Config(ConvolutionLike):
    tied: bool = hf("tie_word_embeddings")
    layer_kinds: list[str] = hf("layer_types", among=CONVOLUTION_KINDS)
    eps: float = hf("norm_eps")
    adjusted: bool = hf("block_auto_adjust_ff_dim")
    times: float | None = hf("block_ffn_dim_multiplier", None)
    multiple: int = hf("block_multiple_of")

    # layer_types follows from the first; the second is another name of the number of heads, which Transformers leaves.
    WITHOUT_EFFECT: ClassVar = frozenset({"full_attn_idxs", "num_heads"})

    @classmethod
    def from_hf(cls, attributes: Mapping[str, Any]) -> Self:
        """Read the attributes. If the inner size of feed-forwards is adjusted, it is two thirds of theirs or more."""
        read = super().from_hf(attributes)
        if not read.adjusted:
            return read
        size = 2 * read.inner_size // 3
        if read.times is not None:
            size = -(-int(read.times * size) // read.multiple) * read.multiple
        return replace(read, inner_size=size)


class Lfm2ForSampling(ForSampling):
    """Transformers' `Lfm2ForCausalLM`, with the options of `Model` and the calls of `ForSampling`."""

    family = Family(Lfm2Config.from_hf, weights, graph, prepare=graph.prepare, folder="lfm2")
