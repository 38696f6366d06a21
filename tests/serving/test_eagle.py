"""EAGLE heads: draft tokens are those of the papers' equations, and tokens those without a head."""

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch.nn.functional import linear, rms_norm, scaled_dot_product_attention, silu
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Lfm2Config,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
)

from transformers_neuronx import (
    EagleDraft,
    Engine,
    LlamaForSampling,
    NeuronAutoModelForCausalLM,
    NeuronConfig,
    QuantizationConfig,
    SamplingParams,
)
from transformers_neuronx.errors import CheckpointError, ConfigError
from transformers_neuronx.gpt2.model import GPT2ForSampling
from transformers_neuronx.runtimes.xla import XlaRuntime
from transformers_neuronx.speculation import SpeculativeGenerator
from transformers_neuronx.speculation.fused import FusedSpeculativeDecoder

LONGEST, VOCAB, LAYERS, HIDDEN, GUESSES = 128, 97, 5, 64, 3
SIZES = dict(rows=4, step_tokens=16, joined_tokens=16, draft_tokens=GUESSES)  # of all engines, so they share programs
LAYER = dict(
    model_type="llama", intermediate_size=80, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2,
    head_dim=16, hidden_act="silu", rms_norm_eps=1e-5, rope_theta=10000.0, max_position_embeddings=LONGEST,
    vocab_size=VOCAB,
)  # fmt: skip
TARGET = dict(
    hidden_size=HIDDEN, intermediate_size=96, num_hidden_layers=LAYERS, num_attention_heads=4, num_key_value_heads=2,
    vocab_size=VOCAB, max_position_embeddings=LONGEST, bos_token_id=1, eos_token_id=2, pad_token_id=0,
)  # fmt: skip


@dataclass
class Head:
    """A head with random weights, as its files have it, and what it drafts, computed in PyTorch."""

    h: int = HIDDEN
    drafted: int = VOCAB
    own_embedding: bool = False
    normed_residual: bool = False
    norm_features: bool = False
    bias: bool = False
    block: str = "midlayer."
    nested: bool = False
    depths: tuple = ()

    def __post_init__(self):
        torch.manual_seed(self.h + self.drafted)
        h, inner = self.h, LAYER["intermediate_size"]
        sizes = {
            "fc": (h, 3 * HIDDEN), self.block + "self_attn.q_proj": (64, 2 * h),
            self.block + "self_attn.k_proj": (32, 2 * h), self.block + "self_attn.v_proj": (32, 2 * h),
            self.block + "self_attn.o_proj": (h, 64), self.block + "mlp.gate_proj": (inner, h),
            self.block + "mlp.up_proj": (inner, h), self.block + "mlp.down_proj": (h, inner),
            "lm_head": (self.drafted, h),
        }  # fmt: skip
        norms = [self.block + name for name in ("input_layernorm", "hidden_norm", "post_attention_layernorm")]
        self.weights = {f"{name}.weight": torch.randn(size) * size[1] ** -0.5 for name, size in sizes.items()}
        self.weights |= {f"{name}.weight": 1 + 0.2 * torch.randn(h) for name in [*norms, "norm"]}
        if self.norm_features:
            self.weights["input_norm.weight"] = 1 + 0.2 * torch.randn(3 * HIDDEN)
        if self.bias:
            biased = [name for name in sizes if "self_attn" in name]
            self.weights |= {f"{name}.bias": 0.2 * torch.randn(sizes[name][0]) for name in biased}
        if self.own_embedding:
            self.weights["embed_tokens.weight"] = torch.randn(VOCAB, h)
        self.ids = torch.arange(VOCAB)
        if self.drafted < VOCAB:
            self.ids = torch.randperm(VOCAB)[: self.drafted].sort().values
            self.weights["d2t"] = self.ids - torch.arange(self.drafted)
            self.weights["t2d"] = torch.isin(torch.arange(VOCAB), self.ids)

    def save(self, directory):
        own = dict(draft_vocab_size=self.drafted, target_hidden_size=HIDDEN, norm_before_fc=self.norm_features)
        if self.depths:
            own["eagle_aux_hidden_state_layer_ids"] = list(self.depths)
        layer = LAYER | dict(hidden_size=self.h, attention_bias=self.bias)
        if self.nested:  # as the library speculators has it, where the norm before the residual is the default
            own |= dict(speculators_model_type="eagle3", transformer_layer_config=layer)
            own |= {} if self.normed_residual else dict(norm_before_residual=False)
        else:
            own |= layer | dict(norm_before_residual=self.normed_residual)
        directory.mkdir()
        (directory / "config.json").write_text(json.dumps(own))
        save_file(self.weights, directory / "model.safetensors")
        return directory

    def drafts(self, target, tokens, count):
        """Return what is drafted after tokens, greedily."""
        with torch.no_grad():
            hidden = target(torch.tensor([tokens[:-1]]), output_hidden_states=True).hidden_states
            depths = self.depths or (2, LAYERS // 2, LAYERS - 3)
            hidden = torch.cat([hidden[depth][0] for depth in depths], -1)
            if self.norm_features:
                hidden = self.normed("input_norm", hidden)
            features, found = linear(hidden, self.weights["fc.weight"]), []
            embedding = self.weights.get("embed_tokens.weight", target.model.embed_tokens.weight)
            for _ in range(count):
                ids = torch.tensor([*tokens[1:], *found])
                last = self.layer(embedding[ids], features)[-1]
                found.append(int(self.ids[linear(self.normed("norm", last), self.weights["lm_head.weight"]).argmax()]))
                features = torch.cat([features, last[None]])
        return found

    def normed(self, name, x):
        return rms_norm(x, x.shape[-1:], self.weights[f"{name}.weight"], LAYER["rms_norm_eps"])

    def linear(self, name, x):
        weights = self.weights
        return linear(x, weights[f"{self.block}{name}.weight"], weights.get(f"{self.block}{name}.bias"))

    def layer(self, embedded, features):
        normed = self.normed(self.block + "hidden_norm", features)
        x = torch.cat([self.normed(self.block + "input_layernorm", embedded), normed], -1)
        return self.fed(self.attended(x) + (normed if self.normed_residual else features))

    def attended(self, x):
        q, k, v = (self.linear(f"self_attn.{p}_proj", x).view(len(x), -1, 16).transpose(0, 1) for p in "qkv")
        y = scaled_dot_product_attention(turned(q), turned(k), v, is_causal=True, enable_gqa=True)
        return self.linear("self_attn.o_proj", y.transpose(0, 1).flatten(1))

    def fed(self, x):
        y = self.normed(self.block + "post_attention_layernorm", x)
        return x + self.linear("mlp.down_proj", silu(self.linear("mlp.gate_proj", y)) * self.linear("mlp.up_proj", y))


@dataclass
class First(Head):
    """A head of the first EAGLE, which predicts the hidden states that the target's head is applied to."""

    block: str = "layers.0."
    own_head: bool = False

    def __post_init__(self):
        torch.manual_seed(1)
        h, inner, block = HIDDEN, LAYER["intermediate_size"], self.block
        sizes = {
            "fc": (h, 2 * h), block + "self_attn.q_proj": (64, h), block + "self_attn.k_proj": (32, h),
            block + "self_attn.v_proj": (32, h), block + "self_attn.o_proj": (h, 64),
            block + "mlp.gate_proj": (inner, h), block + "mlp.up_proj": (inner, h), block + "mlp.down_proj": (h, inner),
        }  # fmt: skip
        sizes |= {"lm_head": (VOCAB, h)} if self.own_head else {}
        self.weights = {f"{name}.weight": torch.randn(size) * size[1] ** -0.5 for name, size in sizes.items()}
        self.weights[block + "post_attention_layernorm.weight"] = 1 + 0.2 * torch.randn(h)
        if self.bias:
            biased = ["fc", *(f"{block}self_attn.{part}_proj" for part in "qkv")]
            self.weights |= {f"{name}.bias": 0.2 * torch.randn(sizes[name][0]) for name in biased}
        if self.own_embedding:
            self.weights["embed_tokens.weight"] = torch.randn(VOCAB, h)

    def save(self, directory):
        directory.mkdir()
        own = dict(architectures=["LlamaForCausalLM"], hidden_size=HIDDEN, qkv_bias=self.bias)
        (directory / "config.json").write_text(json.dumps(LAYER | own))
        save_file(self.weights, directory / "model.safetensors")
        return directory

    def drafts(self, target, tokens, count):
        with torch.no_grad():
            features, found = target.model(torch.tensor([tokens[:-1]])).last_hidden_state[0], []
            embedding = self.weights.get("embed_tokens.weight", target.model.embed_tokens.weight)
            head = self.weights.get("lm_head.weight", target.lm_head.weight)
            for _ in range(count):
                both = torch.cat([embedding[torch.tensor([*tokens[1:], *found])], features], -1)
                x = linear(both, self.weights["fc.weight"], self.weights.get("fc.bias"))
                last = self.fed(x + self.attended(x))[-1]
                found.append(int(linear(last, head).argmax()))
                features = torch.cat([features, last[None]])
        return found


def turned(x):
    angles = torch.arange(x.shape[1])[:, None] * LAYER["rope_theta"] ** -(torch.arange(0, 16, 2) / 16)
    cos, sin = angles.cos().repeat(1, 2), angles.sin().repeat(1, 2)
    low, high = x.chunk(2, -1)
    return x * cos + torch.cat([-high, low], -1) * sin


HEADS = {
    "plain": Head(),
    "some tokens": Head(drafted=41, depths=(1, 2, 4), block="layers.0."),
    "own size": Head(h=48, drafted=50, own_embedding=True, normed_residual=True, norm_features=True, bias=True),
    "nested": Head(normed_residual=True, nested=True, block="model.layers.0."),
    "the first EAGLE": First(),
    "the first EAGLE, with its own": First(own_embedding=True, own_head=True, bias=True, block="model.layers.0."),
}


@pytest.fixture(scope="module")
def reference():
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**TARGET)).eval()
    for weight in model.parameters():
        weight.data.normal_(0, 0.15) if weight.ndim > 1 else None
    return model


@pytest.fixture(scope="module")
def checkpoint(reference, tmp_path_factory):
    directory = tmp_path_factory.mktemp("target")
    reference.save_pretrained(directory)
    return directory


@pytest.fixture(scope="module", params=[1, 2])
def model(checkpoint, request):
    model = LlamaForSampling.from_pretrained(checkpoint, n_positions=LONGEST, tp_degree=request.param)
    model.to_neuron(ahead=False)
    return model


def request(number):
    """A prompt, sometimes one that begins like others, and parameters of all kinds."""
    draw = np.random.default_rng(number % 5)
    kinds = [
        dict(temperature=0),
        dict(seed=number, temperature=0.7),
        dict(seed=number, top_k=20, logprobs=2),
        dict(temperature=0, repetition_penalty=1.2),
        dict(temperature=0, logit_bias={5: 5.0}),
    ]
    params = SamplingParams(max_tokens=6 + number % 12, ignore_eos=True, **kinds[number % 5])
    return [*draw.integers(0, VOCAB, 40 + number % 5 * 9).tolist(), number], params


def answers(engine, count=20):
    handles = [engine.submit(*request(number)) for number in range(count)]
    return [(handle.result(), handle.logprobs) for handle in handles]


@pytest.mark.parametrize("kind", HEADS)
@pytest.mark.few(6)
def test_drafts_are_those_of_the_head(kind, model, reference, tmp_path):
    head = HEADS[kind]
    draft, seen = EagleDraft.from_pretrained(head.save(tmp_path / "head")), []
    with Engine(model, **SIZES, draft=draft, adjustments=False) as engine:
        guess = engine._loop.guesser.guess

        def noted(works):
            found = guess(works)
            seen.extend(([*work.request.tokens], drafts) for work, drafts in zip(works, found, strict=True))
            return found

        engine._loop.guesser.guess = noted
        prompts = [request(number)[0] for number in range(6)]
        params = SamplingParams(max_tokens=10, temperature=0, ignore_eos=True)
        for handle in [engine.submit(prompt, params) for prompt in prompts]:
            handle.result()
    assert len(seen) > 30 and sum(len(drafts) for _, drafts in seen) > 60
    for tokens, drafts in seen:
        assert drafts == head.drafts(reference, tokens, len(drafts))


@pytest.mark.compiled_ahead
@pytest.mark.parametrize(("kind", "cache_tokens"), [("some tokens", None), ("the first EAGLE", LONGEST)])
@pytest.mark.few(2)
def test_tokens_and_logprobs_are_those_without(kind, cache_tokens, model, tmp_path):
    draft = EagleDraft.from_pretrained(HEADS[kind].save(tmp_path / "head"))
    with Engine(model, **SIZES) as engine:
        wanted = answers(engine)
    with Engine(model, **SIZES, cache_tokens=cache_tokens, draft=draft) as engine:
        before = len(model.decoder.store.stored)
        got = answers(engine)
        assert before == len(model.decoder.store.stored), "nothing compiles"
        assert engine.scheduler.cache.unused
    assert got == wanted


OTHERS = {
    "windows": (Gemma2Config, dict(head_dim=16, sliding_window=32, query_pre_attn_scalar=16)),
    "states": (Lfm2Config, dict(full_attn_idxs=[2, 4])),
    "experts": (MixtralConfig, dict(num_local_experts=4, num_experts_per_tok=2)),
    "s8": (LlamaConfig, dict()),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", OTHERS)
def test_models_of_all_kinds(kind, tmp_path):
    torch.manual_seed(0)
    (config, more), quant = OTHERS[kind], QuantizationConfig() if kind == "s8" else None
    AutoModelForCausalLM.from_config(config(**TARGET, **more)).save_pretrained(tmp_path / "target")
    switches = NeuronConfig(quant=quant)
    model = NeuronAutoModelForCausalLM.from_pretrained(
        str(tmp_path / "target"), n_positions=LONGEST, amp="bf16", neuron_config=switches
    )
    model.to_neuron(ahead=False)
    with Engine(model, **SIZES) as engine:
        wanted = answers(engine)
    for name in ("some tokens", "the first EAGLE"):
        draft = EagleDraft.from_pretrained(HEADS[name].save(tmp_path / name))
        with Engine(model, **SIZES, draft=draft) as engine:
            assert [tokens for tokens, _ in answers(engine)] == [tokens for tokens, _ in wanted]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(target_hidden_size=32), "is for a model of hidden size 32 and 97 tokens, and .* has 64 and 97"),
        (dict(vocab_size=96), "is for a model of hidden size 64 and 96 tokens"),
        (dict(eagle_aux_hidden_state_layer_ids=[1, 2, 5]), r"reads layers \[1, 2, 5\], and .* has 5"),
        (dict(num_hidden_layers=2), "num_hidden_layers=2; supported: 1"),
        (dict(norm_output=True), "norm_output=True; supported: False"),
        (dict(eagle_config=dict(use_aux_hidden_state=False)), "use_aux_hidden_state=False; supported: True"),
    ],
)
def test_heads_that_do_not_fit(change, message, model, tmp_path):
    directory = HEADS["plain"].save(tmp_path / "head")
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | change))
    with pytest.raises(ConfigError, match=message):
        Engine(model, **SIZES, draft=EagleDraft.from_pretrained(directory))


def test_a_head_without_a_weight(model, tmp_path):
    directory = HEADS["plain"].save(tmp_path / "head")
    weights = dict(HEADS["plain"].weights)
    del weights["midlayer.mlp.up_proj.weight"]
    save_file(weights, directory / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"lacks model\.layers\.0\.mlp\.up_proj\.weight"):
        Engine(model, **SIZES, draft=EagleDraft.from_pretrained(directory))


TINY_KJV = Path(__file__).parents[2] / "examples" / "tiny-kjv"
OPTIONS = [dict(top_k=1), dict(seed=1), dict(top_k=1, repetition_penalty=1.3)]


@pytest.fixture(scope="module")
def trained():
    model = GPT2ForSampling.from_pretrained(TINY_KJV, n_positions=[64, 128], batch_size=3)
    model.to_neuron()
    return model


@pytest.fixture(scope="module")
def eagle():
    return EagleDraft.from_pretrained(TINY_KJV.with_name("tiny-kjv-eagle"))


@pytest.fixture(scope="module")
def speculative(eagle, trained):
    return SpeculativeGenerator(eagle, trained, 4)


@pytest.mark.compiled_ahead
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_calls_with_a_head(options, speculative, trained, monkeypatch):
    """Twice, as slots are used again; rows of different lengths; fewer steps than tokens."""
    steps, start = [], speculative._head_calls._steps.start
    monkeypatch.setattr(speculative._head_calls._steps, "start", lambda packed: steps.append(1) or start(packed))
    ids = torch.tensor([[0, 0, 302, 392, 342], [65, 66, 67, 68, 69]])
    options = options | dict(attention_mask=torch.tensor([[0, 0, 1, 1, 1], [1] * 5]), eos_token_override=-1)
    want = trained.sample(ids, 100, **options)
    before = len(trained.decoder.store.stored)
    for _ in range(2):
        steps.clear()
        assert torch.equal(speculative.sample(ids, 100, **options), want)
        assert len(steps) < 80
    assert before == len(trained.decoder.store.stored), "nothing compiles"


def test_a_head_follows_what_calls_feed(reference, checkpoint, tmp_path):
    """Draft tokens are those of the equations also after a prompt of several steps."""
    model = LlamaForSampling.from_pretrained(checkpoint, n_positions=LONGEST, context_length_estimate=16)
    draft, seen = EagleDraft.from_pretrained(HEADS["plain"].save(tmp_path / "head")), []
    speculative = SpeculativeGenerator(draft, model, GUESSES)
    model.to_neuron(ahead=False)
    speculative.to_neuron()
    guesser = speculative._head_calls._guesser
    guess = guesser.guess

    def noted(works):
        found = guess(works)
        seen.extend(([*work.request.tokens], drafts) for work, drafts in zip(works, found, strict=True))
        return found

    guesser.guess = noted
    prompt, _ = request(3)
    got = speculative.sample([prompt], len(prompt) + 20, top_k=1, eos_token_id=-1)
    assert torch.equal(got, model.sample([prompt], len(prompt) + 20, top_k=1, eos_token_override=-1))
    assert sum(len(drafts) for _, drafts in seen) > 20
    for tokens, drafts in seen:
        assert drafts == HEADS["plain"].drafts(reference, tokens, len(drafts))
    model.to_neuron(ahead=False)  # which may give it another decoder
    assert torch.equal(got, speculative.sample([prompt], len(prompt) + 20, top_k=1, eos_token_id=-1))


def test_the_name_of_the_original(eagle, trained):
    from transformers_neuronx.eagle_speculation import EagleSpeculativeDecoder

    want = trained.sample([[302, 392, 342]], 60, top_k=1, eos_token_override=5)
    decoder = EagleSpeculativeDecoder(eagle, trained, token_tree={0: [1, 2], 1: [3, 4], 3: [5]}, eos_token_id=5)
    assert decoder.k == 3 and torch.equal(decoder.sample([[302, 392, 342]], 60, top_k=1), want)
    for tree in ({}, {1: [2]}, {0: []}):
        with pytest.raises(ConfigError, match="token_tree must"):
            EagleSpeculativeDecoder(eagle, trained, token_tree=tree)
    with pytest.raises(ConfigError, match="draft must be an EAGLE head"):
        EagleSpeculativeDecoder(trained, trained)
    with pytest.raises(ConfigError, match="draft must be a model, got"):
        FusedSpeculativeDecoder(eagle, trained)


def test_calls_over_slots_have_no_head(eagle, monkeypatch):
    monkeypatch.setattr(XlaRuntime, "pages", False)
    model = GPT2ForSampling.from_pretrained(TINY_KJV, n_positions=64)
    model.to_neuron(ahead=False)
    with pytest.raises(ConfigError, match="a draft head needs a decoder whose slots are over pages"):
        SpeculativeGenerator(eagle, model)
