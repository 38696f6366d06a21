"""Generate text with a model over two processes. Both run this program, and the first one prints.

torchrun --nproc-per-node 2 examples/several_processes.py
"""

import os

from transformers import AutoTokenizer

from transformers_neuronx import NeuronAutoModelForCausalLM

CHECKPOINT = "examples/tiny-kjv"

tokenizer = AutoTokenizer.from_pretrained(CHECKPOINT)
model = NeuronAutoModelForCausalLM.from_pretrained(CHECKPOINT, n_positions=64, tp_degree=2)
model.to_neuron()  # here the processes meet; each reads its half of the weights
prompt = tokenizer("And God said unto Moses,", return_tensors="pt").input_ids
tokens = model.sample(prompt, 24, top_k=1)
if os.environ.get("RANK", "0") == "0":
    print(tokenizer.decode(tokens[0]))
