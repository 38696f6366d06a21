"""How many draft tokens rows get: as many as make the most tokens in the time of a step."""

from itertools import product

import pytest
from hypothesis import given, strategies as st

from transformers_neuronx.serving.drafting import TRIED, Costs, Drafting, Odds, worthwhile

FLAT = Costs([1, 64], [1.0, 1.2], 0.0)  # where reading weights is all that takes time
STEEP = Costs([1, 2, 4, 8, 16, 32, 64], [1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0], 0.0)


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


def test_drafts_that_are_never_right_are_tried_now_and_then():
    drafting, odds, given_, steps = Drafting(Costs([1, 2, 4], [1.0, 1.1, 1.3], 0.0)), None, 0, 400
    for _ in range(steps):
        [count] = drafting.counts(1, [odds], [3])
        given_ += count
        odds = drafting.noted(odds, count, 0) if count else odds
    assert 400 // TRIED <= given_ < 60
    assert drafting.odds.chance < 0.2


def test_without_costs_there_is_all_that_there_is_room_for():
    assert Drafting(None).counts(1, [Odds(0.0), None], [4, 2]) == [4, 2]
