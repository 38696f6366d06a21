"""Autoregressive transformers as pure functions over fixed-shape tensors, written in XLA HLO."""

from __future__ import annotations

import importlib
from typing import Any

from transformers_neuronx.version import __version__ as __version__

# Names that the original had here. They are imported when first asked for: some take seconds.
_HOMES = {
    "BloomForSampling": "bloom.model",
    "ContinuousBatchingConfig": "config",
    "GPT2ForSamplingWithContextBroadcasting": "gpt2.model",
    "GPTJForSampling": "gptj.model",
    "GPTNeoXForSampling": "gptneox.model",
    "GQA": "constants",
    "GenerationConfig": "config",
    "HuggingFaceGenerationModelAdapter": "generation_utils",
    "KVCacheQuantizationConfig": "config",
    "Layout": "constants",
    "LlamaForSampling": "llama.model",
    "MistralForSampling": "mistral.model",
    "MixtralForSampling": "mixtral.model",
    "NeuronAutoModelForCausalLM": "auto",
    "NeuronAutoModelForSeq2SeqLM": "auto",
    "NeuronConfig": "config",
    "OPTForSampling": "opt.model",
    "QuantizationConfig": "config",
    "T5ForSampling": "t5.model",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
