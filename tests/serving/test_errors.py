"""Bad input raises a typed error that names it, and the model serves the next call."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from transformers_neuronx.config import MOST_DEVICES, Buckets, CompileOptions, NeuronConfig
from transformers_neuronx.errors import CheckpointError, ConfigError, EngineError, InputError
from transformers_neuronx.gpt2.model import GPT2ForSampling
from transformers_neuronx.neuron.targets import TARGETS
from transformers_neuronx.runtimes import xla_clients

TINY_KJV = Path(__file__).parents[2] / "examples" / "tiny-kjv"
PROMPT = torch.tensor([[5, 6, 7], [8, 9, 10]])


@pytest.fixture(scope="module")
def model():
    model = GPT2ForSampling.from_pretrained(TINY_KJV, n_positions=32, batch_size=2, context_length_estimate=16)
    model.to_neuron()
    return model


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda m: m(torch.zeros(2, 33, dtype=int)), r"n_positions=32 is the longest .* got 33 tokens"),
        (lambda m: m(torch.zeros(1, 0, dtype=int)), r"prompt is empty: .* got \[1, 0\]"),
        (lambda m: m(torch.zeros(0, 3, dtype=int)), r"prompt is empty: .* got \[0, 3\]"),
        (lambda m: m(PROMPT, attention_mask=[[1, 1, 1], [0, 0, 0]]), "prompt is empty: row 1 has only padding"),
        (lambda m: m(PROMPT, start_ids=[0, 3]), "prompt is empty: row 1 has only padding"),
        (lambda m: m(torch.tensor([[5, 1023]])), r"ids from 0 to 1022, got 1023 in row 0"),
        (lambda m: m(torch.tensor([[5, 6], [-1, 6]])), r"ids from 0 to 1022, got -1 in row 1"),
        (lambda m: m(torch.zeros(3, 2, dtype=int)), r"batch_size=2 .* got 3"),
        (lambda m: m(torch.tensor([5, 6])), r"input_ids must be integers in 2 dimensions, got int64\[2\]"),
        (lambda m: m(torch.tensor([[0.5]])), r"input_ids must be integers in 2 dimensions, got float32\[1, 1\]"),
        (lambda m: m(PROMPT, cache_ids=[0, 2, 3]), r"cache_ids must be consecutive columns for 3 tokens"),
        (lambda m: m(PROMPT, cache_ids=[0, 1]), r"of shape \[3\] or \[2, 3\], got \[0, 1\]"),
        (lambda m: m(PROMPT, cache_ids=[30, 31, 32]), r"n_positions=32 is the longest .* got 33 tokens"),
        (lambda m: m(PROMPT, start_ids=[0]), r"start_ids must be the padding columns of each of 2 rows, got \[0\]"),
        (lambda m: m(PROMPT, attention_mask=[[1, 1]]), r"must be \[2, 3 or more\], for all columns, got \[1, 2\]"),
        (lambda m: m(PROMPT, attention_mask=PROMPT, start_ids=[0, 0]), "and so do start_ids .*: pass one or"),
        (lambda m: m(PROMPT, attention_mask=PROMPT, cache_ids=[0, 1, 2]), "and so do start_ids .*: pass one or"),
        (lambda m: m.sample(PROMPT, 3), "sequence_length must be more than the 3 columns of the prompt, got 3"),
        (lambda m: m.sample(PROMPT, 2), "sequence_length must be more than the 3 columns of the prompt, got 2"),
        (lambda m: m.sample(PROMPT, 33), "sequence_length=33 needs 33"),
        (lambda m: m.sample(PROMPT, 9, top_k=-1), "top_k must be a whole number of at least 1, or 0 .*, got -1"),
        (lambda m: m.sample(PROMPT, 9, top_p=1.5), r"top_p must be in \(0, 1\], got 1.5"),
        (
            lambda m: m.sample(PROMPT, 9, temperature=0),
            r"temperature must be above 0 .* got 0",
        ),
    ],
)
def test_bad_input_is_refused_and_the_model_stays_usable(model, call, message):
    before = model(PROMPT)
    with pytest.raises(InputError, match=message):
        call(model)
    assert torch.equal(model(PROMPT), before)


def test_a_program_that_fails_leaves_the_model_usable(model, monkeypatch):
    before = model(PROMPT)

    def fail(*tensors):
        raise KeyboardInterrupt

    for shape, [(piece, _)] in list(model.decoder.store._built.items()):
        monkeypatch.setitem(model.decoder.store._built, shape, [(piece, fail)])
    with pytest.raises(KeyboardInterrupt):
        model(PROMPT)
    monkeypatch.undo()
    assert torch.equal(model(PROMPT), before)


def test_a_nan_in_the_cache_does_not_reach_the_next_sequence(model):
    before = model(PROMPT)
    decoder = model.decoder
    poison = np.full(decoder.programs.cache.of_layers[0].arrays[0].sizes, np.nan, np.float32)
    decoder.caches[:] = [decoder.runtime.put([poison]) for _ in decoder.caches]
    assert model(PROMPT, cache_ids=[3, 4, 5]).isnan().all()
    assert torch.equal(model(PROMPT), before)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(n_positions=513), "n_positions=513 is more than the 512 the model was trained with"),
        (dict(n_positions=[]), "n_positions must be one or more positive sizes"),
        (dict(context_length_estimate=600), r"from 1 to n_positions=512, got \[600\]"),
        (dict(amp="f64"), "amp must be one of f32, bf16, f16, got 'f64'"),
        (dict(batch_size=0), "batch_size must be a positive number, got 0"),
        (dict(tp_degree=-1), "tp_degree must be from 1 to 64, .*, got -1"),
        (dict(tp_degree=1000), "tp_degree must be from 1 to 64, the number of devices of .*, got 1000"),
        (dict(unroll=0), "unroll must be a positive number, got 0"),
        (dict(batch_size=3, prompt_batch_size=2), "batch_size must be a multiple of prompt_batch_size=2, got 3"),
    ],
)
def test_options_are_checked_when_given(options, message):
    with pytest.raises(ConfigError, match=message):
        GPT2ForSampling.from_pretrained(TINY_KJV, **options)


def test_no_instance_has_more_devices_than_a_model_may_be_split_over():
    degrees = [degree for target in TARGETS.values() for degree in target.degrees]
    assert max(degrees) == MOST_DEVICES
    assert replace(CompileOptions(Buckets((8,), ())), tp_degree=MOST_DEVICES).tp_degree == MOST_DEVICES


def test_an_unknown_runtime_is_named():
    model = GPT2ForSampling.from_pretrained(TINY_KJV, neuron_config=NeuronConfig(runtime="tpu"))
    with pytest.raises(ConfigError, match="runtime must be one of cpu, cuda, neuron, got 'tpu'"):
        model.to_neuron()


def test_calling_before_to_neuron_says_so():
    with pytest.raises(ConfigError, match=r"not on a device yet: call to_neuron\(\) first"):
        GPT2ForSampling.from_pretrained(TINY_KJV).forward(PROMPT[:1])


def test_more_devices_than_there_are(monkeypatch):
    monkeypatch.setattr(xla_clients, "_cuda_client", lambda: xla_clients._cpu_client(1))
    model = GPT2ForSampling.from_pretrained(TINY_KJV, tp_degree=4, neuron_config=NeuronConfig(runtime="cuda"))
    with pytest.raises(EngineError, match="tp_degree=4 needs that many devices, but cuda has 1"):
        model.to_neuron()


def test_a_jaxlib_outside_the_window_is_refused(monkeypatch):
    monkeypatch.setattr(xla_clients.metadata, "version", lambda package: "0.14.1")
    xla_clients.jaxlib.cache_clear()
    try:
        with pytest.raises(EngineError, match=r"at least 0\.10\.2 and below 0\.13, got 0\.14\.1: pip install"):
            xla_clients.jaxlib()
    finally:
        xla_clients.jaxlib.cache_clear()


# Checkpoints that do not fit.


@pytest.fixture
def directory(tmp_path):
    return Path(shutil.copytree(TINY_KJV, tmp_path / "model"))


def change_tensors(directory, change):
    tensors = load_file(directory / "model.safetensors")
    change(tensors)
    save_file(tensors, directory / "model.safetensors")


def change_config(directory, **attributes):
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | attributes))


def drop_biases(tensors):
    for layer in range(6):
        del tensors[f"transformer.h.{layer}.ln_1.bias"]


def test_a_missing_tensor_is_named(directory):
    change_tensors(directory, lambda tensors: tensors.pop("transformer.wpe.weight"))
    with pytest.raises(CheckpointError, match=r"does not fit the model: lacks transformer\.wpe\.weight$"):
        GPT2ForSampling.from_pretrained(directory).to_neuron()


def test_a_tensor_missing_in_every_layer_is_named_once(directory):
    change_tensors(directory, drop_biases)
    with pytest.raises(CheckpointError, match=r"lacks transformer\.h\.\*\.ln_1\.bias \(6 layers\)$"):
        GPT2ForSampling.from_pretrained(directory).to_neuron()


def test_a_tensor_left_over_is_named(directory):
    change_tensors(directory, lambda tensors: tensors.update({"transformer.h.0.adapter.weight": torch.zeros(2)}))
    with pytest.raises(CheckpointError, match=r"has unexpected transformer\.h\.0\.adapter\.weight$"):
        GPT2ForSampling.from_pretrained(directory).to_neuron()


def test_a_tensor_of_the_wrong_shape_is_named(directory):
    change_tensors(directory, lambda tensors: tensors.update({"transformer.wpe.weight": torch.zeros(512, 64)}))
    wanted = r"wrong shape for transformer\.wpe\.weight \[512, 64\] \(for positions \[512, 128\]\)"
    with pytest.raises(CheckpointError, match=wanted):
        GPT2ForSampling.from_pretrained(directory).to_neuron()


def test_a_truncated_file_is_named(directory):
    file = directory / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match=r"model\.safetensors"):
        GPT2ForSampling.from_pretrained(directory)


def test_an_index_that_points_outside_is_refused(directory):
    tensors = load_file(directory / "model.safetensors")
    (directory / "model.safetensors").rename(directory.parent / "stolen.safetensors")
    index = {"weight_map": dict.fromkeys(tensors, "../stolen.safetensors")}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=r"\.\./stolen\.safetensors"):
        GPT2ForSampling.from_pretrained(directory)


@pytest.mark.parametrize(
    ("attributes", "message"),
    [
        (dict(add_cross_attention=True), "add_cross_attention=True; supported: False"),
        (dict(activation_function="mish"), "activation_function='mish'; supported: 'gelu'"),
        (dict(rope_theta=10000.0), r"attributes that are not supported: rope_theta=10000\.0"),
        (dict(quantization_config={"bits": 4}), r"is quantized \(an unnamed format, 4 bits\), and"),
        (dict(n_embd=None), "gpt2 configuration: Validation error for field 'n_embd'"),
    ],
)
def test_an_attribute_that_changes_the_maths_is_refused(directory, attributes, message):
    change_config(directory, **attributes)
    with pytest.raises(ConfigError, match=message):
        GPT2ForSampling.from_pretrained(directory)


def test_what_cannot_be_printed_is_shown_by_its_number():
    assert str(CheckpointError("no tensor \ud800 in it")).encode() == b"no tensor \\ud800 in it"
