"""DJL Serving's speculative decoding (deepjavalibrary/djl-serving, transformers_neuronx_scheduler: token_selector.py,
then speculation.py and optimum_neuron_scheduler.py, 2024).

The caller brings both halves: subclasses of DraftProvider (another model, or none at all) and of TokenAcceptor (greedy)
for SpeculativeGenerator, which hand over and get k - 1 draft tokens each round, whatever is left to do; and a loop of
its own, which fills both models' caches in two threads, calls the provider and speculative_forward() itself, and goes
back to single tokens when the positions run out. usage: djl_speculative.py [MODEL_DIR]
"""
# ruff: noqa: E402

import threading

import _reference as ref
import torch

K, POSITIONS = 4, 48
path, model = ref.checkpoint("llama")
draft_path, _ = ref.shorter(model, 2)
rows, wants = ref.prompts(model, [9, 14], POSITIONS)
ref.package()

from transformers_neuronx import LlamaForSampling
from transformers_neuronx.speculation import DefaultTokenAcceptor, DraftProvider, SpeculativeGenerator, TokenAcceptor


class ModelDraft(DraftProvider):
    def __init__(self, model):
        self.model = model

    def __call__(self, input_ids, k, cache_ids=None, start_ids=None):
        position = 0 if cache_ids is None else int(cache_ids.min())
        scores = [self.model(input_ids, cache_ids, start_ids)]
        if position == 0:
            return scores[0].argmax(1, keepdim=True), scores[0]
        for i in range(1, k):
            last = scores[-1].argmax(1, keepdim=True)
            scores.append(self.model(last, torch.as_tensor([position + i], dtype=torch.int32), start_ids))
        return torch.cat([s.argmax(1, keepdim=True) for s in scores], 1), torch.stack(scores)


class Recorded(DraftProvider):
    """No model: a continuation known beforehand, with every fifth token wrong."""

    def __init__(self, text):
        self.text = [token if i % 5 else token + 1 for i, token in enumerate([*text, *[7] * K])]

    def __call__(self, input_ids, k, cache_ids=None, start_ids=None):
        position = 0 if cache_ids is None else int(cache_ids.min())
        ids = torch.tensor([self.text[position + 1 : position + 1 + k]])
        scores = torch.nn.functional.one_hot(ids, model.config.vocab_size).float() * 9
        return (ids, scores.transpose(0, 1)) if position else (ids[:, :1], scores[:, 0])


class Greedy(TokenAcceptor):
    def __init__(self):
        self.kept = []

    def __call__(self, draft_ids, draft_scores, target_scores):
        assert draft_ids.shape == (1, K - 1), draft_ids.shape
        assert draft_scores.shape == (1, K - 1, model.config.vocab_size), draft_scores.shape
        assert target_scores.shape == (1, K, model.config.vocab_size), target_scores.shape
        best = target_scores.argmax(-1)
        right = int((best[:, :-1] == draft_ids).long().cumprod(1).sum())
        self.kept.append(right + 1)
        return torch.where(torch.arange(K) <= right, best, 0)  # the rest is zeros


def load(path):
    return LlamaForSampling.from_pretrained(path, batch_size=1, tp_degree=2, amp="f32", n_positions=[64])


draft, target = load(draft_path), load(path)
target.enable_speculative_decoder(K)
draft.to_neuron()
target.to_neuron()
assert issubclass(DefaultTokenAcceptor, TokenAcceptor)
for row, want in zip(rows, wants, strict=True):
    for provider in (draft, ModelDraft(draft), Recorded(want)):
        acceptor = Greedy()
        generator = SpeculativeGenerator(provider, target, K, acceptor=acceptor)
        got = generator.sample(input_ids=torch.tensor([row]), sequence_length=POSITIONS)
        ref.same(f"{type(provider).__name__}", got, [want])
        assert sum(acceptor.kept) + 1 >= POSITIONS - len(row) and max(acceptor.kept) > 1, acceptor.kept

provider, acceptor, zero = ModelDraft(draft), Greedy(), torch.tensor([0])
for row, want in zip(rows, wants, strict=True):
    tokens, first, ids = list(row), [], torch.tensor([row])
    tasks = [
        threading.Thread(target=provider, args=(ids, 1, None, zero)),
        threading.Thread(target=lambda ids=ids, out=first: out.append(target(ids, None, zero))),
    ]
    for task in tasks:
        task.start()
    for task in tasks:
        task.join()
    tokens.append(int(first[0].argmax()))
    while len(tokens) < POSITIONS:
        last, at = torch.tensor([tokens[-1:]]), torch.tensor([len(tokens) - 1])
        if len(tokens) > POSITIONS - K:
            tokens.append(int(target(last, at, zero).argmax()))
            continue
        ids, scores = provider(last, K - 1, at, zero)
        checked = target.speculative_forward(
            input_ids=torch.cat([last, ids], 1),
            start_ids=zero,
            speculation_length=K,
            cache_ids=torch.arange(len(tokens) - 1, len(tokens) + K - 1),
        )
        assert checked.shape == (K, model.config.vocab_size, 1), checked.shape
        accepted = acceptor(ids, scores.transpose(0, 1), checked.permute(2, 0, 1))[0, : acceptor.kept[-1]]
        tokens += accepted.tolist()
        if len(accepted) == K:  # its last draft token has not been through the draft model
            provider(torch.tensor([tokens[-2:-1]]), 1, torch.tensor([len(tokens) - 2]), zero)
    ref.same("own loop", [tokens], [want])
print("ok")
