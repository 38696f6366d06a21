"""Triton's Python backend for the auto class (a public TritonPythonModel with a model.json beside it, 2024).

model.json names the model and the arguments of from_pretrained, with NeuronConfig's as a nested dictionary. execute()
cuts dynamic batches where sampling parameters change, fills each cut up to the compiled batch with copies of its last
prompt and passes the parameters straight to sample(). The decoupled variant has continuous batching and one Python
generator per request, each stepping alone. usage: triton_backend.py [MODEL_DIR]
"""
# ruff: noqa: E402

import json
import os

import _reference as ref
import torch

LENGTH = 40
path, model = ref.checkpoint("llama", sharp=2e4)
rows, wants = ref.prompts(model, [11] * 7, LENGTH, gap=40)
ragged, ragged_wants = ref.prompts(model, [4, 13, 9, 6], LENGTH, gap=40, seed=1)
ref.package()

from transformers_neuronx import NeuronAutoModelForCausalLM
from transformers_neuronx.config import ContinuousBatchingConfig, NeuronConfig, QuantizationConfig


class TritonPythonModel:
    def initialize(self, model_dir):
        with open(os.path.join(model_dir, "model.json")) as file:
            arguments = json.load(file)
        location, neuron_config = arguments.pop("model"), arguments.pop("neuron_config", {})
        batching = neuron_config.pop("continuous_batching", {})
        if "batch_size_for_shared_caches" in batching:
            arguments["batch_size"] = int(batching["batch_size_for_shared_caches"])
            neuron_config["continuous_batching"] = ContinuousBatchingConfig(**batching)
        quant = neuron_config.pop("quant", {})
        if "quant_dtype" in quant and "dequant_dtype" in quant:
            neuron_config["quant"] = QuantizationConfig(**quant)
        if neuron_config:
            arguments["neuron_config"] = NeuronConfig(**neuron_config)
        self.batch_size = arguments.get("batch_size", 1)
        self.model = NeuronAutoModelForCausalLM.from_pretrained(location, **arguments)
        self.model.to_neuron()
        return self

    def execute(self, requests):
        """Requests are (prompts of equal length, parameters)."""
        cuts, found = [], []
        for prompts, text in requests:
            parameters = {"sequence_length": LENGTH, **json.loads(text)}
            if not cuts or cuts[-1][1] != parameters:
                cuts.append(([], parameters))
            cuts[-1][0].extend(prompts)
        for prompts, parameters in cuts:
            with torch.inference_mode():
                while prompts:
                    batch, prompts = prompts[: self.batch_size], prompts[self.batch_size :]
                    filled = batch + batch[-1:] * (self.batch_size - len(batch))
                    got = self.model.sample(torch.tensor(filled), **parameters)
                    assert len(got) == self.batch_size
                    found.extend(got[: len(batch)].tolist())
        return [[found.pop(0) for _ in prompts] for prompts, _ in requests]

    def stream(self, row, slot, total):
        """Tokens of one request, whose caches are those of `slot`."""
        ids, at = torch.tensor([row]), torch.arange(len(row)).unsqueeze(0)
        for n in range(len(row), total):
            logits = self.model(ids, cache_ids=at, start_ids=torch.tensor([slot]))
            ids, at = logits.argmax(-1, keepdim=True), torch.tensor([[n]])
            yield ids.item()


def backend(**neuron_config):
    folder = ref.scratch()
    arguments = {"model": path, "n_positions": 64, "tp_degree": 2, "amp": "f32", "batch_size": 3}
    if neuron_config:
        arguments |= {"neuron_config": neuron_config, "context_length_estimate": [16], "n_positions": [64]}
    with open(os.path.join(folder, "model.json"), "w") as file:
        json.dump(arguments, file)
    return TritonPythonModel().initialize(folder)


server = backend()
short = '{"sequence_length": 20, "top_k": 50, "temperature": 0.7}'
requests = [(rows[:2], "{}"), (rows[2:3], '{"top_k": 10, "top_p": 0.9}'), (rows[3:6], short), (rows[6:], short)]
for some in (requests, requests[1:2], requests[2:]):
    got = server.execute(some)
    for (prompts, parameters), texts in zip(some, got, strict=True):
        length = json.loads(parameters).get("sequence_length", LENGTH)
        ref.same(parameters, texts, [wants[rows.index(row)][:length] for row in prompts])

server = backend(continuous_batching={"batch_size_for_shared_caches": 3}, padding_side="right")
assert server.batch_size == 3
waiting, streams, texts = list(range(len(ragged))), {}, [list(row) for row in ragged]
turn = 0
while waiting or streams:
    for slot in {0, 1, 2} - set(streams):
        if waiting and (turn >= 2 * slot):  # they arrive one after another
            request = waiting.pop(0)
            streams[slot] = request, server.stream(ragged[request], slot, LENGTH - 5 * request)
    for slot, (request, tokens) in sorted(streams.items(), reverse=turn % 2 == 1):
        token = next(tokens, None)
        if token is None:
            del streams[slot]
        else:
            texts[request].append(token)
    turn += 1
ref.same("streams", texts, [want[: LENGTH - 5 * i] for i, want in enumerate(ragged_wants)])
print("ok")
