"""T5 for sampling."""

from transformers_neuronx.engine.family import Family
from transformers_neuronx.models.encoder_decoder import EncoderDecoderForSampling
from transformers_neuronx.t5 import graph, weights
from transformers_neuronx.t5.config import T5Config


class T5ForSampling(EncoderDecoderForSampling):
    """Transformers' `T5ForConditionalGeneration`, with the calls of `EncoderDecoderForSampling`."""

    family = Family(T5Config.from_hf, weights, graph, encoder=graph)
