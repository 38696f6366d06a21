"""Speculative decoding gives the same tokens as the target alone, with any draft."""

from collections import Counter
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer

from transformers_neuronx.config import GenerationConfig, NeuronConfig
from transformers_neuronx.errors import ConfigError, InputError
from transformers_neuronx.gpt2.model import GPT2ForSampling
from transformers_neuronx.runtimes.xla import XlaRuntime
from transformers_neuronx.speculation import PromptLookup, SpeculativeGenerator
from transformers_neuronx.speculation.fused import FusedSpeculativeDecoder

EXAMPLES = Path(__file__).parents[2] / "examples"
TINY_KJV, TINY_KJV_DRAFT = EXAMPLES / "tiny-kjv", EXAMPLES / "tiny-kjv-draft"
TEXTS = ["And God said unto Moses,", "In the beginning", "The LORD is my shepherd; I shall not"]


def compiled(directory, **options):
    model = GPT2ForSampling.from_pretrained(directory, **dict(n_positions=[64, 128], batch_size=3) | options)
    model.to_neuron()
    return model


@pytest.fixture(scope="module")
def target():
    return compiled(TINY_KJV)


@pytest.fixture(scope="module")
def draft():
    return compiled(TINY_KJV_DRAFT)


@pytest.fixture(scope="module")
def fused(draft, target):
    return {k: FusedSpeculativeDecoder(draft, target, k) for k in (1, 4)}


@pytest.fixture(scope="module")
def slotted():
    """A target whose cache has no pages, as on a GPU, and what makes it one program with its draft."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(XlaRuntime, "pages", False)
        draft, target = compiled(TINY_KJV_DRAFT), compiled(TINY_KJV)
        return target, FusedSpeculativeDecoder(draft, target, 4)


@pytest.fixture(scope="module")
def batch():
    tokenizer = AutoTokenizer.from_pretrained(TINY_KJV, pad_token="<|endoftext|>")
    return tokenizer(TEXTS, return_tensors="pt", padding=True, padding_side="left")


@pytest.fixture
def checks(target, monkeypatch):
    """Records the target's steps."""
    calls = []
    start = target.decoder.steps.start
    monkeypatch.setattr(target.decoder.steps, "start", lambda packed: calls.append(1) or start(packed))
    return calls


OPTIONS = [dict(top_k=1), dict(top_k=1, repetition_penalty=1.3), dict(seed=1), dict(top_k=0, top_p=0.9, seed=2)]


@pytest.mark.few(2)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("k", [pytest.param(1, marks=pytest.mark.slow), 4])
def test_tokens_are_those_of_the_target_alone(target, draft, fused, batch, options, k):
    options = options | dict(attention_mask=batch.attention_mask, eos_token_override=-1)
    want = target.sample(batch.input_ids, 100, **options)
    for speculator in (*(SpeculativeGenerator(who, target, k) for who in (draft, None)), fused[k]):
        assert torch.equal(speculator.sample(batch.input_ids, 100, **options), want)


def test_a_draft_that_is_right_saves_steps(target, batch, checks):
    twin = compiled(TINY_KJV)
    for options in (dict(top_k=1), dict(seed=3)):
        options = options | dict(attention_mask=batch.attention_mask, eos_token_override=-1)
        got = SpeculativeGenerator(twin, target, 4).sample(batch.input_ids, batch.input_ids.shape[1] + 51, **options)
        assert len(checks) == 1 + 10  # five tokens each, after the first
        assert torch.equal(got, target.sample(batch.input_ids, batch.input_ids.shape[1] + 51, **options))
        checks.clear()


def test_a_text_that_repeats_itself_saves_steps_without_a_draft(target, checks):
    ids = torch.tensor([[5, 6, 7, 8] * 8])
    got = SpeculativeGenerator(None, target, 4).sample(ids, 100, top_k=1, eos_token_override=-1)
    assert len(checks) < 60
    assert torch.equal(got, target.sample(ids, 100, top_k=1, eos_token_override=-1))


def test_rows_that_end_early_and_the_end_of_the_sequence(target, draft, fused, batch):
    free = target.sample(batch.input_ids, 128, top_k=1, attention_mask=batch.attention_mask, eos_token_override=-1)
    width = batch.input_ids.shape[1]
    eos = int(free[1, width + 7])
    options = dict(top_k=1, attention_mask=batch.attention_mask, eos_token_override=eos)
    want = target.sample(batch.input_ids, 128, **options)
    for speculator in (SpeculativeGenerator(draft, target, 5), fused[4]):
        assert torch.equal(speculator.sample(batch.input_ids, 128, **options), want)


def test_rounds_of_its_own_leave_pages_to_slots_alone(target, batch):
    """A batch that a caller continues round by round, and whose pages other calls then need."""
    ids = batch.input_ids[:1]
    want = target.sample(ids, ids.shape[1] + 24, top_k=1, eos_token_override=-1)[0].tolist()
    greedy = NeuronConfig(on_device_generation=GenerationConfig(top_k=1, do_sample=True))
    target, draft = (compiled(where, batch_size=1, neuron_config=greedy) for where in (TINY_KJV, TINY_KJV_DRAFT))
    speculator = FusedSpeculativeDecoder(draft, target, 4)
    made = ids[0].tolist()
    tokens, counts = speculator.speculative_iteration(ids)
    while True:
        made += tokens[0, : counts[0]].tolist()
        if len(made) >= len(want):
            break
        tokens, counts = speculator.speculative_iteration([made[-1:]], [[len(made) - 1]])
    assert made[: len(want)] == want
    for model in (target, draft):
        decoder = model.decoder
        assert decoder.pool.count - decoder.pool.free == len({page for table in decoder.tables for page in table})
        holders = Counter(page for table in decoder.tables for page in table)
        assert all(decoder.pool.is_shared(page) == (count > 1) for page, count in holders.items())


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.few(2)
def test_both_models_in_one_program(slotted, batch, options):
    target, fused = slotted
    options = options | dict(attention_mask=batch.attention_mask, eos_token_override=-1)
    assert torch.equal(fused.sample(batch.input_ids, 100, **options), target.sample(batch.input_ids, 100, **options))


@pytest.mark.slow
def test_over_two_devices(draft, target, batch):
    options = dict(seed=4, attention_mask=batch.attention_mask)
    two, other = compiled(TINY_KJV, tp_degree=2), compiled(EXAMPLES / "tiny-kjv-draft", tp_degree=2)
    want = target.sample(batch.input_ids, 60, **options)
    assert torch.equal(SpeculativeGenerator(draft, two).sample(batch.input_ids, 60, **options), want)
    assert torch.equal(FusedSpeculativeDecoder(other, two, 2).sample(batch.input_ids, 60, **options), want)


@pytest.mark.parametrize("tokens_per_dispatch", [pytest.param(0, marks=pytest.mark.slow), 2])
def test_however_few_tokens_a_dispatch_makes(draft, target, batch, tokens_per_dispatch):
    options = dict(seed=5, attention_mask=batch.attention_mask)
    want = target.sample(batch.input_ids, 60, **options)
    few = compiled(TINY_KJV, neuron_config=NeuronConfig(tokens_per_dispatch=tokens_per_dispatch))
    assert torch.equal(SpeculativeGenerator(few, target, 4).sample(batch.input_ids, 60, **options), want)
    assert torch.equal(FusedSpeculativeDecoder(draft, few, 2).sample(batch.input_ids, 60, **options), want)


class TestPromptLookup:
    @pytest.mark.parametrize(
        ("ids", "guesses"),
        [
            ([1, 2, 3, 4, 1, 2], [3, 4, 1]),
            ([1, 2, 3, 9, 2, 3, 4, 2, 3], [4, 2, 3]),  # the last occurrence, not the first
            ([7, 5, 7], [5, 7]),
            ([1, 2, 3], []),
            ([1], []),
        ],
    )
    def test_what_followed_before(self, ids, guesses):
        assert PromptLookup(3).find(ids, 3) == guesses


def test_what_does_not_go_together_is_refused(target, draft, batch):
    with pytest.raises(ConfigError, match="batch_size must be the same for draft and target, got 3 and 1"):
        SpeculativeGenerator(draft, GPT2ForSampling.from_pretrained(TINY_KJV))
    with pytest.raises(ConfigError, match="tp_degree must be the same for draft and target, got 1 and 2"):
        FusedSpeculativeDecoder(
            draft, GPT2ForSampling.from_pretrained(TINY_KJV, batch_size=3, n_positions=128, tp_degree=2)
        )
    with pytest.raises(ConfigError, match="n_positions of the draft must be at least the target's 128, got 64"):
        SpeculativeGenerator(GPT2ForSampling.from_pretrained(TINY_KJV, batch_size=3, n_positions=64), target)
    with pytest.raises(ConfigError, match="a draft must be another model than its target"):
        SpeculativeGenerator(target, target)
    with pytest.raises(ConfigError, match="k must be at least 1, got 0"):
        SpeculativeGenerator(draft, target, 0)
    with pytest.raises(InputError, match="neither no_repeat_ngram_size nor output_scores"):
        SpeculativeGenerator(draft, target).sample(batch.input_ids, 100, output_scores=True)
