"""The experts that a router chooses, and their shares, against NumPy: near ties, equal scores, groups, corrections."""

from types import SimpleNamespace

import numpy as np
import pytest

from transformers_neuronx import hlo
from transformers_neuronx.layers.experts import Router, routed
from transformers_neuronx.weights.parameters import Parameter
from transformers_neuronx.weights.rows import Weight

COUNT = 12  # experts
ROUTERS = {
    "probabilities": Router(3, normalized=False),
    "shares that add up to one": Router(3),
    "sigmoids": Router(3, sigmoid=True, scale=2.5),
    "sigmoids of the highest logits": Router(3, sigmoid=True, normalized=False, by_logits=True),
    "groups": Router(3, sigmoid=True, groups=4, active_groups=2),
    "groups of probabilities": Router(4, normalized=False, groups=3, active_groups=2),
    "groups by their best": Router(4, normalized=False, groups=3, active_groups=2, ranking=1),
}


def as_numpy(logits, correction, router):
    """The experts of each token, best first, and their shares in f64, for logits [n, experts]."""
    logits = logits.astype(np.float64)
    scores = 1 / (1 + np.exp(-logits)) if router.sigmoid else np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    ids, shares = [], []
    for own, where_chosen in zip(scores, logits if router.by_logits else scores, strict=True):
        ranked = (where_chosen + correction).reshape(router.groups, -1)
        ranks = [sum(sorted(group)[-router.ranking :]) for group in ranked]
        best = sorted(range(router.groups), key=lambda group: -ranks[group])[: router.active_groups]
        open_ = [expert for expert in range(COUNT) if expert // ranked.shape[1] in best]
        chosen = sorted(open_, key=lambda expert: -ranked.flat[expert])[: router.active]  # stable: the first of equals
        ids.append(chosen)
        of_chosen = own[chosen]
        shares.append(of_chosen / (of_chosen.sum() if router.normalized else 1) * router.scale)
    return np.array(ids), np.array(shares)


@pytest.fixture
def route(run):
    """`route(logits, correction, router)`: the same from the graph, in which the weight is the unit matrix."""

    def routes(logits, correction, router):
        def graph(x, weight, *corrections):
            row = Weight("moe.router.weight", "", (COUNT, COUNT), dtype="f32")
            w = SimpleNamespace(weight=Parameter(weight, row, 1, "f32"))
            for found in corrections:
                w.correction = Parameter(found, Weight("moe.router.correction", "", (COUNT,), dtype="f32"), 1, "f32")
            return routed(x, w, router)

        added = [] if correction is None else [correction]
        ids, shares = run(graph, logits[None], np.eye(COUNT, dtype=np.float32), *added)
        return ids[0], shares[0]

    return routes


def check(route, logits, correction, router):
    ids, shares = route(logits, correction, router)
    wanted, wanted_shares = as_numpy(logits, 0.0 if correction is None else correction.astype(np.float64), router)
    np.testing.assert_array_equal(ids, wanted)
    np.testing.assert_allclose(shares, wanted_shares, rtol=2e-6)
    return ids


@pytest.mark.parametrize("corrected", [False, True])
@pytest.mark.parametrize("name", ROUTERS)
def test_experts_and_shares(name, corrected, route):
    generator = np.random.default_rng(0)
    logits = generator.normal(size=(40, COUNT)).astype(np.float32)
    correction = generator.normal(size=COUNT).astype(np.float32) if corrected else None
    ids = check(route, logits, correction, ROUTERS[name])
    if corrected:
        assert (ids != route(logits, None, ROUTERS[name])[0]).any()


@pytest.mark.parametrize("name", ROUTERS)
def test_the_first_of_equal_scores_is_chosen(name, route):
    check(route, np.zeros((1, COUNT), np.float32), None, ROUTERS[name])
    check(route, np.zeros((1, COUNT), np.float32), np.full(COUNT, -2, np.float32), ROUTERS[name])


@pytest.mark.parametrize("name", ROUTERS)
def test_a_small_correction_decides_between_equal_scores_and_changes_no_share(name, route):
    logits = np.zeros((1, COUNT), np.float32)
    correction = np.linspace(-2, -1.999, COUNT).astype(np.float32)  # every score is negative where experts are chosen
    ids = check(route, logits, correction, ROUTERS[name])
    assert ids[0, 0] == COUNT - 1


def test_scores_of_half_precision_are_told_apart(run):
    """Inputs in bf16 whose scores are equal in bf16, but not in f32."""
    weight = np.zeros((2, 4), np.float32)
    weight[:, 0], weight[1, 1] = 1, 2.0**-9
    x = np.array([[[1, 1, 0, 0]]], np.float32)

    def graph(x, weight):
        row = Weight("moe.router.weight", "", (2, 4), dtype="f32")
        return routed(hlo.convert(x, "bf16"), SimpleNamespace(weight=Parameter(weight, row, 1, "bf16")), Router(1))

    assert run(graph, x, weight)[0].item() == 1
