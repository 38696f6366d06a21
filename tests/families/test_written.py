"""Checkpoints that `quantize` writes: their numbers reach the devices exactly, and other programs read them."""

import json
from importlib.util import find_spec

import pytest
import torch
from parity import DECODERS, assert_close, prompts, randomized
from safetensors import safe_open
from safetensors.torch import load_file
from test_every_family import tiny
from test_passed_through import expected, loaded, logits
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM, CompressedTensorsConfig

from transformers_neuronx.errors import CheckpointError, ConfigError, StorageError
from transformers_neuronx.weights.quantizing import quantize, scheme_named

SCHEMES = {
    "W8A16": (scheme_named("W8A16"), "s8"),
    "W4A16": (scheme_named("W4A16", 8), "s4"),
    "W4A16_ASYM": (scheme_named("W4A16_ASYM", 8), "s4"),
    "FP8A16": (scheme_named("FP8A16"), "f8e4m3fn"),
}
WINDOWS = prompts(131, [24] * 4)
EXPERTS = ("mixtral",)  # Transformers stacks its experts
STACKS = ("llama4text",)  # so does the checkpoint, and there they stay as they are
READ_BY_TRANSFORMERS = [  # it refuses GPT-2, whose linear modules are its own, and zeros of experts
    (family, scheme)
    for family in ("llama", "qwen3", "opt", "gemma2", "phi3", "mixtral")
    for scheme in SCHEMES
    if (family, scheme) != ("mixtral", "W4A16_ASYM")
]


def saved(family, directory, **options):
    reference = randomized(tiny(family))
    reference.save_pretrained(directory, **options)
    return reference


def numbers(directory, transposed):
    """Read a checkpoint in fewer bits: the tensors it had before, as numbers. Matrices of GPT-2 are [in, out]."""
    stored = load_file(directory / "model.safetensors")
    found = {
        name: tensor for name, tensor in stored.items() if ".weight_" not in name and f"{name}_scale" not in stored
    }
    for name, scales in stored.items():
        if not name.endswith("_scale"):
            continue
        weight, scales = name.removesuffix("_scale"), scales.float()
        if weight in stored:
            values = stored[weight].float()
            found[weight] = values * (scales.T if transposed else scales)
            continue
        outputs, inputs = stored[f"{weight}_shape"].tolist()
        bits = 32 * stored[f"{weight}_packed"].shape[1] // inputs
        values = unpacked(stored[f"{weight}_packed"], bits)[:, :inputs]
        zeros = torch.full_like(scales, 1 << (bits - 1))
        if f"{weight}_zero_point" in stored:
            zeros = unpacked(stored[f"{weight}_zero_point"].T, bits)[:, :outputs].T
        each = inputs // scales.shape[1]
        matrix = (values - zeros.repeat_interleave(each, 1)) * scales.repeat_interleave(each, 1)
        found[weight] = matrix.T if transposed else matrix
    return found


def unpacked(words, bits):
    return ((words[..., None] >> torch.arange(0, 32, bits)) & ((1 << bits) - 1)).flatten(-2).float()


def dequantized(reference, directory):
    """Return the model of Transformers with a written checkpoint's numbers."""
    found = numbers(directory, reference.config.model_type == "gpt2")
    if "wte.weight" in found:  # the bare model
        found = {f"transformer.{name}": tensor for name, tensor in found.items()}
    found = {name: tensor.float() for name, tensor in found.items()}
    changed = type(reference).from_pretrained(None, config=reference.config, state_dict=found, dtype=torch.float32)
    if reference.config.model_type in EXPERTS:  # in f32, Transformers is 1.5e-5 from f64 itself, and we 6e-6
        changed.set_experts_implementation("eager")  # the others have no f64
        changed = changed.double()
    return changed.eval()


@pytest.mark.parametrize("windows", [[], WINDOWS], ids=["nearest", "GPTQ"])
@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("family", DECODERS)
@pytest.mark.few(14)
def test_logits_are_those_of_the_numbers(family, scheme, windows, tmp_path):
    reference = saved(family, tmp_path / "whole")
    if family in EXPERTS and windows:
        with pytest.raises(CheckpointError, match="can only be rounded to nearest: leave the calibration out"):
            quantize(tmp_path / "whole", tmp_path / "few", SCHEMES[scheme][0], windows=windows)
        return
    written = quantize(tmp_path / "whole", tmp_path / "few", SCHEMES[scheme][0], windows=windows)
    assert written.bytes < written.bytes_before / 2 or family in STACKS
    model = loaded(tmp_path / "few")
    assert model.options.quant.quant_dtype == SCHEMES[scheme][1]
    changed = dequantized(reference, tmp_path / "few")
    assert_close(logits(model), expected(changed))
    assert not torch.allclose(expected(changed).float(), expected(reference), rtol=0, atol=1e-4)


@pytest.mark.parametrize("degree", [2, 3])
@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("family", ["gpt2", "qwen3"])
@pytest.mark.few(4)
def test_over_several_devices(family, scheme, degree, tmp_path):
    reference = saved(family, tmp_path / "whole")
    quantize(tmp_path / "whole", tmp_path / "few", SCHEMES[scheme][0])
    assert_close(logits(loaded(tmp_path / "few", degree)), expected(dequantized(reference, tmp_path / "few")))


@pytest.mark.parametrize("family", ["gpt2", "llama", "gemma2"])
def test_matrices_compensate_for_the_layers_before_them(family, tmp_path):
    """On the text of the calibration, hidden states are nearer to the model's than after rounding to nearest."""
    reference = saved(family, tmp_path / "whole")
    ids = torch.tensor(prompts(131, [24] * 16))
    off = []
    with torch.inference_mode():
        wanted = reference(ids, output_hidden_states=True).hidden_states[-1]
        for number, windows in enumerate(([], ids.tolist())):
            quantize(tmp_path / "whole", tmp_path / str(number), SCHEMES["W4A16"][0], windows=windows)
            found = dequantized(reference, tmp_path / str(number))
            off.append((found(ids, output_hidden_states=True).hidden_states[-1] - wanted).square().mean())
    assert off[1] < 0.8 * off[0]


def test_what_is_not_a_matrix_of_a_layer_stays_as_it_is(tmp_path):
    reference = saved("mixtral", tmp_path / "whole", max_shard_size="40KB")
    ignored = ["re:.*layers[.]0[.]self_attn[.]k_proj$", "model.layers.1.self_attn"]
    whole, few = tmp_path / "whole", tmp_path / "few"
    quantize(whole, few, SCHEMES["W4A16"][0], ignore=ignored, shard_bytes=40_000)
    before, after = {}, {}
    for directory, found in ((whole, before), (few, after)):
        index = json.loads((directory / "model.safetensors.index.json").read_text())
        for name, file in index["weight_map"].items():
            with safe_open(directory / file, framework="pt") as opened:
                found[name] = opened.get_tensor(name)
    files = sorted(file.name for file in few.glob("*.safetensors"))
    assert files == [f"model-{number:05}-of-{len(files):05}.safetensors" for number in range(1, len(files) + 1)]
    assert len(files) > 1 and {*index["weight_map"].values()} == {*files}
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in after.values())
    same = {name for name in before.keys() & after.keys() if before[name].equal(after[name])}
    assert same == before.keys() & after.keys() and all("weight_" in name for name in after.keys() - same)
    modules = {name.removesuffix(".weight_packed") for name in after if name.endswith("_packed")}
    assert len(modules) == 3 + 2 * 3 * reference.config.num_local_experts
    assert {f"{name}.weight" for name in modules} == before.keys() - same
    told = json.loads((few / "config.json").read_text())["quantization_config"]
    assert {"lm_head", "model.layers.1.self_attn.q_proj", "model.layers.0.block_sparse_moe.gate"} <= {*told["ignore"]}
    assert modules.isdisjoint(told["ignore"])


@pytest.mark.parametrize("windows", [[], WINDOWS], ids=["nearest", "GPTQ"])
def test_scales_are_in_the_type_of_the_model_and_names_as_they_were(windows, tmp_path):
    """A bare checkpoint of GPT-2 lacks the prefix, as the first published ones."""
    reference = randomized(tiny("gpt2"))
    reference.transformer.to(torch.bfloat16).save_pretrained(tmp_path / "whole")
    quantize(tmp_path / "whole", tmp_path / "few", SCHEMES["W4A16"][0], windows=windows)
    stored = load_file(tmp_path / "few" / "model.safetensors")
    assert stored["h.0.attn.c_attn.weight_scale"].dtype is torch.bfloat16 and "wte.weight" in stored
    assert_close(logits(loaded(tmp_path / "few")), expected(dequantized(reference, tmp_path / "few")))


@pytest.mark.parametrize("when", ["reading", "writing", "Ctrl-C"])
def test_nothing_stays_of_what_was_not_finished(when, tmp_path, monkeypatch):
    saved("llama", tmp_path / "whole")
    error = KeyboardInterrupt if when == "Ctrl-C" else OSError(28, "No space left on device")
    where = "copy_beside" if when == "writing" else "rounded"

    def fails(*_):
        raise error

    monkeypatch.setattr(f"transformers_neuronx.weights.quantizing.{where}", fails)
    with pytest.raises(KeyboardInterrupt if when == "Ctrl-C" else StorageError):
        quantize(tmp_path / "whole", tmp_path / "a" / "few", "W8A16")
    assert [path.name for path in tmp_path.iterdir()] == ["whole"]


def refused(said, error, *arguments, **options):
    with pytest.raises(error, match=said):
        quantize(*arguments, **options)


def test_what_cannot_be_quantized_is_refused(tmp_path):
    saved("llama", whole := tmp_path / "whole")
    few = tmp_path / "few"
    refused(r"inputs, which are no whole groups of 128; choose a group size that", ConfigError, whole, few, "W4A16")
    refused("no matrix is left to quantize: ignore fewer", ConfigError, whole, few, "W8A16", ignore=["model"])
    refused("windows must be of equal length", ConfigError, whole, few, "W8A16", windows=[[1, 2], [3]])
    assert not few.exists()
    quantize(whole, few, "W8A16")
    refused("expected a new or an empty directory, found files in it", ConfigError, whole, few, "W8A16")
    refused(r"few: is quantized already \(compressed-tensors\)", CheckpointError, few, tmp_path / "fewer", "W8A16")
    reference = AutoModelForSeq2SeqLM.from_config(tiny("t5"))
    reference.save_pretrained(tmp_path / "t5")
    refused("t5: not a decoder that Transformers knows", CheckpointError, tmp_path / "t5", tmp_path / "o", "W8A16")


@pytest.mark.filterwarnings("ignore")  # of compressed-tensors
@pytest.mark.parametrize(("family", "scheme"), READ_BY_TRANSFORMERS)
@pytest.mark.slow
def test_transformers_reads_them_with_compressed_tensors(family, scheme, tmp_path):
    if find_spec("compressed_tensors") is None:
        pytest.fail("compressed-tensors is not installed; `make test-all` does that, or pip install -e '.[test-all]'")
    saved(family, tmp_path / "whole")
    quantize(tmp_path / "whole", tmp_path / "few", SCHEMES[scheme][0], windows=[] if family in EXPERTS else WINDOWS)
    # without this, it takes zeros that are packed for damaged
    how = CompressedTensorsConfig(dequantize=True) if scheme == "W4A16_ASYM" else None
    more = dict(quantization_config=how) if how else {}
    reference = AutoModelForCausalLM.from_pretrained(tmp_path / "few", dtype=torch.float32, **more).eval()
    assert_close(logits(loaded(tmp_path / "few")), expected(reference))
