"""Beam search as the original's demo runs it (aws-neuron/transformers-neuronx, generation_demo.py run --beam, 2023).

Through the adapter: batch_size is batch times beams, caches are reordered because reorder_cache=True was passed, or
because setup_reorder_cache() was called, after to_neuron() or before it; num_return_sequences, scores. By hand:
prompt_batch_size=1 reads the prompt once and broadcasts its caches to all beams; then one-token steps and
reorder_cache(beams) between them. usage: beam_search.py [MODEL_DIR]
"""
# ruff: noqa: E402

import _reference as ref
import torch
import transformers

BEAMS, LENGTH = 4, 26
material = {family: ref.checkpoint(family) for family in ("gpt2", "opt")}
rows = {family: ref.prompts(model, [9, 9, 6], 12)[0] for family, (_, model) in material.items()}


def beam_search(row, first, step):
    """Best rows and their scores by `first` and `step`, which give logits [beams, vocab]."""
    scores, tokens = first(row).log_softmax(-1).topk(BEAMS)
    texts = torch.cat([torch.tensor([row] * BEAMS), tokens.reshape(BEAMS, 1)], 1)
    scores, order = scores.reshape(BEAMS, 1), torch.arange(BEAMS)
    while texts.shape[1] < LENGTH:
        each = scores + step(texts, order).log_softmax(-1)
        scores, places = each.flatten().topk(BEAMS)
        order, scores = places // each.shape[1], scores.reshape(BEAMS, 1)
        texts = torch.cat([texts[order], (places % each.shape[1]).reshape(BEAMS, 1)], 1)
    return texts, scores


def wanted(model, row, mask=None, **options):
    return model.generate(
        torch.tensor(row).reshape(-1, len(row)) if mask is None else row,
        attention_mask=mask,
        num_beams=BEAMS,
        do_sample=False,
        max_length=LENGTH,
        pad_token_id=2,
        **options,
    )


with torch.no_grad():
    _, model = material["gpt2"]
    by_hand = [
        beam_search(row, lambda row: ref.logits(model, row)[-1:], lambda texts, order: model(texts).logits[:, -1])
        for row in rows["gpt2"]
    ]
    scored = dict(num_return_sequences=2, return_dict_in_generate=True, output_scores=True)
    batches = {family: ref.padded(some[:2], "left") for family, some in rows.items()}
    wants = {family: wanted(model, *batches[family], **scored) for family, (_, model) in material.items()}
    alone = wanted(material["gpt2"][1], rows["gpt2"][2], length_penalty=0.5)
ref.package()

from transformers_neuronx.generation_utils import HuggingFaceGenerationModelAdapter
from transformers_neuronx.gpt2.model import GPT2ForSampling, GPT2ForSamplingWithContextBroadcasting
from transformers_neuronx.opt.model import OPTForSampling

COMMON = dict(amp="f32", tp_degree=2, n_positions=64)


def adapter(neuron, family):
    return HuggingFaceGenerationModelAdapter(transformers.AutoConfig.from_pretrained(material[family][0]), neuron)


def check(neuron, family):
    got = wanted(adapter(neuron, family), *batches[family], **scored)
    ref.same(f"{type(neuron).__name__}", got.sequences, wants[family].sequences)
    ref.close("scores", got.sequences_scores, wants[family].sequences_scores, 1e-4)


path = material["gpt2"][0]
neuron = GPT2ForSamplingWithContextBroadcasting.from_pretrained(
    path, batch_size=2 * BEAMS, prompt_batch_size=2 * BEAMS, reorder_cache=True, context_length_estimate=16, **COMMON
)
neuron.to_neuron()
check(neuron, "gpt2")
neuron = GPT2ForSampling.from_pretrained(path, batch_size=2 * BEAMS, **COMMON)
neuron.to_neuron()
neuron.setup_reorder_cache()
check(neuron, "gpt2")
neuron = OPTForSampling.from_pretrained(material["opt"][0], batch_size=2 * BEAMS, **COMMON)
neuron.setup_reorder_cache()
neuron.to_neuron()
check(neuron, "opt")

neuron = GPT2ForSamplingWithContextBroadcasting.from_pretrained(
    path, batch_size=BEAMS, prompt_batch_size=1, reorder_cache=True, context_length_estimate=16, **COMMON
)
neuron.to_neuron()


def step(texts, order):
    neuron.reorder_cache(order)
    return neuron(texts[:, -1:], cache_ids=torch.tensor([texts.shape[1] - 1], dtype=torch.int32))


with torch.inference_mode():
    for row, (texts, scores) in zip(rows["gpt2"], by_hand, strict=True):
        got = beam_search(row, lambda row: neuron(torch.tensor([row])), step)
        ref.same("by hand", got[0], texts)
        ref.close("scores by hand", got[1], scores, 1e-4)
ref.same("through the adapter again", wanted(adapter(neuron, "gpt2"), rows["gpt2"][2], length_penalty=0.5), alone)
print("ok")
