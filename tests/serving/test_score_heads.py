"""Classifiers, reward models, rerankers and bare models: after the last norm comes a score head, or nothing."""

import json

import numpy as np
import pytest
import torch
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    Gemma2Config,
    GPT2Config,
    GPTJConfig,
    LlamaConfig,
    OPTConfig,
    Qwen2Config,
    Qwen3Config,
)

from transformers_neuronx import Engine, NeuronAutoModelForCausalLM, QuantizationConfig, SamplingParams
from transformers_neuronx.config import NeuronConfig
from transformers_neuronx.errors import CheckpointError, ConfigError, InputError
from transformers_neuronx.qwen3.model import Qwen3ForSampling
from transformers_neuronx.weights.checkpoint import checkpoint_of
from transformers_neuronx.weights.directories import load_pooling

LABELS, PAD = 3, 0
STEPS = dict(rows=2, step_tokens=8)
SIZES = dict(
    vocab_size=131, hidden_size=48, num_hidden_layers=2, num_attention_heads=6, max_position_embeddings=64,
    pad_token_id=PAD, num_labels=LABELS, tie_word_embeddings=False,
)  # fmt: skip
LLAMA = SIZES | dict(intermediate_size=72, num_key_value_heads=2)
CONFIGS = {
    "Qwen3": Qwen3Config(**LLAMA, head_dim=16),
    "LLaMA, a reward": LlamaConfig(**LLAMA | dict(num_labels=1)),
    "Qwen2, tied": Qwen2Config(**LLAMA | dict(tie_word_embeddings=True)),
    "GPT-2": GPT2Config(vocab_size=131, n_embd=48, n_head=6, n_layer=2, n_positions=64, pad_token_id=PAD, num_labels=2),
    "GPT-J, whose head has a bias": GPTJConfig(vocab_size=131, n_embd=48, n_head=6, n_layer=2, n_positions=64,
                                               rotary_dim=4, pad_token_id=PAD, num_labels=2),
    "OPT, narrower than its layers": OPTConfig(**SIZES | dict(tie_word_embeddings=True), ffn_dim=72,
                                               word_embed_proj_dim=24),
}  # fmt: skip
DRAW = np.random.default_rng(0)
ROWS = [DRAW.integers(1, 131, count).tolist() for count in (7, 40, 1, 21)]  # without padding


def random(config, kind=AutoModelForSequenceClassification):
    torch.manual_seed(0)
    model = kind.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight.copy_(torch.randn_like(weight) * 0.3 if weight.ndim > 1 else torch.rand_like(weight) + 0.5)
    return model


@torch.inference_mode()
def wanted(reference):
    """Its logits for all rows at once, with padding on the right."""
    width = max(map(len, ROWS))
    ids = torch.tensor([row + [PAD] * (width - len(row)) for row in ROWS])
    return reference(ids, attention_mask=(ids != PAD).long()).logits.numpy()


def opened(source, **options):
    model = NeuronAutoModelForCausalLM.from_pretrained(source, n_positions=[64], **options)
    model.to_neuron(ahead=False)
    return model


def classified(model):
    with Engine(model, **STEPS) as engine:
        handles = [engine.classify(row) for row in ROWS]
        assert [handle.result() for handle in handles] == [[]] * len(ROWS)
        return np.stack([handle.logits for handle in handles])


def check(got, want, tolerance=1e-5):
    assert got.shape == want.shape
    assert np.abs(got - want).max() <= tolerance * np.abs(want).max()


@pytest.mark.parametrize("degree", [1, pytest.param(3, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.few(2)
def test_logits_are_those_of_transformers(name, degree, tmp_path):
    reference = random(CONFIGS[name])
    reference.save_pretrained(tmp_path)
    check(classified(opened(tmp_path, tp_degree=degree)), wanted(reference))


@pytest.mark.compiled_ahead
def test_a_model_in_memory_and_in_an_artifact(tmp_path):
    reference = random(CONFIGS["Qwen3"])
    reference.config.id2label = {0: "bad", 1: "fair", 2: "good"}
    model = Qwen3ForSampling(reference.config, n_positions=[64], tp_degree=2)
    model.use_weights(checkpoint_of(reference))
    model.to_neuron(ahead=False)
    check(classified(model), wanted(reference))
    model.save(tmp_path / "artifact", sharded_weights=True)
    again = opened(tmp_path / "artifact")
    check(classified(again), wanted(reference))
    with Engine(again, **STEPS) as engine:
        assert engine.labels == ["bad", "fair", "good"]
        with pytest.raises(InputError, match="no output layer"):
            engine.submit(ROWS[0])


@pytest.mark.slow
def test_a_score_head_stays_whole_in_few_bits(tmp_path):
    reference = random(CONFIGS["Qwen3"])
    reference.save_pretrained(tmp_path)
    quant = QuantizationConfig("s8", quantize_head=True, quantize_embedding=True)
    model = opened(tmp_path, neuron_config=NeuronConfig(quant=quant))
    got, want = classified(model), wanted(reference)
    assert 1e-5 < np.abs(got - want).max() / np.abs(want).max() < 0.05
    assert torch.equal(torch.tensor(model.decoder.weights[None, "score"].shards()[0]), reference.score.weight)


@pytest.mark.parametrize("degree", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_a_bare_model_makes_vectors(degree, tmp_path):
    reference = random(CONFIGS["Qwen3"], AutoModel)
    reference.save_pretrained(tmp_path)
    model = opened(tmp_path, tp_degree=degree)
    with Engine(model, **STEPS) as engine, torch.inference_mode():
        for pooling in ("last", "mean", "cls"):
            for row in ROWS:
                handle = engine.embed(row, pooling)
                handle.result()
                hidden = reference(torch.tensor([row])).last_hidden_state[0].numpy()
                check(handle.embedding, dict(last=hidden[-1], cls=hidden[0], mean=hidden.mean(0))[pooling])
                assert len(handle.logits) == 0
        with pytest.raises(InputError, match=r"Qwen3ForSampling cannot classify: .* no score head \(score\.weight\)"):
            engine.classify(ROWS[0])


CALLS = {
    "generate": lambda model: model.sample([ROWS[0]], 20),
    "make logits": lambda model: model([ROWS[0]]),
    "score tokens": lambda model: model.score([ROWS[0]]),
}


@pytest.mark.parametrize("kind", [AutoModel, AutoModelForSequenceClassification])
def test_without_an_output_layer_nothing_is_generated(kind, tmp_path):
    random(CONFIGS["Qwen3"], kind).save_pretrained(tmp_path)
    model = opened(tmp_path)
    for what, call in CALLS.items():
        with pytest.raises(InputError, match=rf"^Qwen3ForSampling cannot {what}: .* no output layer \(lm_head\)"):
            call(model)
    with Engine(model, **STEPS) as engine, pytest.raises(InputError, match="cannot generate"):
        engine.submit(ROWS[0], SamplingParams(max_tokens=1))


def test_a_whole_model_that_lacks_its_output_layer_is_incomplete(tmp_path):
    reference = random(CONFIGS["Qwen3"], AutoModelForCausalLM)
    state = {name: tensor for name, tensor in reference.state_dict().items() if name != "lm_head.weight"}
    reference.save_pretrained(tmp_path, state_dict=state)
    with pytest.raises(CheckpointError, match=r"lacks lm_head\.weight$"):
        opened(tmp_path)


RERANKERS = {
    "Qwen3, yes and no": ("Qwen3", (96, 21)),
    "Qwen2, tied, only yes": ("Qwen2, tied", (96, None)),
    "OPT, narrower than its layers": ("OPT, narrower than its layers", (5, 130)),
}


def says_tokens(folder, yes, no):
    (folder / "1_LogitScore").mkdir(exist_ok=True)
    said = json.dumps(dict(true_token_id=yes, false_token_id=no))
    (folder / "1_LogitScore" / "config.json").write_text(said)


@pytest.mark.compiled_ahead
@pytest.mark.parametrize("name", RERANKERS)
@pytest.mark.few(1)
def test_a_reranker_scores_by_logits_of_tokens(name, tmp_path):
    config, (yes, no) = RERANKERS[name]
    reference = random(CONFIGS[config], AutoModelForCausalLM)
    reference.save_pretrained(tmp_path)
    says_tokens(tmp_path, yes, no)
    with torch.inference_mode():
        logits = torch.stack([reference(torch.tensor([row])).logits[0, -1] for row in ROWS])
    want = (logits[:, yes] - (0 if no is None else logits[:, no]))[:, None].numpy()
    model = opened(tmp_path, tp_degree=2)
    check(classified(model), want)
    with pytest.raises(InputError, match="cannot generate: it is a reranker"):
        model.sample([ROWS[0]], 20)
    model.save(tmp_path / "artifact")  # without weights
    check(classified(opened(tmp_path / "artifact", weights=tmp_path)), want)


@pytest.mark.parametrize(
    ("tokens", "config", "error", "message"),
    [
        ((96, 131), "Qwen3", ConfigError, "a score is by tokens from 0 to 130, got 131"),
        ((None, 21), "Qwen3", CheckpointError, r"config\.json: expected token ids true_token_id .* got None, 21"),
        ((1, 2), "GPT-J, whose head has a bias", ConfigError, r"only a matrix, got head\.bias"),
    ],
)  # fmt: skip
def test_tokens_that_make_no_score(tokens, config, error, message, tmp_path):
    random(CONFIGS[config], AutoModelForCausalLM).save_pretrained(tmp_path)
    says_tokens(tmp_path, *tokens)
    with pytest.raises(error, match=message):
        opened(tmp_path)


def test_scores_of_capped_logits_are_refused(tmp_path):
    config = Gemma2Config(**LLAMA | dict(tie_word_embeddings=True), head_dim=16)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    says_tokens(tmp_path, 3, None)
    with pytest.raises(ConfigError, match="only a matrix, got final_logit_softcapping"):
        opened(tmp_path)


def test_modules_of_sentence_transformers(tmp_path):
    def written(*kinds):
        modules = [dict(idx=n, name=str(n), path="", type=f"sentence_transformers.models.{kind}")
                   for n, kind in enumerate(kinds)]  # fmt: skip
        (tmp_path / "modules.json").write_text(json.dumps(modules))

    written("Transformer", "Pooling", "Normalize")
    assert load_pooling(tmp_path) == "last"
    written("Transformer", "LogitScore")
    assert load_pooling(tmp_path) == "last"
    written("Transformer", "Pooling", "Dense", "Normalize")
    with pytest.raises(CheckpointError, match=r"modules\.json: vectors need Dense: supported are Transformer, Pooling"):
        load_pooling(tmp_path)
    (tmp_path / "modules.json").write_text('{"a": 1}')
    with pytest.raises(CheckpointError, match=r"modules\.json: expected a list of modules with their types"):
        load_pooling(tmp_path)
