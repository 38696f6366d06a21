"""Where the original had `NeuronAutoModelForCausalLM`."""

from transformers_neuronx.auto import (
    NeuronAutoModelForCausalLM as NeuronAutoModelForCausalLM,
    NeuronAutoModelForSeq2SeqLM as NeuronAutoModelForSeq2SeqLM,
)
