"""Draft models, which compute nothing of a sequence until they draft for it."""

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st
from transformers import LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM

from transformers_neuronx import Engine, SamplingParams
from transformers_neuronx.gpt2.model import GPT2ForSampling
from transformers_neuronx.huggingface.auto import NeuronAutoModelForCausalLM
from transformers_neuronx.serving.draft_models import Computed, ModelGuesser
from transformers_neuronx.serving.drafting import TRIED, Costs
from transformers_neuronx.serving.step_times import ROUNDS, StepTimes

EXAMPLES = Path(__file__).parents[2] / "examples"
SIZES = dict(rows=4, step_tokens=32, joined_tokens=32, draft_tokens=3)
SIZE = 4  # of the pages of a drawn cache

draws = st.integers(0, 9)


@given(st.lists(st.tuples(draws, draws, draws, draws), max_size=60))
def test_what_is_computed_is_never_more_than_what_was(steps):
    """Beside a cache that says of each position which token is there, and which one the draft model computed."""
    computed, tokens, drafts = Computed(12, SIZE), {}, {}
    tables = [[1, 2, 3], [1, 4, 5], [0, 6, 7], [8, 9, 10]]  # two share a page, and one has lost a page behind a window
    places = [[(page, place) for page in table for place in range(SIZE)] for table in tables]
    for number, (row, start, count, known) in enumerate(steps):
        table, own = tables[row % 4], places[row % 4]
        first = SIZE if row % 4 in (1, 2) else 0  # what several have is not written
        start, known = max(start, first), min(known, count)
        end = min(start + count, len(own))
        for place in range(start, end):
            tokens[own[place]] = number
        if computed.end(table, start) == start:  # otherwise no draft is made
            for place in range(start, min(start + known, end)):
                drafts[own[place]] = number
        else:
            known = 0
        computed.note(table, start, end, known)
        for other, where in zip(tables, places, strict=True):
            end = computed.end(other, len(where))
            real = [tokens.get(each) == drafts.get(each, -1) or not each[0] for each in where]
            assert all(real[:end]), "nothing else than what the sequence has"
            if not any(known for _, _, _, known in steps):
                assert end == (SIZE if other[0] == 0 else 0)


def test_copied_pages():
    computed = Computed(3, SIZE)
    computed.note([1], 0, 3, 3)
    computed.copy((1, 2))
    computed.note([2], 1, 4, 0)
    assert computed.end([1], 9) == 3 and computed.end([2], 9) == 1 and computed.end([1], 2) == 2


def loaded(name, **options):
    model = GPT2ForSampling.from_pretrained(EXAMPLES / name, **dict(n_positions=256) | options)
    model.to_neuron(ahead=False)
    return model


@pytest.fixture(scope="module")
def model():
    return loaded("tiny-kjv")


def submitted(engine, count, **how):
    """Prompts of many lengths, some of which begin alike."""
    draw = np.random.default_rng(0)
    stem = draw.integers(3, 1000, 80).tolist()
    params = SamplingParams(max_tokens=60, temperature=0, ignore_eos=True, **how)
    prompts = [[*(stem if n % 3 else []), *draw.integers(3, 1000, 1 + 7 * n).tolist()] for n in range(count)]
    return [engine.submit(prompt, params) for prompt in prompts]


def sometimes(engine, monkeypatch, turns):
    """Let drafts come and go. Return a list that gets numbers of draft tokens, and of those that were right."""
    drafting, draw, made = engine.scheduler.drafting, np.random.default_rng(1), []
    noted = type(drafting).noted

    def counts(tokens, odds, rooms):
        drafting.pays ^= draw.random() < turns
        return [room if drafting.pays and draw.random() < 0.7 else 0 for room in rooms]

    def note(odds, guesses, right):
        made.append((guesses, right))
        return noted(drafting, odds, guesses, right)

    monkeypatch.setattr(drafting, "counts", counts)
    monkeypatch.setattr(drafting, "noted", note)
    return made


@pytest.mark.parametrize("cache_tokens", [1024, 320])
@pytest.mark.parametrize("turns", [0.1, 0.6])
@pytest.mark.few(2)
def test_a_model_that_drafts_for_itself_is_right_whenever_it_does(turns, cache_tokens, model, monkeypatch):
    """Also after a while without, after pages of others, and after a request lost its own."""
    with Engine(model, **SIZES) as engine:
        wanted = [handle.result() for handle in submitted(engine, 12)]
    with Engine(model, **SIZES, cache_tokens=cache_tokens, draft=model) as engine:
        made = sometimes(engine, monkeypatch, turns)
        handles = submitted(engine, 12)
        assert [handle.result() for handle in handles] == wanted
        assert (engine.scheduler.preemptions > 0) == (cache_tokens == 320)
        assert engine.scheduler.cache.unused
    assert sum(guesses for guesses, _ in made) > 20 and all(guesses == right for guesses, right in made)


def test_nothing_is_computed_while_drafts_do_not_pay(model, monkeypatch):
    """But for a try every so many tokens. Then each token before it is computed once."""
    small, drafts = loaded("tiny-kjv-draft"), []
    monkeypatch.setattr(StepTimes, "most_rounds", lambda self: ROUNDS)  # however fast this machine is
    with Engine(model, **SIZES | dict(joined_tokens=None), draft=small) as engine:
        engine.scheduler.drafting.costs = Costs([1, 32], [1.0, 1.0], 1000.0)
        engine.scheduler.drafting.took = lambda *step: None
        steps = engine._loop.guesser._steps
        monkeypatch.setattr(steps, "start", lambda packed, start=steps.start: drafts.append(packed) or start(packed))
        handle = engine.submit([5, 6, 7], SamplingParams(max_tokens=150, temperature=0, ignore_eos=True))
        assert len(handle.result()) == 150 and engine.scheduler.overlaps
    assert sum((packed.samples["left"] > 0).any() for packed in drafts) == 150 // TRIED
    assert sum(packed.segments["count"].sum() for packed in drafts) < 3 + 150


def test_a_long_prompt_is_computed_in_steps_of_drafts(model):
    """A step has at most so many tokens, so those of others come meanwhile. The request's own come, too, without
    drafts, and are computed in one step more.
    """
    with Engine(model, **SIZES, draft=model) as engine:
        behind, catch_up = [], ModelGuesser._catch_up
        guesser = engine._loop.guesser
        guesser._drafts = False  # as while drafts do not pay: otherwise prompts are computed with the target
        guesser._catch_up = lambda works: (catch_up(guesser, works), behind.append(guesser.behind))
        handle = engine.submit([*range(3, 131)], SamplingParams(max_tokens=20, temperature=0, ignore_eos=True))
        assert len(handle.result()) == 20
    assert sum(behind) == 4 + 1 and handle.usage.accepted_tokens > 0


@pytest.mark.parametrize(
    "windowed", ["draft", *(pytest.param(each, marks=pytest.mark.slow) for each in ("target", "both"))]
)
def test_windows_of_a_target_and_of_its_draft_may_differ(windowed, tmp_path):
    sizes = dict(
        vocab_size=100, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, max_position_embeddings=512,
    )  # fmt: skip
    torch.manual_seed(0)
    models = {}
    for kind in ("target", "draft"):
        window = MistralForCausalLM(MistralConfig(sliding_window=70, **sizes))
        made = window if windowed in (kind, "both") else LlamaForCausalLM(LlamaConfig(**sizes))
        made.save_pretrained(tmp_path / kind)
        models[kind] = NeuronAutoModelForCausalLM.from_pretrained(tmp_path / kind, n_positions=256)
        models[kind].to_neuron(ahead=False)
    prompts = [np.random.default_rng(n).integers(3, 100, 5 + 40 * n).tolist() for n in range(4)]
    params = SamplingParams(max_tokens=30, temperature=0, ignore_eos=True)
    with Engine(models["target"], rows=4, step_tokens=32, joined_tokens=32) as engine:
        wanted = [engine.submit(prompt, params).result() for prompt in prompts]
    for draft in models.values() if windowed != "both" else [models["draft"]]:
        with Engine(models["target"], rows=4, step_tokens=32, joined_tokens=32, draft=draft) as engine:
            handles = [engine.submit(prompt, params) for prompt in prompts]
            assert [handle.result() for handle in handles] == wanted
            assert draft is models["draft"] or sum(handle.usage.accepted_tokens for handle in handles) > 60
