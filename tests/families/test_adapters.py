"""LoRA adapters that are merged into weights while these are read."""

import json
import math
import os
from importlib.util import find_spec

import pytest
import torch
from parity import assert_close, randomized
from safetensors.torch import load_file, save_file
from test_every_family import tiny
from test_passed_through import expected, loaded, logits, published

from transformers_neuronx import Engine, NeuronAutoModelForCausalLM, SamplingParams
from transformers_neuronx.errors import CheckpointError, ConfigError

MATRICES = dict(
    llama=["model.layers.{}.self_attn.q_proj", "model.layers.{}.self_attn.o_proj", "model.layers.{}.mlp.down_proj"],
    gpt2=["transformer.h.{}.attn.c_attn", "transformer.h.{}.mlp.c_proj"],
    phi3=["model.layers.{}.self_attn.qkv_proj", "model.layers.{}.mlp.gate_up_proj"],
    bloom=["transformer.h.{}.self_attention.query_key_value"],
)
RANK, ALPHA = 4, 12
START = "base_model.model."


def write_adapter(directory, tensors, **config):
    directory.mkdir(exist_ok=True)
    save_file({f"{START}{name}": tensor.contiguous() for name, tensor in tensors.items()}, directory / SAVED)
    facts = dict(peft_type="LORA", r=RANK, lora_alpha=ALPHA) | config
    (directory / "adapter_config.json").write_text(json.dumps(facts))
    return directory


SAVED = "adapter_model.safetensors"


def drawn(reference, family):
    """Return an adapter's tensors: for each matrix [out, in], A and B."""
    generator, tensors = torch.Generator().manual_seed(1), {}
    for pattern in MATRICES[family]:
        for layer in range(reference.config.num_hidden_layers):
            name = pattern.format(layer)
            outputs, inputs = reference.get_parameter(f"{name}.weight").shape
            if family == "gpt2":
                outputs, inputs = inputs, outputs
            tensors[f"{name}.lora_A.weight"] = torch.randn(RANK, inputs, generator=generator) * 0.1
            tensors[f"{name}.lora_B.weight"] = torch.randn(outputs, RANK, generator=generator) * 0.1
    return tensors


@torch.no_grad()
def merged(reference, tensors, scale=lambda name: ALPHA / RANK, transposed=False):
    """Change the model of Transformers as an adapter does, and return it."""
    for name in [name for name in tensors if name.endswith(".lora_A.weight")]:
        module = name.removesuffix(".lora_A.weight")
        weight = reference.get_parameter(f"{module}.weight")
        matrix = (weight.T if transposed else weight).clone()
        matrix += scale(module) * tensors[f"{module}.lora_B.weight"] @ tensors[name]
        if (magnitude := tensors.get(f"{module}.lora_magnitude_vector")) is not None:
            matrix = magnitude[:, None] * matrix / matrix.norm(dim=1, keepdim=True)
        weight.copy_(matrix.T if transposed else matrix)
    return reference


def base(family, directory):
    reference = randomized(tiny(family))
    reference.save_pretrained(directory)
    return reference


def with_adapter(directory, adapter, **options):
    model = NeuronAutoModelForCausalLM.from_pretrained(
        directory, adapter=adapter, n_positions=32, context_length_estimate=16, **options
    )
    model.to_neuron()
    return model


@pytest.mark.parametrize("degree", [1, pytest.param(3, marks=pytest.mark.slow)])
@pytest.mark.parametrize("family", MATRICES)
def test_logits_are_those_of_the_sum(family, degree, tmp_path):
    reference = base(family, tmp_path / "base")
    tensors, transposed = drawn(reference, family), family == "gpt2"
    adapter = write_adapter(tmp_path / "adapter", tensors, fan_in_fan_out=transposed)
    before = expected(reference)
    wanted = expected(merged(reference, tensors, transposed=transposed))
    assert (before - wanted).abs().max() > 0.1 * wanted.abs().max(), "the adapter must change something"
    assert_close(logits(with_adapter(tmp_path / "base", adapter, tp_degree=degree)), wanted)
    assert_close(logits(loaded(tmp_path / "base")), before)


def test_scales_and_patterns(tmp_path):
    reference = base("llama", tmp_path / "base")
    tensors, patterns = drawn(reference, "llama"), {r"layers\.1\.self_attn\.q_proj": 2, "o_proj": 3}
    how = dict(use_rslora=True, alpha_pattern=patterns)

    def scale(module):
        alpha = 2 if "1.self_attn.q_proj" in module else 3 if "o_proj" in module else ALPHA
        return alpha / math.sqrt(RANK)

    model = with_adapter(tmp_path / "base", write_adapter(tmp_path / "adapter", tensors, **how))
    assert_close(logits(model), expected(merged(reference, tensors, scale)))


def test_magnitudes_embeddings_and_whole_weights(tmp_path):
    """DoRA, a change of the embedding, and a head of its own."""
    reference = base("llama", tmp_path / "base")
    tensors, generator = drawn(reference, "llama"), torch.Generator().manual_seed(2)
    for name in [name for name in tensors if name.endswith("lora_B.weight")]:
        magnitude = 0.5 + torch.rand(len(tensors[name]), generator=generator)
        tensors[name.replace("lora_B.weight", "lora_magnitude_vector")] = magnitude
    vocabulary, hidden = reference.get_input_embeddings().weight.shape
    a, b = torch.randn(RANK, vocabulary, generator=generator), torch.randn(hidden, RANK, generator=generator) * 0.1
    own = {"model.embed_tokens.lora_embedding_A": a, "model.embed_tokens.lora_embedding_B": b}
    own["lm_head.weight"] = torch.randn(vocabulary, hidden, generator=generator)
    model = with_adapter(tmp_path / "base", write_adapter(tmp_path / "adapter", tensors | own, use_dora=True))
    reference = merged(reference, tensors)
    with torch.no_grad():
        reference.model.embed_tokens.weight += ALPHA / RANK * (b @ a).T
        reference.lm_head.weight.copy_(own["lm_head.weight"])
    assert_close(logits(model), expected(reference))


def test_a_checkpoint_in_few_bits_keeps_what_does_not_change(tmp_path):
    reference = published(tmp_path / "base", "llama", "int8, groups of 8")
    tensors = {name: tensor for name, tensor in drawn(reference, "llama").items() if "down_proj" in name}
    model = with_adapter(tmp_path / "base", write_adapter(tmp_path / "adapter", tensors))
    wanted = expected(merged(reference, tensors))
    assert (logits(model) - wanted).abs().max() < 0.02 * wanted.abs().max(), "sums are rounded to 8 bits again"
    assert model.checkpoint.packed("model.layers.0.self_attn.q_proj.weight") is not None
    assert model.checkpoint.packed("model.layers.0.mlp.down_proj.weight") is None


def test_what_cannot_be_merged(tmp_path):
    reference = base("llama", tmp_path / "base")
    tensors = drawn(reference, "llama")
    name = "model.layers.0.self_attn.q_proj"

    def refused(changed, said, **config):
        with pytest.raises(CheckpointError, match=said):
            with_adapter(tmp_path / "base", write_adapter(tmp_path / "adapter", changed, **config))

    refused(tensors, r"expected an adapter of LoRA, got peft_type='IA3'", peft_type="IA3")
    one = {f"{name}.lora_A.weight": tensors[f"{name}.lora_A.weight"]}
    refused(one, r"model\.layers\.0\.self_attn\.q_proj has a alone")
    refused(
        tensors | {f"{name}.lora_B.bias": torch.zeros(4)}, r"q_proj\.lora_B\.bias' is a part of LoRA that cannot be"
    )
    refused(tensors | {"model.other.weight": torch.zeros(4)}, r"the adapter changes 'model\.other\.weight', which")
    narrow = {f"{name}.lora_A.weight": torch.zeros(RANK, 3)}
    refused(tensors | narrow, r"q_proj\.weight has sizes \[\d+, 3\], and the matrix")
    refused(tensors | {f"{name}.lora_A.weight": torch.zeros(3)}, r"expected \[rank, in\] and \[out, rank\] in")
    (tmp_path / "adapter" / SAVED).write_bytes(b"no tensors")
    with pytest.raises(CheckpointError, match="not a whole safetensors file"):
        with_adapter(tmp_path / "base", tmp_path / "adapter")
    os.unlink(tmp_path / "adapter" / SAVED)
    with pytest.raises(CheckpointError, match=SAVED):
        with_adapter(tmp_path / "base", tmp_path / "adapter")
    with pytest.raises(CheckpointError, match=r"found an adapter .*; load its model with from_pretrained\(…, adapter="):
        loaded(tmp_path / "adapter")
    for own, said in ((False, "needs weights=… for the adapter"), (True, "has its own weights, got others: ")):
        loaded(tmp_path / "base").save(tmp_path / "artifact", sharded_weights=own)
        with pytest.raises(ConfigError, match=said):
            with_adapter(tmp_path / "artifact", tmp_path / "adapter")


def test_an_artifact_takes_weights_with_an_adapter(tmp_path):
    reference = base("llama", tmp_path / "base")
    tensors = drawn(reference, "llama")
    adapter = write_adapter(tmp_path / "adapter", tensors)
    loaded(tmp_path / "base").save(tmp_path / "artifact")
    model = with_adapter(tmp_path / "artifact", adapter, weights=tmp_path / "base")
    assert_close(logits(model), expected(merged(reference, tensors)))


ALL = [(family, degree) for family in MATRICES for degree in (1, 3)]


@pytest.mark.parametrize(
    ("family", "degree"), [pytest.param(*each, marks=[pytest.mark.slow] * (each != ("llama", 1))) for each in ALL]
)
@pytest.mark.usefixtures("needs_pages")
def test_requests_choose_adapters(family, degree, tmp_path):
    """Logits of requests with an adapter are those of the sum, beside requests without it."""
    reference = base(family, tmp_path / "base")
    tensors, transposed = drawn(reference, family), family == "gpt2"
    adapter = write_adapter(tmp_path / "adapter", tensors, fan_in_fan_out=transposed)
    model = loaded(tmp_path / "base", degree)
    prompt = [3, 5, 7, 11, 13]
    with torch.no_grad():
        wanted = [each.log_softmax(-1)[0, :-1] for each in (
            reference(torch.tensor([prompt])).logits,
            merged(reference, tensors, transposed=transposed)(torch.tensor([prompt])).logits,
        )]  # fmt: skip
    with Engine(model, rows=2, step_tokens=16, max_loras=2, max_lora_rank=RANK + 1) as engine:
        engine.load_adapter("one", adapter)
        handles = [
            engine.submit(prompt, SamplingParams(max_tokens=1, prompt_logprobs=0, adapter=name))
            for name in (None, "one")
        ]
        for handle, right in zip(handles, wanted, strict=True):
            handle.result()
            got = [each[0] for each in handle.prompt_logprobs[1:]]
            assert_close(torch.tensor(got), right[range(len(got)), prompt[1:]])


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # peft calls it
@pytest.mark.parametrize("how", [dict(), dict(use_rslora=True), dict(use_dora=True), dict(alpha_pattern="")])
@pytest.mark.parametrize("family", ["llama", "gpt2", "qwen3"])
def test_logits_are_those_that_peft_merges(family, how, tmp_path):
    if find_spec("peft") is None:
        pytest.fail("peft is not installed; `make test-all` does that")
    from peft import LoraConfig, get_peft_model

    reference, matrices = base(family, tmp_path / "base"), ["c_attn", "c_proj"] if family == "gpt2" else ["q_proj"]
    how = dict(alpha_pattern={matrices[0]: 3}) if "alpha_pattern" in how else how
    options = dict(target_modules=matrices, init_lora_weights=False, fan_in_fan_out=family == "gpt2") | how
    torch.manual_seed(3)
    model = get_peft_model(reference, LoraConfig(r=RANK, lora_alpha=ALPHA, **options))
    model.save_pretrained(tmp_path / "adapter")
    assert any("lora_A" in name for name in load_file(tmp_path / "adapter" / SAVED))
    wanted = expected(model.merge_and_unload().eval())
    assert_close(logits(with_adapter(tmp_path / "base", tmp_path / "adapter")), wanted)
