"""How many draft tokens rows get: as many as make the most tokens in the time of a step."""

from itertools import accumulate, chain, product

import pytest
from hypothesis import given, strategies as st

from transformers_neuronx.serving import step_times
from transformers_neuronx.serving.drafting import CONTROL, TRIED, Costs, Drafting, Odds, worthwhile as best

FLAT = Costs([1, 64], [1.0, 1.2], 0.0)  # where reading weights is all that takes time
STEEP = Costs([1, 2, 4, 8, 16, 32, 64], [1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0], 0.0)


def worthwhile(costs, tokens, chances, rooms):
    rows = zip(chances, rooms, strict=True)
    return best(costs, tokens, [[chance**number for number in range(1, room + 1)] for chance, room in rows])


def test_where_tokens_cost_nothing_all_are_drafted():
    assert worthwhile(FLAT, 2, [0.5, 0.9], [4, 3]) == [4, 3]


def test_where_each_token_costs_as_much_none_is():
    assert worthwhile(STEEP, 8, [0.9] * 8, [4] * 8) == [0] * 8


def test_making_them_costs_too():
    costs = Costs([1, 8], [1.0, 1.0], 1.0)
    assert worthwhile(costs, 1, [0.4], [4]) == [0]
    assert worthwhile(costs, 1, [0.9], [4]) == [4]


def test_rows_whose_drafts_are_right_get_more():
    costs = Costs([2, 4, 6, 8, 10], [1.0, 1.2, 1.5, 1.9, 2.4], 0.1)
    good, bad = worthwhile(costs, 2, [0.95, 0.1], [4, 4])
    assert good > bad == 0


@given(
    st.lists(st.tuples(st.floats(0, 1), st.integers(0, 3)), min_size=1, max_size=4),
    st.lists(st.floats(0.01, 1), min_size=5, max_size=5),
    st.floats(0, 1),
)
def test_no_other_numbers_are_better(rows, more, drafting):
    chances, rooms = zip(*rows, strict=True)
    seconds = [sum(more[: place + 1]) for place in range(5)]
    costs = Costs([2, 4, 6, 9, 20], seconds, drafting)

    def rate(counts):
        made = sum(
            sum(chance**number for number in range(count + 1)) for chance, count in zip(chances, counts, strict=False)
        )
        return made / (costs.of(len(rows) + sum(counts)) + (drafting if any(counts) else 0))

    found = worthwhile(costs, len(rows), chances, rooms)
    assert all(0 <= count <= room for count, room in zip(found, rooms, strict=True))
    assert rate(found) == pytest.approx(max(map(rate, product(*(range(room + 1) for room in rooms)))))


def test_costs_follow_what_steps_take():
    """Measured alone, drafts pay; beside requests, steps with them take more time, whatever the machine does else."""
    drafting = Drafting(Costs([1, 4], [1.0, 1.1], 0.1))
    assert drafting.counts(1, [Odds(1.0, 0.5)], [3]) == [3]
    for number in range(100):
        busy = 1 + number % 20
        drafting.took(4, True, 1.8 * 1.2 * busy)
        for _ in range(5):
            drafting.took(1, False, busy)
    assert drafting._slowdown.times == pytest.approx(1.8, rel=0.1)
    assert drafting.counts(1, [Odds(1.0, 0.5)], [3]) == [0]
    before = drafting._slowdown.times
    drafting.took(4, True, 1e6)
    assert drafting._slowdown.times < before + 0.1, "it took so long for another reason"


def test_now_and_then_a_step_has_no_drafts_to_compare_with():
    drafting = Drafting(FLAT)
    counts = [drafting.counts(1, [None], [4]) for _ in range(2 * CONTROL)]
    assert [number for number, count in enumerate(counts, 1) if count == [0]] == [CONTROL, 2 * CONTROL]
    assert drafting.pays


def test_longer_steps_than_those_measured_cost_as_much_for_each_token():
    assert FLAT.of(1) == 1 and FLAT.of(64) == 1.2 and FLAT.of(128) == 2.4


def test_odds_are_those_of_late():
    odds = Odds()
    for _ in range(50):
        odds.note(4, 0)
    assert odds.chance < 0.02
    for _ in range(50):
        odds.note(4, 4)
    assert odds.chance > 0.98
    for _ in range(200):
        odds.note(4, 1)  # right, wrong, and two that do not count
    assert odds.chance == pytest.approx(0.5)


@pytest.mark.parametrize("found", [1, 0])
def test_drafts_that_are_never_right_or_never_there_are_tried_now_and_then(found):
    drafting, odds, given_, pays = Drafting(Costs([1, 2, 4], [1.0, 1.1, 1.3], 0.0)), None, 0, 0
    for _ in range(400):
        [count] = drafting.counts(1, [odds], [3])
        given_, pays = given_ + count, pays + drafting.pays
        odds = drafting.noted(odds, count * found, 0) if count else odds
    assert 400 // TRIED <= pays <= given_ < 80
    assert drafting.odds.gains(1)[0] < 0.2


def test_tokens_without_drafts_bring_the_next_try_nearer():
    drafting = Drafting(STEEP)
    for _ in range(20):
        drafting.odds.note(4, 0)
    assert [drafting.counts(8, [None], [4]) for _ in range(3)] == [[0]] * 3 and not drafting.pays
    drafting.passed(TRIED - 4)
    assert drafting.counts(8, [None], [4]) == [1] and drafting.pays


def test_drafts_that_are_seldom_found_gain_little():
    odds = Odds()
    for number in range(200):
        odds.note(4 * (number % 4 == 0), 4 * (number % 4 == 0))
    assert odds.chance == pytest.approx(1.0, abs=1e-3) and odds.found == pytest.approx(0.25, abs=0.05)
    assert odds.gains(2) == pytest.approx([odds.found] * 2, abs=1e-3)


def test_without_costs_there_is_all_that_there_is_room_for():
    assert Drafting(None).counts(1, [Odds(0.0), None], [4, 2]) == [4, 2]


@pytest.mark.parametrize(
    ("seconds", "calls"),
    [([0.01, 0.03, 0.02], 3), ([0.06, 0.05, 0.04], 2), ([9.0, 9.5], 2), ([10.0], 1), ([0.01, 10.0], 2)],
)
def test_calls_that_take_long_are_measured_twice(seconds, calls, monkeypatch):
    """And those that take more than enough once."""
    called, now = [], iter(accumulate(chain(*((0, taken) for taken in seconds))))
    monkeypatch.setattr(step_times, "perf_counter", lambda: next(now))
    assert step_times.shortest(lambda: called.append(1), enough=10.0) == pytest.approx(min(seconds[:calls]))
    assert len(called) == calls
