"""The engine's cost and gain: a token beside `sample()`, a step beside its program alone, tokens a second of several
requests, a long prompt that joins, and a prompt whose beginning is in the cache.

    python benchmarks/engine.py [--shape gpt2|llama-1b] [--types f32,bf16,s8] [--rounds 3]

Weights are random, all requests greedy. Every ratio is of figures of the same process; the ways take turns.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import tempfile
import threading
import time

import numpy as np
import torch
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig

from transformers_neuronx import Engine, NeuronAutoModelForCausalLM, SamplingParams
from transformers_neuronx.config import NeuronConfig, QuantizationConfig

SHAPES = {
    "gpt2": GPT2Config(n_positions=1024),
    "llama-1b": LlamaConfig(
        vocab_size=128256, hidden_size=2048, intermediate_size=8192, num_hidden_layers=16, num_attention_heads=32,
        num_key_value_heads=8, head_dim=64, max_position_embeddings=8192, tie_word_embeddings=True,
    ),
}  # fmt: skip
TYPES = {"f32": ("f32", None), "bf16": ("bf16", None), "s8": ("bf16", "s8")}
TOKENS, PROMPT = 48, 64


def models(config, types, **how):
    """Yield the name and the model of each type, ready to run, with random weights in bf16."""
    with tempfile.TemporaryDirectory() as scratch:
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(scratch)
        for name in types:
            amp, quant = TYPES[name]
            switches = NeuronConfig(quant=QuantizationConfig(quant_dtype=quant) if quant else None)
            model = NeuronAutoModelForCausalLM.from_pretrained(scratch, amp=amp, neuron_config=switches, **how)
            model.to_neuron()
            yield name, model


def request(tokens, **how):
    return SamplingParams(**dict(max_tokens=tokens, temperature=0, ignore_eos=True) | how)


def prompt(length, seed, vocab):
    return np.random.default_rng(seed).integers(5, vocab, length).tolist()


def times_of(handle):
    """Seconds at which each token came."""
    return [time.perf_counter() for _ in handle]


def one(engine, model, seed):
    """Seconds of a token: with `sample()`, and with the engine alone."""
    ids = prompt(PROMPT, seed, engine.vocab)
    row = torch.tensor([ids])

    def sample(count):
        began = time.perf_counter()
        model.sample(row, PROMPT + count, top_k=1, eos_token_override=-1)
        return time.perf_counter() - began

    plain = (sample(1 + TOKENS) - sample(1)) / TOKENS
    came = times_of(engine.submit(ids, request(1 + TOKENS)))
    return plain, (came[-1] - came[0]) / TOKENS


def submitted(engine, count, seed, length, tokens=1 + TOKENS):
    return [engine.submit(prompt(length, seed + n, engine.vocab), request(tokens)) for n in range(count)]


def unread(engine, count, seed):
    """Let `count` requests be answered as if someone waited for each token, but nobody does."""
    handles = submitted(engine, count, seed, 8)
    for handle in handles:
        handle.request.streamed = True
    for handle in handles:
        handle.result()


def several(engine, count, seed, length=PROMPT):
    """Tokens a second of `count` requests at once, after their prompts. Each has a thread that reads it."""
    handles = submitted(engine, count, seed, length)
    came = [None] * count

    def read(place):
        came[place] = times_of(handles[place])

    threads = [threading.Thread(target=read, args=[place]) for place in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    began = max(each[0] for each in came)
    ended = min(each[-1] for each in came)
    return sum(sum(began < moment <= ended for moment in each) for each in came) / (ended - began)


def in_one_loop(engine, count, seed):
    """Let an event loop read `count` requests at once, as the server does."""
    handles = submitted(engine, count, seed, 8)

    async def read(handle):
        return [token async for token in handle]

    async def read_all():
        await asyncio.gather(*map(read, handles))

    asyncio.run(read_all())


def overhead(engine, rows, seed):
    """Seconds of a step of so many requests in the engine: with a thread that reads each one, with an event loop that
    reads all, and if nobody does. Last, seconds of the same step alone, again and again.
    """
    steps, seen = engine._loop.steps, []

    def noted(step):
        packed = type(steps).pack(steps, step)
        seen.append((time.perf_counter(), packed))
        return packed

    def step(read, *how, **more):
        seen.clear()
        steps.pack = noted
        read(engine, rows, *how, **more)
        del steps.pack
        whole = [(moment, packed) for moment, packed in seen if len(packed.requests) == rows]
        return np.median(np.diff([moment for moment, _ in whole])), whole[len(whole) // 2][1]

    by_threads, _ = step(several, seed, length=8)
    by_loop, _ = step(in_one_loop, seed + 200)
    by_nobody, packed = step(unread, seed + 500)
    times = [time.perf_counter()]
    for _ in range(TOKENS):
        steps.choose(steps.start(packed), None).read()
        times.append(time.perf_counter())
    return by_threads, by_loop, by_nobody, np.median(np.diff(times))


def joined(engine, length, seed):
    """Ratio of the 99th percentile to the median of the time between tokens of 8 requests, while a prompt joins."""
    running = submitted(engine, 8, seed, 8, tokens=90)
    came = [[] for _ in running]

    def read(place):
        came[place] = times_of(running[place])

    threads = [threading.Thread(target=read, args=[place]) for place in range(8)]
    for thread in threads:
        thread.start()
    next(iter(running[0]))
    long = engine.submit(prompt(length, seed + 99, engine.vocab), request(2))
    began = time.perf_counter()
    next(iter(long))
    first = time.perf_counter() - began
    for thread in threads:
        thread.join()
    gaps = np.concatenate([np.diff(each) for each in came])
    return np.percentile(gaps, 50), np.percentile(gaps, 99), first


def shared(engine, seed):
    """Seconds to the first token of a prompt of 1,050 tokens: cold, and where 1,000 of them are in the cache."""
    stem = prompt(1000, seed + 500, engine.vocab)
    taken = []
    for more in (1, 2):
        began = time.perf_counter()
        engine.submit([*stem, *prompt(50, seed + more, engine.vocab)], request(1)).result()
        taken.append(time.perf_counter() - began)
    return taken


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="gpt2")
    parser.add_argument("--types", default="f32,bf16,s8")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--step-tokens", type=int, default=256)
    options = parser.parse_args()
    longest = 1024 if options.shape == "gpt2" else 4352
    how = dict(n_positions=longest, context_length_estimate=PROMPT)
    for name, model in models(SHAPES[options.shape], options.types.split(","), **how):
        print(json.dumps(dict(shape=options.shape, type=name) | measured(model, options, longest)), flush=True)


def measured(model, options, longest):
    with Engine(model, rows=32, step_tokens=options.step_tokens, cache_tokens=3 * longest) as engine:
        engine.vocab = model.decoder.config.vocab_size
        one(engine, model, 0), several(engine, 8, 0)
        found, seed = {}, 1000
        for _ in range(options.rounds):
            seed += 1000
            for place, taken in zip(("sample_ms", "engine_ms"), one(engine, model, seed), strict=True):
                found.setdefault(place, []).append(taken * 1e3)
            for rows in (1, 32):
                ways = "step_ms", "in_loop_ms", "unread_ms", "alone_ms"
                for place, taken in zip(ways, overhead(engine, rows, seed + 40), strict=True):
                    found.setdefault(f"{place}_{rows}", []).append(taken * 1e3)
            for count in (1, 4, 8, 16):
                found.setdefault(f"tokens_per_second_{count}", []).append(several(engine, count, seed + count))
            length = 900 if longest < 4096 else 4096
            for place, taken in zip(
                ("gap_p50_ms", "gap_p99_ms", "first_ms"), joined(engine, length, seed), strict=True
            ):
                found.setdefault(place, []).append(taken * 1e3)
            if longest > 1051:
                for place, taken in zip(("cold_ms", "warm_ms"), shared(engine, seed), strict=True):
                    found.setdefault(place, []).append(taken * 1e3)
        return {place: round(statistics.median(each), 3) for place, each in found.items()}


if __name__ == "__main__":
    main()
