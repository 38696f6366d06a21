"""Acceptors of draft tokens, as the original has them: alone, and with a draft model in a generator."""

import pytest
import torch
from test_speculation import TINY_KJV, TINY_KJV_DRAFT, compiled

from transformers_neuronx.speculation import (
    DefaultTokenAcceptor,
    DraftModelForSpeculation,
    SpeculativeGenerator,
    TokenAcceptor,
)
from transformers_neuronx.speculation.acceptors import DraftProvider, ReferenceTokenAcceptor

ROWS = 40_000


def scores(*rows):
    """Return logits of these probabilities, for each of ROWS sequences. f32[ROWS, n, vocab]"""
    return torch.tensor(rows).log().expand(ROWS, -1, -1)


def shares(tokens):
    return torch.bincount(tokens, minlength=4) / len(tokens)


@pytest.mark.parametrize("acceptor", [DefaultTokenAcceptor(), ReferenceTokenAcceptor()], ids=["default", "reference"])
def test_tokens_are_distributed_as_the_target_would_draw_them(acceptor):
    torch.manual_seed(0)
    draft = scores([0.1, 0.2, 0.3, 0.4], [0.25, 0.25, 0.25, 0.25])
    target = scores([0.4, 0.3, 0.2, 0.1], [0.1, 0.2, 0.3, 0.4], [0.7, 0.1, 0.1, 0.1])
    ids = torch.stack([torch.multinomial(draft[0, column].exp(), ROWS, True) for column in range(2)], 1)
    accepted = acceptor(ids, draft, target)
    assert accepted.shape == (ROWS, 3)
    first, second = accepted[:, 0] == ids[:, 0], (accepted[:, :2] == ids).all(1)
    want = target[0].exp()
    for tokens, distribution in (
        (accepted[:, 0], want[0]),
        (accepted[first, 1], want[1]),
        (accepted[second, 2], want[2]),
    ):
        assert len(tokens) > ROWS / 5
        torch.testing.assert_close(shares(tokens), distribution, rtol=0, atol=0.02)
    assert not accepted[~first, 1:].any()  # zeros follow the token in place of a wrong one
    assert 0.55 < first.float().mean() < 0.65  # the overlap of the two distributions, 0.6


def test_a_draft_that_thinks_as_the_target_is_right_throughout():
    target = scores([0.4, 0.3, 0.2, 0.1], [0.1, 0.2, 0.3, 0.4], [0.7, 0.1, 0.1, 0.1])
    ids = torch.randint(4, (ROWS, 2))
    assert torch.equal(DefaultTokenAcceptor()(ids, target[:, :2], target)[:, :2], ids)


def test_nothing_is_left_to_draw_from(monkeypatch):
    """A token is not accepted, since rounding made its probability smaller, and made that of no other larger."""
    draft = torch.tensor([[[0.5, 0.5]]]).log()
    monkeypatch.setattr(torch, "rand", torch.ones)
    accepted = DefaultTokenAcceptor()(torch.tensor([[1]]), draft, draft.expand(1, 2, 2))
    assert accepted[0, 0] in (0, 1) and accepted[0, 1] == 0


def test_scores_may_come_without_a_batch():
    target = scores([0.4, 0.3, 0.2, 0.1], [0.1, 0.2, 0.3, 0.4])[0]
    accepted = ReferenceTokenAcceptor()(torch.tensor([[2]]), target[:1], target)
    assert accepted.shape == (1, 2) and accepted[0, 0] == 2


def test_bases_say_what_they_need():
    with pytest.raises(NotImplementedError, match="DraftProvider needs __call__, which makes draft tokens"):
        DraftProvider()(torch.ones(1, 1, dtype=torch.long), 2)
    with pytest.raises(NotImplementedError, match="TokenAcceptor needs __call__, which returns accepted tokens"):
        TokenAcceptor()(*torch.zeros(3, 1))


class Greedy(TokenAcceptor):
    """Accepts what the target thinks most likely."""

    def __call__(self, draft_ids, draft_scores, target_scores):
        best, count = target_scores.argmax(-1), draft_ids.shape[1]
        right = (best[:, :count] == draft_ids).long().cumprod(1).sum(1, keepdim=True)
        return torch.where(torch.arange(count + 1) <= right, best, 0)


@pytest.mark.parametrize("rows", [1, 3])
def test_a_generator_with_a_draft_model_and_an_acceptor(rows):
    target, draft = (compiled(where, batch_size=rows) for where in (TINY_KJV, TINY_KJV_DRAFT))
    ids = torch.randint(1, 1000, (rows, 7), generator=torch.Generator().manual_seed(0))
    want = target.sample(ids, 60, top_k=1, eos_token_override=-1)
    generator = SpeculativeGenerator(DraftModelForSpeculation(draft), target, 4, Greedy())
    assert torch.equal(generator.sample(ids, 60, eos_token_id=-1), want)
    torch.manual_seed(0)
    drawn = SpeculativeGenerator(draft, target, 4, DefaultTokenAcceptor()).sample(ids, 60, eos_token_id=-1)
    assert drawn.shape == want.shape and not torch.equal(drawn, want)
