"""Every family in an engine: requests of many lengths together get the tokens that they get alone."""

import numpy as np
import pytest
import torch
from one_file import WITH_STATES
from parity import DECODERS, ONE_FILE, assert_close, randomized
from test_every_family import tiny
from test_llama import config as llama
from test_phi3 import config as phi3, longrope
from test_t5 import config as t5
from test_whisper import config as whisper, features
from transformers import AutoModelForSeq2SeqLM, AutoModelForSpeechSeq2Seq, Gemma2Config, MistralConfig

from transformers_neuronx import Engine, SamplingParams, SparseAttnConfig
from transformers_neuronx.config import NeuronConfig
from transformers_neuronx.errors import InputError
from transformers_neuronx.huggingface.auto import NeuronAutoModelForCausalLM
from transformers_neuronx.speculation import PromptLookup
from transformers_neuronx.t5.model import T5ForSampling
from transformers_neuronx.whisper.model import WhisperForSampling

EACH_TIME = {"bloom", "gemma2", "mixtral"}  # slopes; windows, soft caps and rotations; experts
DRAW = np.random.default_rng(0)
PROMPTS = [DRAW.integers(3, 100, count).tolist() for count in (1, 3, 30, 9, 17, 2)]


@pytest.mark.parametrize("degree", [1, pytest.param(3, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "family",
    [each if each in EACH_TIME else pytest.param(each, marks=pytest.mark.slow) for each in DECODERS + ONE_FILE],
)
@pytest.mark.usefixtures("needs_pages")
def test_tokens_and_vectors_are_those_of_transformers(family, degree, tmp_path):
    reference = randomized(tiny(family))
    reference.save_pretrained(tmp_path)
    model = NeuronAutoModelForCausalLM.from_pretrained(tmp_path, n_positions=48, tp_degree=degree)
    model.to_neuron()
    with Engine(model, rows=4, step_tokens=16) as engine:
        params = SamplingParams(max_tokens=15, temperature=0, ignore_eos=True)
        handles = [engine.submit(prompt, params) for prompt in PROMPTS]
        for prompt, handle in zip(PROMPTS, handles, strict=True):
            wanted = reference.generate(
                torch.tensor([prompt]), max_new_tokens=15, do_sample=False, eos_token_id=None, pad_token_id=0
            )
            assert handle.result() == wanted[0, len(prompt) :].tolist()
        vectors = [engine.embed(prompt) for prompt in PROMPTS]
        for prompt, handle in zip(PROMPTS, vectors, strict=True):
            handle.result()
            bare = getattr(reference, "model", reference.base_model)
            hidden = bare(torch.tensor([prompt])).last_hidden_state
            assert_close(torch.from_numpy(handle.embedding), hidden[0, -1])


@pytest.mark.slow
@pytest.mark.parametrize("family", DECODERS + ONE_FILE)
@pytest.mark.usefixtures("needs_pages")
def test_draft_tokens_change_nothing(family, tmp_path):
    """A model that drafts for itself is right; what followed the last token before is wrong most times."""
    reference = randomized(tiny(family))
    reference.save_pretrained(tmp_path)
    model = NeuronAutoModelForCausalLM.from_pretrained(tmp_path, n_positions=48)
    model.to_neuron(ahead=False)
    greedy = dict(max_new_tokens=15, do_sample=False, eos_token_id=None, pad_token_id=0)
    wanted = [reference.generate(torch.tensor([ids]), **greedy)[0, len(ids) :].tolist() for ids in PROMPTS]
    params = SamplingParams(max_tokens=15, temperature=0, ignore_eos=True)
    itself = [] if family in WITH_STATES else [model]  # wrong tokens would stay in states of a draft model
    for draft in (*itself, PromptLookup(ngram=1)):
        with Engine(model, rows=4, step_tokens=16, joined_tokens=16, draft=draft, draft_tokens=3) as engine:
            handles = [engine.submit(prompt, params) for prompt in PROMPTS]
            assert [handle.result() for handle in handles] == wanted
            accepted = sum(handle.usage.accepted_tokens for handle in handles)
        assert accepted > 30 or draft is not model


@pytest.mark.parametrize("family", ["mistral", "gemma2"])
@pytest.mark.usefixtures("needs_pages")
def test_pages_behind_a_window_go_back(family, tmp_path):
    """All layers of Mistral have a window; every second one of Gemma 2. A prompt that others share is found in both."""
    small = dict(
        hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2
    )
    kind = MistralConfig if family == "mistral" else Gemma2Config
    config = kind(vocab_size=100, head_dim=8, max_position_embeddings=1024, sliding_window=100, **small)
    reference = randomized(config)
    reference.save_pretrained(tmp_path)
    model = NeuronAutoModelForCausalLM.from_pretrained(tmp_path, n_positions=640)
    model.to_neuron(ahead=False)
    stem = DRAW.integers(3, 100, 520).tolist()
    prompts = [[*stem, *DRAW.integers(3, 100, more).tolist()] for more in (5, 40, 9, 33)]
    params = SamplingParams(max_tokens=15, temperature=0, ignore_eos=True)
    with Engine(model, rows=4, step_tokens=64, joined_tokens=64, cache_tokens=1280) as engine:
        pools = {pool.window: pool for pool in engine.scheduler.cache.pools}
        assert [*pools] == ([100] if family == "mistral" else [100, None]), "the first layer has the window"
        assert pools[100].count == 4 * 3 + 2 and all(pools[w].count == 20 for w in pools if w is None)
        handles = [engine.submit(prompt, params) for prompt in prompts]
        for prompt, handle in zip(prompts, handles, strict=True):
            wanted = reference.generate(
                torch.tensor([prompt]), max_new_tokens=15, do_sample=False, eos_token_id=None, pad_token_id=0
            )
            assert handle.result() == wanted[0, len(prompt) :].tolist()
        assert [handle.usage.cached_tokens for handle in handles] == [0, 512, 512, 512]
        assert engine.scheduler.cache.unused


@pytest.mark.parametrize("kind", ["longrope", "dynamic"])
@pytest.mark.few(1)
@pytest.mark.usefixtures("needs_pages")
def test_prompts_whose_lengths_turn_their_keys_differently_share_no_pages(kind, tmp_path):
    """Of frequencies that depend on a sequence's length; and with so few pages that requests start again."""
    if kind == "longrope":
        rope = longrope(4) | dict(original_max_position_embeddings=100, max_position_embeddings=256)
        reference = randomized(phi3(**rope))
    else:
        rope = dict(rope_type="dynamic", rope_theta=1e4, factor=4.0)
        reference = randomized(llama(max_position_embeddings=100, rope_parameters=rope))
    reference.save_pretrained(tmp_path)
    model = NeuronAutoModelForCausalLM.from_pretrained(tmp_path, n_positions=200)
    model.to_neuron()
    stem = DRAW.integers(3, 100, 70).tolist()
    prompts = [[*stem, *DRAW.integers(3, 100, more).tolist()] for more in (60, 10, 65, 15)]
    params = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
    with Engine(model, rows=4, step_tokens=32) as engine:
        for prompt in prompts:
            wanted = model.sample(torch.tensor([prompt]), len(prompt) + 12, top_k=1, eos_token_override=-1)
            handle = engine.submit(prompt, params)
            assert handle.result() == wanted[0, len(prompt) :].tolist()
        shared = handle.usage.cached_tokens
    assert shared == 64, "prompts of one kind share"


@pytest.mark.parametrize("pages", [True, False])
@pytest.mark.few(1)
def test_sources_of_an_encoder(pages, tmp_path):
    """Requests with sources of many lengths get what each gets alone, over pages and over the model's slots."""
    reference = randomized(t5(), AutoModelForSeq2SeqLM)
    reference.save_pretrained(tmp_path)
    mask = torch.ones(32, 32, dtype=torch.bool).tril()
    sparse = None if pages else SparseAttnConfig("custom", sparse_mask_dict={(32, 32): mask})
    sizes = dict(n_positions=32, context_length_estimate=[16, 32], batch_size=3, prompt_batch_size=1)
    model = T5ForSampling.from_pretrained(tmp_path, neuron_config=NeuronConfig(sparse_attn=sparse), **sizes)
    model.to_neuron()
    wanted = [model.sample(torch.tensor([prompt] * 3), 16, top_k=1, eos_token_override=-1)[0, 1:] for prompt in PROMPTS]
    with Engine(model, rows=3, step_tokens=16) as engine:
        params = SamplingParams(max_tokens=15, temperature=0, ignore_eos=True)
        handles = [engine.submit(prompt, params) for prompt in PROMPTS * 2]
        for prompt, tokens, handle in zip(PROMPTS * 2, wanted * 2, handles, strict=True):
            assert handle.result() == tokens.tolist() and handle.usage.prompt_tokens == len(prompt)
        with pytest.raises(InputError, match=r"from 1 to 32 tokens \(context_length_estimate\), got 33"):
            engine.submit([5] * 33)
        assert engine.scheduler.cache.unused


@pytest.mark.parametrize("pages", [False, True])
@pytest.mark.few(1)
def test_sources_of_numbers(pages, tmp_path):
    """Requests with sounds and the beginnings of their texts get what each gets alone. They share no pages."""
    randomized(whisper(max_target_positions=160), AutoModelForSpeechSeq2Seq).save_pretrained(tmp_path)
    sizes = dict(n_positions=160, batch_size=3, prompt_batch_size=1, unroll=None if pages else 1)
    model = WhisperForSampling.from_pretrained(tmp_path, **sizes)
    model.to_neuron()
    sounds = features(3)[0]
    begun = [[92], [92, 93, 96, 99], [92, *range(20, 120)]]
    wanted = {
        (sound, prompt): model.sample(
            sounds[[sound] * 3], len(begun[prompt]) + 9, decoder_input_ids=[begun[prompt]] * 3, top_k=1,
            eos_token_override=-1,
        )[0, len(begun[prompt]) :].tolist()
        for sound in range(3) for prompt in range(3)
    }  # fmt: skip
    assert len(set(map(tuple, wanted.values()))) > 3, "the sounds make no difference"
    with Engine(model, **dict(rows=3, step_tokens=32) if pages else {}) as engine:
        params = SamplingParams(max_tokens=9, temperature=0, ignore_eos=True)
        asked = [*wanted] * 2
        handles = [engine.submit(begun[prompt], params, sounds[sound]) for sound, prompt in asked]
        assert [handle.result() for handle in handles] == [wanted[each] for each in asked]
        assert {handle.usage.prompt_tokens for handle in handles} == {1, 4, 101}
        assert {handle.usage.cached_tokens for handle in handles} == {0}, "keys and values depend on the sound"
        assert engine.submit([], params, sounds[0].numpy()).result() == wanted[0, 0]
        with pytest.raises(InputError, match=r"sources of this model are numbers \[batch, 8, 100\]"):
            engine.submit([92], params)
        assert engine.scheduler.cache.unused


def test_a_source_is_for_models_that_read_numbers(tmp_path):
    randomized(t5(), AutoModelForSeq2SeqLM).save_pretrained(tmp_path)
    model = T5ForSampling.from_pretrained(tmp_path, n_positions=32, context_length_estimate=16, batch_size=2)
    model.to_neuron(ahead=False)
    with Engine(model, rows=2) as engine, pytest.raises(InputError, match="source is for models whose encoder reads"):
        engine.submit([5, 6], source=[0.5])
