"""`NeuronAutoModelForCausalLM` at the original's import path."""

from transformers_neuronx.auto import (
    NeuronAutoModelForCausalLM as NeuronAutoModelForCausalLM,
    NeuronAutoModelForSeq2SeqLM as NeuronAutoModelForSeq2SeqLM,
)
