"""An artifact's weights serve the checkpoint that they came from, in any file format, and no other."""

import ctypes
import json
import logging
import mmap
import os
import shutil
import sys

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    GPT2Config,
    GPT2LMHeadModel,
    MixtralConfig,
    MixtralForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

from transformers_neuronx.config import NeuronConfig, QuantizationConfig
from transformers_neuronx.engine import compile_cache as cache
from transformers_neuronx.engine.artifacts import open_artifact
from transformers_neuronx.engine.manifest import sealed
from transformers_neuronx.errors import ConfigError
from transformers_neuronx.gpt2.model import GPT2ForSampling
from transformers_neuronx.huggingface.auto import NeuronAutoModelForCausalLM
from transformers_neuronx.mixtral.model import MixtralForSampling
from transformers_neuronx.t5.model import T5ForSampling
from transformers_neuronx.weights.checkpoint import open_checkpoint, save_pretrained_split
from transformers_neuronx.weights.origin import NUMBERS, RUNS, mark, marks_in

pytestmark = pytest.mark.compiled_ahead

IDS = torch.tensor([[3, 1, 4, 1, 5]])
ALL = RUNS * NUMBERS  # the largest tensor that a mark covers whole


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """A checkpoint of numbers that bf16 can represent."""
    torch.manual_seed(0)
    sizes = {"n_layer": 2, "n_embd": 16, "n_head": 2, "n_positions": 16, "vocab_size": 41}
    model = GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0))
    directory = tmp_path_factory.mktemp("checkpoint")
    model.bfloat16().float().save_pretrained(directory)
    return directory


@pytest.fixture(scope="module")
def artifact(checkpoint, tmp_path_factory):
    """An artifact of the checkpoint, with weights, which tests must not change."""
    directory = tmp_path_factory.mktemp("artifact")
    made(checkpoint).save(directory, sharded_weights=True)
    return directory


@pytest.fixture
def other(checkpoint, tmp_path):
    """A checkpoint of the same shape in which one number differs."""
    return trained_further(checkpoint, tmp_path / "other", "transformer.h.1.mlp.c_fc.weight")


def made(directory, load=None, **options):
    model = NeuronAutoModelForCausalLM.from_pretrained(directory, **options)
    if load is not None:
        model.load(load)
    model.to_neuron()
    return model


@torch.no_grad()
def trained_further(checkpoint, directory, *names, auto=AutoModelForCausalLM):
    model = auto.from_pretrained(checkpoint, dtype=torch.float32)
    for name in names:
        model.get_parameter(name)[-1, -1] += 0.25
    model.save_pretrained(directory)
    return directory


@pytest.fixture
def said(caplog):
    """`said()`: the messages of the log; those that are logged once may come again."""
    caplog.set_level(logging.INFO, "transformers_neuronx.engine.artifacts")
    cache.warn_once.cache_clear()
    return lambda: [r.getMessage() for r in caplog.records if "weights" in r.getMessage()]


def test_weights_of_another_checkpoint_are_refused(artifact, checkpoint, other):
    model = GPT2ForSampling.from_pretrained(other)
    with pytest.raises(ConfigError) as caught:
        model.load(artifact)
    assert str(caught.value) == (
        f"load: the weights in {artifact} must be those of {other}, but 1 of 28 tensors differ: "
        f"h.1.mlp.c_fc.weight; save the artifact again from a model of that checkpoint, or load the artifact's own "
        f"weights with from_pretrained({str(artifact)!r})"
    )
    model.to_neuron()  # the model is unchanged
    assert model(IDS).equal(made(other)(IDS))
    assert not model(IDS).equal(made(checkpoint)(IDS))


def test_a_few_of_many_tensors_are_named(artifact, checkpoint, tmp_path):
    names = ["transformer.wte.weight", *(f"transformer.h.{n}.attn.c_proj.weight" for n in range(2))]
    model = GPT2ForSampling.from_pretrained(trained_further(checkpoint, tmp_path, *names))
    with pytest.raises(ConfigError, match=r"3 of 28 tensors differ: h\.\*\.attn\.c_proj\.weight \(2 layers\), wte"):
        model.load(artifact)


def in_shards(model, directory):
    model.save_pretrained(directory, max_shard_size="8KB")
    assert len(list(directory.glob("*.safetensors"))) > 3


def in_bf16(model, directory):
    model.bfloat16().save_pretrained(directory)


def of_the_bare_model(model, directory):
    model.transformer.save_pretrained(directory)
    assert "wte.weight" in load_file(directory / "model.safetensors")


def in_a_pickle(model, directory):
    model.config.save_pretrained(directory)
    torch.save(model.state_dict(), directory / "pytorch_model.bin")  # with the tied head next to the embedding


def in_a_pickle_with_other_strides(model, directory):
    model.config.save_pretrained(directory)
    state = {
        name: tensor.t().contiguous().t() if tensor.ndim == 2 else tensor for name, tensor in model.state_dict().items()
    }
    torch.save(state, directory / "pytorch_model.bin")


FORMATS = [in_shards, save_pretrained_split, in_a_pickle, in_a_pickle_with_other_strides, in_bf16, of_the_bare_model]


@pytest.mark.parametrize("write", FORMATS)
def test_the_same_checkpoint_in_other_files(write, artifact, checkpoint, tmp_path, said):
    model = GPT2LMHeadModel.from_pretrained(checkpoint, dtype=torch.float32)
    write_to(write, model, tmp_path / "same")
    same = made(tmp_path / "same", artifact)
    assert same(IDS).equal(made(checkpoint)(IDS)) and not said()
    # A change is detected there as well.
    with torch.no_grad():
        model.transformer.h[0].ln_2.weight[3] += 0.25
    write_to(write, model, tmp_path / "changed")
    with pytest.raises(ConfigError, match=r"1 of 28 tensors differ: h\.0\.ln_2\.weight;"):
        NeuronAutoModelForCausalLM.from_pretrained(tmp_path / "changed").load(artifact)


def write_to(write, model, directory):
    directory.mkdir()
    write(model, directory)


@pytest.mark.parametrize(
    ("amp", "degree", "quant"), [("f32", 2, None), ("bf16", 1, None), ("bf16", 2, "s8"), ("f32", 1, "s4")]
)
def test_however_the_weights_are_stored(amp, degree, quant, checkpoint, other, tmp_path):
    switches = NeuronConfig(quant=quant and QuantizationConfig(quant))
    options = dict(amp=amp, tp_degree=degree, neuron_config=switches)
    model = made(checkpoint, **options)
    model.save(tmp_path / "artifact", sharded_weights=True)
    assert made(shutil.copytree(checkpoint, tmp_path / "copy"), tmp_path / "artifact", **options)(IDS).equal(model(IDS))
    with pytest.raises(ConfigError, match=r"1 of 28 tensors differ: h\.1\.mlp\.c_fc\.weight;"):
        made(other, tmp_path / "artifact", **options)


@pytest.mark.parametrize("meanwhile", [True, False])
def test_weights_that_were_only_compiled_for(meanwhile, checkpoint, other, artifact, tmp_path):
    model = GPT2ForSampling.from_pretrained(checkpoint)
    model.cpu_compile(weights=meanwhile)
    model.save(tmp_path, sharded_weights=True)
    assert open_artifact(tmp_path).marks == open_artifact(artifact).marks
    with pytest.raises(ConfigError, match=r"differ: h\.1\.mlp\.c_fc\.weight;"):
        GPT2ForSampling.from_pretrained(other).load(tmp_path)


@pytest.mark.parametrize("tied", [True, False])
def test_a_model_with_an_encoder(tied, tmp_path):
    torch.manual_seed(0)
    sizes = dict(vocab_size=41, d_model=16, d_kv=8, d_ff=24, num_layers=3, num_decoder_layers=2, num_heads=2)
    config = T5Config(**sizes, tie_word_embeddings=tied, decoder_start_token_id=0)
    reference = T5ForConditionalGeneration(config)
    reference.save_pretrained(tmp_path / "a")
    (tmp_path / "same").mkdir()
    in_a_pickle(reference, tmp_path / "same")
    name = "encoder.block.2.layer.1.DenseReluDense.wo.weight"
    trained_further(tmp_path / "a", tmp_path / "b", name, auto=AutoModelForSeq2SeqLM)
    options = dict(n_positions=8, context_length_estimate=8)
    model = T5ForSampling.from_pretrained(tmp_path / "a", **options)
    model.cpu_compile()
    model.save(tmp_path / "artifact", sharded_weights=True)
    T5ForSampling.from_pretrained(tmp_path / "same", **options).load(tmp_path / "artifact")
    with pytest.raises(ConfigError, match=rf"differ: {name};"):
        T5ForSampling.from_pretrained(tmp_path / "b", **options).load(tmp_path / "artifact")


@torch.no_grad()
def test_tensors_under_other_names_are_left_out(tmp_path):
    """Experts are stored one by one in files, and stacked in Transformers' models."""
    torch.manual_seed(0)
    sizes = dict(hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2, vocab_size=41)
    reference = MixtralForCausalLM(MixtralConfig(**sizes, num_key_value_heads=1, num_local_experts=2))
    reference.save_pretrained(tmp_path / "a")
    options = dict(n_positions=8, context_length_estimate=4)
    model = MixtralForSampling.from_pretrained(tmp_path / "a", **options)
    model.cpu_compile()
    model.save(tmp_path / "artifact", sharded_weights=True)
    write_to(in_a_pickle, reference, tmp_path / "stacked")
    stacked = open_checkpoint(tmp_path / "stacked")
    assert "model.layers.0.mlp.experts.gate_up_proj" in stacked
    assert not stacked.names.issuperset(f"model.{name}" for name in open_artifact(tmp_path / "artifact").marks)
    MixtralForSampling.from_pretrained(tmp_path / "stacked", **options).load(tmp_path / "artifact")
    reference.model.layers[0].self_attn.v_proj.weight += 0.1
    write_to(in_a_pickle, reference, tmp_path / "changed")
    with pytest.raises(ConfigError, match=r"differ: layers\.0\.self_attn\.v_proj\.weight;"):
        MixtralForSampling.from_pretrained(tmp_path / "changed", **options).load(tmp_path / "artifact")


# Models without a checkpoint, and artifacts without marks.


def test_programs_are_anybodys(checkpoint, other, tmp_path, said):
    made(checkpoint).save(tmp_path / "programs")
    assert open_artifact(tmp_path / "programs").marks == {}
    own = made(other)(IDS)
    assert made(other, tmp_path / "programs")(IDS).equal(own)
    assert made(tmp_path / "programs", weights=other)(IDS).equal(own)
    assert not said()


def test_weights_beside_programs_are_compared_with_those_of_an_artifact(artifact, checkpoint, other, tmp_path):
    made(checkpoint).save(tmp_path / "programs")
    model = GPT2ForSampling.from_pretrained(tmp_path / "programs", weights=other)
    with pytest.raises(ConfigError, match=r"differ: h\.1\.mlp\.c_fc\.weight;"):
        model.load(artifact)


def test_artifacts_with_weights_are_compared_with_each_other(artifact, other, tmp_path, said):
    made(other).save(tmp_path / "others", sharded_weights=True)
    model = GPT2ForSampling.from_pretrained(artifact)
    with pytest.raises(ConfigError, match=rf"in {tmp_path}/others must be those of {artifact}, but 1 of 28 tensors"):
        model.load(tmp_path / "others")
    made(artifact).save(tmp_path / "again", sharded_weights=True)
    model.load(tmp_path / "again")
    assert not said()


@pytest.mark.parametrize("programs", [True, False])
def test_a_model_without_weights_says_whose_it_takes(programs, artifact, checkpoint, tmp_path, said):
    if programs:
        made(checkpoint).save(tmp_path)
        model = GPT2ForSampling.from_pretrained(tmp_path)
    else:
        model = GPT2ForSampling(json.loads((checkpoint / "config.json").read_text()))
    model.load(artifact)
    assert said() == [f"the model has no weights of its own, using those in {artifact}"]
    model.to_neuron()
    assert model(IDS).equal(made(checkpoint)(IDS)) and len(said()) == 1


def test_of_an_earlier_artifact_it_is_said_once_that_nothing_can_be_told(artifact, checkpoint, other, tmp_path, said):
    copy = shutil.copytree(artifact, tmp_path / "copy")
    manifest = json.loads((copy / "manifest.json").read_text())
    del manifest["origin"], manifest["sha256"]
    (copy / "manifest.json").write_bytes(sealed(manifest))
    for _ in range(2):
        assert made(other, copy)(IDS).equal(made(checkpoint)(IDS))
    assert said() == [
        f"using the weights in {copy} without checking that they are those of {other}, because the artifact has no "
        "marks of these tensors: save it again to add them"
    ]
    made(copy).save(copy, sharded_weights=True)  # an unknown origin stays unknown
    assert open_artifact(copy).marks == {}


# Changes that marks detect.


def test_a_small_tensor_is_seen_whole():
    tensor = torch.arange(ALL, dtype=torch.float32).reshape(128, -1)
    marks = {mark(tensor)}
    for position in range(0, ALL, 997):
        changed = tensor.clone()
        changed.view(-1)[position] += 0.5
        marks.add(mark(changed))
    assert len(marks) == 1 + len(range(0, ALL, 997))
    assert mark(tensor.reshape(64, -1)) not in marks


def test_runs_of_a_large_tensor_are_seen_from_its_first_number_to_its_last():
    tensor, seen = torch.zeros(10 * ALL), []
    whole = mark(tensor)
    for position in range(0, len(tensor), NUMBERS // 4):
        tensor[position] = 1
        seen.append(mark(tensor) != whole)
        tensor[position] = 0
    assert seen[0] and np.diff(seen).sum() == 2 * (RUNS - 1)
    assert sum(seen) == 4 * RUNS
    tensor[-1] = 1
    assert mark(tensor) != whole


def test_a_change_of_one_number_in_a_thousand_is_seen():
    """Most changes of training may be lost in rounding to bf16."""
    torch.manual_seed(0)
    tensor = torch.randn(4096, 512).bfloat16()
    changed = tensor.clone()
    changed[torch.rand(tensor.shape) < 1e-3] += 1
    assert mark(tensor) != mark(changed)


def test_an_adapter_that_was_merged_is_seen():
    torch.manual_seed(0)
    tensor = torch.randn(4096, 512).bfloat16()
    update = torch.randn(4096, 1) @ torch.randn(1, 512)  # of rank 1, and less than most numbers' rounding
    assert mark(tensor) != mark((tensor.float() + 1e-3 * update).bfloat16())


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float8_e4m3fn])
@pytest.mark.parametrize("sizes", [(), (0, 3), (7,), (300, 200)])
def test_numbers_are_alike_in_every_type_and_layout(dtype, sizes):
    torch.manual_seed(0)
    tensor = torch.randn(sizes).to(dtype)
    assert mark(tensor) == mark(tensor.float()) == mark(tensor.float().mT.contiguous().mT if len(sizes) > 1 else tensor)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs mincore, which shows the pages read")
def test_little_of_a_large_file_is_read(tmp_path):
    size = 64 * 2**20
    header = json.dumps({"w": {"dtype": "BF16", "shape": [size // 2], "data_offsets": [0, size]}}).encode()
    with open(tmp_path / "model.safetensors", "wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + size)
        os.fsync(file.fileno())
    checkpoint = open_checkpoint(tmp_path)
    before = resident(tmp_path / "model.safetensors")
    assert marks_in(checkpoint, ["w"], "") == {"w": mark(torch.zeros(size // 2))}
    read = resident(tmp_path / "model.safetensors") - before
    assert RUNS * NUMBERS * 2 <= read <= 3 * RUNS * mmap.PAGESIZE


def resident(path):
    """Return the bytes of a file that are in memory."""
    with open(path, "r+b") as file, mmap.mmap(file.fileno(), 0) as mapped:
        pages = np.zeros(-(-len(mapped) // mmap.PAGESIZE), np.uint8)
        lies = np.frombuffer(mapped, np.uint8)
        status = ctypes.CDLL(None).mincore(
            ctypes.c_void_p(lies.ctypes.data), ctypes.c_size_t(len(mapped)), ctypes.c_void_p(pages.ctypes.data)
        )
        del lies
        assert status == 0
        return int((pages & 1).sum()) * mmap.PAGESIZE
