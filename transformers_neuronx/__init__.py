"""Autoregressive transformers as pure functions over fixed-shape tensors, written in XLA HLO."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from transformers_neuronx.original.names import find, install
from transformers_neuronx.version import __version__ as __version__

if TYPE_CHECKING:
    from transformers_neuronx.bloom.model import BloomForSampling as BloomForSampling
    from transformers_neuronx.config import (
        ContinuousBatchingConfig as ContinuousBatchingConfig,
        GenerationConfig as GenerationConfig,
        KVCacheQuantizationConfig as KVCacheQuantizationConfig,
        NeuronConfig as NeuronConfig,
        QuantizationConfig as QuantizationConfig,
    )
    from transformers_neuronx.config.constants import (
        GQA as GQA,
        Layout as Layout,
    )
    from transformers_neuronx.gpt2.model import (
        GPT2ForSamplingWithContextBroadcasting as GPT2ForSamplingWithContextBroadcasting,
    )
    from transformers_neuronx.gptj.model import GPTJForSampling as GPTJForSampling
    from transformers_neuronx.gptneox.model import GPTNeoXForSampling as GPTNeoXForSampling
    from transformers_neuronx.huggingface.adapter import (
        HuggingFaceGenerationModelAdapter as HuggingFaceGenerationModelAdapter,
    )
    from transformers_neuronx.huggingface.auto import (
        NeuronAutoModelForCausalLM as NeuronAutoModelForCausalLM,
        NeuronAutoModelForImageTextToText as NeuronAutoModelForImageTextToText,
        NeuronAutoModelForSeq2SeqLM as NeuronAutoModelForSeq2SeqLM,
    )
    from transformers_neuronx.llama.model import LlamaForSampling as LlamaForSampling
    from transformers_neuronx.mistral.model import MistralForSampling as MistralForSampling
    from transformers_neuronx.mixtral.model import MixtralForSampling as MixtralForSampling
    from transformers_neuronx.opt.model import OPTForSampling as OPTForSampling
    from transformers_neuronx.serving.engine import Engine as Engine
    from transformers_neuronx.serving.request import SamplingParams as SamplingParams
    from transformers_neuronx.serving.structured import StructuredOutputs as StructuredOutputs
    from transformers_neuronx.speculation.eagle.draft import EagleDraft as EagleDraft
    from transformers_neuronx.t5.model import T5ForSampling as T5ForSampling

# The names of this package that most programs need. They are imported on first use, because some take seconds.
_HOMES = {
    "BloomForSampling": "bloom.model",
    "ContinuousBatchingConfig": "config",
    "EagleDraft": "speculation.eagle.draft",
    "Engine": "serving.engine",
    "GPT2ForSamplingWithContextBroadcasting": "gpt2.model",
    "GPTJForSampling": "gptj.model",
    "GPTNeoXForSampling": "gptneox.model",
    "GQA": "config.constants",
    "GenerationConfig": "config",
    "HuggingFaceGenerationModelAdapter": "huggingface.adapter",
    "KVCacheQuantizationConfig": "config",
    "Layout": "config.constants",
    "LlamaForSampling": "llama.model",
    "MistralForSampling": "mistral.model",
    "MixtralForSampling": "mixtral.model",
    "NeuronAutoModelForCausalLM": "huggingface.auto",
    "NeuronAutoModelForImageTextToText": "huggingface.auto",
    "NeuronAutoModelForSeq2SeqLM": "huggingface.auto",
    "NeuronConfig": "config",
    "OPTForSampling": "opt.model",
    "QuantizationConfig": "config",
    "SamplingParams": "serving.request",
    "StructuredOutputs": "serving.structured",
    "T5ForSampling": "t5.model",
}

install()

if not TYPE_CHECKING:  # a type checker would accept any name

    def __getattr__(name: str) -> Any:
        if name not in _HOMES:
            return find(__name__, name)
        return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
