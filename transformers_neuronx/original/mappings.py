"""The mappings of the original's `modeling_auto`: by model type, and by class of a Hugging Face configuration."""

from __future__ import annotations

from transformers import CONFIG_MAPPING as HUGGING_FACE

from transformers_neuronx.huggingface.auto import family_of

_TYPES = ("bloom", "gpt2", "gpt_neox", "gptj", "llama", "mistral", "mixtral", "opt")

NEURON_MODEL_FOR_CAUSAL_LM_MAPPING = {name: family_of(name) for name in _TYPES}
CONFIG_MAPPING = {HUGGING_FACE[name]: name for name in _TYPES}
