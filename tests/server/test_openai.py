"""OpenAI's own client cannot tell the server apart."""

import threading
from pathlib import Path

import openai
import pytest
import torch
from transformers import GPT2LMHeadModel

TINY_KJV = Path(__file__).parents[2] / "examples" / "tiny-kjv"
PROMPT = "And the LORD said unto Moses,"
GREEDY = dict(model="tiny-kjv", temperature=0)


@pytest.fixture(scope="module")
def ids(tokenizer):
    return tokenizer(PROMPT)["input_ids"]


@pytest.fixture(scope="module")
def wanted(model, ids):
    """The tokens of `sample()` after the prompt."""
    return model.sample(torch.tensor([ids]), len(ids) + 20, top_k=1)[0, len(ids) :].tolist()


@pytest.fixture(scope="module")
def logits():
    """`logits(ids)`: those of Transformers."""
    theirs = GPT2LMHeadModel.from_pretrained(TINY_KJV)
    return lambda ids: theirs(torch.tensor([ids])).logits[0].log_softmax(-1)


def test_models(client):
    [model] = client.models.list().data
    assert model.id == "tiny-kjv" == client.models.retrieve("tiny-kjv").id and model.max_model_len == 256
    assert model.capabilities == ["completion"]
    with pytest.raises(openai.NotFoundError, match="there is no model 'other' here, only tiny-kjv"):
        client.models.retrieve("other")


def test_a_completion_has_the_tokens_of_sample(client, tokenizer, ids, wanted):
    for prompt in (PROMPT, ids):
        answer = client.completions.create(prompt=prompt, max_tokens=20, **GREEDY)
        [choice] = answer.choices
        assert choice.text == tokenizer.decode(wanted) and choice.finish_reason == "length"
        used = answer.usage
        assert (used.prompt_tokens, used.completion_tokens, used.total_tokens) == (len(ids), 20, len(ids) + 20)


def test_a_stream_tells_the_same(client, tokenizer, ids, wanted):
    events = [*client.completions.create(
        prompt=PROMPT, max_tokens=20, stream=True, stream_options=dict(include_usage=True), **GREEDY
    )]  # fmt: skip
    *texts, last, usage = events
    assert len({(each.id, each.created) for each in events}) == 1
    assert "".join(each.choices[0].text for each in texts) == tokenizer.decode(wanted)
    assert {each.choices[0].finish_reason for each in texts} == {None} and all(each.choices[0].text for each in texts)
    assert (last.choices[0].text, last.choices[0].finish_reason) == ("", "length")
    assert not usage.choices and usage.usage.completion_tokens == 20


def test_values_without_effect_are_not_refused(client):
    fields = dict(suffix=None, best_of=1, length_penalty=1.0, use_beam_search=False, something_new=dict(a=1), user="me")
    answer = client.completions.create(prompt=PROMPT, max_tokens=2, extra_body=fields, **GREEDY)
    assert answer.usage.completion_tokens == 2


def test_several_prompts_and_sequences(client, ids, tokenizer):
    prompts, how = [PROMPT, "In the beginning"], dict(model="tiny-kjv", n=2, seed=3, max_tokens=8)
    answer = client.completions.create(prompt=prompts, **how)
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert answer.usage.prompt_tokens == sum(len(tokenizer(each)["input_ids"]) for each in prompts)
    assert answer.usage.completion_tokens == 32
    alone = client.completions.create(prompt=prompts[1], **how)
    assert [choice.text for choice in answer.choices[2:]] == [choice.text for choice in alone.choices]
    parts = ["", "", "", ""]
    for each in client.completions.create(prompt=prompts, stream=True, **how):
        parts[each.choices[0].index] += each.choices[0].text
    assert parts == [choice.text for choice in answer.choices]


def test_logprobs_and_echo_are_those_of_transformers(client, ids, wanted, logits):
    both = ids + wanted
    theirs = logits(both)
    answer = client.completions.create(prompt=ids, max_tokens=20, logprobs=2, echo=True, **GREEDY)
    found = answer.choices[0].logprobs
    assert found.token_logprobs[0] is None and found.top_logprobs[0] is None
    for place in range(1, len(both)):
        assert found.token_logprobs[place] == pytest.approx(theirs[place - 1, both[place]].item(), abs=1e-4)
        assert len(found.top_logprobs[place]) in (2, 3)
        assert found.top_logprobs[place][found.tokens[place]] == found.token_logprobs[place]
    text = answer.choices[0].text
    assert text.startswith(PROMPT) and text == "".join(found.tokens)
    assert all(text[start:].startswith(token) for token, start in zip(found.tokens, found.text_offset, strict=True))


def test_a_chat(client, tokenizer, model):
    messages = [dict(role="user", content="And Moses"), dict(role="user", content=[dict(type="text", text="said")])]
    prompt = tokenizer("And Moses\nsaid\nAnswer: ")["input_ids"]
    wanted = model.sample(torch.tensor([prompt]), len(prompt) + 12, top_k=1)[0, len(prompt) :].tolist()
    how = dict(messages=messages, max_completion_tokens=12, logprobs=True, top_logprobs=3, **GREEDY)
    answer = client.chat.completions.create(**how)
    [choice] = answer.choices
    assert choice.message.role == "assistant" and choice.message.content == tokenizer.decode(wanted)
    assert [each.token for each in choice.logprobs.content] == [tokenizer.decode([token]) for token in wanted]
    assert all(len(each.top_logprobs) == 3 for each in choice.logprobs.content)
    assert answer.usage.prompt_tokens == len(prompt)
    first, *texts, last = client.chat.completions.create(stream=True, **how)
    assert (first.choices[0].delta.role, first.choices[0].delta.content) == ("assistant", "")
    assert "".join(each.choices[0].delta.content for each in texts) == choice.message.content
    assert last.choices[0].finish_reason == "length" and last.choices[0].delta.content is None


def test_the_bytes_of_tokens_are_those_of_the_text(client):
    """Also of tokens that are a part of a character."""
    text = "5 € naïve 😀"
    answer = client.chat.completions.create(
        messages=[dict(role="user", content=PROMPT)], logprobs=True, top_logprobs=2,
        extra_body=dict(structured_outputs=dict(choice=[text])), **GREEDY,
    )  # fmt: skip
    [choice] = answer.choices
    found = [each for each in choice.logprobs.content if each.token != "<|endoftext|>"]
    assert choice.message.content == text and b"".join(bytes(each.bytes) for each in found) == text.encode()
    assert "\N{REPLACEMENT CHARACTER}" in [each.token for each in found]


def test_a_client_tries_again_when_there_are_too_many_requests(started):
    """The second request waits, as the server says, until the first has ended."""
    server, statuses = started(most_per_key=1), []

    def noted(response):
        statuses.append((response.status_code, response.headers.get("Retry-After")))

    with openai.DefaultHttpxClient(event_hooks=dict(response=[noted])) as http:
        client = openai.OpenAI(base_url=f"{server.address()}/v1", api_key="none", max_retries=5, http_client=http)
        how = dict(prompt=PROMPT, extra_body=dict(ignore_eos=True), **GREEDY)
        first = client.completions.create(stream=True, max_tokens=200, **how)
        ended = threading.Timer(1.5, first.close)
        ended.start()
        assert client.completions.create(max_tokens=2, **how).usage.completion_tokens == 2
        ended.join()
        assert statuses[0] == statuses[-1] == (200, None) and set(statuses[1:-1]) == {(429, "1")}
        with client.completions.create(stream=True, max_tokens=200, **how), pytest.raises(openai.RateLimitError):
            client.with_options(max_retries=0).completions.create(max_tokens=2, **how)
        assert client.models.list().data, "reading is not counted"


def test_a_chat_goes_on_for_as_long_as_there_is_room(client):
    ended = client.chat.completions.create(
        messages=[dict(role="user", content=PROMPT)], extra_body=dict(ignore_eos=True), **GREEDY
    )
    assert ended.usage.total_tokens == 256 and ended.choices[0].finish_reason == "length"


def test_stop_strings(client, tokenizer, wanted):
    whole = tokenizer.decode(wanted)
    answer = client.completions.create(prompt=PROMPT, max_tokens=20, stop=[whole[9:13]], **GREEDY)
    assert answer.choices[0].text == whole[:9] and answer.choices[0].finish_reason == "stop"
    assert answer.usage.completion_tokens < 20
    streamed = client.completions.create(prompt=PROMPT, max_tokens=20, stop=whole[9:13], stream=True, **GREEDY)
    assert "".join(each.choices[0].text for each in streamed) == whole[:9]


def test_the_same_beginning_is_cached(client):
    prompt = "And he said unto them, " * 20
    used = [client.completions.create(prompt=prompt, max_tokens=1, **GREEDY).usage for _ in range(2)]
    assert used[1].prompt_tokens_details.cached_tokens >= 64


BAD = {
    "no prompt": (dict(), "the body: Object missing required field `prompt`", "prompt"),
    "text": (dict(prompt="a", max_tokens="5"), "max_tokens: Expected `int | null`, got `str`", "max_tokens"),
    "a bool": (dict(prompt="a", n=True), "n: Expected `int | null`, got `bool`", "n"),
    "too hot": (dict(prompt="a", temperature=-1), "temperature: Expected `float` >= 0.0", "temperature"),
    "too many": (dict(prompt="a", logprobs=21), "logprobs: Expected `int` <= 20", "logprobs"),
    "too long": (dict(prompt="a " * 900, max_tokens=1), "this model's maximum context length is 256", None),
    "no room": (dict(prompt=[5] * 56, max_tokens=201), "must be at most 200 after this prompt, got 201", "max_tokens"),
    "unknown token": (dict(prompt=[5, 1023]), "token ids must be from 0 to 1022, got 1023", None),
    "mixed": (dict(prompt=["a", 5]), "prompt must be text, token ids, or a list of either", "prompt"),
    "bias": (dict(prompt="a", logit_bias=dict(x=1.0)), "logit_bias must have token ids as keys, got 'x'", "logit_bias"),
    "refused": (dict(prompt="a", suffix="b"), "suffix is not supported", "suffix"),
    "beams": (dict(prompt="a", use_beam_search=True), "use_beam_search is not supported", "use_beam_search"),
    "best of": (dict(prompt="a", best_of=2), "best_of is not supported", "best_of"),
    "many": (dict(prompt="a", n=129), "prompts and n must ask for at most 128 sequences, got 129", "n"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_is_wrong_is_said(client, name):
    body, message, param = BAD[name]
    with pytest.raises(openai.BadRequestError) as caught:
        client.post("/completions", body=dict(model="tiny-kjv") | body, cast_to=object)
    assert message in caught.value.body["message"] and caught.value.param == param
    assert caught.value.type == "invalid_request_error"


WRONG_CHATS = {
    "none": ([], "messages must have one message or more"),
    "no role": ([dict(content="a")], r"messages\[0\] must have a role"),
    "no part": (
        [dict(role="user", content=[dict(type="image_url")])],
        "must be of type text or image_url, with what it",
    ),
    "an image": (
        [dict(role="user", content=[dict(type="image_url", image_url="data:image/png;base64,aaaa")])],
        r"messages\[0\].content\[0\].image_url: this model reads no images",
    ),
    "the template's": ([dict(role="teapot", content="")], "the chat template refuses these messages: no teapots"),
}


@pytest.mark.parametrize("name", WRONG_CHATS)
def test_chats_that_are_wrong(client, name):
    messages, wanted = WRONG_CHATS[name]
    with pytest.raises(openai.BadRequestError, match=wanted):
        client.chat.completions.create(messages=messages, **GREEDY)


def test_embeddings(client, tokenizer, model):
    texts = [PROMPT, "In the beginning"]
    theirs = GPT2LMHeadModel.from_pretrained(TINY_KJV).transformer
    answer = client.embeddings.create(model="tiny-kjv", input=texts)  # as base64, which the client decodes
    ids = [tokenizer(text)["input_ids"] for text in texts]
    for place, each in enumerate(ids):
        wanted = theirs(torch.tensor([each])).last_hidden_state[0, -1].detach()
        found = torch.tensor(answer.data[place].embedding)
        assert answer.data[place].index == place
        torch.testing.assert_close(found, wanted / wanted.norm(), atol=1e-5, rtol=0)
    assert answer.usage.prompt_tokens == answer.usage.total_tokens == sum(map(len, ids))
    [short] = client.embeddings.create(model="tiny-kjv", input=ids[0], dimensions=8, encoding_format="float").data
    first = torch.tensor(answer.data[0].embedding)[:8]
    torch.testing.assert_close(torch.tensor(short.embedding), first / first.norm(), atol=1e-6, rtol=0)
    for fields, param in ((dict(dimensions=10000), "dimensions"), (dict(input=[]), "input"), (dict(input=[[]]), None)):
        with pytest.raises(openai.BadRequestError) as caught:
            client.embeddings.create(**dict(model="tiny-kjv", input="a") | fields)
        assert caught.value.param == param
