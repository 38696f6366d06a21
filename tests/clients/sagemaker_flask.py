"""SageMaker endpoints with a container of one's own: Flask around GPT-2 (a public Gpt2Generator for inf2, 2023).

One generator per process, made by a class method under a lock while the first requests wait; threads of the server call
it. The model folder holds the split checkpoint in bf16 (norms and embeddings in f32) and, in the same folder, the
compiled artifacts: _save_compiled_artifacts() there by the first container, _load_compiled_artifacts() by the others.
reset() before every sample(); texts of unequal length are padded left, start_ids counts the pads, answers end at the
end token. usage: sagemaker_flask.py [MODEL_DIR]
"""
# ruff: noqa: E402

import json
import os
import threading
from concurrent.futures import ThreadPoolExecutor

import _reference as ref
import torch
import transformers

BATCH, LENGTH = 2, 28
path, model = ref.checkpoint("gpt2", sharp=2e3)
rows, wants = ref.prompts(model, [10, 10, 6, 13], LENGTH, gap=80)
end = next(token for i, token in enumerate(wants[0]) if i > 16 and token not in wants[0][:i])
model.config.eos_token_id = model.generation_config.eos_token_id = end
model.save_pretrained(path)


def until_end(row, text):
    return row[: row.index(end, len(text)) + 1] if end in row[len(text) :] else row


wants = [until_end(want, row) for row, want in zip(rows, wants, strict=True)]
assert len(wants[0]) < LENGTH
ref.package()

from transformers_neuronx.gpt2.model import GPT2ForSampling
from transformers_neuronx.module import save_pretrained_split


class Generator:
    lock, generator, made = threading.Lock(), None, 0

    @classmethod
    def get(cls):
        with cls.lock:
            if cls.generator is None:
                cls.generator = cls(os.environ["SM_MODEL_DIR"])
                Generator.made += 1
            return cls.generator

    def __init__(self, model_dir):
        first = not os.path.exists(model_dir)
        if first:
            full = transformers.AutoModelForCausalLM.from_pretrained(path)
            for block in full.transformer.h:
                block.attn.to(torch.bfloat16)
                block.mlp.to(torch.bfloat16)
            full.lm_head.to(torch.bfloat16)
            save_pretrained_split(full, model_dir)
        self.neuron = GPT2ForSampling.from_pretrained(
            model_dir, batch_size=BATCH, tp_degree=2, n_positions=64, amp="bf16"
        )
        if not first:
            self.neuron._load_compiled_artifacts(model_dir)
        self.neuron.to_neuron()
        if first:
            before = set(os.listdir(model_dir))
            self.neuron._save_compiled_artifacts(model_dir)
            assert before <= set(os.listdir(model_dir)) and len(os.listdir(model_dir)) > len(before)
        self.busy = threading.Lock()

    def batch_tokenize(self, texts):
        ids, mask = ref.padded(texts, "left", pad=end)
        return ids, (mask == 0).sum(1)

    def __call__(self, texts):
        ids, pads = self.batch_tokenize(texts)
        with self.busy, torch.inference_mode():
            self.neuron.reset()
            got = self.neuron.sample(ids, sequence_length=LENGTH, start_ids=pads if pads.any() else None, top_k=50)
        answers = [row[n:] for row, n in zip(got.tolist(), pads.tolist(), strict=True)]
        return [until_end(row, text) for row, text in zip(answers, texts, strict=True)]


def invocations(body):
    """What the route does: JSON in, JSON out."""
    return json.dumps({"output": Generator.get()(json.loads(body)["user_input"])})


os.environ["NEURON_CC_FLAGS"] = "--model-type=transformer-inference"
os.environ["SM_MODEL_DIR"] = os.path.join(ref.scratch(), "model")
batches = [(0, 1), (2, 3), (3, 0), (1, 1), (2, 0)]
for container in range(2):
    Generator.generator = None  # a new process
    bodies = [json.dumps({"user_input": [rows[i] for i in batch]}) for batch in batches]
    with ThreadPoolExecutor(4) as pool:
        for batch, response in zip(batches, pool.map(invocations, bodies), strict=True):
            width = max(len(rows[i]) for i in batch)
            ref.same(
                f"container {container}, {batch}",
                json.loads(response)["output"],
                [wants[i][: LENGTH - width + len(rows[i])] for i in batch],
            )
assert Generator.made == 2
transformers.AutoConfig.from_pretrained(os.environ["SM_MODEL_DIR"])
print("ok")
