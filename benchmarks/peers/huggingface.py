"""Transformers, unchanged and with a compiled step over a static cache."""

import torch
from transformers import AutoModelForCausalLM, DynamicCache, StaticCache

from peers.common import Clock, run

DTYPES = dict(f32=torch.float32, bf16=torch.bfloat16)


def load(task):
    torch.set_num_threads(task.threads)
    torch.set_grad_enabled(False)
    model = AutoModelForCausalLM.from_pretrained(task.checkpoint, dtype=DTYPES[task.format])
    return (Compiled if task.engine == "compile" else Eager)(model, task)


class Eager:
    def __init__(self, model, task):
        self.model, self.task = model, task
        self.weights = sum(weight.nbytes for weight in model.parameters())
        self.step = self.prompt = self.forward

    def forward(self, ids, cache):
        return self.model(ids, past_key_values=cache, use_cache=True, logits_to_keep=1).logits.argmax(-1)

    def cache(self, positions):
        return DynamicCache(config=self.model.config)

    def generate(self, ids, count):
        clock, ids = Clock(), torch.tensor(ids)
        cache = self.cache(ids.shape[1] + count)
        tokens = [self.prompt(ids, cache)]
        clock.token()
        while len(tokens) < count:
            tokens.append(self.step(tokens[-1], cache))
        return torch.cat(tokens, 1).tolist(), *clock.seconds()


class Compiled(Eager):
    """A compiled step. Prompts are not compiled, as in Transformers' own `generate()`."""

    def __init__(self, model, task):
        super().__init__(model, task)
        self.step = torch.compile(self.forward, dynamic=False)
        self.size, self.caches, self.compiled = 0, {}, set()

    def cache(self, positions):
        """Return the same cache for each size, emptied. For another one, the step would be compiled again."""
        if self.size not in self.caches:
            self.caches[self.size] = StaticCache(config=self.model.config, max_cache_len=self.size)
        self.caches[self.size].reset()
        return self.caches[self.size]

    def generate(self, ids, count):
        positions = len(ids[0]) + count
        self.size = next((size for size in self.task.positions if size >= positions), positions)
        if count > 1 and self.size not in self.compiled:  # compiles at the first run
            self.compiled.add(self.size)
            super().generate([row[:1] for row in ids], 4)
        return super().generate(ids, count)


run(lambda task: None, load)
