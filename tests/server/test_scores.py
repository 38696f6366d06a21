"""Classes, scores and rankings over HTTP: by a score head, and by vectors."""

import copy
import re
from pathlib import Path

import httpx2
import pytest
import torch
from transformers import AutoModelForSequenceClassification, GPT2Config, GPT2Model

from transformers_neuronx import Engine
from transformers_neuronx.gpt2.model import GPT2ForSampling
from transformers_neuronx.server.app import Server
from transformers_neuronx.server.models import ServedModel
from transformers_neuronx.server.settings import Settings

TINY_KJV = Path(__file__).parents[2] / "examples" / "tiny-kjv"
QUERY, TEXTS = "Who made heaven?", ["God created the heaven", "And he died.", "the heaven"]
NAMES = ["calm", "angry", "holy"]
CONFIG = GPT2Config(vocab_size=1024, n_embd=32, n_head=2, n_layer=1, n_positions=64, pad_token_id=0)


def classifier(directory, labels, **more):
    torch.manual_seed(labels)
    config = copy.deepcopy(CONFIG)
    config.update(more)
    config.id2label = dict(enumerate(NAMES[:labels]))
    model = AutoModelForSequenceClassification.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight.copy_(torch.randn_like(weight) * 0.3)
    model.save_pretrained(directory)
    return model


@pytest.fixture(scope="module")
def references(tmp_path_factory):
    """Models of Transformers, and where they are saved."""
    directory = tmp_path_factory.mktemp("classifiers")
    kinds = dict(
        reward=dict(labels=1),
        classes=dict(labels=3),
        several=dict(labels=3, problem_type="multi_label_classification"),
    )
    return {name: (classifier(directory / name, **how), directory / name) for name, how in kinds.items()}


@pytest.fixture(scope="module")
def client(references, engine, tokenizer, started_with):
    engines = {"tiny-kjv": engine}
    for name, (_, directory) in references.items():
        model = GPT2ForSampling.from_pretrained(directory)
        model.to_neuron(ahead=False)
        engines[name] = Engine(model, rows=1, step_tokens=4, tokenizer=tokenizer)
    served = {name: ServedModel(each, name) for name, each in engines.items()}
    url = started_with(Server(served, Settings(most_choices=8))).address()
    with httpx2.Client(base_url=url, timeout=60) as client:
        yield client
    for name in references:
        engines[name].close()


@torch.inference_mode()
def logits(references, name, ids):
    return references[name][0](torch.tensor([ids])).logits[0]


def close(got, want):
    torch.testing.assert_close(torch.tensor(got), want, atol=1e-5, rtol=1e-5)


ACTIVATIONS = dict(
    classes=lambda logits: logits.softmax(-1), several=lambda logits: logits.sigmoid(),
    reward=lambda logits: logits.sigmoid(),
)  # fmt: skip


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_classes(client, references, tokenizer, name):
    answer = client.post("/classify", json=dict(model=name, input=TEXTS)).json()
    plain = client.post("/classify", json=dict(model=name, input=TEXTS, use_activation=False)).json()
    ids = [tokenizer(text).input_ids for text in TEXTS]
    for place, each in enumerate(ids):
        wanted, found = logits(references, name, each), answer["data"][place]
        close(found["probs"], ACTIVATIONS[name](wanted))
        close(plain["data"][place]["probs"], wanted)
        assert found["label"] == NAMES[int(wanted.argmax())]
        assert found["index"] == place and found["num_classes"] == len(wanted)
    assert answer["object"] == "list" and answer["model"] == name and answer["id"].startswith("classify-")
    assert answer["usage"]["prompt_tokens"] == answer["usage"]["total_tokens"] == sum(map(len, ids))


def test_token_ids_are_classified_as_they_are(client, references):
    [found] = client.post("/classify", json=dict(model="classes", input=[5, 6, 7])).json()["data"]
    close(found["probs"], logits(references, "classes", [5, 6, 7]).softmax(-1))


@pytest.mark.parametrize("path", ["/score", "/v1/score"])
def test_scores_of_a_head_with_one_label(client, references, tokenizer, path):
    answer = client.post(path, json=dict(model="reward", text_1=QUERY, text_2=TEXTS)).json()
    wanted = [logits(references, "reward", tokenizer(QUERY, text).input_ids).sigmoid() for text in TEXTS]
    assert [each["index"] for each in answer["data"]] == [0, 1, 2]
    close([each["score"] for each in answer["data"]], torch.cat(wanted))
    pairs = client.post(path, json=dict(model="reward", text_1=TEXTS, text_2=TEXTS[::-1])).json()
    wanted = [logits(references, "reward", tokenizer(*pair).input_ids) for pair in zip(TEXTS, TEXTS[::-1], strict=True)]
    close([each["score"] for each in pairs["data"]], torch.cat(wanted).sigmoid())


@pytest.mark.parametrize("path", ["/rerank", "/v1/rerank", "/v2/rerank"])
def test_documents_come_in_the_order_of_their_scores(client, references, tokenizer, path):
    asked = dict(model="reward", query=QUERY, documents=TEXTS)
    answer = client.post(path, json=asked | dict(use_activation=False)).json()
    wanted = [float(logits(references, "reward", tokenizer(QUERY, text).input_ids)) for text in TEXTS]
    order = sorted(range(3), key=lambda place: -wanted[place])
    assert [each["index"] for each in answer["results"]] == order
    assert [each["document"]["text"] for each in answer["results"]] == [TEXTS[place] for place in order]
    close([each["relevance_score"] for each in answer["results"]], torch.tensor(sorted(wanted, reverse=True)))
    [best] = client.post(path, json=asked | dict(top_n=1, return_documents=False)).json()["results"]
    assert best.keys() == {"index", "relevance_score"} and best["index"] == order[0]


def test_scores_without_a_head_are_cosines_of_vectors(client, tokenizer):
    theirs = GPT2Model.from_pretrained(TINY_KJV)
    with torch.inference_mode():
        query, *others = (
            theirs(torch.tensor([tokenizer(text).input_ids])).last_hidden_state[0, -1] for text in [QUERY, *TEXTS]
        )
    answer = client.post("/score", json=dict(model="tiny-kjv", text_1=QUERY, text_2=TEXTS)).json()
    wanted = torch.stack([torch.cosine_similarity(query, other, dim=0) for other in others])
    close([each["score"] for each in answer["data"]], wanted)


REFUSED = {
    "no score head": ("/classify", dict(model="tiny-kjv", input="a"), None, r"no score head \(score\.weight\)"),
    "no input": ("/classify", dict(model="classes", input=[]), "input", "input must be text"),
    "too many": ("/classify", dict(model="classes", input=["a"] * 9), "input", "at most 8 sequences, got 9"),
    "three labels": ("/score", dict(model="classes", text_1="a", text_2="b"), None, "has 3: use /classify"),
    "unequal lists": ("/score", dict(model="reward", text_1=["a"] * 2, text_2=["b"] * 3), "text_2",
                      r"one text, or as many as text_1 has \(2\), got 3"),
    "no documents": ("/rerank", dict(model="reward", query="a", documents=[]), "documents", "must have one text"),
    "no such model": ("/rerank", dict(model="x", query="a", documents=["b"]), "model", "x"),
    "top_n": ("/rerank", dict(model="reward", query="a", documents=["b"], top_n=0), "top_n", ">= 1"),
    "text of a classifier": ("/v1/completions", dict(model="classes", prompt="a"), None,
                             r"cannot generate: its checkpoint has no output layer \(lm_head\)"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused(client, name):
    path, body, param, message = REFUSED[name]
    answer = client.post(path, json=body)
    error = answer.json()["error"]
    assert answer.status_code in (400, 404) and error["param"] == param
    assert re.search(message, error["message"]), error
