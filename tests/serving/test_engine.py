"""An engine with many callers: every request gets the tokens that it gets alone, and ends."""

import asyncio
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer

from transformers_neuronx import Engine, SamplingParams, SparseAttnConfig
from transformers_neuronx.config import KVCacheQuantizationConfig, NeuronConfig, QuantizationConfig
from transformers_neuronx.engine.store import ProgramStore
from transformers_neuronx.errors import ConfigError, EngineError, InputError, QueueFullError
from transformers_neuronx.gpt2.model import GPT2ForSampling
from transformers_neuronx.serving.handles import Handle, changes, wake
from transformers_neuronx.serving.request import Request

TINY_KJV = Path(__file__).parents[2] / "examples" / "tiny-kjv"
LONGEST = 256
STEM = np.random.default_rng(7).integers(3, 1000, 140).tolist()


def loaded(**options):
    options = dict(n_positions=LONGEST, context_length_estimate=64) | options
    model = GPT2ForSampling.from_pretrained(TINY_KJV, **options)
    model.to_neuron()
    return model


@pytest.fixture(scope="module")
def model():
    return loaded()


@pytest.fixture(scope="module")
def engine(model):
    with Engine(model, rows=8, step_tokens=64) as engine:
        yield engine


def prompt(number, shared=0):
    draw = np.random.default_rng(number)
    return [*STEM[:shared], *draw.integers(3, 1000, 1 + draw.integers(30)).tolist()]


def sampled(model, ids, count, **rules):
    """What the model samples alone, without its prompt, up to its end token."""
    tokens = model.sample(torch.tensor([ids]), len(ids) + count, **rules)[0, len(ids) :].tolist()
    ends = [place for place, token in enumerate(tokens) if token in model.eos_token_ids]
    return tokens[: ends[0] + 1 if ends else None]


def params(number, count=12):
    """Parameters, and the rules of `sample` that mean the same."""
    if number % 3 == 0:
        return SamplingParams(max_tokens=count, temperature=0), dict(top_k=1)
    if number % 3 == 1:
        rules = dict(top_k=40, temperature=0.8, top_p=0.9, seed=number)
        return SamplingParams(max_tokens=count, **rules), rules
    rules = dict(top_k=0, repetition_penalty=1.3, seed=number)
    return SamplingParams(max_tokens=count, **rules), rules


def test_a_request_gets_what_sample_gives(engine, model):
    for number in range(9):
        ids, (how, rules) = prompt(number), params(number)
        handle = engine.submit(ids, how)
        assert handle.result() == sampled(model, ids, 12, **rules)
        assert handle.finish_reason in ("length", "stop")
        assert handle.usage[:2] == (len(ids), len(handle.result()))


def test_without_a_seed_requests_of_the_same_parameters_draw_differently(engine):
    params = SamplingParams(max_tokens=20, ignore_eos=True)
    handles = [engine.submit([5, 6, 7], params) for _ in range(3)]
    assert len({tuple(handle.result()) for handle in handles}) == 3


def together(engine, numbers):
    """Submit requests that share prompts, from four threads, and return their tokens."""
    start = threading.Barrier(4)

    def some(first):
        start.wait()
        handles = [(n, engine.submit(prompt(n, 40 * (n % 4)), params(n)[0])) for n in numbers[first::4]]
        return {n: handle.result() for n, handle in handles}

    with ThreadPoolExecutor(4) as pool:
        return {number: tokens for each in pool.map(some, range(4)) for number, tokens in each.items()}


@pytest.mark.compiled_ahead
@pytest.mark.parametrize("cache_tokens", [None, LONGEST])
def test_what_many_get_is_what_each_gets_alone(cache_tokens, model):
    """With room for all, and with so little that requests start again."""
    wanted = {n: sampled(model, prompt(n, 40 * (n % 4)), 12, **params(n)[1]) for n in range(40)}
    with Engine(model, rows=8, step_tokens=32, cache_tokens=cache_tokens) as engine:
        before = dict(model.decoder.store.stored)
        assert together(engine, range(40)) == wanted
        assert model.decoder.store.stored.keys() == before.keys(), "nothing compiles"
        assert not len(engine.scheduler) and engine.scheduler.cache.unused


@pytest.fixture(scope="module")
def slots():
    """A model whose attention is not in pages: it is by a mask, of all positions."""
    mask = torch.ones(LONGEST, LONGEST, dtype=torch.bool).tril()
    switches = NeuronConfig(sparse_attn=SparseAttnConfig("custom", sparse_mask_dict={(LONGEST, LONGEST): mask}))
    return loaded(batch_size=4, prompt_batch_size=1, context_length_estimate=[8, 32], neuron_config=switches)


@pytest.mark.compiled_ahead
def test_without_pages_the_slots_of_the_model_serve(slots, model):
    wanted = {n: sampled(model, prompt(n, 40 * (n % 4)), 12, **params(n)[1]) for n in range(20)}
    with Engine(slots, step_tokens=32) as engine:
        before = dict(slots.decoder.store.stored)
        assert together(engine, range(20)) == wanted
        assert slots.decoder.store.stored.keys() == before.keys(), "nothing compiles"
        biased = engine.submit([5, 6], SamplingParams(max_tokens=5, logit_bias={777: 100}, logprobs=2))
        assert biased.result() == [777] * 5 and len(biased.logprobs) == 5
        scored = engine.submit(STEM[:50], SamplingParams(max_tokens=2, prompt_logprobs=0))
        found = [own for own, _ in (scored.result(), scored.prompt_logprobs)[1][1:]]
        np.testing.assert_allclose(found, model.score(torch.tensor([STEM[:50]]))[0, 1:].numpy(), atol=1e-4)
        with pytest.raises(ConfigError, match=r"rows must be at least 1 and at most the model's batch_size=4, as"):
            Engine(slots, rows=5)
    assert sampled(slots, prompt(4), 12, **params(4)[1]) == wanted[4], "the model is free again"


def preempted(engine, ids):
    """Submit a request, and urgent ones that take its pages while it runs."""
    for _ in range(20):
        handle = engine.submit(ids, SamplingParams(max_tokens=20, temperature=0, logprobs=3))
        next(iter(handle))
        urgent = SamplingParams(max_tokens=60, priority=-1, ignore_eos=True)
        others = [engine.submit(prompt(n), urgent) for n in range(3)]
        handle.result(), [other.result() for other in others]
        if handle.request.preempted:
            return handle
    pytest.fail("it always ended before the others came")


def logprobs(engine, ids, company=()):
    others = [engine.submit(prompt(n), SamplingParams(max_tokens=40)) for n in company]
    handle = engine.submit(ids, SamplingParams(max_tokens=20, temperature=0, logprobs=3))
    handle.result()
    for other in others:
        other.cancel()
    return handle


S8 = dict(kv_cache_quant=KVCacheQuantizationConfig(quant_dtype="s8"))
WEIGHTS = {bits: dict(quant=QuantizationConfig(quant_dtype=bits)) for bits in ("s8", "s4")}
SLOW = [("f32", {}), ("bf16", {}), ("bf16", S8), ("f16", {}), ("f32", WEIGHTS["s8"]), ("f32", WEIGHTS["s4"])]


@pytest.mark.parametrize(
    ("amp", "switches"), [("f32", S8), *(pytest.param(*each, marks=pytest.mark.slow) for each in SLOW)]
)
def test_the_same_bits_in_company_in_chunks_and_after_a_hit(amp, switches):
    model = loaded(amp=amp, neuron_config=NeuronConfig(**switches))
    ids = prompt(5, 100)
    with Engine(model, rows=8, step_tokens=32) as small, Engine(model, rows=8, step_tokens=256) as large:
        cold = logprobs(large, ids)
        warm = logprobs(large, ids)
        assert (cold.usage.cached_tokens, warm.usage.cached_tokens) == (0, 64)
        busy = logprobs(large, ids, range(7))
        chunks = logprobs(small, ids, range(3))
    with Engine(model, rows=8, step_tokens=32, cache_tokens=LONGEST) as tiny:
        again = preempted(tiny, ids)
    assert cold.result() == warm.result() == busy.result() == chunks.result() == again.result()
    assert cold.logprobs == warm.logprobs == busy.logprobs == chunks.logprobs == again.logprobs
    for own, likeliest in cold.logprobs:
        assert len(likeliest) == 3 and own == max(likeliest.values()) < 0


def test_a_prompt_that_leaves_another_inside_a_page_has_the_same_bits(model):
    first, second = [*STEM[:130], 5, 6, 7], [*STEM[:100], 8, 9]
    with Engine(model, rows=8, step_tokens=64) as engine:
        cold = logprobs(engine, second)
    with Engine(model, rows=8, step_tokens=64) as engine:
        engine.submit(first).result()
        warm = logprobs(engine, second)
    assert cold.usage.cached_tokens == 0 and warm.usage.cached_tokens == 100
    assert cold.result() == warm.result() and cold.logprobs == warm.logprobs


def test_logprobs_of_a_prompt_are_those_of_the_model_in_any_company(engine, model):
    ids = STEM[:-91:-1]
    wanted = model.score(torch.tensor([ids]))[0, 1:].numpy()
    list(engine.submit(ids, SamplingParams(max_tokens=2)))  # the cache has the prompt now
    others = [engine.submit(prompt(n), SamplingParams(max_tokens=40, ignore_eos=True)) for n in range(6)]
    scored = SamplingParams(max_tokens=3, temperature=0, prompt_logprobs=2, logprobs=1)
    handles = [engine.submit(ids, scored) for _ in range(2)]
    for handle in (*handles, *others):
        handle.result()
    alone = engine.submit(ids, scored)
    assert alone.result() == handles[0].result() and len(alone.logprobs) == 3 and alone.usage.cached_tokens == 0
    assert alone.prompt_logprobs == handles[0].prompt_logprobs == handles[1].prompt_logprobs, "the same bits"
    none, *found = alone.prompt_logprobs
    assert none is None and len(found) == len(ids) - 1
    np.testing.assert_allclose([own for own, _ in found], wanted, atol=1e-4)
    for token, (own, likeliest) in zip(ids[1:], found, strict=True):
        assert len(likeliest) == 2 and likeliest.get(token, own) == own <= max(likeliest.values())
    assert not others[0].prompt_logprobs and not engine.submit([5], scored).prompt_logprobs[1:]


def test_logprobs_are_those_of_the_model(engine, model):
    ids = prompt(3)
    handle = engine.submit(ids, SamplingParams(max_tokens=8, temperature=0.7, seed=1, logprobs=0))
    whole = ids + handle.result()
    wanted = torch.log_softmax(model(torch.tensor([whole[:-1]]), output_all_logits=True)[0], -1)[len(ids) - 1 :]
    got = torch.tensor([own for own, likeliest in handle.logprobs])
    torch.testing.assert_close(got, wanted[range(8), handle.result()], atol=1e-5, rtol=0)
    assert all(likeliest == {} for _, likeliest in handle.logprobs)


def test_penalties_biases_and_ends(engine, model):
    ids = prompt(1)
    plain = engine.submit(ids, SamplingParams(max_tokens=30, temperature=0)).result()
    repeated = max(plain, key=plain.count)
    assert plain.count(repeated) > 2

    def got(**how):
        handle = engine.submit(ids, SamplingParams(**dict(max_tokens=30, temperature=0) | how))
        return handle.result(), handle.finish_reason

    assert got(logit_bias={repeated: -100})[0].count(repeated) == 0
    assert got(logit_bias={777: 100})[0] == [777] * 30
    assert len(set(got(presence_penalty=2.0, frequency_penalty=2.0)[0])) > len(set(plain))
    place = plain.index(repeated)
    assert got(stop_token_ids=[repeated]) == (plain[: place + 1], "stop")
    late = got(stop_token_ids=[repeated], min_tokens=place + 5)[0]
    assert repeated not in late[: place + 5] and late[:place] == plain[:place]


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(TINY_KJV)


def test_text_and_the_strings_that_end_it(model, tokenizer):
    ids = tokenizer("And the LORD said unto Moses,")["input_ids"]
    with Engine(model, rows=4, step_tokens=16, tokenizer=tokenizer) as engine:

        def got(**how):
            return engine.submit(ids, SamplingParams(**dict(max_tokens=30, temperature=0) | how))

        plain = got()
        assert plain.text == "" or plain.text  # it may still run
        whole = tokenizer.decode(plain.result())
        assert plain.text == whole
        stop = whole[17:23]
        ended = got(stop=["no such text", stop])
        tokens = ended.result()
        assert ended.text == whole[: whole.index(stop)] and ended.finish_reason == "stop"
        assert stop in tokenizer.decode(tokens) and stop not in tokenizer.decode(tokens[:-1])
        kept = got(stop=[stop], include_stop_str_in_output=True)
        assert kept.result() == tokens and kept.text == whole[: whole.index(stop) + len(stop)]
        late = got(stop=[stop], min_tokens=len(tokens))
        assert len(late.result()) > len(tokens)
        seen = []
        streamed = got(stop=[stop])
        for _ in streamed:
            seen.append(streamed.text)
        assert all(ended.text.startswith(text) for text in seen), "nothing is shown that is taken back"
        begun, end = tokenizer.decode(plain.result()[:5]), plain.result()[5]
        half = got(stop=[f"{begun[-3:]} and more"], stop_token_ids=[end])
        assert len(half.result()) == 6 and half.text == begun, "an end token releases what was held back"


def test_several_sequences_of_one_prompt(engine, model):
    ids = prompt(2, 130)
    handle = engine.submit(ids, SamplingParams(max_tokens=10, n=3, seed=5, ignore_eos=True))
    tokens = [choice.result() for choice in handle.choices]
    assert handle.choices[0] is handle and len(set(map(tuple, tokens))) == 3
    batch = loaded(batch_size=3)
    wanted = batch.sample(torch.tensor([ids] * 3), len(ids) + 10, top_k=0, seed=5, eos_token_override=-1)
    assert tokens == wanted[:, len(ids) :].tolist(), "those of the rows of a batch"
    assert [choice.usage.cached_tokens for choice in handle.choices] == [0, 128, 128], "they share its pages"


def test_a_mask_says_which_tokens_may_come(engine):
    asked = []

    def even(tokens):
        asked.append(list(tokens))
        return None if len(tokens) == 3 else np.arange(1023) % 2 == 0

    tokens = engine.submit(prompt(1), SamplingParams(max_tokens=20, mask=even, ignore_eos=True)).result()
    assert all(token % 2 == 0 for place, token in enumerate(tokens) if place != 3)
    assert asked == [tokens[:count] for count in range(20)]


def test_a_mask_that_fails_ends_its_own_request_alone(engine):
    def fail(tokens):
        raise KeyError("no such state")

    others = [engine.submit(prompt(n), SamplingParams(max_tokens=30, ignore_eos=True)) for n in range(3)]
    wrong = [
        (fail, "no such state"),
        (lambda tokens: np.ones(3, bool), r"a mask must be pred\[1023\], got \[3\]"),
        (lambda tokens: np.zeros(1023, bool), "its logits are NaN or all -inf"),
    ]
    for mask, message in wrong:
        handle = engine.submit(prompt(5), SamplingParams(mask=mask))
        with pytest.raises(EngineError, match=message):
            handle.result()
        assert handle.finish_reason == "error"
    assert [len(other.result()) for other in others] == [30] * 3


def test_tokens_come_one_by_one_to_threads_and_event_loops(engine):
    wanted = engine.submit(prompt(2), SamplingParams(max_tokens=25, temperature=0)).result()
    handle = engine.submit(prompt(2), SamplingParams(max_tokens=25, temperature=0))

    async def read():
        return [token async for token in handle]

    async def all_of_them():
        return await asyncio.gather(*(read() for _ in range(3)))

    with ThreadPoolExecutor(3) as pool:
        by_thread = [pool.submit(list, handle) for _ in range(2)]
        assert asyncio.run(all_of_them()) == [wanted] * 3
        assert [each.result() for each in by_thread] == [wanted] * 2
    assert list(handle) == wanted, "also after its end"


@pytest.mark.parametrize("patience", [None, 15.0])
@pytest.mark.parametrize("turns", range(6))
def test_a_reader_ends_when_it_is_cancelled_while_it_is_told(turns, patience):
    """A deadline may pass in any turn of the event loop after a token came."""
    request = Request(0, [5], SamplingParams(max_tokens=9))
    handle = Handle(request, lambda _: None)
    seen = []

    async def read():
        async for _ in changes([handle], patience):
            seen.append(len(handle.tokens))

    async def cancelled():
        reader = asyncio.create_task(read())
        await asyncio.sleep(0.01)
        request.append(7)
        wake(handle.tell(ended=False))
        for _ in range(turns):
            await asyncio.sleep(0)
        reader.cancel()
        await asyncio.wait([reader], timeout=1)
        return reader.cancelled()

    assert asyncio.run(cancelled()) and seen in ([0], [0, 1])


def test_a_reader_may_give_up_while_it_is_told():
    """As when an abandoned iterator is collected as garbage in the engine's thread."""
    request = Request(0, [5], SamplingParams(max_tokens=2))
    handle = Handle(request, lambda _: None)
    request.append(7)
    handle.tell(ended=False)
    reader = iter(handle)
    assert next(reader) == 7
    own = handle._threads.copy()

    class GivesUp:
        def put(self, _):
            reader.close()

    handle._threads.add(GivesUp())
    request.append(8)
    telling = threading.Thread(target=handle.tell, args=[True], daemon=True)
    telling.start()
    telling.join(10)
    assert not telling.is_alive() and not own & handle._threads
    assert handle.result() == list(handle) == [7, 8]


def test_steps_generate_several_tokens_unless_someone_waits_for_each(engine, monkeypatch):
    steps, count = [], 40
    monkeypatch.setattr(engine.scheduler, "limits", replace(engine.scheduler.limits, rounds=8))
    start = engine._loop.steps.start
    monkeypatch.setattr(engine._loop.steps, "start", lambda packed: steps.append(packed) or start(packed))
    params = SamplingParams(max_tokens=count, temperature=0.9, seed=3, ignore_eos=True)

    def run(params, streams=False):
        steps.clear()
        handle = engine.submit(prompt(4), params)
        handle.request.streamed = streams
        return handle.result(), len(steps)

    tokens, few = run(params)
    assert run(params, streams=True) == (tokens, count) and few == 1 + -(-(count - 1) // 8)
    place = next(place for place in range(11, count) if place % 8 == 4 and tokens[place] not in tokens[:place])
    ended, _ = run(replace(params, stop_token_ids=[tokens[place]]))
    assert ended == tokens[: place + 1], "it ends between two steps"
    assert list(engine.submit(prompt(4), params)) == tokens


def test_requests_that_come_while_nothing_runs_begin_together(model, monkeypatch):
    with Engine(model, rows=8, step_tokens=64) as engine:
        engine.submit(prompt(1), SamplingParams(max_tokens=2)).result()
        monkeypatch.setattr("transformers_neuronx.serving.engine.GATHER", 1 / engine._records.steps.mean)  # a second
        handles = []
        for number in range(3):
            handles.append(engine.submit(prompt(number), SamplingParams(max_tokens=2)))
            time.sleep(0.05)
        for handle in handles:
            handle.result()
        assert len({handle.times.started for handle in handles}) == 1
        assert handles[0].times.started - handles[-1].times.submitted > 0.9


def test_requests_can_be_cancelled_at_any_moment(engine):
    handles = [engine.submit(prompt(n), SamplingParams(max_tokens=100, ignore_eos=True)) for n in range(30)]
    first = next(iter(handles[0]))
    for handle in handles[::2]:
        handle.cancel()
        handle.cancel()
    assert handles[0].result()[0] == first and handles[0].finish_reason == "abort"
    assert [len(handle.result()) for handle in handles[1::2]] == [100] * 15
    assert all(handle.finish_reason == "abort" for handle in handles[::2])
    assert not len(engine.scheduler) and engine.scheduler.cache.unused


def test_prompts_that_it_cannot_serve(engine):
    with pytest.raises(InputError, match=r"token ids must be from 0 to 1022, got 1023"):
        engine.submit([5, 1023])
    with pytest.raises(InputError, match=r"token ids must be from 0 to 1022, got -1"):
        engine.submit([5], SamplingParams(logit_bias={-1: 1.0}))
    with pytest.raises(InputError, match="the prompt is empty"):
        engine.submit([])
    with pytest.raises(InputError, match=r"250 tokens and max_tokens=16 need 265 positions, but the engine has 256"):
        engine.submit([5] * 250)
    with pytest.raises(InputError, match=r"stop strings need an engine with a tokenizer: Engine\(model, tokenizer=…\)"):
        engine.submit([5], SamplingParams(stop=["x"]))
    assert len(engine.submit([5] * 250, SamplingParams(max_tokens=7)).result()) <= 7


def test_without_adjustments_there_are_fewer_programs(model, monkeypatch):
    counts, compiled = [], ProgramStore.compile_modules

    def counted(self, keys, *others):
        counts.append(len(keys))
        return compiled(self, keys, *others)

    monkeypatch.setattr(ProgramStore, "compile_modules", counted)
    with Engine(model, rows=2, step_tokens=8, adjustments=False) as engine:
        for changed in (dict(logprobs=0), dict(min_tokens=1), dict(logit_bias={5: 1.0}), dict(presence_penalty=1.0)):
            with pytest.raises(InputError, match="adjustments=False"):
                engine.submit([5, 6], SamplingParams(**changed))
        greedy = SamplingParams(max_tokens=6, temperature=0)
        assert engine.submit([5, 6], greedy).result() == sampled(model, [5, 6], 6, top_k=1)
    assert counts == [0]


def test_a_full_queue(model):
    with Engine(model, rows=1, step_tokens=8, waiting=2) as engine:
        running = engine.submit([5], SamplingParams(max_tokens=200, ignore_eos=True))
        next(iter(running))
        waiting = [engine.submit([6]) for _ in range(2)]
        with pytest.raises(QueueFullError, match="2 requests with 2 tokens are waiting"):
            engine.submit([7])
        with pytest.raises(TimeoutError, match=r"has not ended after 0\.001 seconds"):
            waiting[1].result(timeout=0.001)
        running.cancel()
        assert all(len(handle.result()) for handle in waiting)


def test_a_failure_ends_what_runs_and_the_engine_goes_on(model, monkeypatch):
    with Engine(model, rows=4, step_tokens=16) as engine:
        wanted = engine.submit(prompt(1, 140), SamplingParams(temperature=0)).result()
        start = engine._loop.steps.start

        def fail(packed):
            monkeypatch.setattr(engine._loop.steps, "start", start)
            raise RuntimeError("the device is gone")

        monkeypatch.setattr(engine._loop.steps, "start", fail)
        handle = engine.submit(prompt(2))
        with pytest.raises(EngineError, match="request 1 failed: the device is gone"):
            handle.result()
        assert handle.finish_reason == "error"
        assert engine.submit(prompt(1, 140), SamplingParams(temperature=0)).result() == wanted, "old pages"


def test_a_closed_engine(model):
    engine = Engine(model, rows=2, step_tokens=8)
    handle = engine.submit([5], SamplingParams(max_tokens=200, ignore_eos=True))
    engine.close()
    engine.close()
    assert len(handle.result()) < 200 and handle.finish_reason == "abort"
    with pytest.raises(EngineError, match="the engine is closed"):
        engine.submit([5])


def test_a_program_that_forgets_to_close_it_ends_in_order():
    forgotten = """
from transformers_neuronx import Engine, NeuronAutoModelForCausalLM, SamplingParams
model = NeuronAutoModelForCausalLM.from_pretrained(%r, n_positions=256)
model.to_neuron()
engine = Engine(model, rows=2, step_tokens=4)
print(next(iter(engine.submit([5, 6], SamplingParams(max_tokens=250, temperature=0, ignore_eos=True)))))
"""
    ran = subprocess.run([sys.executable, "-c", forgotten % str(TINY_KJV)], capture_output=True, text=True)
    assert (ran.returncode, ran.stdout.strip().isdigit()) == (0, True), ran.stderr


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(rows=0), "rows must be at least 1, got 0"),
        (dict(rows=8, step_tokens=4), "step_tokens must be at least rows=8, got 4"),
    ],
)
def test_sizes_that_do_not_fit(options, message, model):
    with pytest.raises(ConfigError, match=message):
        Engine(model, **options)
