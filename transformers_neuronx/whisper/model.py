"""Whisper for sampling."""

from types import SimpleNamespace

from transformers_neuronx.engine.family import Family
from transformers_neuronx.models.encoder_decoder import EncoderDecoderForSampling
from transformers_neuronx.whisper import graph, weights
from transformers_neuronx.whisper.config import WhisperConfig


class WhisperForSampling(EncoderDecoderForSampling):
    """Transformers' `WhisperForConditionalGeneration`, with the calls of `EncoderDecoderForSampling`.

    Sources are log-mel features f32[batch, mel bins, frames], as `WhisperFeatureExtractor` makes them: 3000 frames of
    10 ms. The decoder begins with the tokens that say language and task: pass them as `decoder_input_ids`.
    """

    family = Family(WhisperConfig.from_hf, weights, graph, encoder=graph)
    # Transformers' generate() reads there how many frames a position has.
    encoder = SimpleNamespace(conv1=SimpleNamespace(stride=(1,)), conv2=SimpleNamespace(stride=(2,)))
