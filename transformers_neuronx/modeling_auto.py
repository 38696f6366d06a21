"""Where the original had `NeuronAutoModelForCausalLM`."""

from transformers_neuronx.auto import NeuronAutoModelForCausalLM as NeuronAutoModelForCausalLM
