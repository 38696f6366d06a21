"""Compare traced models with PyTorch's own at the sizes of the tutorials: milliseconds per call, and the ratio.

    python benchmarks/tracing.py [--models bert,blip,t5] [--dtypes f32,bf16] [--turns 15]

Random weights in the shapes of bert-base, blip-vqa-base and t5-large. T5 also runs as a model family. All take turns in
one process with the same number of threads. Prints medians.
"""

import argparse
import functools
import gc
import statistics
import tempfile
import time

import torch
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    BlipConfig,
    BlipForQuestionAnswering,
    T5Config,
    T5ForConditionalGeneration,
)
from transformers.cache_utils import EncoderDecoderCache

from transformers_neuronx.t5.model import T5ForSampling
from transformers_neuronx.trace import trace

DTYPES = dict(f32=torch.float32, bf16=torch.bfloat16)


def ids(*sizes):
    return torch.randint(5, 100, sizes)


def ones(*sizes):
    return torch.ones(sizes, dtype=torch.int64)


class Call(torch.nn.Module):
    """A model as a function of tensors: `call(model, *inputs)`."""

    def __init__(self, model, call):
        super().__init__()
        self.model, self.call = model, call

    def forward(self, *inputs):
        return self.call(self.model, *inputs)


def bert(dtype):
    model = BertForSequenceClassification(BertConfig()).to(dtype).eval()
    for length in (128, 512):
        yield (
            f"BERT base, {length} tokens",
            Call(model, lambda m, i, a: m(i, a).logits),
            (ids(1, length), ones(1, length)),
            None,
        )


def blip(dtype):
    model = BlipForQuestionAnswering(BlipConfig()).to(dtype).eval()
    image, question = torch.randn(1, 577, 768, dtype=dtype), torch.randn(1, 8, 768, dtype=dtype)
    pixels = torch.randn(1, 3, 384, 384, dtype=dtype)
    yield "BLIP base, picture of 384", Call(model.vision_model, lambda m, x: m(x).last_hidden_state), (pixels,), None
    read = Call(model.text_encoder, lambda m, i, a, h, s: m(i, a, encoder_hidden_states=h, encoder_attention_mask=s)[0])
    yield "… question of 8 tokens", read, (ids(1, 8), ones(1, 8), image, ones(1, 577)), None
    write = Call(
        model.text_decoder,
        lambda m, i, a, h, s: m(i, a, encoder_hidden_states=h, encoder_attention_mask=s, use_cache=False).logits,
    )
    yield "… answer of 20 tokens", write, (ids(1, 20), ones(1, 20), question, ones(1, 8)), None


def t5(dtype):
    config = T5Config(d_model=1024, d_ff=4096, num_layers=24, num_heads=16, decoder_start_token_id=0)
    model = T5ForConditionalGeneration(config).to(dtype).eval()
    with tempfile.TemporaryDirectory() as directory:
        model.save_pretrained(directory)
        amp = next(name for name, known in DTYPES.items() if known == dtype)
        family = T5ForSampling.from_pretrained(directory, amp=amp, n_positions=[256], context_length_estimate=[128])
        family.to_neuron()
        yield (
            "T5 large, encoding 128 tokens",
            Call(model, read),
            (ids(1, 128), ones(1, 128)),
            lambda i, a: (family.encode(i, attention_mask=a), family.decoder.memory.arrays[0].numpy()),
        )
        family.forward(ids(1, 128))  # the tokens that it follows
        yield "… a token after 128", *a_token(model, dtype), lambda token, *_: family.forward(token, cache_ids=[128])


def read(model, *source):
    """Return keys and values of a source for all layers of the decoder. [2 layers, 1, tokens, h]"""
    hidden = model.encoder(*source).last_hidden_state
    layers = [block.layer[1].EncDecAttention for block in model.decoder.block]
    return torch.stack([project(hidden) for layer in layers for project in (layer.k, layer.v)])


def a_token(model, dtype):
    states = [torch.randn(1, 16, 128, 64, dtype=dtype) for _ in range(4 * 24)]

    def step(m, token, seen, hidden, mask):
        past = EncoderDecoderCache([tuple(states[n : n + 4]) for n in range(0, len(states), 4)])
        out = m.decoder(
            token, seen, encoder_hidden_states=hidden, encoder_attention_mask=mask, past_key_values=past, use_cache=True
        )
        return m.lm_head(out.last_hidden_state)

    inputs = ids(1, 1), ones(1, 129), torch.randn(1, 128, 1024, dtype=dtype), ones(1, 128)
    return Call(model, step), inputs


def medians(calls, turns):
    """Return the median milliseconds of each call. Each waits until the threads of the one before are idle."""
    times = [[] for _ in calls]
    for turn in range(turns + 2):
        for each, call in zip(times, calls, strict=True):
            time.sleep(0.02)
            began = time.perf_counter()
            call()
            if turn > 1:
                each.append(time.perf_counter() - began)
    return [1e3 * statistics.median(each) for each in times]


@torch.no_grad()
def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="bert,blip,t5")
    parser.add_argument("--dtypes", default="f32,bf16")
    parser.add_argument("--turns", type=int, default=15)
    arguments = parser.parse_args()
    print("| | type | PyTorch, ms | traced, ms | times as fast | largest difference | family, ms | times as fast |")
    print("|---|---|---|---|---|---|---|---|")
    for model in arguments.models.split(","):
        for dtype in arguments.dtypes.split(","):
            for name, module, inputs, family in dict(bert=bert, blip=blip, t5=t5)[model](DTYPES[dtype]):
                traced = trace(module, inputs)
                want, got = module(*inputs), traced(*inputs)
                apart = ((got - want).abs().max() / want.abs().max()).item()
                calls = [functools.partial(call, *inputs) for call in (module, traced, family) if call]
                eager, ours, *own = medians(calls, arguments.turns)
                line = f"| {name} | {dtype} | {eager:.1f} | {ours:.1f} | {eager / ours:.2f} | {apart:.1e} |"
                print(line, *(f"{each:.1f} | {eager / each:.2f} |" for each in own or []), flush=True)
                del traced
                gc.collect()


if __name__ == "__main__":
    main()
