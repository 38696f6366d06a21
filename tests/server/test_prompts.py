"""Texts and bytes of single tokens, and prompts of pairs of texts."""

import copy

import pytest
from tokenizers import Tokenizer, decoders, models, normalizers
from transformers import PreTrainedTokenizerFast

from transformers_neuronx.server.errors import ApiError
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


# Templates of rerankers read the content of a message as text, or as a list of parts.
PAIRS = {
    "text": """{%- for m in messages -%}<{{ m.role }}>{{ m.content }}{%- endfor -%}
        {%- if add_generation_prompt -%}<{{ "query" ~ "document" }}>{%- endif -%}""",
    "parts": """<query>{{ (messages | selectattr("role", "eq", "query") | first).content[0].text -}}
        <document>{{ (messages | selectattr("role", "eq", "document") | first).content[0].text -}}<querydocument>""",
}


@pytest.mark.parametrize("kind", PAIRS)
def test_a_template_with_both_roles_makes_a_prompt_of_a_pair(kind, tokenizer):
    prompts = Prompts(copy.copy(tokenizer))
    prompts.tokenizer.chat_template = PAIRS[kind]
    wanted = tokenizer("<query>Who is wise?<document>a king<querydocument>", add_special_tokens=False).input_ids
    assert prompts.of_pair("Who is wise?", "a king") == wanted


def test_other_templates_leave_pairs_to_the_tokenizer(tokenizer):
    prompts = Prompts(copy.copy(tokenizer))
    prompts.tokenizer.chat_template = "{% for m in messages %}{{ m.role }}: {{ m.content }}{% endfor %}"
    assert prompts.of_pair("a", "b") == tokenizer("a", "b").input_ids


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("query: {{ messages[0].content }} document", "does not show"),
        ("query document {{ raise_exception('no') }}", "no"),
    ],
)
def test_templates_that_make_no_prompt_of_a_pair(template, message, tokenizer):
    prompts = Prompts(copy.copy(tokenizer))
    prompts.tokenizer.chat_template = template
    with pytest.raises(ApiError, match=message) as caught:
        prompts.of_pair("Who is wise?", "a king")
    assert caught.value.status == 400
