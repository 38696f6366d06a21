"""Sampling against NumPy: the tokens that may be drawn, and how often they are."""

import numpy as np
import pytest
import torch
from transformers import RepetitionPenaltyLogitsProcessor

from transformers_neuronx import hlo
from transformers_neuronx.engine.rules import Rules
from transformers_neuronx.layers.sampling import BROKEN, CANDIDATES, sample
from transformers_neuronx.runtimes import get_runtime

INF = np.inf


@pytest.fixture(scope="module")
def draw(write):
    """`draw(logits, rules, …)`: the token of each row. A program is compiled once for each shape."""
    programs = {}

    def drawn(logits, rules=None, position=0, seen=None, degree=1):
        logits = np.atleast_2d(np.asarray(logits, np.float32))
        rows = len(logits)
        seen = np.zeros(logits.shape, bool) if seen is None else seen
        operands = logits, seen, (rules or Rules(seed=0)).packed(rows), np.full(rows, position, np.int32)
        runtime = get_runtime("cpu", degree)
        if (logits.shape, degree) not in programs:
            module = write(sample, *operands)
            programs[logits.shape, degree] = runtime.compile(module)
        [tokens] = programs[logits.shape, degree](*(runtime.put([operand]) for operand in operands))
        return tokens.numpy()

    return drawn


def probabilities(logits, top_k=0, top_p=1.0, temperature=1.0, min_p=0.0):
    """Compute each token's expected share of draws in f64, one filter after the other. logits [v]"""
    logits = np.asarray(logits, np.float64) / temperature
    kept = logits > -INF
    if 0 < top_k < len(logits):
        kept &= logits >= np.sort(logits)[-top_k]
    weights = np.where(kept, np.exp(logits - logits.max()), 0)
    weights /= weights.sum()
    likelier = np.array([weights[weights > weight].sum() for weight in weights])
    kept &= likelier < top_p
    kept &= weights >= min_p * weights.max()
    weights = np.where(kept, weights, 0)
    return weights / weights.sum()


LOGITS = [3.0, 2.0, 1.5, 0.0, -1.0, 2.5, -INF, 0.5, -4.0, 1.0, 0.25]
RULES = [
    dict(top_k=0),
    dict(top_k=3),
    dict(top_k=3, top_p=0.8, temperature=2.0),
    dict(top_k=0, top_p=0.6),
    dict(top_k=0, min_p=0.2),
    dict(top_k=6, top_p=0.95, min_p=0.1, temperature=0.5),
    dict(top_k=0, top_p=1e-6),
]


class TestRandomBits:
    def test_threefry_gives_the_published_vectors(self, run):
        ones = 2**32 - 1
        words = np.array(
            [[0, 0, 0, 0], [ones] * 4, [0x13198A2E, 0x03707344, 0x243F6A88, 0x85A308D3]], np.uint32
        ).T  # key and counter of each
        bits = run(lambda a, b, c, d: hlo.threefry((a, b), (c, d)), *words)
        assert [[int(x) for x in word] for word in np.transpose(bits)] == [
            [0x6B200159, 0x99BA4EFE],
            [0x1CB996FC, 0xBB002BE7],
            [0xC4923A9C, 0x483DF7A0],
        ]

    def test_gumbel_noise_is_finite_below_and_has_its_quantiles(self, run):
        bits = np.array([0, 1, 2**31, 2**32 - 2**9, 2**32 - 1], np.uint32)
        noise = run(hlo.gumbel, bits)[0]
        uniform = (bits.astype(np.float64) + 0.5) / 2**32
        np.testing.assert_allclose(noise[:4], -np.log(-np.log1p(-uniform))[:4], rtol=1e-4)
        assert noise[4] == -INF  # never the largest


class TestWhichTokensAreDrawn:
    @pytest.mark.parametrize("rules", RULES, ids=str)
    def test_as_often_as_numpy_says(self, draw, rules):
        count = 100_000
        drawn = draw(np.tile(LOGITS, (count, 1)), Rules(**rules, seed=1))
        share = probabilities(LOGITS, **rules)
        counts = np.bincount(drawn, minlength=len(LOGITS))
        assert counts[share == 0].sum() == 0
        some = share > 0
        chi_square = ((counts - count * share)[some] ** 2 / (count * share[some])).sum()
        # 1 in 10⁵ correct results exceed these, for one degree of freedom less than there are tokens.
        assert chi_square < [1e-9, 19.6, 23.1, 25.9, 28.5, 30.9, 33.2, 35.4, 37.6, 39.7][some.sum() - 1]

    def test_one_token_that_dominates_is_drawn_always(self, draw):
        assert set(draw(np.tile([0.0, 200.0, 0.0], (1000, 1)), Rules(0, seed=0)).tolist()) == {1}

    @pytest.mark.parametrize(("number", "drawn"), [(1e-300, {1}), (1e-40, {1}), (4e307, {0, 1, 2})])
    def test_a_temperature_beyond_f32_has_its_effect(self, draw, number, drawn):
        rules = Rules(0, temperature=number, repetition_penalty=number, seed=0)
        assert set(draw(np.tile([30.0, 31.0, -30.0], (1000, 1)), rules).tolist()) == drawn

    def test_of_level_tokens_all_are_kept(self, draw):
        level = np.tile([2.0, 1.0, 1.0, 1.0, 0.0], (2000, 1))
        assert set(draw(level, Rules(2, seed=0)).tolist()) == {0, 1, 2, 3}
        assert set(draw(level, Rules(0, top_p=0.5, seed=0)).tolist()) == {0, 1, 2, 3}
        assert set(draw(np.zeros((2000, 5)), Rules(1, seed=0)).tolist()) == {0}

    def test_a_token_of_minus_infinity_is_never_drawn(self, draw):
        row = [-INF, 0.0, -INF]
        assert set(draw(np.tile(row, (500, 1)), Rules(3, seed=0)).tolist()) == {1}

    @pytest.mark.parametrize("top_k", [1, 3, 0])
    def test_rows_without_a_choice_are_reported_and_the_others_drawn(self, draw, top_k):
        rows = [[1.0, 0.0, 9.0], [1.0, np.nan, 0.0], [-INF, -INF, -INF], [0.0, INF, 0.0], [50.0, 0.0, -INF]]
        drawn = draw(rows, Rules(top_k, temperature=0.1, seed=0))
        assert drawn.tolist() == [2, BROKEN, BROKEN, BROKEN, 0]

    def test_each_row_has_its_own_rules(self, draw):
        logits = np.tile(np.linspace(0, 3, 400, dtype=np.float32), (4, 1))
        together = [
            draw(logits, Rules([1, 50, 0, CANDIDATES], [1.0, 0.5, 0.9, 1.0], [1.0, 2.0, 0.5, 1.0], seed=5), position)
            for position in range(20)
        ]
        for row, rules in enumerate(
            [Rules(1, seed=5), Rules(50, 0.5, 2.0, seed=5), Rules(0, 0.9, 0.5, seed=5), Rules(CANDIDATES, seed=5)]
        ):
            alone = [draw(logits, rules, position)[row] for position in range(20)]
            assert alone == [drawn[row] for drawn in together]  # in both ways of searching the vocabulary
        assert len({drawn[2] for drawn in together}) > 10

    def test_the_draw_follows_from_seed_row_and_position(self, draw):
        logits = np.zeros((3, 1000))
        one, same, other, later = (
            draw(logits, Rules(0, seed=seed), position).tolist() for seed, position in ((1, 0), (1, 0), (2, 0), (1, 1))
        )
        assert one == same
        assert len({*one, *other, *later}) == 9

    def test_several_devices_draw_alike(self, draw):
        logits = np.random.default_rng(0).normal(size=(5, 1000))
        assert (draw(logits, Rules(40, seed=3), degree=2) == draw(logits, Rules(40, seed=3))).all()


def test_the_repetition_penalty_is_that_of_transformers(draw):
    logits = np.random.default_rng(0).normal(size=(64, 50)).astype(np.float32)
    ids = np.random.default_rng(1).integers(0, 50, (64, 30))
    seen = np.zeros(logits.shape, bool)
    np.put_along_axis(seen, ids, True, 1)
    want = RepetitionPenaltyLogitsProcessor(1.7)(torch.from_numpy(ids), torch.from_numpy(logits)).argmax(-1)
    got = draw(logits, Rules(1, repetition_penalty=1.7), seen=seen)
    assert got.tolist() == want.tolist()
    assert got.tolist() != logits.argmax(-1).tolist()
