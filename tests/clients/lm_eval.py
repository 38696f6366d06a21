"""lm-evaluation-harness's neuronx model (EleutherAI/lm-evaluation-harness, lm_eval/models/neuron_optimum.py, 2024).

Scoring: rows (context + continuation)[:-1], padded right with zeros and filled up to the compiled batch with zero rows,
no mask. Where the model has output_all_logits, one call gives [batch, positions, vocab]; where not, every column is a
call of its own from cache_ids 0 on, so the prompt never goes through a context program. generate_until is greedy, from
left-padded contexts cut from the left, with stopping criteria and use_cache=True. usage: lm_eval.py [MODEL_DIR]
"""
# ruff: noqa: E402

import _reference as ref
import torch
import transformers
from torch.nn import functional

BATCH, LENGTH = 3, 64
path, model = ref.checkpoint("llama")
contexts, wants = ref.prompts(model, [12, 5, 20, 9, 7], 34)
draw = torch.Generator().manual_seed(7)
# greedy continuations, others, and one that is greedy but for its last token
requests = [(row, want[len(row) :][:n]) for row, want, n in zip(contexts, wants, (6, 1, 9, 4, 2), strict=True)]
requests += [(row, torch.randint(5, model.config.vocab_size, (5,), generator=draw).tolist()) for row in contexts[:3]]
requests += [(contexts[0], [*wants[0][12:15], wants[0][15] + 1])]


def score(context, continuation):
    """(log probability, whether greedy)"""
    logits = ref.logits(model, (context + continuation)[:-1]).double().log_softmax(-1)[-len(continuation) :]
    tokens = torch.tensor(continuation)
    return logits.gather(1, tokens[:, None]).sum(), bool((logits.argmax(-1) == tokens).all())


answers = [score(*request) for request in requests]
assert [greedy for _, greedy in answers] == [True] * 5 + [False] * 4
ref.package()

from transformers_neuronx import LlamaForSampling
from transformers_neuronx.config import NeuronConfig
from transformers_neuronx.generation_utils import HuggingFaceGenerationModelAdapter


class Until(transformers.StoppingCriteria):
    """Every row has had its stop sequence."""

    def __init__(self, stop, prompt):
        self.stop, self.prompt = stop, prompt

    def __call__(self, input_ids, scores, **kwargs):
        done = [
            self.stop in [row[i : i + len(self.stop)] for i in range(self.prompt, len(row))]
            for row in input_ids.tolist()
        ]
        return torch.tensor(done)


class NeuronHF:
    def __init__(self, **neuron_config):
        self.neuron = LlamaForSampling.from_pretrained(
            path,
            batch_size=BATCH,
            tp_degree=2,
            amp="f32",
            n_positions=LENGTH,
            context_length_estimate=32,
            neuron_config=NeuronConfig(**neuron_config) if neuron_config else None,
        )
        self.neuron.to_neuron()

    def model_call(self, ids):
        count, length = ids.shape
        ids = torch.concat([ids, torch.zeros(BATCH - count, length, dtype=ids.dtype)])
        with torch.inference_mode():
            if self.neuron.neuron_config.output_all_logits:
                logits = self.neuron.forward(ids, None, torch.zeros(BATCH, dtype=torch.int64))
            else:
                columns = zip(ids.split(1, dim=1), torch.arange(length, dtype=torch.int32).split(1), strict=True)
                logits = torch.stack([self.neuron.forward(input_ids=x, cache_ids=at) for x, at in columns], 1)
        assert logits.shape == (BATCH, length, model.config.vocab_size), logits.shape
        return logits[:count]

    def loglikelihood(self):
        order = sorted(range(len(requests)), key=lambda i: -len(requests[i][0] + requests[i][1]))
        found = {}
        for chunk in (order[i : i + BATCH] for i in range(0, len(order), BATCH)):
            inputs = [(requests[i][0] + requests[i][1])[:-1] for i in chunk]
            logits = self.model_call(ref.padded(inputs, "right", pad=0)[0])
            for i, row, ids in zip(chunk, functional.log_softmax(logits, -1), inputs, strict=True):
                tokens = torch.tensor(requests[i][1])
                part = row[len(ids) - len(tokens) : len(ids)]
                found[i] = part.gather(1, tokens[:, None]).sum(), bool((part.argmax(-1) == tokens).all())
        return [found[i] for i in range(len(requests))]

    def generate_until(self, rows, stop, most, left_truncate_len):
        adapter = HuggingFaceGenerationModelAdapter(transformers.AutoConfig.from_pretrained(path), self.neuron)
        ids, mask = ref.padded(rows, "left")
        ids, mask = ids[:, -left_truncate_len:], mask[:, -left_truncate_len:]
        width = ids.shape[1]
        criteria = transformers.StoppingCriteriaList([Until(stop, width)])
        got = adapter.generate(
            input_ids=ids,
            attention_mask=mask,
            max_length=width + most,
            stopping_criteria=criteria,
            do_sample=False,
            use_cache=True,
            pad_token_id=2,
        )
        return [row[width:] for row in got.tolist()]


for options in ({"output_all_logits": True}, {}):
    evaluator = NeuronHF(**options)
    for _ in range(2):
        for i, (got, want) in enumerate(zip(evaluator.loglikelihood(), answers, strict=True)):
            ref.close(f"{options}, request {i}", got[0], want[0].float(), 2e-5)
            assert got[1] == want[1], f"{options}, request {i}: greedy {got[1]}"
rows, texts = contexts[:3], wants[:3]
stop = texts[1][9:11]
cut = [text[len(row) :][:14] for row, text in zip(rows, texts, strict=True)]
cut[1] = cut[1][: cut[1].index(stop[0]) + 2]
for got, want in zip(evaluator.generate_until(rows, stop, 14, 40), cut, strict=True):
    ref.same("generate_until", [got[: len(want)]], [want])
    assert all(token == 2 for token in got[len(want) :]), got
short = [row[-8:] for row in contexts[2:3]]
assert evaluator.generate_until([contexts[2]] * BATCH, stop, 4, 8) == [ref.greedy(model, short[0], 12)[8:]] * BATCH
print("ok")
