"""A thousand requests of four threads and an event loop, on each kind of cache: each gets what it gets alone."""

import asyncio
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from recurrent import RecurrentForSampling, checkpoint
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM, MistralConfig, T5Config

from transformers_neuronx import Engine, SamplingParams
from transformers_neuronx.config import KVCacheQuantizationConfig, NeuronConfig
from transformers_neuronx.gpt2.model import GPT2ForSampling
from transformers_neuronx.mistral.model import MistralForSampling
from transformers_neuronx.speculation import PromptLookup
from transformers_neuronx.t5.model import T5ForSampling

TINY_KJV = Path(__file__).parents[2] / "examples" / "tiny-kjv"
COUNT, DIFFERENT = 1000, 125  # requests, and how many of them differ
STEM = np.random.default_rng(11).integers(3, 90, 150).tolist()


def plain(directory):
    return GPT2ForSampling.from_pretrained(TINY_KJV, n_positions=256)


def eight_bits(directory):
    switches = NeuronConfig(kv_cache_quant=KVCacheQuantizationConfig())
    return GPT2ForSampling.from_pretrained(TINY_KJV, n_positions=256, neuron_config=switches)


def windowed(directory):
    config = MistralConfig(
        vocab_size=96, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, max_position_embeddings=512, sliding_window=70, initializer_range=0.3,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config).save_pretrained(directory)
    return MistralForSampling.from_pretrained(directory, n_positions=256)


def memory(directory):
    config = T5Config(
        vocab_size=96, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4, decoder_start_token_id=0,
        initializer_factor=3.0,
    )  # fmt: skip
    AutoModelForSeq2SeqLM.from_config(config).save_pretrained(directory)
    return T5ForSampling.from_pretrained(directory, n_positions=64, context_length_estimate=[64, 256])


def states(directory):
    checkpoint(directory)
    return RecurrentForSampling.from_pretrained(directory, n_positions=256)


def request(number):
    """One of `DIFFERENT` prompts, of which many begin alike, with parameters of all kinds."""
    number %= DIFFERENT
    draw = np.random.default_rng(number)
    phrase = draw.integers(3, 90, 4).tolist() * int(draw.integers(1, 5))
    params = [
        dict(temperature=0),
        dict(temperature=0, logprobs=1),
        dict(seed=number, top_k=20),
        dict(seed=number, temperature=0.8, repetition_penalty=1.2),
        dict(seed=number, presence_penalty=0.5, logprobs=2),
    ][number % 5]
    return [*STEM[: 30 * (number % 6)], *phrase], SamplingParams(max_tokens=3 + number % 18, ignore_eos=True, **params)


def answer(handle):
    return handle.result(), handle.logprobs


async def answers(engine, numbers):
    """What an event loop gets, with some requests that it cancels."""

    async def one(number):
        handle = engine.submit(*request(number))
        tokens = []
        async for token in handle:
            tokens.append(token)
            if number % 7 == 0 and len(tokens) == 2:
                handle.cancel()
        return tokens

    return dict(zip(numbers, await asyncio.gather(*map(one, numbers)), strict=True))


@pytest.mark.compiled_ahead
@pytest.mark.slow
@pytest.mark.parametrize("draft", [None, PromptLookup()], ids=["alone", "with draft tokens"])
@pytest.mark.parametrize("kind", [plain, eight_bits, windowed, memory, states])
def test_a_thousand_requests_get_what_each_gets_alone(kind, draft, tmp_path):
    model = kind(tmp_path)
    model.to_neuron(ahead=False)
    with Engine(model, rows=1, step_tokens=256) as engine:
        wanted = [answer(engine.submit(*request(number))) for number in range(DIFFERENT)]
    sizes = dict(rows=8, step_tokens=48, joined_tokens=40, cache_tokens=600)  # requests start again, too
    with Engine(model, draft=draft, **sizes) as engine, ThreadPoolExecutor(5) as pool:
        before = dict(model.decoder.store.stored)

        def thread(first):
            handles = [(number, engine.submit(*request(number))) for number in range(first, COUNT, 5)]
            return {number: answer(handle) for number, handle in handles}

        looped = pool.submit(lambda: asyncio.run(answers(engine, range(4, COUNT, 5))))
        found = {number: got for each in pool.map(thread, range(4)) for number, got in each.items()}
        wrong = [number for number, got in found.items() if got != wanted[number % DIFFERENT]]
        assert not wrong, "tokens and bits"
        for number, tokens in looped.result().items():
            whole = wanted[number % DIFFERENT][0]
            assert tokens == whole[: len(tokens)] and (number % 7 == 0 or len(tokens) == len(whole))
        assert model.decoder.store.stored.keys() == before.keys(), "nothing compiles"
        assert engine.scheduler.cache.unused and not len(engine.scheduler)
