"""The token loop on the devices and what ends it: the tokens are the same as with a loop on the host."""

from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from transformers_neuronx import SparseAttnConfig
from transformers_neuronx.config import NeuronConfig
from transformers_neuronx.errors import EngineError, InputError
from transformers_neuronx.gpt2.model import GPT2ForSampling

TINY_KJV = Path(__file__).parents[2] / "examples" / "tiny-kjv"
TEXTS = ["And God said unto Moses,", "In the beginning", "The LORD is my shepherd; I shall not"]


def compiled(tokens_per_dispatch=32, sparse_attn=None, **options):
    model = GPT2ForSampling.from_pretrained(
        TINY_KJV, **dict(n_positions=[64, 128], batch_size=4) | options,
        neuron_config=NeuronConfig(tokens_per_dispatch=tokens_per_dispatch, sparse_attn=sparse_attn),
    )  # fmt: skip
    model.to_neuron()
    return model


@pytest.fixture(scope="module")
def model():
    return compiled()


@pytest.fixture(scope="module")
def slots():
    """A model whose attention is by a mask of all positions, so that its cache is in slots."""
    mask = torch.ones(128, 128, dtype=torch.bool).tril()
    return compiled(sparse_attn=SparseAttnConfig("custom", sparse_mask_dict={(128, 128): mask}))


@pytest.fixture(scope="module")
def reference():
    return AutoModelForCausalLM.from_pretrained(TINY_KJV)


@pytest.fixture(scope="module")
def batch():
    tokenizer = AutoTokenizer.from_pretrained(TINY_KJV, pad_token="<|endoftext|>")
    return tokenizer(TEXTS, return_tensors="pt", padding=True, padding_side="left")


OPTIONS = [
    dict(top_k=1),
    dict(seed=1),
    dict(top_k=0, top_p=0.9, temperature=0.7, seed=2),
    dict(top_k=[1, 20, 0], min_p=[0.0, 0.1, 0.05], repetition_penalty=1.2, seed=3),
]


@pytest.mark.parametrize(
    "options",
    [
        dict(tokens_per_dispatch=0),
        pytest.param(dict(tokens_per_dispatch=5), marks=pytest.mark.slow),
        dict(tp_degree=2),
        dict(unroll=2),
    ],
    ids=str,
)
def test_wherever_the_loop_is_the_tokens_are_the_same(model, batch, options):
    other = compiled(**options)
    for rules in OPTIONS:
        rules = rules | dict(attention_mask=batch.attention_mask, eos_token_override=-1)
        want = model.sample(batch.input_ids, 100, **rules)
        assert torch.equal(other.sample(batch.input_ids, 100, **rules), want)


class TestAgainstTransformers:
    @pytest.mark.parametrize("options", [dict(repetition_penalty=1.3), dict(no_repeat_ngram_size=3)], ids=str)
    def test_greedy_with_what_processors_change(self, model, reference, batch, options):
        # One prompt: with several, Transformers also penalizes padding as tokens that are there already.
        ids = batch.input_ids[2:]
        want = reference.generate(ids, max_length=90, eos_token_id=None, do_sample=False, pad_token_id=0, **options)
        plain = model.sample(ids, 90, top_k=1, eos_token_override=-1)
        got = model.sample(ids, 90, top_k=1, eos_token_override=-1, **options)
        assert torch.equal(got, want)
        assert not torch.equal(got, plain)

    def test_scores_are_the_logits(self, model, reference, batch):
        options = dict(attention_mask=batch.attention_mask)
        ids, scores = model.sample(batch.input_ids, 40, top_k=1, output_scores=True, **options)
        want = reference.generate(
            batch.input_ids, max_length=40, do_sample=False, pad_token_id=0, output_logits=True,
            return_dict_in_generate=True, **options,
        )  # fmt: skip
        assert torch.equal(ids, want.sequences)
        assert len(scores) == 40 - batch.input_ids.shape[1]
        torch.testing.assert_close(torch.stack(scores), torch.stack(want.logits), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("side", ["left", "right"])
def test_scores_of_a_given_text_are_its_log_probabilities(model, reference, side):
    tokenizer = AutoTokenizer.from_pretrained(TINY_KJV, pad_token="<|endoftext|>")
    batch = tokenizer(TEXTS, return_tensors="pt", padding=True, padding_side=side)
    got = model.score(batch.input_ids, attention_mask=batch.attention_mask)
    for row, text in enumerate(TEXTS):
        ids = tokenizer(text, return_tensors="pt").input_ids
        with torch.inference_mode():
            loss = reference(ids, labels=ids).loss
        assert got[row].sum() == pytest.approx(-float(loss) * (ids.shape[1] - 1), rel=1e-5)
        assert (got[row] != 0).sum() == ids.shape[1] - 1


class TestWhatEndsIt:
    def test_criteria_see_the_prompt_and_every_token_in_order(self, model, batch):
        options = dict(top_k=1, attention_mask=batch.attention_mask, eos_token_override=-1)
        want = model.sample(batch.input_ids, 60, **options)
        seen = []

        def criterion(ids, scores):
            seen.append(ids.clone())
            return ids.shape[1] >= 43

        got = model.sample(batch.input_ids, 60, stopping_criteria_list=criterion, **options)
        assert torch.equal(got, want[:, :43])
        assert [ids.shape[1] for ids in seen] == list(range(batch.input_ids.shape[1] + 1, 44))
        assert all(torch.equal(ids, want[:, : ids.shape[1]]) for ids in seen)

    def test_criteria_end_single_rows(self, model, batch):
        options = dict(top_k=1, attention_mask=batch.attention_mask)
        free = model.sample(batch.input_ids, 60, eos_token_override=-1, **options)

        def second_row_at_thirty(ids, scores):
            return torch.tensor([False, ids.shape[1] >= 30, False])

        got = model.sample(
            batch.input_ids, 60, eos_token_override=7, stopping_criteria_list=second_row_at_thirty, **options
        )
        assert torch.equal(got[1, :30], free[1, :30])
        assert (got[1, 30:] == 7).all()
        assert torch.equal(got[2, :40], free[2, :40])

    def test_each_of_several_eos_tokens(self, model, batch):
        options = dict(top_k=1, attention_mask=batch.attention_mask)
        width = batch.input_ids.shape[1]
        free = model.sample(batch.input_ids, 60, eos_token_override=-1, **options)[:, width:]
        ends = [int(free[0, 4]), int(free[1, 9])]
        got = model.sample(batch.input_ids, 60, eos_token_override=ends, **options)[:, width:]
        for row in range(3):
            found = np.flatnonzero(np.isin(free[row], ends))
            assert found.size or row == 2
            first = found[0] if found.size else got.shape[1] - 1
            assert torch.equal(got[row, : first + 1], free[row, : first + 1])
            assert (got[row, first + 1 :] == ends[0]).all()
        with pytest.raises(InputError, match="eos_token_id must be at most 8 tokens, got 9"):
            model.sample(batch.input_ids, 60, eos_token_override=list(range(9)))

    def test_a_conversation_goes_on_where_it_was(self, model, reference):
        first = torch.tensor([[5, 6, 7, 8]])
        answer = model.sample(first, 20, top_k=1, eos_token_override=-1)
        # The last token has been sampled but not been fed: it starts the next call.
        turn = torch.cat([answer[:, -1:], torch.tensor([[9, 10, 11]])], 1)
        got = model.sample(turn, 40, top_k=1, cache_ids=torch.arange(19, 23), eos_token_override=-1)
        whole = torch.cat([answer[:, :-1], turn], 1)
        want = reference.generate(whole, max_length=40, eos_token_id=None, do_sample=False, pad_token_id=0)
        assert torch.equal(got, want[:, 19:])


class TestSeeds:
    HOT: ClassVar = dict(top_k=0, temperature=2.0, eos_token_override=-1)

    def test_a_list_has_each_row_draw_what_it_draws_alone(self, model):
        prompts, seeds = torch.tensor([[5, 6, 7], [8, 9, 10], [5, 6, 7]]), [3, 4, 4]
        pairs = zip(prompts, seeds, strict=True)
        alone = [model.sample(ids[None], 24, seed=seed, **self.HOT)[0] for ids, seed in pairs]
        assert not torch.equal(alone[0], alone[2])
        for order in ([0, 1, 2], [2, 0, 1], [1, 2]):
            got = model.sample(prompts[order], 24, seed=[seeds[row] for row in order], **self.HOT)
            assert torch.equal(got, torch.stack([alone[row] for row in order]))

    def test_one_seed_keeps_rows_apart_and_the_first_as_it_is_alone(self, model):
        ids = torch.tensor([[5, 6, 7]])
        alone, rows = (model.sample(ids.repeat(n, 1), 24, seed=3, **self.HOT) for n in (1, 3))
        assert torch.equal(rows[:1], alone)
        assert len(set(map(tuple, rows.tolist()))) == 3

    @pytest.mark.parametrize("seed", [[1, 2], [1, -2, 3], [1, 2.5, 3], "7"])
    def test_others_are_refused(self, model, seed):
        with pytest.raises(InputError, match="seed must be"):
            model.sample(torch.tensor([[5, 6, 7]]).repeat(3, 1), 24, seed=seed, **self.HOT)


class TestWhenSomethingGoesWrong:
    def test_logits_that_are_nan_are_reported_and_the_model_stays_usable(self, model, batch):
        options = dict(top_k=1, attention_mask=batch.attention_mask)
        before = model.sample(batch.input_ids, 40, **options)
        decoder = model.decoder
        poison = np.full(decoder.programs.cache.of_layers[0].arrays[0].sizes, np.nan, np.float32)
        decoder.caches[:] = [decoder.runtime.put([poison]) for _ in decoder.caches]
        with pytest.raises(EngineError, match=r"the logits of rows \[0\] are NaN or all -inf"):
            model.sample([[5]], 20, cache_ids=[10], top_k=1)
        assert torch.equal(model.sample(batch.input_ids, 40, **options), before)

    @pytest.mark.parametrize(
        ("over", "what"), [("pages", "step"), *(("slots", what) for what in ("loop", "sample", "step"))]
    )
    def test_an_interrupt_leaves_the_model_usable(self, model, slots, batch, monkeypatch, over, what):
        model = model if over == "pages" else slots
        options = dict(top_k=1, attention_mask=batch.attention_mask)
        before = model.sample(batch.input_ids, 60, **options)

        def fail(*operands):
            raise KeyboardInterrupt

        for key, [(piece, _)] in list(model.decoder.store._built.items()):
            if key.kind == what:
                monkeypatch.setitem(model.decoder.store._built, key, [(piece, fail)])
        with pytest.raises(KeyboardInterrupt):
            model.sample(batch.input_ids, 60, **options)
        monkeypatch.undo()
        assert torch.equal(model.sample(batch.input_ids, 60, **options), before)

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            (dict(min_p=1.5), r"min_p must be in \[0, 1\], got 1.5"),
            (dict(top_p=0.0), r"top_p must be in \(0, 1\], got 0.0"),
            (dict(repetition_penalty=0), "repetition_penalty must be above 0, got 0"),
            (dict(temperature=-1.0), "temperature must be above 0 .* got -1.0"),
            (dict(temperature=[1.0, 0.0, 1.0]), r"temperature must be above 0 .* got \[1.0, 0.0, 1.0\]"),
            (dict(top_k=[1, 2]), "top_k must be one value, or one for each of 3 rows, got 2"),
            (dict(top_k=2.5), "top_k must be a whole number of at least 1, .*, got 2.5"),
            (dict(seed=-1), "seed must be a whole number of at least 0, or one per row, got -1"),
        ],
        ids=str,
    )
    def test_options_that_contradict_themselves(self, model, batch, options, message):
        with pytest.raises(InputError, match=message):
            model.sample(batch.input_ids, 40, **options)
