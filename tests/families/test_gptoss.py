"""gpt-oss against Transformers: sinks of every size, generation past a window, and experts in MXFP4."""

import json

import pytest
import torch
from codes_in_bytes import store_experts
from one_file import tiny
from parity import assert_close, continued, prompts, randomized
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, GptOssConfig
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from transformers_neuronx import NeuronAutoModelForCausalLM, NeuronConfig
from transformers_neuronx.errors import CheckpointError
from transformers_neuronx.weights.checkpoint import open_checkpoint
from transformers_neuronx.weights.packed import Packed

# Logits of sinks by which they take nearly all of the mass, some of it, and nearly none; and each head its own share.
SINKS = {"most": [12.0], "some": [2.0], "none": [-50.0], "each": [9.0, 4.0, 1.0, 0.0, -4.0, -50.0]}


def with_sinks(sinks, **changes):
    config = tiny("gpt_oss")
    config.update(changes)
    reference = randomized(config)
    with torch.no_grad():
        for layer in reference.model.layers:
            heads = len(layer.self_attn.sinks)
            layer.self_attn.sinks.copy_(torch.tensor(sinks).repeat(heads)[:heads])
    return reference


def loaded(directory, degree=1, **options):
    model = NeuronAutoModelForCausalLM.from_pretrained(
        directory, n_positions=48, context_length_estimate=32, tp_degree=degree, **options
    )
    model.to_neuron()
    return model


def logits(model, ids, more):
    """Return the logits after each token of a prompt, and of those that follow one by one."""
    mask = torch.ones(1, len(ids), dtype=torch.int64)
    found = [model.forward(torch.tensor([ids]), attention_mask=mask, output_all_logits=True)[0]]
    for token in more:
        mask = torch.cat([mask, torch.ones(1, 1, dtype=mask.dtype)], 1)
        found.append(model.forward(torch.tensor([[token]]), attention_mask=mask))
    return torch.cat(found)


@pytest.mark.parametrize("degree", [1, 3])
@pytest.mark.parametrize("sinks", SINKS)
@pytest.mark.few(2)
def test_sinks_of_every_size(sinks, degree, tmp_path):
    """A prompt, and tokens one by one, beyond the window of five."""
    reference = with_sinks(SINKS[sinks])
    reference.save_pretrained(tmp_path)
    [ids], more = prompts(131, [13]), [5, 6, 7]
    wanted = continued(reference, ids, more)
    assert (wanted - continued(with_sinks([0.0]), ids, more)).abs().max() > 1e-3 * wanted.abs().max()
    model = loaded(tmp_path, degree, neuron_config=NeuronConfig(tokens_per_dispatch=0))
    assert_close(logits(model, ids, more), wanted)


def test_greedy_tokens_past_the_window(tmp_path):
    reference = with_sinks(SINKS["each"])
    reference.save_pretrained(tmp_path)
    ids = torch.tensor(prompts(131, [13]))
    wanted = reference.generate(ids, max_new_tokens=20, do_sample=False, eos_token_id=None, pad_token_id=0)
    assert loaded(tmp_path, 2).sample(ids, 33, top_k=1, eos_token_override=-1).equal(wanted)


def test_positions_divided_over_devices(tmp_path):
    """Four devices share each of two key heads; one of them counts a sink."""
    reference = with_sinks(SINKS["each"], num_attention_heads=8)
    reference.save_pretrained(tmp_path)
    [ids], more = prompts(131, [13]), [5, 6]
    how = NeuronConfig(tokens_per_dispatch=0, shard_over_sequence=True)
    model = loaded(tmp_path, 8, neuron_config=how)
    assert_close(logits(model, ids, more), continued(reference, ids, more))


MXFP4 = dict(
    quant_method="mxfp4",
    modules_to_not_convert=["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"],
)


def in_mxfp4(directory, whole=()):
    """Write a checkpoint with experts in MXFP4, but for layers `whole`. Return Transformers' model with its numbers."""
    config = tiny("gpt_oss")
    config.update(dict(hidden_size=64, intermediate_size=96))
    reference = randomized(config)
    reference.save_pretrained(directory)
    reference = store_experts(reference, directory, whole)
    say_so(directory, whole)
    return reference


def say_so(directory, whole=()):
    kept = [f"model.layers.{layer}.mlp.experts" for layer in whole]
    how = MXFP4 | dict(modules_to_not_convert=[*MXFP4["modules_to_not_convert"], *kept])
    told = json.loads((directory / "config.json").read_text()) | dict(quantization_config=how)
    (directory / "config.json").write_text(json.dumps(told))


@pytest.mark.parametrize("degree", [1, 2, 3])
@pytest.mark.parametrize("whole", [(), (1,)], ids=["all layers", "the first layer"])
@pytest.mark.few(4)
def test_experts_in_mxfp4(whole, degree, tmp_path, monkeypatch):
    """Codes and scales reach the devices as they are: no matrix is made of them on the way."""
    reference = in_mxfp4(tmp_path, whole)
    monkeypatch.setattr(Packed, "numbers", property(lambda self: pytest.fail("a matrix of numbers was made")))
    model = loaded(tmp_path, degree, neuron_config=NeuronConfig(tokens_per_dispatch=0))
    plan = {"e2m1/32, bf16": [0, 1]} if not whole else {"e2m1/32, bf16": [0], "plain": [1]}
    assert model.options.quant.stored == {f"moe.{part}.weight": plan for part in ("gate", "up", "down")}
    [ids], more = prompts(131, [13]), [5, 6, 7]
    assert_close(logits(model, ids, more), continued(reference, ids, more))


def test_numbers_of_mxfp4_are_exactly_those_of_transformers(tmp_path):
    """Of all codes and exponents, also those whose numbers are subnormal."""
    reference = in_mxfp4(tmp_path)
    name = "model.layers.0.mlp.experts.down_proj"
    stored = load_file(tmp_path / "model.safetensors")
    exponents = torch.arange(253).to(torch.uint8)  # a number is at most 6 * 2^127, which f32 does not have
    stored[f"{name}_scales"].flatten()[:253] = exponents
    save_file(stored, tmp_path / "model.safetensors")
    wanted = convert_moe_packed_tensors(stored[f"{name}_blocks"], stored[f"{name}_scales"], dtype=torch.float32)
    assert wanted.isfinite().all() and wanted.shape == reference.get_parameter(name).shape
    with open_checkpoint(tmp_path) as checkpoint:
        for number, matrix in enumerate(wanted):
            own = name.replace("experts", f"experts.{number}")
            assert checkpoint.read(own).equal(matrix) and checkpoint.shape(own) == matrix.shape


def test_an_artifact_keeps_experts_in_mxfp4(tmp_path):
    reference = in_mxfp4(tmp_path / "checkpoint")
    loaded(tmp_path / "checkpoint").save(tmp_path / "artifact", sharded_weights=True)
    [ids] = prompts(131, [13])
    assert_close(logits(loaded(tmp_path / "artifact"), ids, []), continued(reference, ids, []))


@pytest.mark.parametrize(
    ("end", "change", "said"),
    [
        ("_scales", lambda part: part | 255, "expected exponents as scales, found NaN"),
        ("_scales", lambda part: part[:, 1:], "expected scales uint8[5, 64, 3], got uint8[5, 63, 3]"),
        ("_scales", None, "its scales are missing"),
        ("_blocks", lambda part: part[..., 1:], "expected values uint8[?, ?, ?, 16], got uint8[5, 64, 3, 15]"),
        ("_blocks", torch.Tensor.int, "expected values uint8[?, ?, ?, 16], got int32[5, 64, 3, 16]"),
    ],
)
def test_parts_of_mxfp4_that_do_not_fit_are_errors_that_name_them(end, change, said, tmp_path):
    in_mxfp4(tmp_path)
    stored, name = load_file(tmp_path / "model.safetensors"), "model.layers.1.mlp.experts.down_proj"
    part = stored.pop(f"{name}{end}")
    changed = {f"{name}{end}": change(part).contiguous()} if change else {}
    save_file(stored | changed, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError) as error:
        loaded(tmp_path)
    assert str(error.value).startswith(f"{tmp_path}: {name}: ") and said in str(error.value)


@pytest.mark.slow
def test_a_layer_at_its_true_size(tmp_path):
    """Of gpt-oss-20b, with a smaller vocabulary: past its window, and where positions are stretched.

    Weights are random, with the deviation that Transformers gives them, and so are experts, in MXFP4.
    """
    torch.manual_seed(0)
    config = GptOssConfig(num_hidden_layers=1, num_local_experts=32, vocab_size=2000)
    config.rope_parameters |= dict(original_max_position_embeddings=64)
    reference = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    for name, weight in reference.named_parameters():
        if name.endswith(("bias", "sinks")):
            weight.data.normal_(0, 0.5)
    reference.save_pretrained(tmp_path)
    reference = store_experts(reference, tmp_path, exponents=(118, 121))
    say_so(tmp_path)
    ids, more = prompts(config.vocab_size, [150, 3])
    wanted = continued(reference, ids, more)
    del reference
    for degree in (1, 2):
        model = NeuronAutoModelForCausalLM.from_pretrained(
            tmp_path, n_positions=256, context_length_estimate=160, tp_degree=degree,
            neuron_config=NeuronConfig(tokens_per_dispatch=0),
        )  # fmt: skip
        model.to_neuron()
        assert_close(logits(model, ids, more), wanted)
