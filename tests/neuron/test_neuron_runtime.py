"""Models on the neuron runtime, with stand-ins for its compiler and its devices, against those on the CPU.

Nothing of this ran on Neuron: `neuronx-cc` and `standin_device` run instead. Both sides end in XLA:CPU, here without
kernels, so results must be the same to the last bit.
"""

import gc
import itertools
import os
import signal
import subprocess
import sys
import threading

import numpy as np
import pytest
import standin_device
import torch
from standin_cc import gone, soon
from transformers import GPT2Config, LlamaConfig, T5Config
from typer.testing import CliRunner

from transformers_neuronx.cli import app
from transformers_neuronx.config import ContinuousBatchingConfig, NeuronConfig, QuantizationConfig
from transformers_neuronx.engine.rectangles import SampleKey, StepKey
from transformers_neuronx.engine.slots import SlotDecoder
from transformers_neuronx.errors import ConfigError, EngineError
from transformers_neuronx.gpt2.model import GPT2ForSampling
from transformers_neuronx.huggingface.adapter import HuggingFaceGenerationModelAdapter
from transformers_neuronx.layers import sampling
from transformers_neuronx.llama.model import LlamaForSampling
from transformers_neuronx.runtimes import get_runtime, kernels
from transformers_neuronx.runtimes.xla import xla_runtime
from transformers_neuronx.speculation.drafts import SpeculativeGenerator
from transformers_neuronx.speculation.fused import FusedSpeculativeDecoder
from transformers_neuronx.t5.model import T5ForSampling

pytestmark = pytest.mark.compiled_ahead

IDS = torch.tensor([[5, 6, 7, 8, 9, 10, 11], [3, 4, 5, 6, 7, 8, 9]])
SMALL = dict(vocab_size=67, bos_token_id=0, eos_token_id=66)
MODELS = {
    "gpt2": (GPT2ForSampling, GPT2Config(n_positions=48, n_embd=32, n_layer=2, n_head=4, **SMALL)),
    "llama": (
        LlamaForSampling,
        LlamaConfig(
            hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
            max_position_embeddings=48, **SMALL,
        ),
    ),
    "t5": (
        T5ForSampling,
        T5Config(d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4, vocab_size=67, decoder_start_token_id=0),
    ),
}  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def without_kernels():
    """Turn kernels off: they sum in another order than XLA's own code."""
    get_runtime("cpu", 1)  # registers the kernels for XLA, once in a process: other tests need them
    caches = kernels.level, xla_runtime
    before, os.environ["NEURONX_KERNELS"] = os.environ.get("NEURONX_KERNELS"), "off"
    for cache in caches:
        cache.cache_clear()
    yield
    del os.environ["NEURONX_KERNELS"]
    if before is not None:
        os.environ["NEURONX_KERNELS"] = before
    for cache in caches:
        cache.cache_clear()


@pytest.fixture(autouse=True)
def few_candidates(monkeypatch):
    """Let programs choose among fewer tokens than these models have, as they do for models of the usual size."""
    monkeypatch.setattr(sampling, "CANDIDATES", 48)


@pytest.fixture(autouse=True)
def machine(neuronx_cc, neuron_device, caplog):
    """Provide a compiler and a device for all tests here, and lint every program."""
    yield neuronx_cc
    assert not [record.message for record in caplog.records if "may refuse" in record.message]


@pytest.fixture
def one_program(monkeypatch):
    """Compile programs when they are needed, so that models have one at first."""
    monkeypatch.setattr(SlotDecoder, "planned", lambda self: [StepKey(2, 1, 16)])


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """`checkpoint(name)`: a directory with random weights that make errors visible."""
    from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM

    known = {}

    def saved(name, seed=0):
        if (name, seed) not in known:
            torch.manual_seed(seed)
            kind = AutoModelForSeq2SeqLM if name == "t5" else AutoModelForCausalLM
            model = kind.from_config(MODELS[name][1])
            with torch.no_grad():
                for weight_name, weight in model.named_parameters():
                    one = weight.ndim == 1 and not weight_name.endswith("bias")  # the weight of a norm
                    weight.copy_(torch.randn_like(weight) * 0.3 + one)
            known[name, seed] = tmp_path_factory.mktemp(name)
            model.save_pretrained(known[name, seed])
        return known[name, seed]

    return saved


def opened(directory, name, runtime, degree=1, **switches):
    options = dict(n_positions=[16, 32], batch_size=2, context_length_estimate=8, tp_degree=degree)
    batching = "continuous_batching" in switches
    return MODELS[name][0].from_pretrained(
        directory,
        **options if not batching else options | dict(batch_size=None),
        neuron_config=NeuronConfig(runtime=runtime, **switches),
    )


def made(*model, **options):
    model = opened(*model, **options)
    model.to_neuron()
    return model


def logits(name, model):
    """Return logits after a prompt, and after the next tokens, across the edge of a bucket."""
    if name == "t5":
        model.encode(IDS)
        return [model.forward([[0] * n, [0] * n]) for n in (1, 2)]
    return [model(torch.cat([IDS, torch.full((2, n), 5)], 1)) for n in (0, 1, 10)]


def results(name, model):
    """Return logits, and tokens, greedy and sampled."""
    tokens = [model.sample(IDS, 20, top_k=1), model.sample(IDS, 20, top_k=20, top_p=0.9, temperature=9.0, seed=3)]
    return [*logits(name, model), *tokens]


def same(got, want):
    return len(got) == len(want) and all(torch.equal(*pair) for pair in zip(got, want, strict=True))


def combinations():
    """Return one combination per model; the others are left to `make test-all`."""
    soon = {("gpt2", 1, None), ("llama", 2, "s8"), ("t5", 8, None)}
    for each in itertools.product(MODELS, (1, 2, 8), (None, "s8")):
        yield pytest.param(*each, marks=[] if each in soon else [pytest.mark.slow])


@pytest.mark.parametrize(("name", "degree", "quant"), list(combinations()))
def test_exactly_what_the_cpu_computes(name, degree, quant, checkpoint):
    switches = dict(quant=quant and QuantizationConfig(quant))
    model = made(checkpoint(name), name, "neuron", degree, **switches)
    assert "NeuronCore" in model.decoder.runtime.description
    assert set(standin_device.loads) == {degree} and len(standin_device.loads) == len(model.decoder.store.stored)
    want = results(name, made(checkpoint(name), name, "cpu", degree, **switches))
    assert all(torch.isfinite(each).all() for each in want) and not torch.equal(want[-1], want[-2])
    assert same(results(name, model), want)


@pytest.mark.slow
def test_in_bf16_by_layers_and_in_continuous_batches(checkpoint):
    for options in (dict(amp="bf16"), dict(unroll=1, context_unroll=1)):
        kind, sizes = MODELS["llama"][0], dict(n_positions=32, batch_size=2, context_length_estimate=8)
        models = [
            kind.from_pretrained(checkpoint("llama"), **sizes, **options, neuron_config=NeuronConfig(runtime=runtime))
            for runtime in ("cpu", "neuron")
        ]
        for model in models:
            model.to_neuron()
        assert same(results("llama", models[1]), results("llama", models[0]))
    batching = ContinuousBatchingConfig(max_num_seqs=3, max_model_len=32)
    got, want = (
        made(checkpoint("llama"), "llama", runtime, continuous_batching=batching, padding_side="right")
        for runtime in ("neuron", "cpu")
    )
    slots = torch.tensor([2, 0])
    asked = dict(cache_ids=torch.arange(7).repeat(2, 1), start_ids=slots)
    assert torch.equal(got(IDS, **asked), want(IDS, **asked))
    asked = dict(cache_ids=torch.full((2, 1), 7), start_ids=slots)
    assert torch.equal(got(IDS[:, :1], **asked), want(IDS[:, :1], **asked))


def test_a_cache_of_blocks_is_refused(checkpoint):
    batching = ContinuousBatchingConfig(max_num_seqs=3, max_model_len=32, optimized_paged_attention=True)
    batching.init_cache_engine(block_size=16, num_blocks=6)
    with pytest.raises(ConfigError, match="has no attention over blocks yet: make the model without init_cache_engine"):
        made(checkpoint("llama"), "llama", "neuron", continuous_batching=batching)


@pytest.mark.slow
def test_several_models_share_the_cores(checkpoint, one_program):
    names = ("gpt2", "llama", "gpt2")
    models = [made(checkpoint(name, seed), name, "neuron", 2) for seed, name in enumerate(names)]
    wanted = [logits(name, made(checkpoint(name, seed), name, "cpu", 2)) for seed, name in enumerate(names)]
    assert not same(wanted[0], wanted[2])
    for _ in range(2):
        for name, model, want in zip(names, models, wanted, strict=True):
            assert same(logits(name, model), want)


@pytest.mark.slow
def test_beams_and_speculation(checkpoint):
    reference = MODELS["gpt2"][1]
    made_of = {
        runtime: [made(checkpoint("gpt2", seed), "gpt2", runtime) for seed in (0, 1)] for runtime in ("neuron", "cpu")
    }
    tokens = []
    for target, draft in made_of.values():
        adapter = HuggingFaceGenerationModelAdapter(reference, target)
        beams = adapter.generate(IDS[:1], num_beams=2, max_new_tokens=8, do_sample=False, pad_token_id=0)
        speculated = SpeculativeGenerator(draft, target, k=2).sample(IDS, 20, top_k=1)
        fused = FusedSpeculativeDecoder(draft, target, k=2).sample(IDS, 20, top_k=1)
        assert torch.equal(fused, target.sample(IDS, 20, top_k=1)) and len(set(fused[:, 7:].flatten().tolist())) > 4
        tokens.append([beams, speculated, fused])
    assert same(*tokens)


def test_artifacts_hold_neffs_that_are_not_compiled_again(checkpoint, tmp_path, machine, monkeypatch, one_program):
    model = made(checkpoint("llama"), "llama", "neuron", 2, quant=QuantizationConfig("s8"))
    want = logits("llama", model)
    model.save(tmp_path / "artifact", sharded_weights=True)
    neffs = list((tmp_path / "artifact").glob("program-*.neff"))
    assert len(neffs) == len(model.decoder.store.stored) and all(
        path.read_bytes().startswith(standin_device.MAGIC) for path in neffs
    )
    monkeypatch.setenv("NEURONX_RUNTIME", "neuron")
    monkeypatch.setenv("NEURONX_CACHE", "off")
    count = len(machine.notes("compile"))
    again = LlamaForSampling.from_pretrained(tmp_path / "artifact")
    again.to_neuron()
    assert "NeuronCores" in again.decoder.runtime.description and same(logits("llama", again), want)
    assert len(machine.notes("compile")) == count
    neffs[0].write_bytes(neffs[0].read_bytes()[:-1])
    with pytest.raises(Exception, match=neffs[0].name):
        LlamaForSampling.from_pretrained(tmp_path / "artifact").to_neuron()


def test_the_cache_has_neffs(checkpoint, tmp_path, machine, monkeypatch, one_program):
    monkeypatch.setenv("NEURONX_CACHE_DIR", str(tmp_path / "cache"))
    want = logits("gpt2", made(checkpoint("gpt2"), "gpt2", "neuron"))
    count = len(machine.notes("compile"))
    assert count and same(logits("gpt2", made(checkpoint("gpt2"), "gpt2", "neuron")), want)
    assert len(machine.notes("compile")) == count
    monkeypatch.setenv("NEURON_CC_FLAGS", "-O1")
    made(checkpoint("gpt2"), "gpt2", "neuron")
    assert len(machine.notes("compile")) == count + 1


@pytest.mark.parametrize("how", ["fail", "crash", "nothing"])
def test_nothing_half_written_stays_in_the_cache(how, checkpoint, tmp_path, monkeypatch, one_program):
    monkeypatch.setenv("NEURONX_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("STANDIN_NEURONX_CC", how)
    with pytest.raises(EngineError, match="neuronx-cc"):
        made(checkpoint("gpt2"), "gpt2", "neuron")
    assert not list((tmp_path / "cache").glob("*.bin")) and not list((tmp_path / "cache").glob("*tmp*"))
    monkeypatch.delenv("STANDIN_NEURONX_CC")
    made(checkpoint("gpt2"), "gpt2", "neuron")
    assert list((tmp_path / "cache").glob("*.bin"))


def test_ctrl_c_ends_the_compilers(checkpoint, machine, monkeypatch, one_program):
    monkeypatch.setenv("NEURONX_CACHE", "off")
    monkeypatch.setenv("STANDIN_NEURONX_CC", "hang")
    monkeypatch.setenv("NEURONX_COMPILE_TIMEOUT", "120")

    def interrupt():
        soon(lambda: machine.notes("hangs"))
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)

    # Commands that a shell starts in the background ignore it.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    thread = threading.Thread(target=interrupt)
    thread.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            made(checkpoint("gpt2"), "gpt2", "neuron")
    finally:
        thread.join()
        signal.signal(signal.SIGINT, before)
    assert gone(machine) and not list(machine.temporary.iterdir())


def test_a_neff_that_cannot_be_loaded_is_said_to_be_one(checkpoint, tmp_path, monkeypatch, one_program):
    monkeypatch.setenv("NEURONX_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("STANDIN_NEURONX_CC", "truncated")
    with pytest.raises(EngineError, match=r"loading \w+ failed on the device: nrt_load: the NEFF is damaged"):
        made(checkpoint("gpt2"), "gpt2", "neuron")
    assert not list((tmp_path / "cache").glob("*.bin"))


def test_compiling_where_there_is_no_device(checkpoint, tmp_path, monkeypatch, machine, one_program):
    monkeypatch.setenv("NEURONX_CACHE", "off")
    monkeypatch.delitem(sys.modules, "torch_neuronx")
    standin_device.loads.clear()
    model = opened(checkpoint("gpt2"), "gpt2", "neuron")
    with pytest.raises(ConfigError, match="is not on a device yet: call to_neuron"):
        model.save(tmp_path / "artifact")
    model.cpu_compile()
    model.save(tmp_path / "artifact")
    model.save(tmp_path / "whole", sharded_weights=True)
    assert model.programs == ["step_rows2_active1_width16"] and not standin_device.loads
    with pytest.raises(ConfigError, match="is not on a device yet: call to_neuron"):
        model(IDS)
    with pytest.raises(EngineError, match="needs torch-neuronx to run programs: pip install"):
        model.to_neuron()
    monkeypatch.setitem(sys.modules, "torch_neuronx", standin_device.PACKAGE)
    count, elsewhere = len(machine.notes("compile")), opened(checkpoint("gpt2"), "gpt2", "neuron")
    elsewhere.load(tmp_path / "artifact")
    elsewhere.to_neuron()
    monkeypatch.setenv("NEURONX_RUNTIME", "neuron")
    whole = GPT2ForSampling.from_pretrained(tmp_path / "whole")
    whole.to_neuron()
    assert len(machine.notes("compile")) == count > 0
    want = logits("gpt2", made(checkpoint("gpt2"), "gpt2", "cpu"))
    assert same(logits("gpt2", elsewhere), want) and same(logits("gpt2", whole), want)


def test_the_command_line_compiles_where_there_is_no_device(checkpoint, tmp_path, monkeypatch, one_program):
    monkeypatch.delitem(sys.modules, "torch_neuronx")
    arguments = ["compile", str(checkpoint("gpt2")), str(tmp_path / "artifact"), "--runtime", "neuron", "--batch-size"]
    ran = CliRunner().invoke(app, [*arguments, "2", "--n-positions", "32"])
    assert ran.exit_code == 0 and "1 programs:" in ran.output and "weights" in ran.output, ran.output
    assert list((tmp_path / "artifact").glob("*.neff")) and not standin_device.loads


def test_it_is_chosen_where_there_is_a_device(monkeypatch):
    monkeypatch.delenv("NEURONX_RUNTIME", raising=False)
    assert get_runtime(None, 1).description.startswith("XLA:CPU")
    monkeypatch.setattr("glob.glob", lambda pattern: ["/dev/neuron0"] if pattern == "/dev/neuron*" else [])
    assert get_runtime(None, 2).description == "Neuron (neuronx-cc 2.99.0.1+standin), 2 NeuronCores, trn1"
    assert get_runtime("cpu", 1).description.startswith("XLA:CPU")
    monkeypatch.setenv("NEURONX_RUNTIME", "cpu")
    assert get_runtime(None, 1).description.startswith("XLA:CPU")


@pytest.mark.parametrize(
    ("variables", "degree", "message"),
    [
        ({}, 3, "tp_degree must be one of 1, 2, 8, 16, 32 on trn1, got 3"),
        ({"NEURON_PLATFORM_TARGET_OVERRIDE": "inf2"}, 16, "one of 1, 2, 4, 8, 24 on inf2, got 16"),
        ({"NEURON_RT_NUM_CORES": "1"}, 2, "NEURON_RT_NUM_CORES allow this process 1"),
        ({"NEURON_RT_VISIBLE_CORES": "4-6,9", "NEURON_RT_NUM_CORES": "32"}, 8, "allow this process 4"),
        ({"NEURON_RT_VISIBLE_CORES": "a-b"}, 1, "NEURON_RT_VISIBLE_CORES must list cores, such as 0-3,6"),
    ],
)
def test_cores_that_there_are_not(variables, degree, message, monkeypatch):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=message):
        get_runtime("neuron", degree)


def test_cores_that_there_are(monkeypatch):
    monkeypatch.setenv("NEURON_RT_VISIBLE_CORES", "4-6,9")
    assert get_runtime("neuron", 2).device_count == 2


# Tensors and executables.


def doubled_and_kept(x, state):
    new = state + x
    new.set_alias_to(state, must=True)
    return x * 2.0, new


@pytest.fixture
def program(write):
    x = np.arange(3, dtype=np.float32)
    runtime = get_runtime("neuron", 2)
    return runtime, runtime.compile(write(doubled_and_kept, x, x)), x


def test_states_stay_on_the_devices_and_results_are_not_overwritten(program):
    runtime, executable, x = program
    state, kept = runtime.put([x, x + 10]), []
    for n in range(4):
        result, state = executable(runtime.put([x + n]), state)
        kept.append(result)
    assert [each.numpy().tolist() for each in kept] == [(2 * (x + n)).tolist() for n in range(4)]
    assert [shard.tolist() for shard in state.shards()] == [(5 * x + 6).tolist(), (5 * x + 16).tolist()]
    memory = {id(each.memory) for each in kept}
    assert len(memory) == 4
    del kept, result
    gc.collect()
    result, state = executable(runtime.put([x]), state)
    assert id(result.memory) in memory, "memory that nobody holds is used again"


def test_a_result_that_a_program_takes_over_is_not_given_away(program):
    runtime, executable, x = program
    result, _ = executable(runtime.put([x]), runtime.put([x]))
    _, state = executable(runtime.put([x]), result)
    del result, _
    gc.collect()
    other, _ = executable(runtime.put([x + 100]), runtime.put([x]))
    assert state.numpy().tolist() == (3 * x).tolist() and other.numpy().tolist() == (2 * x + 200).tolist()


def test_an_operand_that_comes_again_goes_to_the_devices_for_good(program):
    runtime, executable, x = program
    operand = runtime.put([x])
    for _ in range(3):
        result, _ = executable(operand, runtime.put([x]))
        assert result.numpy().tolist() == (2 * x).tolist()
    assert operand.memory is not None and operand.numpy().tolist() == x.tolist()


def test_the_caller_may_write_to_its_array_again(program):
    runtime, executable, x = program
    array = x.copy()
    operand, state = runtime.put([array]), runtime.put([x])
    array[:] = -1
    assert executable(operand, state)[0].numpy().tolist() == (2 * x).tolist()


def test_arguments_are_checked(program):
    runtime, executable, x = program
    state = runtime.put([x])
    with pytest.raises(EngineError, match="needs 2 arguments, got 1"):
        executable(state)
    with pytest.raises(EngineError, match=r"needs float32\[3\] as parameter 1"):
        executable(runtime.put([x]), runtime.put([x[:2]]))
    executable(runtime.put([x]), state)
    with pytest.raises(EngineError, match="donated to an earlier program"):
        executable(runtime.put([x]), state)
    with pytest.raises(EngineError, match="put needs one array or 2, one per core, got 3"):
        runtime.put([x] * 3)
    with pytest.raises(EngineError, match="put needs shards of one shape and type"):
        runtime.put([x, x[:2]])


def test_how_large_something_is_is_known_without_reading_it(program, monkeypatch):
    runtime, executable, x = program

    def read(_):
        raise AssertionError

    monkeypatch.setattr(standin_device.OPERATIONS, "_parallel_from_neuron", read)
    result, state = executable(runtime.put([x]), runtime.put([x], donate=True))
    assert result.nbytes == state.nbytes == runtime.put([x]).nbytes == 2 * x.nbytes
    assert executable.memory() == (2 * x.nbytes, 2 * x.nbytes, x.nbytes, 0)


def test_what_goes_wrong_on_the_devices_is_an_engine_error(program, monkeypatch):
    runtime, executable, x = program

    def broken(*_):
        raise RuntimeError("nrt_execute: status 1006")

    monkeypatch.setattr(standin_device.OPERATIONS, "_parallel_run_neuron", broken)
    with pytest.raises(EngineError, match="failed on the device: nrt_execute: status 1006"):
        executable(runtime.put([x]), runtime.put([x]))


def test_types_that_neuron_keeps_in_others(write):
    def same_again(flags, words, small):
        return (flags.shape.Copy(flags), words.shape.Copy(words), small.shape.Copy(small))

    arrays = [np.array([True, False]), np.array([1, 2**32 - 1], np.uint32), np.array([-3, 4], np.int8)]
    runtime = get_runtime("neuron", 1)
    got = runtime.compile(write(same_again, *arrays))(*(runtime.put([array]) for array in arrays))
    for array, tensor in zip(arrays, got, strict=True):
        assert tensor.numpy().dtype == array.dtype and tensor.numpy().tolist() == array.tolist()
        assert tensor.nbytes == array.nbytes


def test_dumps_have_what_the_compiler_was_given_and_made(checkpoint, tmp_path, monkeypatch):
    monkeypatch.setattr(SlotDecoder, "planned", lambda self: [SampleKey(2)])
    monkeypatch.setenv("NEURONX_DUMP_TO", str(tmp_path))
    made(checkpoint("gpt2"), "gpt2", "neuron")
    endings = {path.name.partition(".")[2] for path in tmp_path.iterdir()}
    assert endings >= {"hlo.pb", "hlo.txt", "neuron.hlo.pb", "neff", "metaneff", "compiled.txt", "flags.json"}
    [text] = tmp_path.glob("sample*.compiled.txt")
    assert "AwsNeuronTopK" in text.read_text() and " while(" not in text.read_text()


def test_nothing_of_neuron_is_imported_without_it():
    code = """
import sys, transformers_neuronx.gpt2.model, transformers_neuronx.runtimes.neuron
from transformers_neuronx.neuron.presence import torch_neuronx
torch_neuronx()
assert not {"torch_neuronx", "libneuronxla", "neuronxcc"} & sys.modules.keys()
"""
    subprocess.run([sys.executable, "-c", code], check=True)
