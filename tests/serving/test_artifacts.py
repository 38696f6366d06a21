"""Artifacts load as saved and without a compiler; errors list differences and name damaged files."""

import json
import logging
import os
import pkgutil
import resource
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
import torch
from safetensors.torch import load_file
from saves import fails_at, snapshot
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from transformers_neuronx import Engine, SamplingParams, gpt2
from transformers_neuronx.config import Completed, NeuronConfig, QuantizationConfig
from transformers_neuronx.engine.artifacts import open_artifact
from transformers_neuronx.engine.manifest import sealed
from transformers_neuronx.engine.store import ProgramStore
from transformers_neuronx.errors import CheckpointError, ConfigError
from transformers_neuronx.gpt2.model import GPT2ForSampling
from transformers_neuronx.huggingface.auto import NeuronAutoModelForCausalLM
from transformers_neuronx.llama.model import LlamaForSampling
from transformers_neuronx.runtimes.xla import XlaRuntime
from transformers_neuronx.speculation.drafts import SpeculativeGenerator
from transformers_neuronx.weights.checkpoint import open_checkpoint

pytestmark = pytest.mark.compiled_ahead

IDS = torch.tensor([[3, 1, 4, 1, 5]])
PROGRAMS = 5  # steps of one token and of a prompt, logits of all its tokens, copies of pages, sampling


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    torch.manual_seed(0)
    sizes = {"n_layer": 2, "n_embd": 16, "n_head": 2, "n_positions": 16, "vocab_size": 41}
    model = GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0))
    directory = tmp_path_factory.mktemp("checkpoint")
    model.save_pretrained(directory)
    return directory


@pytest.fixture(scope="module")
def model(checkpoint):
    return made(checkpoint)


@pytest.fixture(scope="module")
def artifact(model, tmp_path_factory):
    """An artifact with weights, which tests must not change."""
    directory = tmp_path_factory.mktemp("saved") / "artifact"
    model.save(directory, sharded_weights=True)
    return directory


@pytest.fixture
def copy(artifact, tmp_path):
    return Path(shutil.copytree(artifact, tmp_path / "copy"))


def made(directory, load=None, **options):
    model = NeuronAutoModelForCausalLM.from_pretrained(directory, **options)
    if load is not None:
        model.load(load)
    model.to_neuron()
    return model


@pytest.fixture
def no_compiler(monkeypatch):
    def refuse(self, module):
        raise AssertionError(f"{module.name} is compiled")

    monkeypatch.setattr(XlaRuntime, "compile", refuse)
    monkeypatch.setenv("NEURONX_CACHE", "off")


@pytest.fixture
def modules_written(monkeypatch):
    """Names of the modules that are written; an artifact made by this code needs none."""
    written = []
    write = ProgramStore.written
    monkeypatch.setattr(ProgramStore, "written", lambda self, key, part: written.append(key) or write(self, key, part))
    return written


# Loads sys.argv[1] with the options of sys.argv[2], without a compiler, modules or Transformers.
ELSEWHERE = """
import json, os, sys
import torch
from transformers_neuronx.huggingface.auto import NeuronAutoModelForCausalLM
from transformers_neuronx.engine.store import ProgramStore
from transformers_neuronx.runtimes import get_runtime
from transformers_neuronx.runtimes.xla import XlaRuntime
directory, options = sys.argv[1], json.loads(sys.argv[2])
get_runtime("cpu", options["tp_degree"])
XlaRuntime.compile = ProgramStore.written = None
os.environ["NEURONX_CACHE"] = "off"
model = NeuronAutoModelForCausalLM.from_pretrained(directory)
model.to_neuron()
assert model.options.tp_degree == options["tp_degree"] and model.options.amp == options["amp"]
ids = torch.tensor([[3, 1, 4, 1, 5]])
torch.save((model(ids), model.sample(ids, 16, top_k=5, seed=3)), sys.argv[3])
assert "transformers" not in sys.modules
"""


@pytest.mark.parametrize("options", [{"tp_degree": 1, "amp": "f32"}, {"tp_degree": 2, "amp": "bf16"}], ids=str)
def test_a_new_process_computes_the_same_bits_without_compiler_and_checkpoint(options, checkpoint, tmp_path):
    moved = Path(shutil.copytree(checkpoint, tmp_path / "checkpoint"))
    model = made(moved, **options)
    logits, tokens = model(IDS), model.sample(IDS, 16, top_k=5, seed=3)
    model.save(tmp_path / "artifact", sharded_weights=True)
    shutil.rmtree(moved)
    command = [sys.executable, "-c", ELSEWHERE, str(tmp_path / "artifact"), json.dumps(options), str(tmp_path / "out")]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert ran.returncode == 0, ran.stderr
    loaded_logits, loaded_tokens = torch.load(tmp_path / "out")
    assert loaded_logits.equal(logits) and loaded_tokens.equal(tokens)


def test_programs_of_groups_of_layers(checkpoint, tmp_path, request):
    model = made(checkpoint, unroll=1, context_unroll=1)
    model.save(tmp_path, sharded_weights=True)
    request.getfixturevalue("no_compiler")
    assert made(tmp_path)(IDS).equal(model(IDS))


def test_programs_alone_take_the_weights_of_the_checkpoint(model, checkpoint, tmp_path, no_compiler):
    model._save_compiled_artifacts(tmp_path / "programs")
    assert not list((tmp_path / "programs").glob("weights-*"))
    loaded = GPT2ForSampling.from_pretrained(checkpoint)
    loaded._load_compiled_artifacts(tmp_path / "programs")
    loaded.to_neuron()
    assert loaded(IDS).equal(model(IDS))
    with pytest.raises(ConfigError, match="has no weights: create it with from_pretrained"):
        made(tmp_path / "programs")


@pytest.mark.parametrize("amp", ["f32", "bf16", "f16"])
@pytest.mark.parametrize("degree", [1, 2, 3])
def test_weights_of_every_type_and_degree(amp, degree, checkpoint, tmp_path):
    model = made(checkpoint, amp=amp, tp_degree=degree)
    model.save(tmp_path, sharded_weights=True)
    again = made(tmp_path)
    check_same_weights(model, again)
    assert again(IDS).equal(model(IDS))


@pytest.mark.parametrize("quant_dtype", ["s8", "f8e4m3fn", "s4"])
@pytest.mark.few(1)
def test_weights_in_fewer_bits(quant_dtype, checkpoint, tmp_path):
    config = NeuronConfig(quant=QuantizationConfig(quant_dtype=quant_dtype))
    model = made(checkpoint, tp_degree=2, neuron_config=config)
    model.save(tmp_path, sharded_weights=True)
    again = made(tmp_path)
    check_same_weights(model, again)
    assert again(IDS).equal(model(IDS))
    stored = {tensor.dtype for file in tmp_path.glob("weights-layer*") for tensor in load_file(file).values()}
    values = {"s8": [torch.int8], "f8e4m3fn": [torch.float8_e4m3fn], "s4": [torch.uint8, torch.bfloat16]}
    assert stored == {torch.float32, *values[quant_dtype]}
    with pytest.raises(ConfigError, match=rf"quant: saved .*{quant_dtype}.*, expected None"):
        made(tmp_path, neuron_config=NeuronConfig())


@pytest.mark.parametrize("saved", [True, False])
@pytest.mark.parametrize("quant_dtype", [None, "s8", "s4"])
@pytest.mark.few(2)
def test_weights_are_laid_out_as_the_runtime_wants_them(quant_dtype, saved, checkpoint, tmp_path, monkeypatch):
    quant = quant_dtype and QuantizationConfig(quant_dtype, quantize_head=True, group_size=8)
    options = dict(tp_degree=2, neuron_config=NeuronConfig(quant=quant))
    monkeypatch.setattr(XlaRuntime, "panels", saved)
    made(checkpoint, **options).save(tmp_path, sharded_weights=True)
    monkeypatch.setattr(XlaRuntime, "panels", not saved)
    model, again = made(checkpoint, **options), made(tmp_path)
    assert model.decoder.programs.panels != saved
    check_same_weights(model, again)
    assert again(IDS).equal(model(IDS))


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="needs /proc, which lists mapped files")
def test_weights_are_used_as_they_lie_in_their_files(checkpoint, tmp_path):
    made(checkpoint).save(tmp_path, sharded_weights=True)
    again = made(tmp_path)
    maps = Path("/proc/self/maps").read_text().splitlines()
    mapped = {Path(line.split()[-1]).name for line in maps if str(tmp_path) in line}
    assert mapped == {file.name for file in tmp_path.glob("weights-*")}
    assert again.decoder.weights


def check_same_weights(one, other):
    assert one.decoder.weights.keys() == other.decoder.weights.keys()
    for key, tensor in one.decoder.weights.items():
        for mine, its in zip(tensor.shards(), other.decoder.weights[key].shards(), strict=True):
            assert mine.dtype == its.dtype and mine.shape == its.shape and mine.tobytes() == its.tobytes()


def test_weights_are_saved_layer_by_layer_and_tied_ones_once(checkpoint, tmp_path):
    model = made(checkpoint, tp_degree=2)
    model.save(tmp_path, sharded_weights=True)
    held = {file.name: set(load_file(file)) for file in tmp_path.glob("weights-*")}
    assert held.keys() == {
        "weights-shared.safetensors",
        "weights-layer-0000.safetensors",
        "weights-layer-0001.safetensors",
    }
    # Weights that are split over the devices, equal on both, and tied to the head.
    assert held["weights-shared.safetensors"] >= {"embed@0", "embed@1", "positions@0"}
    assert not held["weights-shared.safetensors"] & {"positions@1", "head.weight@0"}
    assert all(name.startswith("layer.1.") for name in held["weights-layer-0001.safetensors"])
    again = made(tmp_path)
    assert again.decoder.weights[None, "embed"] is again.decoder.weights[None, "head.weight"]


def test_what_was_compiled_on_the_way_is_saved_and_what_is_missing_is_compiled(checkpoint, tmp_path, monkeypatch):
    model = made(checkpoint, batch_size=2)
    model.save(tmp_path / "planned")
    prompts = IDS.repeat(2, 1)
    model.forward(prompts, output_all_logits=True)
    model.reorder_cache([1, 0])
    guessed = SpeculativeGenerator(None, model, k=2).sample(prompts, 16, top_k=1)
    model.save(tmp_path / "all")
    programs = open_artifact(tmp_path / "all").manifest["programs"]
    names = {program["hlo"].partition("-")[2].partition("_")[0].partition("-")[0] for program in programs.values()}
    assert names == {"step", "logits", "copy", "sample"}
    compiled = []
    compile_module = XlaRuntime.compile
    monkeypatch.setattr(
        XlaRuntime, "compile", lambda self, module: compiled.append(module.name) or compile_module(self, module)
    )
    monkeypatch.setenv("NEURONX_CACHE", "off")
    verifying = {f"step_tokens{n}_sequences2_samples{n}" for n in (4, 6)}
    for directory, wanted in (("all", set()), ("planned", verifying)):
        loaded = made(checkpoint, tmp_path / directory, batch_size=2)
        assert not compiled
        loaded.forward(prompts, output_all_logits=True)
        loaded.reorder_cache([1, 0])
        assert SpeculativeGenerator(None, loaded, k=2).sample(prompts, 16, top_k=1).equal(guessed)
        assert set(compiled) == wanted


def test_programs_of_an_engine_are_saved_too(checkpoint, tmp_path, monkeypatch):
    def answer(model):
        with Engine(model, rows=2, step_tokens=8) as engine:
            params = SamplingParams(max_tokens=6, temperature=0, frequency_penalty=0.5, logprobs=1)
            handle = engine.submit(IDS[0].tolist(), params)
            return handle.result(), handle.logprobs

    model = made(checkpoint)
    wanted = answer(model)
    model.save(tmp_path / "artifact")
    loaded = made(checkpoint, tmp_path / "artifact")
    compiled = []
    monkeypatch.setattr(XlaRuntime, "compile", lambda self, module: compiled.append(module.name))
    monkeypatch.setenv("NEURONX_CACHE", "off")
    assert answer(loaded) == wanted and not compiled


def test_what_was_loaded_can_be_saved(artifact, tmp_path, no_compiler):
    first = made(artifact)
    first.save(tmp_path / "again", sharded_weights=True)
    again = made(tmp_path / "again")
    assert again(IDS).equal(first(IDS))
    assert open_artifact(tmp_path / "again").manifest == open_artifact(artifact).manifest


# Artifacts that do not fit the model.


def test_every_difference_is_listed(artifact, tmp_path):
    torch.manual_seed(0)
    sizes = {"n_layer": 1, "n_embd": 32, "n_head": 2, "n_positions": 16, "vocab_size": 41}
    GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0)).save_pretrained(tmp_path)
    other = GPT2ForSampling.from_pretrained(
        tmp_path,
        amp="bf16",
        tp_degree=2,
        n_positions=8,
        batch_size=3,
        neuron_config=NeuronConfig(tokens_per_dispatch=4),
    )
    with pytest.raises(ConfigError) as caught:
        other.load(artifact)
    assert str(caught.value) == (
        f"the artifact {artifact} was saved from another model or with other options: "
        "config.hidden_size: saved 16, expected 32; config.inner_size: saved 64, expected 128; "
        "config.n_layer: saved 2, expected 1; amp: saved f32, expected bf16; batch_size: saved 1, expected 3; "
        "buckets.context: saved [8], expected [4]; buckets.positions: saved [16], expected [8]; "
        "chunk: saved 32, expected 4; prompt_batch_size: saved 1, expected 3; tp_degree: saved 1, expected 2"
    )


def test_another_family(artifact, tmp_path):
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    LlamaForCausalLM(LlamaConfig(**sizes, vocab_size=41)).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="family: saved gpt2, expected llama"):
        LlamaForSampling.from_pretrained(tmp_path).load(artifact)


def test_how_many_are_compiled_at_once_makes_no_difference(artifact, no_compiler):
    made(artifact, neuron_config=NeuronConfig(compilation_worker_count=1))


def test_options_of_the_artifact_are_taken_where_none_are_given(checkpoint, tmp_path):
    made(checkpoint, tp_degree=2, n_positions=[8, 16], batch_size=2, context_length_estimate=4).save(tmp_path, True)
    model = GPT2ForSampling.from_pretrained(tmp_path)
    assert (model.options.tp_degree, model.options.buckets.positions, model.options.batch_size) == (2, (8, 16), 2)
    assert model.options.buckets.context == (4,)
    with pytest.raises(ConfigError, match=r"tp_degree: saved 2, expected 1$"):
        GPT2ForSampling.from_pretrained(tmp_path, tp_degree=1)


@pytest.mark.parametrize("fact", ["jaxlib", "processor", "processors", "XLA_FLAGS"])
def test_executables_for_elsewhere_are_compiled_from_the_modules_saved(fact, copy, model, caplog, modules_written):
    change(copy, "runtime", fact, "another")
    loaded = made(copy)
    assert not modules_written
    assert loaded(IDS).equal(model(IDS))
    [warning] = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert warning.startswith(
        f"the executables in {copy} are for another environment, compiling the programs again: {fact}: "
    )


@pytest.mark.parametrize("code", ["of another version", ""])
def test_modules_that_other_code_has_written_are_written_anew(code, copy, model, no_compiler, modules_written):
    change(copy, "code", code)
    loaded = made(copy)  # and its modules are the same, so that their executables are found
    assert len(modules_written) == PROGRAMS
    assert loaded(IDS).equal(model(IDS))


def test_a_family_that_is_not_of_this_package_has_its_modules_written(model, tmp_path, no_compiler, modules_written):
    graph = ModuleType("elsewhere.graph")
    vars(graph).update({name: value for name, value in vars(gpt2.graph).items() if not name.startswith("__")})
    mine = type("Mine", (GPT2ForSampling,), {"family": replace(GPT2ForSampling.family, graph=graph)})
    model.save(tmp_path, sharded_weights=True)
    loaded = mine(Completed(model.config.to_dict()), **open_artifact(tmp_path).options())
    loaded._artifact = loaded._weights = open_artifact(tmp_path)
    loaded.to_neuron()
    assert len(modules_written) == PROGRAMS
    loaded.save(tmp_path / "mine")
    assert open_artifact(tmp_path / "mine").manifest["code"] == ""


def change(directory, *path_and_value):
    """Set a value in the manifest, and make its checksum valid again."""
    *path, last, value = path_and_value
    manifest = json.loads((directory / "manifest.json").read_text())
    inside = manifest
    for name in path:
        inside = inside[name]
    inside[last] = value
    (directory / "manifest.json").write_bytes(sealed(manifest))


def test_the_order_of_calls(model, artifact, checkpoint, tmp_path):
    with pytest.raises(ConfigError, match=r"call to_neuron\(\) first"):
        GPT2ForSampling.from_pretrained(checkpoint).save(tmp_path)
    with pytest.raises(ConfigError, match=r"is already on a device: call load\(\) before to_neuron\(\)"):
        model.load(artifact)
    with pytest.raises(CheckpointError, match=r"is a checkpoint; save the artifact to a separate directory"):
        model.save(checkpoint)
    assert open_checkpoint(checkpoint)
    with pytest.raises(CheckpointError, match=r"manifest.json: expected a regular file, found nothing"):
        GPT2ForSampling.from_pretrained(checkpoint).load(tmp_path)


# Damage.


def files_of(directory):
    return sorted(path.name for path in directory.iterdir())


def test_a_flipped_bit_in_any_file_is_found(artifact, tmp_path):
    for name in files_of(artifact):
        copy = Path(shutil.copytree(artifact, tmp_path / name))
        content = bytearray((copy / name).read_bytes())
        content[len(content) // 2] ^= 1
        (copy / name).write_bytes(content)
        with pytest.raises(CheckpointError, match=name):
            made(copy)


@pytest.mark.parametrize("kind", ["cut", "longer", "missing", "directory", "dangling link", "fifo"])
def test_a_file_that_is_not_there_as_it_was(kind, copy):
    for name in files_of(copy):
        path = copy / name
        whole = path.read_bytes()
        path.unlink()
        if kind in ("cut", "longer"):
            path.write_bytes(whole[:-1] if kind == "cut" else whole + b" ")
        elif kind == "directory":
            path.mkdir()
        elif kind == "dangling link":
            path.symlink_to(copy / "nothing")
        elif kind == "fifo":
            os.mkfifo(path)
        if (kind, name) != ("longer", "manifest.json"):
            with pytest.raises(CheckpointError) as caught:
                made(copy)
            assert (name if (kind, name) != ("missing", "manifest.json") else "no checkpoint here") in str(caught.value)
        path.rmdir() if kind == "directory" else path.unlink(missing_ok=True)
        path.write_bytes(whole)
    made(copy)


@pytest.mark.parametrize("name", ["../secret", "/etc/passwd", "", ".", "..", "a/b", "program\0", "\ud800"])
def test_a_manifest_that_names_what_is_elsewhere(name, copy):
    (copy.parent / "secret").write_text("secret")
    change(copy, "files", name, {"size": 6, "sha256": ""})
    with pytest.raises(CheckpointError, match=r"manifest.json: (not the manifest of an artifact|invalid file name)"):
        open_artifact(copy)


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (["format"], 1, "format 1, but this version reads 3"),
        (["family"], None, "no name of a model family"),
        (["programs"], [], "'programs' must be an object"),
        (["programs", "x"], {"hlo": "a", "executable": "b"}, "'a' is not among its files"),
        (["programs", "x"], "a", "each program must have two files"),
        (["weights", "weights-shared.safetensors", "embed"], [3], "expected names of weights"),
        (["weights", "x"], {}, "'x' is not among its files"),
        (["weights", "weights-shared.safetensors"], {}, "lists weights that differ from the model's: embed"),
        (["weights", "weights-shared.safetensors", "more"], ["embed"], "is missing, but manifest.json lists it"),
        (["options", "buckets"], 7, "not valid options of a model"),
        (["files", "config.json"], {}, "'config.json' must have a size and a checksum"),
        (["origin"], [], "'origin' must hold marks"),
        (["origin", "wte.weight"], 3, "'origin' must hold marks"),
    ],
)
def test_a_manifest_that_is_none(path, value, message, copy):
    change(copy, *path, value)
    with pytest.raises(CheckpointError) as caught:
        made(copy)
    assert message in str(caught.value)


# Saves that fail.


FILES = 2 * PROGRAMS + 3 + 2  # programs, weights, config.json and manifest.json


@pytest.mark.parametrize("earlier", [False, True])
@pytest.mark.parametrize("error", [OSError, KeyboardInterrupt])
@pytest.mark.parametrize(
    ("function", "calls"),
    [("os.fsync", [0, 5, FILES - 1, FILES, FILES + 1]), ("os.rename", [0, 1, 2, 2 * FILES - 1, FILES - 1])],
)
def test_a_failed_save_leaves_what_was_there(earlier, error, function, calls, model, artifact, tmp_path, monkeypatch):
    target = tmp_path / "new" / "artifact"
    if earlier:
        shutil.copytree(artifact, target)
        (target / "tokenizer.json").write_text("kept")
        change(target, "options", "amp", "an earlier one")
    before = snapshot(tmp_path)
    for call in calls:
        if not earlier and call > FILES + (function == "os.fsync"):
            continue
        with monkeypatch.context() as patch:
            patch.setattr(function, fails_at(call, pkgutil.resolve_name(function), error))
            with pytest.raises(error):
                model.save(target, sharded_weights=True)
        assert snapshot(tmp_path) == before
    model.save(target, sharded_weights=True)
    assert open_artifact(target).manifest == open_artifact(artifact).manifest


def test_a_new_artifact_replaces_the_files_of_the_earlier_one_and_no_others(model, copy):
    (copy / "tokenizer.json").write_text("kept")
    (copy / "program-of-another-build.executable").touch()
    model.save(copy)
    listed = open_artifact(copy).manifest["files"].keys()
    assert set(files_of(copy)) == listed | {"manifest.json", "tokenizer.json"}
    assert not list(copy.glob("weights-*"))


def test_a_full_disk_leaves_what_was_there(model, copy):
    before = snapshot(copy)
    largest = max(path.stat().st_size for path in copy.iterdir())
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    for limit in (0, 100, 5000, largest // 2, largest - 1):
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limits[1]))
        try:
            with pytest.raises(OSError, match="File too large"):
                model.save(copy, sharded_weights=True)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        assert snapshot(copy) == before


# Saves the contents of two artifacts in turn, each in a process that is killed during the save, and checks the
# directory each time. It needs no runtime, and forks processes, since starting new ones takes most of the time.
KILLED = """
import collections, faulthandler, os, random, shutil, signal, sys, threading, time
from types import SimpleNamespace as made_of
from tqdm import tqdm
from transformers_neuronx.engine.artifact_saving import save_artifact
from transformers_neuronx.engine.artifact_weights import key_of
from transformers_neuronx.engine.artifacts import open_artifact
from transformers_neuronx.engine.compile_cache import SavedModule
from transformers_neuronx.engine.store import StoredProgram
from transformers_neuronx.errors import CheckpointError
from transformers_neuronx.gpt2.model import GPT2ForSampling
from transformers_neuronx.pyhlo import HloModuleProto
from transformers_neuronx.pyhlo.dtypes import torch_to_numpy

def decoder_like(source):
    artifact, model = open_artifact(source), GPT2ForSampling.from_pretrained(source)
    held = lambda name: artifact.verified(name).read_bytes()
    stored = {
        identity: StoredProgram(
            SavedModule.of(HloModuleProto.FromString(held(of["hlo"]))),
            made_of(serialize=lambda of=of: held(of["executable"])),
        )
        for identity, of in artifact.manifest["programs"].items()
    }
    held_by = lambda pieces: made_of(shards=lambda: [torch_to_numpy(piece) for piece in pieces()])
    tensors = [(names, held_by(pieces)) for names, pieces in artifact.tensors()]
    return artifact.manifest["files"], model.config.to_dict(), made_of(
        family=model.family, config=model.model_config, options=model.options,
        store=made_of(stored=stored, identities=artifact.manifest["keys"]),
        runtime=made_of(
            fingerprint=artifact.manifest["runtime"], suffix="executable", here=range(1), device_count=1
        ),
        weights={key_of(name): tensor for names, tensor in tensors for name in names},
        programs=made_of(panels=True, in_place=True, scatters=False), origin={},
    )

tqdm.set_lock(threading.RLock())  # its own one is shared by forked processes: who is killed with it stops all others
target, kills = sys.argv[1], int(sys.argv[2])
faulthandler.dump_traceback_later(580, exit=True)  # where it hangs, should it
sources = [decoder_like(source) for source in sys.argv[3:]]
kept = [files for files, *_ in sources]
assert kept[0] != kept[1]
began = time.monotonic()
save_artifact(target, sources[1][2], sources[1][1], True)
longest = 2 * (time.monotonic() - began)
assert open_artifact(target).manifest["files"] == kept[1]
chance = random.Random(0)
seen = collections.Counter()
for number in range(kills):
    if (child := os.fork()) == 0:
        while True:
            save_artifact(target, sources[number % 2][2], sources[number % 2][1], True)
    time.sleep(chance.uniform(0, longest))
    os.kill(child, signal.SIGKILL)
    assert os.waitpid(child, 0)[1] == signal.SIGKILL
    unfinished = [name for name in os.listdir(target) if ".tmp-" in name or ".old-" in name]
    seen["unfinished"] += bool(unfinished)
    for name in unfinished:
        shutil.rmtree(os.path.join(target, name))
    try:
        found = open_artifact(target)
    except CheckpointError as error:
        assert "manifest.json: expected a regular file, found nothing" in str(error), error
        seen["none"] += 1
        continue
    for name in found.manifest["files"]:
        found.verified(name)
    seen["earlier" if kept.index(found.manifest["files"]) != number % 2 else "new"] += 1
save_artifact(target, sources[0][2], sources[0][1], True)
assert open_artifact(target).manifest["files"] == kept[0]
print(dict(seen))
"""


@pytest.mark.parametrize("kills", [20, pytest.param(200, marks=pytest.mark.slow)])
def test_a_killed_save_leaves_the_earlier_artifact_or_none(kills, artifact, tmp_path):
    torch.manual_seed(1)
    sizes = {"n_layer": 2, "n_embd": 16, "n_head": 2, "n_positions": 16, "vocab_size": 41}
    GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0)).save_pretrained(tmp_path / "checkpoint")
    made(tmp_path / "checkpoint").save(tmp_path / "other", sharded_weights=True)
    command = [sys.executable, "-c", KILLED, tmp_path / "target", kills, artifact, tmp_path / "other"]
    ran = subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=590)
    assert ran.returncode == 0, ran.stderr
    print(ran.stdout)
    assert "'unfinished'" in ran.stdout and "'new'" in ran.stdout


def test_a_family_in_one_file_is_saved(checkpoint, tmp_path):
    one = ModuleType("one")
    vars(one).update(vars(gpt2.weights) | vars(gpt2.graph) | dict(__name__="one"))

    class OneFile(GPT2ForSampling):
        family = replace(GPT2ForSampling.family, weights=one, graph=one)

    model = OneFile.from_pretrained(checkpoint)
    model.to_neuron()
    model.save(tmp_path / "artifact", sharded_weights=True)
    again = OneFile.from_pretrained(tmp_path / "artifact")
    again.to_neuron()
    assert torch.equal(again(IDS), model(IDS))
