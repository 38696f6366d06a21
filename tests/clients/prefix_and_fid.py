"""Corners of the original's own models and sampling module (llama, opt, gpt2 and sampling.py, 2023-24).

A prefix that all prompts share is fed once by set_prefixed(); fusion in decoder joins the rows of a call; OPT with the
greedy choice on the device; GPT-2 with generate() of its own; and the sampling loops called by hand, with the model
and with a wrapper that is only callable, as their signatures promise. usage: client_prefix_and_fid.py [MODEL_DIR]
"""
# ruff: noqa: E402

import warnings

import _reference as ref
import torch

PREFIX, LENGTH = 8, 32
path, model = ref.checkpoint("llama", sharp=2e4)
rows, wants = ref.prompts(model, [14, 24], LENGTH, gap=40)
tails, _ = ref.prompts(model, [6, 1, 11], LENGTH, gap=40, seed=5)
prompts = [rows[0][:PREFIX] + tail for tail in tails]
continuations = [ref.greedy(model, prompt, LENGTH, gap=20, avoid=(2,)) for prompt in prompts]
assert all(continuations), "near tie behind the prefix: take another seed"
opt_path, opt = ref.checkpoint("opt")
opt_rows, opt_wants = ref.prompts(opt, [7, 7], LENGTH)
gpt2_path, gpt2 = ref.checkpoint("gpt2", sharp=2e4)
gpt2_rows, gpt2_wants = ref.prompts(gpt2, [9, 5], LENGTH, gap=40)
ref.package()

from transformers_neuronx import NeuronAutoModelForCausalLM, sampling
from transformers_neuronx.gpt2.model import GPT2ForHuggingFaceSampling
from transformers_neuronx.llama.model import FIDLlamaForSampling, LlamaForSampling
from transformers_neuronx.opt.model import OPTForGreedySearch

sizes = dict(tp_degree=2, amp="f32", n_positions=64)
neuron = LlamaForSampling.from_pretrained(path, prefixed_length=PREFIX, **sizes)
neuron.to_neuron()
neuron.set_prefixed(torch.tensor(prompts[:1]))
for prompt, want in [*zip(prompts, continuations, strict=True)] * 2:
    got = neuron.sample(torch.tensor([prompt]), sequence_length=LENGTH)
    ref.same("after the prefix", got, [want[PREFIX:]])

fid = FIDLlamaForSampling.from_pretrained(path, batch_size=3, context_length_estimate=8, **sizes)
fid.to_neuron()
for parts in (3, 2, 1):
    got = fid.sample(torch.tensor(rows[1]).reshape(parts, -1), LENGTH, top_k=1)
    ref.same(f"{parts} contexts", got, wants[1:])

greedy = OPTForGreedySearch.from_pretrained(opt_path, batch_size=2, **sizes)
greedy.to_neuron()
ids = torch.tensor(opt_rows)
tokens = greedy(ids, torch.arange(7, dtype=torch.int32))
ref.same("OPT, a call", tokens, [[want[7]] for want in opt_wants])
ref.same("OPT", greedy.sample(ids, LENGTH), opt_wants)
ref.same("OPT, sample_tokens", sampling.sample_tokens(greedy, ids, None, sequence_length=LENGTH), opt_wants)

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # deprecated in the original
    old = GPT2ForHuggingFaceSampling.from_pretrained(gpt2_path, batch_size=2, unroll=None, **sizes)
old.to_neuron()
ids, mask = ref.padded(gpt2_rows, "left")
for _ in range(2):
    old.reset_generation()
    got = old.generate(input_ids=ids, attention_mask=mask, do_sample=True, max_length=LENGTH, temperature=0.7)
    ref.same("GPT-2", [got[0].tolist(), got[1, 4:].tolist()], [gpt2_wants[0], gpt2_wants[1][:-4]])

auto = NeuronAutoModelForCausalLM.from_pretrained(pretrained_model_name_or_path=path, batch_size=1, **sizes)
auto.to_neuron()


class Counted(torch.nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner, self.calls, self.context_hook = inner, 0, None
        self.neuron_config = inner.neuron_config

    def forward(self, input_ids, cache_ids=None, start_ids=None):
        self.calls += 1
        return self.inner(input_ids, cache_ids, start_ids)


ids, want = torch.tensor(rows[:1]), wants[:1]
for some in (auto, Counted(auto)):
    scores = some(ids, None, None)
    ref.same("sample_loop", sampling.sample_loop(some, ids, None, scores, LENGTH, 2, 50), want)
    loop = sampling.sample_loop_llama(
        some, ids, None, some(ids, None, None), LENGTH, eos_token_id=2, top_k=50, top_p=0.9
    )
    ref.same("sample_loop_llama", loop, want)
    ref.same("sample_greedy", sampling.sample_greedy(some, ids, sequence_length=LENGTH), want)
    ref.same("simple_sample", sampling.simple_sample(some, ids, None, LENGTH, eos_token_id=2, top_k=50), want)
    ref.same("sample_llama", sampling.sample_llama(some, ids, None, LENGTH, top_k=50, top_p=0.9, temperature=0.7), want)
counted = Counted(greedy)
ids = torch.tensor(opt_rows)
ref.same("sample_tokens", sampling.sample_tokens(counted, ids, sequence_length=LENGTH), opt_wants)
assert counted.calls == LENGTH - 7
short = neuron.sample(torch.tensor([rows[0][: PREFIX - 3]]), sequence_length=12)
ref.same("shorter than the prefix", short, [ref.greedy(model, rows[0][: PREFIX - 3], 12, gap=20)])
print("ok")
