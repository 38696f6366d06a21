"""Texts and bytes of single tokens."""

import pytest
from tokenizers import Tokenizer, decoders, models, normalizers
from transformers import PreTrainedTokenizerFast

from transformers_neuronx.server.prompts import Prompts


@pytest.fixture(scope="module")
def pieces():
    """A tokenizer as LLaMA's: it marks spaces, has a token for each byte, and strips a space where text begins."""
    bytes_ = {f"<0x{value:02X}>": 6 + value for value in range(256)}
    vocab = {"<unk>": 0, "▁": 1, "a": 2, "▁a": 3, "▁the": 4, "dog": 5} | bytes_
    made = Tokenizer(models.BPE(vocab, [("▁", "a")], unk_token="<unk>", byte_fallback=True))
    made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    spaces, strip = decoders.Replace("▁", " "), decoders.Strip(" ", 1, 0)
    made.decoder = decoders.Sequence([spaces, decoders.ByteFallback(), decoders.Fuse(), strip])
    return PreTrainedTokenizerFast(tokenizer_object=made, unk_token="<unk>")


def test_tokens_that_follow_others_keep_their_space(pieces):
    prompts = Prompts(pieces)
    assert [prompts.text_of_token(token) for token in (4, 5, 6 + ord("A"))] == [" the", "dog", "A"]


def test_parts_of_characters_have_their_bytes(pieces, tokenizer):
    for prompts in (Prompts(pieces), Prompts(tokenizer)):
        ids = prompts.encoded("a dog: 5 €")
        assert b"".join(map(prompts.bytes_of_token, ids)).decode().strip() == "a dog: 5 €"


def test_a_character_for_what_is_no_text_has_its_bytes(tokenizer):
    prompts = Prompts(tokenizer)
    ids = prompts.encoded("\N{REPLACEMENT CHARACTER}")
    assert b"".join(map(prompts.bytes_of_token, ids)).decode() == "\N{REPLACEMENT CHARACTER}"
