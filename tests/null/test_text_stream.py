"""Text of tokens as they come: characters of several tokens, and strings that end it."""

from pathlib import Path

import pytest

pytest.importorskip("transformers", reason="the tokenizer of the bundled checkpoint is loaded with Transformers")
from transformers import AutoTokenizer

from transformers_neuronx.errors import InputError
from transformers_neuronx.serving.text import TextStream

TINY_KJV = Path(__file__).parents[2] / "examples" / "tiny-kjv"
TEXT = "Ünïcode 🎉 and ☃, é; the end"


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(TINY_KJV)


def fed(tokenizer, text, *stop, **options):
    """Feed a text token by token. Return what was shown after each, and whether it was stopped."""
    stream, shown = TextStream(tokenizer, [], stop, **options), []
    for token in tokenizer(text)["input_ids"]:
        stopped = stream.add(token)
        shown.append(stream.shown)
        if stopped:
            return shown, True
    stream.finish()
    return [*shown, stream.shown], False


def test_characters_are_shown_whole(tokenizer):
    shown, stopped = fed(tokenizer, TEXT)
    assert not stopped and shown[-1] == TEXT
    assert all(TEXT.startswith(each) for each in shown) and not any("\ufffd" in each for each in shown)
    assert len(shown) > len(set(shown)), "some tokens are parts of a character"


def test_an_incomplete_character_is_shown_at_the_end(tokenizer):
    stream = TextStream(tokenizer, [])
    for token in tokenizer("ok 🎉")["input_ids"][:-1]:
        stream.add(token)
    assert stream.shown == "ok "
    stream.finish()
    assert stream.shown.startswith("ok ") and "\ufffd" in stream.shown


@pytest.mark.parametrize("place", range(len(TEXT) - 1))
@pytest.mark.parametrize("length", [1, 2, 5, 9])
def test_a_string_ends_the_text_wherever_it_stands(place, length, tokenizer):
    stop = TEXT[place : place + length]
    first = TEXT.index(stop)
    for keeps in (False, True):
        shown, stopped = fed(tokenizer, TEXT, "zzz", stop, keeps_stop=keeps)
        assert stopped and shown[-1] == TEXT[: first + keeps * len(stop)]
        assert all(TEXT[: first + len(stop)].startswith(each) for each in shown)
        assert all(stop not in each for each in shown[:-1])


def test_the_string_that_is_complete_first_ends_the_text(tokenizer):
    assert fed(tokenizer, TEXT, "code 🎉 and", "🎉")[0][-1] == "Ünïcode " == fed(tokenizer, TEXT, "🎉")[0][-1]
    shown, stopped = fed(tokenizer, "the en", "the end")
    assert not stopped and shown[-1] == "the en" and shown[-2] == "", "what may become a stop string waits"


def test_a_tokenizer_of_another_kind():
    with pytest.raises(InputError, match="text needs a fast tokenizer, got object: load it with use_fast=True"):
        TextStream(object(), [])
