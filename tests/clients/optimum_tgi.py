"""optimum-neuron's continuous batching for TGI (huggingface/optimum-neuron, modeling.py, modeling_decoder.py and
text-generation-inference/server/…/generator.py, 2024).

export: split checkpoint in one folder, neuron.save() into another; load() of that folder before to_neuron(). Each slot
is a sequence id: prompts come padded left from the tokenizer and are turned to right padding, their cache_ids count
only real tokens; running slots pause during a prefill and decode with a mask longer than their text. Slots are taken
from the end and freed in any order. usage: optimum_tgi.py [MODEL_DIR]
"""
# ruff: noqa: E402

import os

import _reference as ref
import torch
from transformers.utils import ModelOutput

SLOTS, LENGTH, EOS = 4, 64, 2
_, model = ref.checkpoint("llama")
rows, wants = ref.prompts(model, [7, 3, 15, 10, 6, 12], 34)
news = [9, 14, 5, 11, 8, 3]
ref.package()

from transformers_neuronx.config import ContinuousBatchingConfig, NeuronConfig
from transformers_neuronx.llama.model import LlamaForSampling
from transformers_neuronx.module import PretrainedModel, save_pretrained_split


class NeuronModelForCausalLM:
    def __init__(self, folder, export=None):
        checkpoint, compiled = os.path.join(folder, "checkpoint"), os.path.join(folder, "compiled")
        if export is not None:
            save_pretrained_split(export, checkpoint)
        config = NeuronConfig(continuous_batching=ContinuousBatchingConfig(batch_size_for_shared_caches=SLOTS))
        neuron = LlamaForSampling.from_pretrained(
            checkpoint,
            batch_size=SLOTS,
            tp_degree=2,
            amp="f32",
            n_positions=[LENGTH],
            context_length_estimate=[LENGTH],
            neuron_config=config,
        )
        assert isinstance(neuron, PretrainedModel)
        if export is None:
            neuron.load(compiled)
        neuron.to_neuron()
        self.model, self.continuous_batching = neuron, neuron.neuron_config.continuous_batching is not None
        if export is not None:
            neuron.save(compiled)
            assert os.listdir(compiled)

    def forward(self, input_ids, cache_ids, start_ids):
        logits = self.model.forward(input_ids, cache_ids, start_ids)
        return ModelOutput([("logits", logits[:, None, :])])

    def prefill(self, input_ids, mask, seq_ids):
        n = mask.sum(1)
        ids, cache_ids, right = torch.full_like(input_ids, EOS), torch.zeros_like(mask), torch.zeros_like(mask)
        for i, m in enumerate(n.tolist()):
            ids[i, :m] = input_ids[i, mask[i] == 1]
            right[i, :m] = 1
            cache_ids[i, :m] = torch.arange(m)
        return self.forward(ids, cache_ids, seq_ids)

    def decode(self, input_ids, mask, seq_ids):
        return self.forward(input_ids[:, -1:], (mask.sum(1) - 1).unsqueeze(1), seq_ids)


class Slot:
    def __init__(self, number):
        self.id, self.state, self.request = number, "empty", None


class Generator:
    def __init__(self, model):
        assert model.continuous_batching
        self.model, self.slots, self.done = model, [Slot(i) for i in range(SLOTS)], {}

    def in_state(self, state):
        return [slot for slot in self.slots if slot.state == state]

    def prefill(self, requests):
        active, empty = self.in_state("ready"), self.in_state("empty")
        for slot in active:
            slot.state = "paused"
        new = [empty.pop() for _ in requests]
        ids, mask = ref.padded([rows[r] for r in requests], "left", pad=EOS)
        for slot, request, row, real in zip(new, requests, ids, mask, strict=True):
            slot.state, slot.request, slot.tokens, slot.mask = "ready", request, row.tolist(), real.tolist()
        self.select(new, self.model.prefill(ids, mask, torch.tensor([slot.id for slot in new])).logits)
        for slot in active:
            slot.state = "ready"

    def decode(self):
        slots = self.in_state("ready")
        mask = torch.zeros(len(slots), max(len(slot.mask) for slot in slots), dtype=torch.int64)
        for i, slot in enumerate(slots):
            mask[i, : len(slot.mask)] = torch.tensor(slot.mask)
        ids = torch.tensor([[slot.tokens[-1]] for slot in slots])
        self.select(slots, self.model.decode(ids, mask, torch.tensor([slot.id for slot in slots])).logits)

    def select(self, slots, logits):
        for i, slot in enumerate(slots):
            text = [token for token, real in zip(slot.tokens, slot.mask, strict=True) if real]
            ref.close(f"request {slot.request}", logits[i : i + 1, -1, :], ref.logits(model, text)[-1:])
            slot.tokens.append(int(logits[i, -1].argmax()))
            slot.mask.append(1)
            if len(text) + 1 == len(rows[slot.request]) + news[slot.request]:
                self.done[slot.request] = [*text, slot.tokens[-1]]
                slot.state = "empty"


folder = ref.scratch()
for export in (model, None):
    generator = Generator(NeuronModelForCausalLM(folder, export))
    generator.prefill([0, 1])
    waiting = [[2], [3, 4], [5]]
    while generator.in_state("ready"):
        generator.decode()
        if waiting and len(generator.in_state("empty")) >= len(waiting[0]):
            generator.prefill(waiting.pop(0))
    texts = [generator.done[i] for i in range(len(rows))]
    ref.same(
        f"export {export is not None}",
        texts,
        [want[: len(row) + n] for want, row, n in zip(wants, rows, news, strict=True)],
    )
print("ok")
