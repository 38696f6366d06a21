"""Text of tokens as they come: characters of several tokens, and strings that end it."""

from pathlib import Path

import pytest
from hypothesis import HealthCheck, assume, given, settings, strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers

pytest.importorskip("transformers", reason="the tokenizer of the bundled checkpoint is loaded with Transformers")
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from transformers_neuronx.errors import InputError
from transformers_neuronx.serving.text import TextStream

TINY_KJV = Path(__file__).parents[2] / "examples" / "tiny-kjv"
drawn = settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])
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


def of_pieces():
    """A tokenizer as Llama 2 has one: spaces belong to words, and what is no piece is written in bytes."""
    pieces = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *"abcdé", "▁a", "ab", "▁ab", "</s>"]
    model = models.BPE(
        {piece: i for i, piece in enumerate(pieces)}, [("▁", "a"), ("a", "b"), ("▁a", "b")],
        byte_fallback=True, unk_token="<unk>",
    )  # fmt: skip
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>")


TOKENIZERS = dict(bytes=AutoTokenizer.from_pretrained(TINY_KJV), pieces=of_pieces())


@pytest.mark.parametrize("kind", TOKENIZERS)
@drawn
@given(st.data(), st.lists(st.sampled_from(["a", "ab", " ", "é", "🎉", "☃", "\n", "the", "d"]), max_size=12))
def test_any_text_comes_whole_and_once(kind, data, words):
    """What is shown only grows, up to the whole text or a stop string, wherever that is in the tokens."""
    tokenizer, text = TOKENIZERS[kind], "".join(words)
    stops = data.draw(st.lists(st.text("abhe é🎉", min_size=1, max_size=4), max_size=3))
    tokens = tokenizer(text)["input_ids"]
    whole = tokenizer.decode(tokens)
    ends = [(whole.index(stop) + len(stop), whole.index(stop)) for stop in stops if stop in whole]
    stream, shown, stopped = TextStream(tokenizer, [], stops), [""], False
    while not stopped and tokens:
        stopped = stream.add(tokens.pop(0))
        shown.append(stream.shown)
    stream.finish()
    assert stopped == bool(ends) and stream.shown == (whole[: min(ends)[1]] if ends else whole)
    assert all(later.startswith(before) for before, later in zip(shown, [*shown[1:], stream.shown], strict=True))


@pytest.mark.parametrize("kind", TOKENIZERS)
@drawn
@given(st.data(), st.text("ab é🎉", max_size=5))
def test_any_tokens_have_the_text_that_they_have_together(kind, data, prompt):
    """Random tokens are mostly bytes that are no characters, or parts of one.

    Where pieces may be bytes, a whole run of them is invalid if one is. What was shown by then is not taken back.
    """
    tokenizer = TOKENIZERS[kind]
    before = tokenizer(prompt)["input_ids"]
    tokens = data.draw(st.lists(st.integers(0, len(tokenizer) - 1), max_size=12))
    known = tokenizer.decode(before, skip_special_tokens=True)
    whole = tokenizer.decode(before + tokens, skip_special_tokens=True)
    assume(whole.startswith(known))
    stream, shown = TextStream(tokenizer, before), ""
    for token in tokens:
        stream.add(token)
        assert stream.shown.startswith(shown)
        shown = stream.shown
    stream.finish()
    assert stream.shown.startswith(shown)
    assert known + stream.shown == whole or (kind == "pieces" and "\ufffd" in whole)


def test_bytes_that_are_no_characters_do_not_end_a_request():
    tokenizer = TOKENIZERS["pieces"]
    snowman = tokenizer("☃", add_special_tokens=False)["input_ids"]
    [space_a] = tokenizer("a", add_special_tokens=False)["input_ids"]
    stream = TextStream(tokenizer, [])
    for token in [*snowman, snowman[-1], space_a, *snowman[1:], space_a]:
        stream.add(token)
    assert stream.shown == "☃\ufffd a☃ a"
