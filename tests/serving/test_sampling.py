"""sample() on the trained checkpoint, token for token against Transformers."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from transformers_neuronx.gpt2.model import GPT2ForSampling, GPT2ForSamplingWithContextBroadcasting
from transformers_neuronx.serving.step_writer import ROUNDS
from transformers_neuronx.serving.steps import TokensKey

TINY_KJV = Path(__file__).parents[2] / "examples" / "tiny-kjv"
TEXTS = ["And God said unto Moses,", "In the beginning", "The LORD is my shepherd; I shall not"]


@pytest.fixture(scope="module")
def reference():
    return AutoModelForCausalLM.from_pretrained(TINY_KJV)


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(TINY_KJV, pad_token="<|endoftext|>")


@pytest.fixture(scope="module")
def model():
    model = GPT2ForSampling.from_pretrained(TINY_KJV, n_positions=256, batch_size=8)
    model.to_neuron()
    return model


@pytest.fixture(scope="module", params=[1, 2], ids="tp{}".format)
def broadcasting(request):
    model = GPT2ForSamplingWithContextBroadcasting.from_pretrained(
        TINY_KJV, n_positions=128, prompt_batch_size=2, batch_size=6, tp_degree=request.param
    )
    model.to_neuron()
    return model


def greedy(reference, ids, length):
    return reference.generate(ids, max_length=length, do_sample=False, eos_token_id=None, pad_token_id=0)


@pytest.mark.parametrize("text", TEXTS)
def test_two_hundred_greedy_tokens_are_those_of_transformers(model, reference, tokenizer, text):
    ids = tokenizer(text, return_tensors="pt").input_ids
    length = ids.shape[1] + 200
    got = model.sample(ids, length, top_k=1, eos_token_override=-1)
    assert torch.equal(got, greedy(reference, ids, length))


@pytest.mark.parametrize("side", ["left", "right"])
def test_rows_of_a_padded_batch_go_on_as_each_does_alone(model, reference, tokenizer, side):
    batch = tokenizer(TEXTS, return_tensors="pt", padding=True, padding_side=side)
    width = batch.input_ids.shape[1]
    where = dict(attention_mask=batch.attention_mask)
    if side == "left":
        where = dict(start_ids=(batch.attention_mask == 0).sum(1))
    got = model.sample(batch.input_ids, width + 50, top_k=1, eos_token_override=-1, **where)
    assert torch.equal(got[:, :width], batch.input_ids)
    for row, text in enumerate(TEXTS):
        ids = tokenizer(text, return_tensors="pt").input_ids
        alone = greedy(reference, ids, ids.shape[1] + 50)
        assert torch.equal(got[row, width:], alone[0, ids.shape[1] :])


def test_a_row_past_its_end_repeats_it_and_all_ended_stops(model, tokenizer):
    batch = tokenizer(TEXTS, return_tensors="pt", padding=True, padding_side="left")
    width = batch.input_ids.shape[1]
    where = dict(top_k=1, attention_mask=batch.attention_mask)
    free = model.sample(batch.input_ids, width + 150, eos_token_override=-1, **where)[:, width:]
    # A token that every row reaches, at different steps.
    end = next(
        token
        for token in range(1023)
        if (free == token).any(1).all() and len(set((free == token).int().argmax(1).tolist())) > 1
    )
    firsts = (free == end).int().argmax(1)
    got = model.sample(batch.input_ids, width + 150, eos_token_override=end, **where)[:, width:]
    assert got.shape[1] == firsts.max() + 1
    for row, first in enumerate(firsts):
        assert torch.equal(got[row, : first + 1], free[row, : first + 1])
        assert (got[row, first:] == end).all()


def test_the_end_is_the_generation_configurations_before_the_models_own(tmp_path, reference, tokenizer):
    shutil.copytree(TINY_KJV, tmp_path, dirs_exist_ok=True)
    ids = tokenizer(TEXTS[0], return_tensors="pt").input_ids
    ends = greedy(reference, ids, 60)[0, [30, 40]].tolist()
    (tmp_path / "generation_config.json").write_text(json.dumps(dict(eos_token_id=ends)))
    want = AutoModelForCausalLM.from_pretrained(tmp_path).generate(ids, max_length=60, do_sample=False, pad_token_id=0)
    model = GPT2ForSampling.from_pretrained(tmp_path, n_positions=64)
    model.to_neuron()
    assert want.shape[1] < 60
    assert torch.equal(model.sample(ids, 60, top_k=1), want)


def test_the_same_seed_draws_the_same_tokens(model, tokenizer):
    ids = tokenizer(TEXTS[0], return_tensors="pt").input_ids.repeat(4, 1)
    one, two, other = (model.sample(ids, 60, seed=seed) for seed in (1, 1, 2))
    assert torch.equal(one, two)
    assert not torch.equal(one, other)
    assert not torch.equal(one[0], one[1])


class Recorder:
    def __init__(self, fail_at=None):
        self.tokens, self.ended, self.fail_at = [], False, fail_at

    def put(self, value):
        if len(self.tokens) == self.fail_at:
            raise RuntimeError("the reader has gone")
        self.tokens.append(value.clone())

    def end(self):
        self.ended = True


def test_a_streamer_gets_every_new_token_once(model, tokenizer):
    ids = tokenizer(TEXTS[1], return_tensors="pt").input_ids
    recorder = Recorder()
    got = model.sample(ids, 30, top_k=1, streamer=recorder)
    assert recorder.ended
    assert all(tokens.shape == (1, 1) for tokens in recorder.tokens)
    assert torch.equal(torch.cat([ids, *recorder.tokens], 1), got)


def test_a_streamer_that_skips_the_prompt_gets_it_first(model, tokenizer):
    ids = tokenizer(TEXTS[1], return_tensors="pt").input_ids
    recorder = Recorder()
    recorder.skip_prompt = True
    got = model.sample(ids, 30, top_k=1, streamer=recorder)
    assert torch.equal(recorder.tokens[0], ids) and torch.equal(torch.cat(recorder.tokens, 1), got)


def test_a_streamer_may_ask_for_all_tokens_so_far(model, tokenizer):
    ids = tokenizer(TEXTS[1], return_tensors="pt").input_ids
    recorder = Recorder()
    recorder.response_with_prefix = True
    got = model.sample(ids, 30, top_k=1, streamer=recorder)
    assert [tokens.shape[1] for tokens in recorder.tokens] == list(range(ids.shape[1] + 1, got.shape[1] + 1))
    assert torch.equal(recorder.tokens[-1], got)


def test_an_exception_in_a_streamer_leaves_the_model_ready(model, tokenizer):
    ids = tokenizer(TEXTS[1], return_tensors="pt").input_ids
    before = model.sample(ids, 30, top_k=1)
    recorder = Recorder(fail_at=5)
    with pytest.raises(RuntimeError, match="the reader has gone"):
        model.sample(ids, 30, top_k=1, streamer=recorder)
    assert recorder.ended
    assert torch.equal(model.sample(ids, 30, top_k=1), before)


class TestPromptsThatServeSeveralSequences:
    def test_each_sequence_goes_on_with_its_prompt(self, broadcasting, reference, tokenizer):
        batch = tokenizer(TEXTS[:2], return_tensors="pt", padding=True, padding_side="left")
        got = broadcasting.sample(
            batch.input_ids, 60, top_k=1, eos_token_override=-1, attention_mask=batch.attention_mask
        )
        assert got.shape == (6, 60)
        for row in range(6):
            ids = tokenizer(TEXTS[row % 2], return_tensors="pt").input_ids
            alone = greedy(reference, ids, ids.shape[1] + 60 - batch.input_ids.shape[1])
            assert torch.equal(got[row, batch.input_ids.shape[1] :], alone[0, ids.shape[1] :])

    def test_sequences_of_one_prompt_part_when_drawn(self, broadcasting, tokenizer):
        batch = tokenizer(TEXTS[:2], return_tensors="pt", padding=True, padding_side="left")
        got = broadcasting.sample(batch.input_ids, 60, attention_mask=batch.attention_mask, seed=0)
        assert len({tuple(row) for row in got.tolist()}) == 6

    def test_a_whole_batch_of_prompts_is_no_broadcast(self, broadcasting, reference, tokenizer):
        ids = tokenizer(TEXTS[0], return_tensors="pt").input_ids.repeat(6, 1)
        want = greedy(reference, ids[:1], 40)
        assert torch.equal(broadcasting.sample(ids, 40, top_k=1, eos_token_override=-1), want.repeat(6, 1))


def test_caches_stay_on_the_device_in_the_same_memory(model, tokenizer):
    ids = tokenizer(TEXTS[0], return_tensors="pt").input_ids

    def addresses():
        return [cache.arrays[0].unsafe_buffer_pointer() for cache in model.decoder.caches]

    before = addresses()
    model.sample(ids, 40, top_k=1)
    assert addresses() == before
    cache_bytes = sum(4 * int(np.prod(cache.shape)) for cache in model.decoder.caches)
    checked = set()
    for key, [(_, executable)] in model.decoder.store._built.items():
        if not isinstance(key, TokensKey):
            continue
        memory = executable.memory()
        made = 4 * key.samples * (1 + 1023)  # tokens and logits; and tokens of all rounds
        made += 4 * key.samples * ROUNDS if key.rounds else 0
        tuple_table = 8 * (3 + key.rounds + len(model.decoder.caches))
        assert memory.aliased == cache_bytes + key.samples * 1023  # the tokens that sequences have are state as well
        assert memory.outputs - memory.aliased == made + tuple_table
        assert executable.text().count("must-alias") == len(model.decoder.caches) + 1
        checked.add(key.rounds)
    assert checked == {True, False}
