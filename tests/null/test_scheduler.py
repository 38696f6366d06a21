"""The scheduler and its pages against a cache that remembers what was written where, under random schedules."""

import math
import random
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from transformers_neuronx.errors import InputError, QueueFullError
from transformers_neuronx.serving.adapters import Adapters, HostAdapter
from transformers_neuronx.serving.drafting import Costs
from transformers_neuronx.serving.kv_cache import KVCache
from transformers_neuronx.serving.limits import Limits
from transformers_neuronx.serving.pages import NO_PAGE, Pages, digests
from transformers_neuronx.serving.request import Request, SamplingParams
from transformers_neuronx.serving.scheduler import Scheduler, Work

VOCAB = 7
END = 0
HAPPENS = (
    "preempted",
    "cached",
    "aborted",
    "refused",
    "guessed",
    "accepted",
    "copied",
    "left behind",
    "gone back",
    "rounds",
    "overlapped",
    "scored",
    "loaded",
)


def following(tokens):
    """The token that a model of this test samples after `tokens`."""
    return random.Random(str(tokens)).randrange(VOCAB)


def alone(prompt, params):
    """The tokens that a prompt gets without any scheduler."""
    request = Request(0, list(prompt), params, frozenset([END]))
    while request.reason is None:
        request.append(following(request.tokens))
    return request.tokens, request.reason


class Device:
    """The device of this test. It keeps for each place the tokens up to the one that was written there."""

    def __init__(self, cache):
        self.cache, self.size, self.states = cache, cache.size, {}
        self.places = [{} for _ in cache.pools]
        self.adapters = {}

    def load(self, adapters):
        self.adapters |= {adapter.place: adapter for adapter in adapters}

    def copy(self, copies):
        for pairs in copies:
            for places, (source, target) in zip(self.places, pairs, strict=True):
                held = {offset: places.get((source, offset)) for offset in range(self.size)}
                places |= {(target, offset): what for offset, what in held.items()}

    def run(self, step):
        """Compute a step: write first, then read, as the kernel does. Return the sampled tokens."""
        sampled, tokens_of = {}, {}
        for request in (work.request for work in step):
            [work] = [work for work in step if work.request is request]  # a request is in a step once
            known = request.tokens + request.guesses
            if work.start + work.count > len(known):
                known = [*known, *self.sampled[request.id]]
            tokens_of[request.id] = known
        lost = [work for work in step if work.start + work.count > len(tokens_of[work.request.id])]
        assert all(END in tokens_of[work.request.id] for work in lost), "it ended in the step before"
        step = [work for work in step if work not in lost]
        for work in step:
            request, start, count = work.request, work.start, work.count
            assert request.adapter is None or self.adapters[request.adapter.place] is request.adapter
            tokens, end = tokens_of[request.id], start + count - work.guesses
            assert request.reason is None and count > 0 and end + work.rounds - 1 == request.computed
            whole = request.computed == request.known - (work.samples > 0)
            assert work.samples == (work.guesses + 1 if whole else 0) and work.guesses == len(request.guesses) * whole
            assert start + count <= request.prompt_length or start >= request.prompt_length
            self.write(request, tokens, start, count)
            self.replace_state(work, tokens)
            for place in range(start + 1, start + 1 + work.scored):
                request.note_of_prompt(place, place, [], [])
        for work in step:
            request = work.request
            self.read(request, tokens_of[request.id], work.start, work.count)
            ends = range(work.start + work.count - work.samples, work.start + work.count)
            sampled[request.id] = [following(tokens_of[request.id][: end + 1]) for end in ends]
        for work in step:
            self.run_on(work, tokens_of[work.request.id], sampled[work.request.id])
        self.sampled = sampled | {work.request.id: [] for work in lost}
        return self.sampled

    def run_on(self, work, tokens, sampled):
        """Compute what was sampled, and sample again, up to the number of rounds or the end."""
        for place in range(work.start + 1, work.start + work.rounds):
            if sampled[-1] == END:
                return
            tokens.append(sampled[-1])
            self.write(work.request, tokens, place, 1)
            self.replace_state(replace(work, start=place), tokens)
            self.read(work.request, tokens, place, 1)
            sampled.append(following(tokens))

    def write(self, request, tokens, start, count):
        for pool, places, table in zip(self.cache.pools, self.places, request.tables, strict=True):
            for position in range(start, start + count):
                page = table[position // self.size]
                assert page != NO_PAGE and pool._holders[page] == 1, "written while others may read it"
                places[page, position % self.size] = tuple(tokens[: position + 1])

    def read(self, request, tokens, start, count):
        """Read what the tokens from `start` on see: all before them, or a window."""
        for pool, places, table in zip(self.cache.pools, self.places, request.tables, strict=True):
            first = 0 if pool.window is None else max(start - pool.window + 1, 0)
            for position in range(first, start + count):
                here = places.get((table[position // self.size], position % self.size))
                assert here == tuple(tokens[: position + 1]), "read before it was written"

    def replace_state(self, work, tokens):
        """A state is all tokens that made it. A step that may be forgotten leaves the one before where it is."""
        if work.request.places:
            source, target = work.request.places[0], work.request.places[work.guesses > 0]
            before = self.states.get(source) if work.start else ()
            assert before == tuple(tokens[: work.start]), "the state is that of other tokens"
            self.states[target] = tuple(tokens[: work.start + work.count])


def check_cache(scheduler):
    """No page or place is lost, and each page has as many holders as requests name it."""
    cache = scheduler.cache
    for number, pages in enumerate(cache.pools):
        named = Counter(page for request in scheduler.running for page in request.tables[number] if page)
        for page in range(1, pages.count + 1):
            assert pages._holders[page] == named[page]
            assert (page in pages._free) == (named[page] == 0)
        assert set(pages._page_of.values()) == set(pages._digest_of) == set(pages._held)
        assert sorted(page for after in pages._after.values() for page in after) == sorted(pages._held)
    taken = [place for request in scheduler.running for place in request.places]
    assert sorted(taken + cache.free_places) == [*range(1, len(taken) + len(cache.free_places) + 1)]
    assert all(not request.tables and not request.places for request in scheduler.waiting)


def random_cache(draw, rows, tokens, guesses):
    """A small cache of one kind or another: pages without a window, with one, or both; states."""
    size, windows = draw.choice([1, 2, 4]), draw.choice([[None], [None], [None, 5], [3], [], [6, None]])
    states = not windows or draw.random() < 0.2
    pools = [Pages(draw.randint(3, 16), size, window) for window in windows]
    return KVCache(pools, rows, (2 if guesses else 1) * states)


def guessed(work, draw):
    """Use some of the room for draft tokens. Most of them are right."""
    request = work.request
    for _ in range(draw.randint(0, work.guesses)):
        known = request.tokens + request.guesses
        request.guesses.append(following(known) if draw.random() < 0.7 else draw.randrange(VOCAB))
    return work.with_guesses(len(request.guesses)) if work.guesses else work


def drive(seed, count=12):
    """A random pool, and requests that come, go and share prompts. Return the counts of what happened."""
    draw = random.Random(seed)
    tokens = draw.randint(4, 12)
    guesses = draw.choice([0, 0, 1, 3])
    sizes = dict(rows=draw.randint(1, 4), positions=40, guesses=guesses, rounds=draw.choice([1, 1, 2, 5]))
    sizes["doubled"] = draw.choice([math.inf, 5, 20])
    seconds = sorted(draw.random() for _ in range(3))
    sizes["costs"] = draw.choice([None, Costs([1, 4, 12], seconds, draw.random())])
    sizes["samples"] = sizes["rows"] * (1 + guesses) + draw.randint(0, 3)
    limits = Limits(tokens, draw.randint(4, tokens), **sizes)
    cache = random_cache(draw, limits.rows, tokens, guesses)
    places, adapters = draw.randint(1, 3), [None, None, *(HostAdapter(str(number), number, {}) for number in range(4))]
    scheduler, device, happened = Scheduler(cache, limits, places), Device(cache), Counter()
    stem = [draw.randrange(VOCAB) for _ in range(12)]
    left, requests = count, []
    idle, flying, ahead = 0, None, draw.random() < 0.7  # whether a step is planned before the last one's results
    while left or len(scheduler) or flying:
        while left and draw.random() < 0.5:
            prompt = stem[: draw.randint(0, 12)] + [draw.randrange(VOCAB) for _ in range(draw.randint(1, 8))]
            params = SamplingParams(
                max_tokens=draw.randint(1, 12),
                min_tokens=draw.choice([0, 0, 3]),
                priority=draw.choice([0, 0, 0, 1, -1]),
                prompt_logprobs=draw.choice([None, None, 0]),
            )
            request = Request(
                len(requests) + happened["refused"],
                prompt,
                params,
                frozenset([END]),
                draw.choice([b"", b"", b"other"]),
                adapter=draw.choice(adapters),
            )
            left -= 1
            if request.longest > min(limits.positions, cache.longest(tokens)):
                with pytest.raises(InputError, match="positions, but the engine has"):
                    scheduler.add(request)
                happened["refused"] += 1
                continue
            scheduler.add(request)
            requests.append(request)
        if requests and draw.random() < 0.05:
            scheduler.abort(victim := draw.choice(requests))
            happened["aborted"] += victim.reason == "abort"
        if flying and not ahead:
            scheduler.update(*flying)
            flying = None
        step = [guessed(work, draw) for work in scheduler.schedule()]
        device.copy(scheduler.copies)
        device.load(scheduler.adapters.loads)
        happened["loaded"] += len(scheduler.adapters.loads)
        assert all(0 <= each.place < places for each in device.adapters.values() if each.place is not None)
        happened["copied"] += len(scheduler.copies)
        happened["guessed"] += sum(work.guesses for work in step)
        happened["rounds"] += sum(work.rounds > 1 for work in step)
        happened["overlapped"] += sum(bool(guesses) and work.request.pending > work.rounds for work in step)
        check_cache(scheduler)
        happened["left behind"] += any(NO_PAGE in table for each in scheduler.running for table in each.tables)
        assert sum(work.count for work in step) <= limits.tokens and len(scheduler.running) <= limits.rows
        assert sum(work.samples + work.scored for work in step) <= limits.samples
        happened["scored"] += sum(work.scored for work in step)
        assert sum(work.start + work.count < work.request.prompt_length for work in step) <= 1, "prompts in chunks"
        assert step or flying or not scheduler.running, "what runs goes on"
        idle = 0 if step else idle + 1
        assert idle < 50 or left, "nothing runs, but something waits"
        if scheduler.running and not flying:
            assert step and min(scheduler.running, key=lambda each: each.order).id in {w.request.id for w in step}
        sampled = device.run(step)
        if requests and draw.random() < 0.05:  # while the step runs
            scheduler.abort(draw.choice(requests))
        if flying:
            scheduler.update(*flying)
        flying = (step, sampled) if step else None
        happened["gone back"] += any(
            each.places and each.generated and each.known - each.computed > 1 for each in scheduler.running
        )
        check_cache(scheduler)
    for request in requests:
        happened["preempted"] += request.preempted
        happened["cached"] += request.cached > 0
        happened["accepted"] += request.accepted
        assert request.reason and not request.tables and not request.places
        if request.reason != "abort":
            wanted = alone(request.tokens[: request.prompt_length], request.params)
            assert (request.tokens, request.reason) == wanted
            places = range(1, request.prompt_length) if request.scores else []
            assert request.prompt_logprobs[1:] == [(place, {}) for place in places]
    assert cache.unused and not scheduler.waiting_tokens
    return happened


def test_who_waits_for_a_place_gets_the_next_one():
    """Requests of two adapters share one place. Without a rule, those that come would keep it for ever."""
    one, other = (HostAdapter(name, number, {}) for number, name in enumerate("ab"))
    scheduler = engine(rows=2)
    scheduler.adapters = Adapters(1)
    busy, waits, late, none = (request(number, 3, bytes([number]), max_tokens=4) for number in range(4))
    busy.adapter, waits.adapter, late.adapter = one, other, one
    for each in (busy, waits, late, none):
        scheduler.add(each)
    orders = [{number for number, *_ in run(scheduler)} for _ in range(9)]
    assert orders[0] == {0, 3}, "the second waits for the place, and the third for the second; the last needs none"
    assert orders[4] == {1} and orders[8] == {2}
    assert (one.place, other.place) == (0, None)
    scheduler.adapters.forget()
    assert one.place is None


@settings(max_examples=600, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
@given(st.integers(0, 2**64))
def test_any_schedule_gives_each_request_what_it_gets_alone(seed):
    drive(seed)


@pytest.mark.slow
def test_a_hundred_thousand_schedules():
    happened = sum((drive(seed) for seed in range(100_000)), Counter())
    print(dict(happened))
    assert min(happened[each] for each in HAPPENS) > 10_000


def test_schedules_have_all_that_can_happen():
    happened = sum((drive(seed) for seed in range(200)), Counter())
    assert min(happened[each] for each in HAPPENS) > 20


def engine(pages=100, size=4, window=None, places=0, **limits):
    cache = KVCache([Pages(pages, size, window)], limits.get("rows", 4), places)
    return Scheduler(cache, Limits(**dict(tokens=8, joined=8, rows=4, positions=100) | limits))


def request(number, length, salt=b"", **params):
    return Request(number, list(range(1, length + 1)), SamplingParams(**dict(max_tokens=4) | params), salt=salt)


def shares(step):
    return [(work.request.id, work.start, work.count) for work in step]


def run(scheduler):
    step = scheduler.schedule()
    scheduler.update(step, {work.request.id: [99] * work.samples for work in step})
    return shares(step)


def test_running_rows_come_first_and_one_prompt_is_in_chunks():
    scheduler = engine()
    for each in (request(1, 3), request(2, 20, b"2"), request(3, 9, b"3")):
        scheduler.add(each)
    assert run(scheduler) == [(1, 0, 3), (2, 0, 5)]
    assert run(scheduler) == [(1, 3, 1), (2, 5, 7)]
    assert run(scheduler) == [(1, 4, 1), (2, 12, 7)]
    assert run(scheduler) == [(1, 5, 1), (2, 19, 1), (3, 0, 6)]
    assert run(scheduler) == [(2, 20, 1), (3, 6, 3)]


def test_a_prompt_that_joins_has_smaller_chunks():
    scheduler = engine(tokens=8, joined=5)
    for each in (request(1, 8), request(2, 20, b"2")):
        scheduler.add(each)
    assert [run(scheduler) for _ in range(3)] == [[(1, 0, 8)], [(1, 8, 1), (2, 0, 4)], [(1, 9, 1), (2, 4, 4)]]


def test_chunks_are_smaller_where_a_prompt_is_long():
    """Half as many tokens where each takes twice the time, but never fewer than a quarter."""
    scheduler = engine(tokens=8, joined=9, doubled=4, positions=200)
    for each in (request(1, 8, max_tokens=20), request(2, 60, b"2")):
        scheduler.add(each)
    step, *joined = [run(scheduler) for _ in range(6)]
    assert step == [(1, 0, 8)], "nobody waits yet"
    assert [chunk for _, chunk in joined] == [(2, 0, 8), (2, 8, 3), (2, 11, 3), (2, 14, 2), (2, 16, 2)]


def test_draft_tokens_are_kept_up_to_the_first_that_is_wrong():
    scheduler = engine(guesses=3)
    scheduler.add(one := request(1, 3, max_tokens=20))
    run(scheduler)
    [work] = scheduler.schedule()
    assert (work.start, work.count, work.samples, work.guesses) == (3, 4, 4, 3)
    one.guesses = [5, 6, 7]
    assert work.tokens == [99, 5, 6, 7] and not scheduler.schedule(), "its next token is not known yet"
    scheduler.update([work], {1: [5, 6, 8, 9]})
    assert one.tokens[3:] == [99, 5, 6, 8] and one.computed == 6 and one.accepted == 2
    [work] = scheduler.schedule()
    assert work.with_guesses(0) == Work(one, 6, 1, 1, room=3)


def test_draft_tokens_do_not_pass_the_end_the_budget_or_the_free_pages():
    scheduler = engine(guesses=3, joined=6)
    for each in (request(1, 3, max_tokens=3), request(2, 3, b"2"), request(3, 3, b"3")):
        scheduler.add(each)
    run(scheduler), run(scheduler)
    assert [work.guesses for work in scheduler.schedule()] == [0, 1, 1], "the budget of six, in equal parts"
    scheduler = engine(guesses=3)
    scheduler.add(request(1, 3, max_tokens=3))
    run(scheduler)
    assert scheduler.schedule()[0].guesses == 1, "one of two tokens is sampled anyway"
    scheduler = engine(guesses=3, pages=2)
    scheduler.add(request(1, 4, max_tokens=4))
    run(scheduler), run(scheduler)
    assert scheduler.schedule()[0].guesses == 1, "the two pages have eight places"


def test_prompts_that_begin_alike_share_pages_but_their_last_token_is_computed():
    scheduler = engine()
    first, second, salted = request(1, 8), request(2, 8), request(3, 8, b"x")
    for each in (first, second, salted):
        scheduler.add(each)
        run(scheduler)
    assert (first.cached, second.cached, salted.cached) == (0, 7, 0)
    [own], [same], [other] = first.tables, second.tables, salted.tables
    assert own[0] == same[0] != other[0] and own[1] != same[1]


def test_a_page_that_begins_alike_is_copied():
    scheduler = engine(size=16, tokens=64, joined=64)
    first, second, third = (request(number, 40) for number in range(3))
    second.tokens[28:] = range(100, 112)
    third.tokens[17:] = range(200, 223)
    scheduler.add(first), run(scheduler)
    scheduler.add(second), run(scheduler)
    assert second.cached == 28 and scheduler.copies == [((first.tables[0][1], second.tables[0][1]),)]
    scheduler.add(third), run(scheduler)
    assert third.cached == 16 and not scheduler.copies, "a single token is not worth a copy"


def test_a_request_that_can_never_run_is_refused_and_so_is_one_too_many():
    scheduler = engine(pages=5, waiting=2, waiting_tokens=24)
    with pytest.raises(InputError, match=r"17 tokens and max_tokens=5 need 21 positions, but the engine has 20"):
        scheduler.add(request(1, 17, max_tokens=5))
    scheduler.add(request(2, 17))
    with pytest.raises(QueueFullError, match=r"1 requests with 17 tokens are waiting"):
        scheduler.add(request(3, 8))
    scheduler.add(request(4, 1))
    with pytest.raises(QueueFullError, match="submit the request later"):
        scheduler.add(request(5, 1))
    with pytest.raises(InputError, match="the prompt is empty"):
        scheduler.add(request(6, 0))


def test_an_urgent_request_takes_the_place_of_others():
    scheduler = engine(rows=1)
    scheduler.add(slow := request(1, 3, max_tokens=9))
    run(scheduler), run(scheduler)
    scheduler.add(request(2, 3, priority=-1, max_tokens=2))
    assert run(scheduler) == [(2, 0, 3)] and run(scheduler) == [(2, 3, 1)]
    assert slow.preempted == 1 and run(scheduler) == [(1, 0, 3)]
    assert run(scheduler) == [(1, 3, 2)], "generated tokens are computed apart from the prompt"


def test_digests_depend_on_all_before_and_on_the_salt():
    first, second = digests([1, 2, 3, 4, 5], 2), digests([9, 2, 3, 4], 2)
    assert len(first) == len(second) == 2 and not set(first) & set(second)
    assert digests([1, 2], 2, b"salt") != first[:1] == digests([1, 2, 9], 2)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (dict(max_tokens=0), "max_tokens must be a whole number of at least 1, got 0"),
        (dict(min_tokens=-1), "min_tokens must be a whole number of at least 0, got -1"),
        (dict(temperature=-0.5), r"temperature must be at least 0 \(0 is greedy\), got -0.5"),
        (dict(presence_penalty=3), "presence_penalty must be from -2 to 2, got 3"),
        (dict(top_p=2), r"top_p must be in \(0, 1\], got 2"),
        (dict(stop="x"), "stop must be a list of strings that are not empty, got 'x'"),
        (dict(logprobs=21), "logprobs must be at most 20, got 21"),
        (dict(prompt_logprobs=-1), "prompt_logprobs must be a whole number of at least 0, got -1"),
        (dict(logprobs=True), "logprobs must be a whole number of at least 0, got True"),
    ],
)
def test_parameters_out_of_range(wrong, message):
    with pytest.raises(InputError, match=message):
        SamplingParams(**wrong)
