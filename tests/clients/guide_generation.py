"""The guide's chapter on generate() (aws-neuron-sdk, transformers-neuronx-developer-guide.rst, 2.18 and later, 2024).

NeuronAutoModelForCausalLM, AutoConfig and the adapter; rows padded left by a tokenizer whose pad is the end token. The
compiled batch is rows times num_return_sequences times beams. Besides: a chat that calls generate(max_new_tokens=1) on
rows that grow, and an adapter whose caller replaced _update_model_kwargs_for_generation, as was needed for some
versions of Transformers: it extends the mask and does nothing else. usage: client_guide_generation.py [MODEL_DIR]
"""
# ruff: noqa: E402

import types

import _reference as ref
import torch
from transformers import AutoConfig

EOS = 2
gpt2_path, gpt2 = ref.checkpoint("gpt2", sharp=2e4)
rows, wants = ref.prompts(gpt2, [12, 5], 30, gap=40)
path, llama = ref.checkpoint("llama")
beam_rows, beam_wants = ref.prompts(llama, [4, 9], 22)
ids, mask = ref.padded(beam_rows, "left", pad=EOS)
options = [
    dict(do_sample=False, num_beams=2, num_return_sequences=2, max_length=22),
    dict(do_sample=False, num_beams=2, max_new_tokens=11, length_penalty=0.6, early_stopping=True),
    dict(do_sample=False, max_new_tokens=13, repetition_penalty=1.3, no_repeat_ngram_size=2),
    dict(do_sample=False, max_length=22, min_new_tokens=13, suppress_tokens=[beam_wants[0][4], beam_wants[1][9]]),
]
references = [llama.generate(ids, attention_mask=mask, pad_token_id=EOS, **option) for option in options]
ref.package()

from transformers_neuronx import HuggingFaceGenerationModelAdapter, NeuronAutoModelForCausalLM


def load(folder, **kwargs):
    neuron = NeuronAutoModelForCausalLM.from_pretrained(folder, batch_size=4, n_positions=64, tp_degree=2, **kwargs)
    neuron.to_neuron()
    return HuggingFaceGenerationModelAdapter(AutoConfig.from_pretrained(folder), neuron)


def check(what, outputs, texts, continuations, repeats=1):
    """Every row, without its padding, is the continuation as far as it goes."""
    width, length = max(map(len, texts)), outputs.shape[1]
    left = [width - len(text) for text in texts for _ in range(repeats)]
    longer = [want for want in continuations for _ in range(repeats)]
    ref.same(what, [row[n:] for row, n in zip(outputs, left, strict=True)],
             [want[:length - n] for want, n in zip(longer, left, strict=True)])  # fmt: skip


def grow(model, tokens, attention_mask, count):
    for _ in range(count):
        model.reset_generation()
        tokens = model.generate(input_ids=tokens, attention_mask=attention_mask, do_sample=False, max_new_tokens=1)
        attention_mask = torch.cat([attention_mask, torch.ones(len(tokens), 1, dtype=torch.long)], 1)
    return tokens


def only_the_mask(self, outputs, model_kwargs, is_encoder_decoder=False, **others):
    before = model_kwargs["attention_mask"]
    model_kwargs["attention_mask"] = torch.cat([before, before.new_ones((before.shape[0], 1))], dim=-1)
    return model_kwargs


model = load(gpt2_path, prompt_batch_size=4, context_length_estimate=32)
encoded = dict(zip(("input_ids", "attention_mask"), ref.padded(rows, "left", pad=EOS), strict=True))
for seed in range(2):
    torch.manual_seed(seed)
    with torch.inference_mode():
        model.reset_generation()
        output = model.generate(**encoded, do_sample=True, max_length=30, temperature=0.7, pad_token_id=EOS)
        check("temperature", output, rows, wants)
        output = model.generate(**encoded, do_sample=True, max_length=30, top_k=9, top_p=0.8, num_return_sequences=2)
        check("two of each", output, rows, wants, repeats=2)
check("growing rows", grow(model, *encoded.values(), 12), rows, wants)
adapter = load(path, amp="f32")
for option, want in zip(options, references, strict=True):
    with torch.inference_mode():
        ref.same(str(option), adapter.generate(ids, attention_mask=mask, pad_token_id=EOS, **option), want)
adapter._update_model_kwargs_for_generation = types.MethodType(only_the_mask, adapter)
for _ in range(2):
    output = adapter.generate(input_ids=ids, attention_mask=mask, do_sample=False, max_length=22)
    check("a replaced method", output, beam_rows, beam_wants)
check("a replaced method, growing rows", grow(adapter, ids, mask, 10), beam_rows, beam_wants)
print("ok")
