"""generate() on the trained checkpoint, token for token against Transformers."""

import copy
import threading
from pathlib import Path

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    DynamicCache,
    StoppingCriteria,
    StoppingCriteriaList,
    TextIteratorStreamer,
    TextStreamer,
    pipeline,
)  # fmt: skip

from transformers_neuronx.errors import InputError
from transformers_neuronx.gpt2.model import GPT2ForSampling, GPT2ForSamplingWithContextBroadcasting
from transformers_neuronx.huggingface.adapter import HuggingFaceGenerationModelAdapter
from transformers_neuronx.huggingface.device_cache import CACHE

TINY_KJV = Path(__file__).parents[2] / "examples" / "tiny-kjv"
TEXTS = ["And God said unto Moses,", "In the beginning", "The LORD is my shepherd; I shall not"]
LONGEST = 128


@pytest.fixture(scope="module")
def reference():
    return AutoModelForCausalLM.from_pretrained(TINY_KJV)


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(TINY_KJV, pad_token="<|endoftext|>")


def compiled(reference, path, cls=GPT2ForSampling, **options):
    model = cls.from_pretrained(path, n_positions=LONGEST, **options)
    model.to_neuron()
    return HuggingFaceGenerationModelAdapter(reference.config, model)


@pytest.fixture(scope="module")
def adapter(reference):
    return compiled(reference, TINY_KJV, batch_size=8)


@pytest.fixture(scope="module")
def draft(reference):
    """A changed copy of Transformers' model: its draft tokens are often rejected."""
    torch.manual_seed(0)
    model = copy.deepcopy(reference)
    with torch.no_grad():
        for weight in model.transformer.h.parameters():
            weight.add_(torch.randn_like(weight) * 0.03)
    return model


@pytest.fixture(scope="module")
def compiled_draft(draft, tmp_path_factory):
    directory = tmp_path_factory.mktemp("draft")
    draft.save_pretrained(directory)
    return compiled(draft, directory, batch_size=1)


@pytest.fixture
def one(tokenizer):
    return tokenizer(TEXTS[0], return_tensors="pt")


@pytest.fixture
def batch(tokenizer):
    return tokenizer(TEXTS, return_tensors="pt", padding=True, padding_side="left")


def generated(model, inputs, **options):
    """Call `generate` with the same seed each time, since some options draw."""
    torch.manual_seed(0)
    return model.generate(**inputs, **dict(max_length=60, pad_token_id=0, do_sample=False) | options)


def assert_same(adapter, reference, inputs, **options):
    want = generated(reference, inputs, **options)
    assert torch.equal(generated(adapter, inputs, **options), want)
    return want


@pytest.mark.parametrize(
    "options",
    [
        dict(),
        dict(use_cache=False, max_length=30),
        dict(prefill_chunk_size=3),
        dict(repetition_penalty=1.3, no_repeat_ngram_size=3, bad_words_ids=[[13]]),
        dict(min_new_tokens=30, eos_token_id=[11, 13], forced_eos_token_id=11),
        dict(num_beams=2, num_return_sequences=2),
        dict(num_beams=2, length_penalty=2.0, early_stopping=True, eos_token_id=11, no_repeat_ngram_size=3),
        dict(num_beams=2, do_sample=True, temperature=0.9, num_return_sequences=2),
        dict(num_beams=2, use_cache=False, max_length=30),
        dict(do_sample=True, temperature=0.7),
        dict(do_sample=True, num_return_sequences=2, top_k=0, top_p=0.9, min_p=0.02),
        dict(do_sample=True, typical_p=0.9, epsilon_cutoff=0.001, eta_cutoff=0.001),
    ],
    ids=str,
)
def test_tokens_of_a_padded_batch(adapter, reference, batch, options):
    assert_same(adapter, reference, batch, **options)


@pytest.mark.parametrize("sampled", [False, True])
def test_four_beams(adapter, reference, tokenizer, sampled):
    batch = tokenizer(TEXTS[1:], return_tensors="pt", padding=True, padding_side="left")
    options = dict(num_beams=4, num_return_sequences=2, length_penalty=0.5, early_stopping=True, eos_token_id=[11, 13])
    assert_same(adapter, reference, batch, do_sample=sampled, **options)


def test_rows_padded_on_the_right_go_on_as_each_does_alone(adapter, reference, tokenizer):
    """Transformers itself continues from the padding, and warns about it."""
    batch = tokenizer(TEXTS, return_tensors="pt", padding=True, padding_side="right")
    width = batch.input_ids.shape[1]
    for options in (dict(), dict(num_beams=2)):
        got = generated(adapter, batch, max_new_tokens=30, max_length=None, **options)
        for row, text in enumerate(TEXTS):
            ids = tokenizer(text, return_tensors="pt")
            want = generated(reference, ids, max_new_tokens=30, max_length=None, **options)
            assert torch.equal(got[row, width:], want[0, ids.input_ids.shape[1] :])


def test_rows_that_end_are_filled(adapter, reference, batch):
    want = assert_same(adapter, reference, batch, eos_token_id=13, pad_token_id=7)
    ended = (want[:, batch.input_ids.shape[1] :] == 7).any(1)
    assert ended.any() and not ended.all()


def test_each_call_stands_alone(adapter, reference, one, batch):
    first = generated(adapter, one)
    assert_same(adapter, reference, batch, num_beams=2)
    assert torch.equal(generated(adapter, one), first)
    adapter.reset_generation()
    assert torch.equal(generated(adapter, one), first)


def test_prompts_that_serve_several_sequences_serve_one_here(reference, batch):
    adapter = compiled(reference, TINY_KJV, GPT2ForSamplingWithContextBroadcasting, prompt_batch_size=3, batch_size=6)
    assert_same(adapter, reference, batch)
    assert_same(adapter, reference, batch, num_beams=2)


class TestWhatIsReturned:
    @pytest.mark.parametrize("options", [dict(do_sample=True), dict(num_beams=2)], ids=str)
    def test_scores_and_logits(self, adapter, reference, batch, options):
        options |= dict(return_dict_in_generate=True, output_scores=True, output_logits=True, max_length=30, top_k=5)
        got, want = generated(adapter, batch, **options), generated(reference, batch, **options)
        assert torch.equal(got.sequences, want.sequences)
        for name in ("scores", "logits"):
            ours, theirs = torch.stack(got[name]), torch.stack(want[name])
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
        if "num_beams" in options:
            torch.testing.assert_close(got.sequences_scores, want.sequences_scores, rtol=1e-4, atol=1e-4)

    def test_a_later_call_goes_on_with_what_is_cached(self, adapter, reference, batch):
        lengths = []

        def twice(model):
            first = generated(model, batch, return_dict_in_generate=True, max_length=30)
            lengths.append(first[CACHE].get_seq_length())
            mask = torch.cat([batch.attention_mask, torch.ones(3, 30 - batch.input_ids.shape[1]).long()], 1)
            return generated(model, dict(input_ids=first.sequences, attention_mask=mask), **{CACHE: first[CACHE]})

        assert torch.equal(twice(adapter), twice(reference))
        assert lengths == [29, 29]

    @torch.no_grad()
    def test_logits_of_all_tokens(self, adapter, reference, batch):
        positions = (batch.attention_mask.cumsum(1) - 1).clamp(min=0)
        want = reference(**batch, position_ids=positions).logits
        got = adapter(**batch, position_ids=positions)
        real = batch.attention_mask.bool()
        torch.testing.assert_close(got.logits[real], want[real], rtol=1e-4, atol=1e-4)
        assert torch.equal(adapter(**batch, logits_to_keep=2).logits, got.logits[:, -2:])
        assert torch.equal(adapter(**batch, logits_to_keep=torch.tensor([9, 5])).logits, got.logits[:, [9, 5]])
        assert torch.equal(adapter(**batch, return_dict=False)[0], got.logits)
        with pytest.raises(InputError, match="position_ids must count"):
            adapter(**batch, position_ids=positions + 1)


class TestDrafts:
    @pytest.mark.parametrize(
        ("assistant", "sampled"),
        [
            ("draft", False),
            ("compiled_draft", True),
            pytest.param("draft", True, marks=pytest.mark.slow),
            pytest.param("compiled_draft", False, marks=pytest.mark.slow),
        ],
    )
    def test_of_an_assistant(self, adapter, reference, draft, one, request, monkeypatch, assistant, sampled):
        options = dict(do_sample=sampled, max_length=LONGEST, eos_token_id=None)
        want = generated(reference, one, assistant_model=draft, **options)
        calls, feed = [], adapter.model.run

        def counted(ids, **where):
            calls.append(ids.shape[1])
            return feed(ids, **where)

        monkeypatch.setattr(adapter.model, "run", counted)
        got = generated(adapter, one, assistant_model=request.getfixturevalue(assistant), **options)
        assert torch.equal(got, want)
        made = LONGEST - one.input_ids.shape[1]
        assert len(calls) < made, "no draft was accepted"
        assert sum(calls) > LONGEST, "no draft was rejected"

    def test_for_transformers(self, compiled_draft, reference, one):
        want = generated(reference, one)
        assert torch.equal(generated(reference, one, assistant_model=compiled_draft), want)

    @pytest.mark.parametrize("sampled", [False, True])
    def test_of_the_prompt(self, adapter, reference, one, sampled):
        options = dict(do_sample=sampled, max_length=LONGEST, eos_token_id=None, temperature=0.3)
        assert_same(adapter, reference, one, prompt_lookup_num_tokens=10, **options)

    @pytest.mark.parametrize("side", ["left", "right"])
    def test_of_a_padded_prompt(self, adapter, reference, tokenizer, one, side):
        padded = tokenizer(TEXTS[0], return_tensors="pt", padding="max_length", max_length=20, padding_side=side)
        got = generated(adapter, padded, prompt_lookup_num_tokens=10, max_length=80, eos_token_id=None)
        want = generated(reference, one, max_length=one.input_ids.shape[1] + 60, eos_token_id=None)
        assert torch.equal(got[0, 20:], want[0, one.input_ids.shape[1] :])

    def test_by_the_model_itself_are_refused(self, adapter, one):
        with pytest.raises(InputError, match="assistant_model must wrap another model"):
            generated(adapter, one, assistant_model=adapter)


class TestStopping:
    def test_at_strings(self, adapter, reference, one, tokenizer):
        want = assert_same(adapter, reference, one, stop_strings=["LORD"], tokenizer=tokenizer, max_length=100)
        assert tokenizer.decode(want[0]).endswith("LORD")

    def test_criteria_see_the_prompt_and_what_follows(self, adapter, reference, batch):
        class Seven(StoppingCriteria):
            def __init__(self):
                self.seen = []

            def __call__(self, input_ids, scores, **_):
                self.seen.append(input_ids.clone())
                return torch.full((len(input_ids),), len(self.seen) == 7)

        ours, theirs = Seven(), Seven()
        got = generated(adapter, batch, stopping_criteria=StoppingCriteriaList([ours]))
        want = generated(reference, batch, stopping_criteria=StoppingCriteriaList([theirs]))
        assert torch.equal(got, want) and got.shape[1] == batch.input_ids.shape[1] + 7
        for one, other in zip(ours.seen, theirs.seen, strict=True):
            assert torch.equal(one, other)


class TestStreamers:
    def test_text_as_it_comes(self, adapter, reference, one, tokenizer, capsys):
        texts = []
        for model in (adapter, reference):
            generated(model, one, streamer=TextStreamer(tokenizer, skip_prompt=True))
            texts.append(capsys.readouterr().out)
        assert texts[0] == texts[1] != ""

    def test_from_another_thread(self, adapter, reference, one, tokenizer):
        streamer = TextIteratorStreamer(tokenizer, timeout=60)
        thread = threading.Thread(target=generated, args=(adapter, one), kwargs=dict(streamer=streamer))
        thread.start()
        text = "".join(streamer)
        thread.join()
        assert text == tokenizer.decode(generated(reference, one)[0])

    def test_one_that_fails_leaves_the_model_ready(self, adapter, reference, one):
        class Failing:
            left = 5

            def put(self, value):
                self.left -= 1
                if not self.left:
                    raise RuntimeError("the reader has gone")

        with pytest.raises(RuntimeError, match="the reader has gone"):
            generated(adapter, one, streamer=Failing())
        assert_same(adapter, reference, one)


def test_a_pipeline(adapter, reference, tokenizer):
    options = dict(max_new_tokens=20, batch_size=3, pad_token_id=0)
    for drawn in (dict(do_sample=False), dict(do_sample=True, num_return_sequences=2)):
        results = []
        for model in (adapter, reference):
            torch.manual_seed(0)
            generator = pipeline("text-generation", model=model, tokenizer=tokenizer)
            results.append(generator(TEXTS, **options, **drawn))
        assert results[0] == results[1]


def test_the_checkpoints_own_defaults_hold(reference, tmp_path):
    reference = copy.deepcopy(reference)
    reference.generation_config.update(max_new_tokens=3, repetition_penalty=1.5)
    reference.save_pretrained(tmp_path)
    config = AutoModelForCausalLM.from_pretrained(tmp_path).config
    adapter = HuggingFaceGenerationModelAdapter(config, GPT2ForSampling.from_pretrained(tmp_path))
    assert adapter.generation_config.to_dict() == reference.generation_config.to_dict()


class Gone:
    """A streamer that fails if any token is generated."""

    def put(self, value):
        assert value.ndim == 2, "generation has begun"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(max_length=LONGEST + 1), f"n_positions={LONGEST} is the longest .*; max_length=129 .* needs 129"),
        (dict(max_new_tokens=200, max_length=None), "n_positions=128 is .*max_new_tokens=200"),
        (dict(num_return_sequences=3, do_sample=True), "batch_size=8 .* got 9: 3 prompts .*return_sequences=3"),
        (dict(output_attentions=True, return_dict_in_generate=True), "output_attentions is not supported"),
        (dict(output_hidden_states=True, return_dict_in_generate=True), "output_hidden_states is not supported"),
        (dict(inputs_embeds=torch.zeros(3, 4, 128)), "inputs_embeds is not supported"),
        ({CACHE: DynamicCache()}, f"{CACHE} must be what this model returned, got Dyn"),
    ],
)
def test_what_cannot_be_served_is_refused_before_anything_runs(adapter, batch, options, message):
    with pytest.raises(InputError, match=message):
        generated(adapter, batch, streamer=Gone(), **options)


def test_more_beams_than_the_batch_are_refused(adapter, batch):
    with pytest.raises(InputError, match="batch_size=8 is the most rows this model takes, got 12: 3 prompts with num_"):
        generated(adapter, batch, num_beams=4)


def test_padding_does_not_count_as_length(adapter, tokenizer):
    ids = tokenizer(TEXTS[0], return_tensors="pt", padding="max_length", max_length=40, padding_side="left")
    assert generated(adapter, ids, max_length=LONGEST + 20, eos_token_id=None).shape[1] == LONGEST + 20


def test_cached_rows_are_selected_and_repeated(adapter, reference, one):
    """Transformers' caches can do this with a prompt that several sequences continue."""
    results = []
    for model in (adapter, reference):
        with torch.no_grad():
            cache = model(**one, use_cache=True, **{CACHE: None})[CACHE]
        cache.crop(-1)
        cache.batch_repeat_interleave(3)
        cache.batch_select_indices(torch.tensor([2, 0]))
        ids = one.input_ids.repeat(2, 1)
        results.append(generated(model, dict(input_ids=ids), **{CACHE: cache}, do_sample=True))
    assert torch.equal(*results)


def test_torch_has_its_threads_again_after_generating(adapter, tokenizer):
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    seen = []

    class Streamer:
        def put(self, value):
            seen.append(torch.get_num_threads())

        def end(self):
            raise RuntimeError("the reader has gone")

    try:
        with pytest.raises(RuntimeError, match="the reader has gone"):
            adapter.generate(**tokenizer("In the", return_tensors="pt"), max_new_tokens=3, streamer=Streamer())
        assert set(seen) == {1}
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(threads)
