"""What Whisper's `generate()` of Transformers needs to be different for a compiled model.

That method finds the language, keeps to timestamps, cuts audio into segments, conditions each on the text before it,
and repeats segments at higher temperatures. It calls the model's own `generate()` for each segment.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers.generation.logits_process import WhisperNoSpeechDetection
from transformers.models.whisper.generation_whisper import WhisperGenerationMixin

from transformers_neuronx.errors import InputError
from transformers_neuronx.huggingface.device_cache import CACHE


class SpeechGeneration(WhisperGenerationMixin):
    """Whisper's `generate()`, for a model with one set of caches whose attention stays on the devices."""

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """Generate tokens of features f32[batch, mel bins, frames] as Transformers' Whisper does.

        It has the arguments and results of `WhisperForConditionalGeneration.generate`, without the cache.
        Raises InputError for `return_token_timestamps`, and otherwise as `HuggingFaceGenerationModelAdapter.generate`.
        """
        if kwargs.get("return_token_timestamps"):
            raise InputError(
                "return_token_timestamps is not supported: it needs the weights of attention to the audio, which stay "
                "on the devices; return_timestamps=True gives the timestamps of segments"
            )
        return super().generate(*args, **kwargs)

    def _postprocess_outputs(self, seek_outputs: Any, *args: Any, **kwargs: Any) -> Any:
        """Leave out the cache, which Transformers would divide by rows: it is on the devices."""
        if not isinstance(seek_outputs, torch.Tensor):
            kept = {name: value for name, value in seek_outputs.items() if name != CACHE}
            seek_outputs = type(seek_outputs)(**kept)
        theirs: Any = super()
        return theirs._postprocess_outputs(seek_outputs, *args, **kwargs)

    def _setup_no_speech_detection(  # type: ignore[override]
        self, logits_processor: Any, segment_input: Any, decoder_input_ids: Any, kwargs: dict[str, Any]
    ) -> None:
        """Compute the logits that the detector of silence needs. It would call the model inside `generate()`, whose
        sequences are in the same caches.
        """
        theirs: Any = super()
        detector: Any = next(each for each in logits_processor if isinstance(each, WhisperNoSpeechDetection))
        detector.set_model(self)
        theirs._setup_no_speech_detection(logits_processor, segment_input, decoder_input_ids, kwargs)
        if detector.start_of_trans_offset > 1:
            output = self(**detector.inputs)  # type: ignore[operator]
            detector.set_model(lambda **_: output)
