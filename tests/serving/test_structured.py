"""Requests whose text must follow a grammar: JSON by schemas, regular expressions, choices."""

import json
import re
from pathlib import Path

import jsonschema
import numpy as np
import pytest
import torch
from schemas import SCHEMAS
from transformers import AutoTokenizer, GPT2Config, GPT2LMHeadModel

from transformers_neuronx import Engine, SamplingParams, SparseAttnConfig, StructuredOutputs
from transformers_neuronx.config import NeuronConfig
from transformers_neuronx.errors import EngineError, InputError
from transformers_neuronx.gpt2.model import GPT2ForSampling
from transformers_neuronx.serving.structured import Parser, closed
from transformers_neuronx.speculation import PromptLookup

EXAMPLES = Path(__file__).parents[2] / "examples"
LONGEST = 192
PROMPT = list(range(5, 12))
WEATHER = SCHEMAS[-1]


def loaded(folder, **options):
    model = GPT2ForSampling.from_pretrained(folder, n_positions=LONGEST, batch_size=4, **options)
    model.to_neuron(ahead=False)
    return model


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(EXAMPLES / "tiny-kjv")


@pytest.fixture(scope="module")
def model():
    return loaded(EXAMPLES / "tiny-kjv")


@pytest.fixture(scope="module")
def engine(model, tokenizer):
    with Engine(model, rows=4, step_tokens=32, tokenizer=tokenizer) as engine:
        yield engine


def checked(schema, text):
    """Parse a text, and check it against a schema, with its formats."""
    value = json.loads(text)
    jsonschema.validate(value, schema, format_checker=jsonschema.Draft202012Validator.FORMAT_CHECKER)
    return value


def asked(schema, **params):
    return SamplingParams(**dict(max_tokens=150, structured_outputs=StructuredOutputs(json=schema)) | params)


def test_json_by_a_schema(engine):
    schemas = SCHEMAS[::2]
    handles = [engine.submit(PROMPT, asked(schema, seed=number)) for number, schema in enumerate(schemas)]
    ended = 0
    for schema, handle in zip(schemas, handles, strict=True):
        handle.result()
        if handle.finish_reason == "stop":
            ended += 1
            checked(schema, handle.text)
    assert ended >= len(schemas) - 4, "few run on to max_tokens"


@pytest.mark.parametrize("ignore_eos", [False, True])
def test_other_texts(engine, ignore_eos):
    def text(**outputs):
        how = dict(max_tokens=100, seed=1, n=4, ignore_eos=ignore_eos)
        handle = engine.submit(PROMPT, SamplingParams(structured_outputs=StructuredOutputs(**outputs), **how))
        return next(choice.text for choice in handle.choices if choice.result() and choice.finish_reason == "stop")

    assert re.fullmatch("[a-c]{3,6}-[0-9]", text(regex="^[a-c]{3,6}-[0-9]$"))
    assert text(choice=["behold", 'lo, "and"\n', "née"]) in ["behold", 'lo, "and"\n', "née"]
    assert isinstance(json.loads(text(json_object=True)), dict)
    assert re.fullmatch("a[xy]+", text(grammar='start: "a" b+\nb: /x|y/'))


def test_it_ends_when_nothing_can_follow(engine):
    handle = engine.submit(PROMPT, SamplingParams(structured_outputs=StructuredOutputs(choice=["the LORD"]), seed=0))
    tokens = handle.result()
    assert handle.text == "the LORD" and handle.finish_reason == "stop" and 1022 not in tokens


def test_each_sequence_has_its_own_parser(engine):
    handle = engine.submit(PROMPT, asked(WEATHER, n=4, seed=3))
    texts = set()
    for choice in handle.choices:
        choice.result()
        checked(WEATHER, choice.text)
        texts.add(choice.text)
    assert len(texts) > 1


def test_beside_others_and_alone_it_is_the_same(engine):
    params = [asked(WEATHER, seed=number) for number in range(8)]
    alone = [engine.submit(PROMPT, each).result() for each in params]
    others = [engine.submit(PROMPT, SamplingParams(max_tokens=40, seed=number)) for number in range(4)]
    together = [engine.submit(PROMPT, each) for each in params]
    assert [each.result() for each in together] == alone and all(each.result() for each in others)


@pytest.mark.parametrize("guesser", ["text", pytest.param("model", marks=pytest.mark.slow)])
def test_draft_tokens_change_nothing(guesser, engine, model, tokenizer):
    draft = PromptLookup() if guesser == "text" else loaded(EXAMPLES / "tiny-kjv-draft")
    kinds = [dict(temperature=0), dict(seed=5), dict(seed=6, temperature=0.5, presence_penalty=0.5, min_tokens=9)]
    params = [asked(schema, **kind) for kind in kinds for schema in (WEATHER, SCHEMAS[5], SCHEMAS[44])]
    params += [SamplingParams(max_tokens=40, frequency_penalty=0.3, logit_bias={7: 2.0}, **kind) for kind in kinds[:2]]
    prompt = tokenizer('{"city": "Jerusalem", "unit": "celsius"}, {"city": "Bethlehem", "unit": "cel').input_ids[-40:]
    wanted = [engine.submit(prompt, each).result() for each in params]
    sizes = dict(rows=4, step_tokens=32, joined_tokens=32, draft_tokens=3)  # all of them, whether they pay or not
    with Engine(model, tokenizer=tokenizer, draft=draft, **sizes) as drafting:
        handles = [drafting.submit(prompt, each) for each in params]
        assert [handle.result() for handle in handles] == wanted
        assert sum(handle.usage.accepted_tokens for handle in handles[:9]) > 0, "they had draft tokens"


def test_slots(engine, tokenizer):
    mask = torch.ones(LONGEST, LONGEST, dtype=torch.bool).tril()
    switches = NeuronConfig(sparse_attn=SparseAttnConfig("custom", sparse_mask_dict={(LONGEST, LONGEST): mask}))
    params = [asked(WEATHER, seed=number) for number in range(6)]
    wanted = [engine.submit(PROMPT, each).result() for each in params]
    with Engine(loaded(EXAMPLES / "tiny-kjv", neuron_config=switches), tokenizer=tokenizer) as slotted:
        handles = [slotted.submit(PROMPT, each) for each in params]
        assert [handle.result() for handle in handles] == wanted


def test_a_grammar_that_becomes_too_complex_ends_its_own_request_alone(engine, monkeypatch):
    def fail(*_):
        raise EngineError("too complex")

    other = engine.submit(PROMPT, SamplingParams(max_tokens=30, ignore_eos=True))
    monkeypatch.setattr(Parser, "fill", fail)
    with pytest.raises(EngineError, match="too complex"):
        engine.submit(PROMPT, asked(WEATHER)).result()
    assert len(other.result()) == 30


def test_options_of_a_schema_for_llguidance_stay(engine):
    schema = dict(oneOf=[dict(enum=["Ur", "Nod"]), dict(enum=["Ur", "Uz"])])
    with pytest.raises(InputError, match="Enable 'coerce_one_of'"):
        engine.submit(PROMPT, asked(schema))
    handle = engine.submit(PROMPT, asked(schema | {"x-guidance": dict(coerce_one_of=True)}))
    handle.result()
    checked(dict(enum=["Ur", "Nod", "Uz"]), handle.text)


@pytest.mark.parametrize(
    ("outputs", "message"),
    [
        (dict(), "must have one of json, json_object, regex, choice, grammar, got none"),
        (dict(regex="a", choice=["b"]), "must have one of .*, got regex, choice"),
        (dict(choice=[""]), r"choice must be a list of texts that are not empty, got \[''\]"),
        (dict(json="{no"), "the schema must be a JSON object: Expecting property name enclosed in double quotes"),
        (dict(json=dict(type="strin")), "cannot be followed: Invalid type: strin"),
        (dict(json={"not": {}}), 'cannot be followed: Unimplemented keys: \\["not"\\]'),
        (dict(regex="(a"), "unclosed group"),
        (dict(grammar="begin: 3"), "Expected value"),
    ],
)
def test_what_cannot_be_followed_is_refused(engine, outputs, message):
    with pytest.raises(InputError, match=message):
        engine.submit(PROMPT, SamplingParams(structured_outputs=StructuredOutputs(**outputs)))


def test_it_needs_a_tokenizer(model):
    with Engine(model, rows=4, step_tokens=32) as engine, pytest.raises(InputError, match="structured_outputs need an"):
        engine.submit(PROMPT, asked(WEATHER))


@pytest.fixture(scope="module")
def untrained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("untrained")
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=1023, n_embd=32, n_layer=1, n_head=2, n_positions=LONGEST, eos_token_id=1022)
    GPT2LMHeadModel(config).save_pretrained(folder)
    return loaded(folder)


@pytest.mark.slow
@pytest.mark.parametrize("weights", ["model", "untrained"])
def test_all_of_many_are_valid(weights, tokenizer, request):
    """5,000 answers each: what ends by itself is valid, and most does."""
    draw, ended = np.random.default_rng(0), 0
    with Engine(request.getfixturevalue(weights), rows=32, step_tokens=64, tokenizer=tokenizer) as engine:
        for _ in range(20):
            sent = [(SCHEMAS[number % 50], int(seed)) for number, seed in enumerate(draw.integers(0, 2**31, 250))]
            handles = [(each, engine.submit(PROMPT, asked(each, seed=seed))) for each, seed in sent]
            for schema, handle in handles:
                handle.result()
                if handle.finish_reason == "stop":
                    ended += 1
                    checked(schema, handle.text)
    print(f"{weights}: {ended} of 5000 ended by themselves, and are valid")
    assert ended > 4000


def test_a_strict_schema_has_no_other_properties():
    inner = dict(type="object", properties=dict(b=dict(enum=[dict(properties={})])))
    schema = dict(type="object", properties=dict(a=inner, free=dict(type="object")), required=["a"])
    found = closed(schema)
    first, free = found["properties"].values()
    assert found["additionalProperties"] is False is first["additionalProperties"]
    assert free == dict(type="object") and first["properties"] == inner["properties"]
    named = dict(type="object", properties=dict(default=inner, properties=inner))
    for name, each in closed(named)["properties"].items():
        assert each["additionalProperties"] is False and name in ("default", "properties")
    others = dict(additionalProperties=True), dict(patternProperties={}), dict(unevaluatedProperties=True)
    for more in others:
        assert closed(schema | more).get("additionalProperties") == more.get("additionalProperties")
    joined = schema | dict(allOf=[dict(required=["a"])])
    assert closed(joined) == joined
