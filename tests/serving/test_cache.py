"""The cache of compiled programs: what it finds, what it does not trust, and that no fault of it is fatal."""

import inspect
import json
import logging
import os
import re
import resource
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from transformers_neuronx import hlo
from transformers_neuronx.compiler import compile_py_func, identity
from transformers_neuronx.engine import compile_cache as cache
from transformers_neuronx.errors import ConfigError, EngineError
from transformers_neuronx.pyhlo import dtype_named
from transformers_neuronx.runtimes import get_runtime

pytestmark = pytest.mark.compiled_ahead

PROCESSES = 16


def doubling(times=2.0, size=4):
    def double(_):
        return hlo.multiply(dtype_named("f32")[size].Parameter(parameter_number=0), times)

    return compile_py_func(double)


class Counting:
    """A runtime that records what it has compiled."""

    def __init__(self, runtime):
        self.runtime = runtime
        self.compiled = []

    def __getattr__(self, name):
        return getattr(self.runtime, name)

    def compile(self, module):
        self.compiled.append(module)
        return self.runtime.compile(module)


@pytest.fixture
def runtime():
    return Counting(get_runtime("cpu", 1))


@pytest.fixture
def directory(tmp_path, monkeypatch):
    """An empty cache."""
    monkeypatch.setenv("NEURONX_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


def check(runtime, module=None, times=2.0):
    module = module or doubling()
    executable = cache.build(runtime, cache.SavedModule.of(module))
    assert executable(runtime.put([np.arange(4, dtype=np.float32)]))[0].numpy().tolist() == [
        0,
        times,
        2 * times,
        3 * times,
    ]


def entries(directory):
    return sorted(directory.glob("*.bin"))


def warnings(caplog):
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


def test_a_program_is_compiled_once(runtime, directory):
    for _ in range(3):
        check(runtime)
    assert len(runtime.compiled) == 1
    assert len(entries(directory)) == 1
    check(runtime, doubling(3.0), times=3.0)
    assert len(runtime.compiled) == 2


def test_what_is_there_is_the_users_own(runtime, directory):
    before = os.umask(0)
    try:
        check(runtime)
    finally:
        os.umask(before)
    assert directory.stat().st_mode & 0o777 == 0o700
    assert {path.stat().st_mode & 0o777 for path in directory.iterdir()} == {0o600}
    assert {path.suffix for path in directory.iterdir()} == {".bin", ".lock"}


def test_where_a_program_was_written_makes_no_difference_and_what_it_does_makes_one():
    here, there = doubling(), doubling()
    there.name = "other"
    for instruction in there.computations[0].instructions:
        instruction.metadata.source_file, instruction.metadata.source_line = "elsewhere.py", 7
    assert here != there and identity(here) == identity(there)
    assert here.computations[0].instructions[0].metadata.source_file.endswith("test_cache.py")
    assert len({identity(module) for module in (here, doubling(3.0), doubling(size=5))}) == 3
    there.input_output_alias.entries.add()
    assert identity(here) != identity(there)


def test_a_program_has_one_identity_in_every_process():
    # With names from a hash that differs between processes, every process would compile again.
    program = f"""
from transformers_neuronx import hlo
from transformers_neuronx.compiler import compile_py_func, identity
from transformers_neuronx.pyhlo import dtype_named
{inspect.getsource(doubling)}
print(identity(doubling()))
"""
    command, options = [sys.executable, "-c", program], dict(capture_output=True, text=True, check=True)
    seeds = [subprocess.run(command, env=os.environ | {"PYTHONHASHSEED": seed}, **options) for seed in "12"]
    assert [ran.stdout.strip() for ran in seeds] == [identity(doubling())] * 2


@pytest.mark.parametrize("fact", ["jaxlib", "processors", "XLA_FLAGS", "instructions", "devices"])
def test_another_engine_compiles_anew(fact, runtime, directory):
    check(runtime)
    runtime.fingerprint = dict(runtime.runtime.fingerprint) | {fact: "another"}
    check(runtime)
    assert len(runtime.compiled) == 2


def test_off(runtime, directory, monkeypatch):
    monkeypatch.setenv("NEURONX_CACHE", "off")
    check(runtime)
    check(runtime)
    assert len(runtime.compiled) == 2
    assert not directory.exists()
    monkeypatch.setenv("NEURONX_CACHE", "perhaps")
    with pytest.raises(ConfigError, match="NEURONX_CACHE must be on or off, got 'perhaps'"):
        check(runtime)


def test_where_it_is_by_default(runtime, tmp_path, monkeypatch):
    monkeypatch.delenv("NEURONX_CACHE_DIR")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    check(runtime)
    assert entries(tmp_path / "home" / ".cache" / "transformers_neuronx")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    check(runtime)
    assert entries(tmp_path / "xdg" / "transformers_neuronx")
    assert len(runtime.compiled) == 2


@pytest.mark.parametrize("mode", [0o770, 0o707, 0o777, 0o1777])
def test_a_directory_that_others_may_write_to_is_not_used(mode, runtime, directory, caplog):
    directory.mkdir()
    directory.chmod(mode)
    check(runtime)
    check(runtime)
    assert len(runtime.compiled) == 2
    assert not list(directory.iterdir())
    [warning] = warnings(caplog)
    assert f"not cached in {directory}: cached code is executed" in warning and f"(mode {mode:o})" in warning


def test_another_users_directory_is_not_used(runtime, directory, caplog, monkeypatch):
    directory.mkdir(mode=0o700)
    monkeypatch.setattr(os, "getuid", lambda: directory.stat().st_uid + 1)
    check(runtime)
    assert not list(directory.iterdir())
    [warning] = warnings(caplog)
    assert f"not cached in {directory}: cached code is executed, but the directory belongs to another user" in warning


@pytest.mark.parametrize("damage", ["cut", "empty", "flipped", "other magic"])
def test_a_damaged_entry_is_compiled_anew_with_one_warning(damage, runtime, directory, caplog):
    check(runtime)
    [path] = entries(directory)
    whole = path.read_bytes()
    flipped = bytearray(whole)
    flipped[len(whole) // 2] ^= 1
    damaged = {
        "cut": whole[:-1],
        "empty": b"",
        "flipped": bytes(flipped),
        "other magic": whole.replace(b" 1\n", b" 2\n", 1),
    }
    path.write_bytes(damaged[damage])
    check(runtime)
    check(runtime)
    assert warnings(caplog) == [f"{path} is truncated or damaged, making it again"]
    assert len(runtime.compiled) == 2
    assert cache.Cache(directory).read(path.stem) is not None


def test_a_whole_entry_that_does_not_load_is_compiled_anew(runtime, directory, caplog, monkeypatch):
    check(runtime)

    def refuse(data, module):
        raise EngineError("not of this world")

    runtime.load = refuse
    check(runtime)
    assert len(runtime.compiled) == 2
    [warning] = warnings(caplog)
    assert f" from {entries(directory)[0]}, compiling it again: " in warning and warning.endswith("not of this world")


class Loading(Counting):
    """A runtime that records what it has loaded."""

    def __init__(self, runtime, lazily=True):
        super().__init__(runtime)
        self.loads_lazily, self.loads = lazily, []

    def load(self, data, module):
        self.loads.append(module.name)
        return self.runtime.load(data, module)


@pytest.mark.parametrize("lazily", [True, False])
def test_what_is_found_is_loaded_when_it_is_first_used(runtime, directory, lazily):
    """Unless a runtime, as that of Neuron, takes long, or may fail."""
    check(runtime)
    later = Loading(runtime, lazily)
    found = cache.build(later, cache.SavedModule.of(doubling()))
    assert later.loads == ["double"] * (not lazily) and found.is_loaded == (not lazily)
    assert found.serialize() == cache.Cache(directory).read(entries(directory)[0].stem)
    ones = later.put([np.ones(4, np.float32)])
    with ThreadPoolExecutor(8) as pool:
        results = [each.result() for each in [pool.submit(found, ones) for _ in range(32)]]
    assert all(result.numpy().tolist() == [2] * 4 for [result] in results)
    assert later.loads == ["double"] and not later.compiled
    assert found.memory() == found.loaded().memory() and found.text() == found.loaded().text()


def test_a_full_disk_is_no_reason_to_stop(runtime, directory, caplog):
    directory.mkdir(mode=0o700)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    try:
        check(runtime)
        check(runtime, doubling(3.0), times=3.0)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert warnings(caplog) == [f"compiled programs are not cached in {directory}: File too large"]
    assert not [path for path in directory.iterdir() if path.suffix != ".lock"]
    check(runtime)
    check(runtime)
    assert len(runtime.compiled) == 3


def test_a_directory_that_cannot_be_is_no_reason_to_stop(runtime, tmp_path, caplog, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("NEURONX_CACHE_DIR", str(tmp_path / "file" / "cache"))
    check(runtime)
    assert "compiled programs are not cached: [Errno 20] Not a directory" in warnings(caplog)[0]


@pytest.mark.skipif(os.getuid() == 0, reason="root may write everywhere")
def test_a_directory_for_reading_only_is_no_reason_to_stop(runtime, directory, caplog):
    directory.mkdir(mode=0o500)
    check(runtime)
    assert len(warnings(caplog)) == 2


def test_a_lock_that_is_never_let_go_is_not_waited_for_for_ever(runtime, directory, caplog):
    runtime.patience = 0.1
    directory.mkdir(mode=0o700)
    with cache.Cache(directory).alone(cache._key(runtime, cache.SavedModule.of(doubling())), 600):
        check(runtime)
    assert warnings(caplog)[0].startswith("another process has locked ")


def test_a_program_that_the_compiler_refuses_is_refused_every_time(runtime, directory):
    broken = doubling()
    broken.computations[0].instructions[0].opcode = "no such operation"
    for _ in range(2):
        with pytest.raises(EngineError, match="XLA:CPU refused the module 'double'"):
            cache.build(runtime, cache.SavedModule.of(broken))
    assert len(runtime.compiled) == 2
    assert not entries(directory)


def test_dumps(runtime, directory, tmp_path, monkeypatch, caplog):
    caplog.set_level(logging.INFO)
    monkeypatch.setenv("NEURONX_DUMP_TO", str(tmp_path / "new" / "dump"))
    check(runtime)
    check(runtime)
    kinds = ["compiled.txt", "flags.json", "hlo.pb", "hlo.txt"]
    names = sorted(path.name for path in (tmp_path / "new" / "dump").iterdir())
    stem = names[0].partition(".")[0]
    assert re.fullmatch(r"double-[0-9a-f]{12}", stem)
    assert names == [f"{stem}.{kind}" for kind in kinds] + ["log.txt"]
    pb, txt, compiled, flags, log = (
        tmp_path / "new" / "dump" / name
        for name in (f"{stem}.hlo.pb", f"{stem}.hlo.txt", f"{stem}.compiled.txt", f"{stem}.flags.json", "log.txt")
    )
    assert type(doubling()).FromString(pb.read_bytes()) == doubling()
    assert txt.read_text().startswith("HloModule double") and "multiply" in txt.read_text()
    assert compiled.read_text().startswith("HloModule double, is_scheduled=true")
    assert json.loads(flags.read_text()) == dict(runtime.fingerprint)
    first, second = log.read_text().splitlines()
    assert re.fullmatch(rf"\S+ {stem}: compiled in \d+\.\d\d s", first)
    assert re.fullmatch(rf"\S+ {stem}: loaded from the cache in \d+\.\d\d s", second)
    assert [record.getMessage() for record in caplog.records if record.name == cache.__name__] == [
        line.partition(" ")[2] for line in (first, second)
    ]


def test_a_dump_that_cannot_be_written_is_no_reason_to_stop(runtime, directory, tmp_path, monkeypatch, caplog):
    (tmp_path / "file").touch()
    monkeypatch.setenv("NEURONX_DUMP_TO", str(tmp_path / "file"))
    check(runtime)
    assert "NEURONX_DUMP_TO: cannot write programs: " in warnings(caplog)[0]


# Forks after all imports, which take most of the time, and before a client exists.
AT_ONCE = """
import os, sys
import torch
from transformers_neuronx.gpt2.model import GPT2ForSampling
from transformers_neuronx.runtimes.xla import XlaRuntime

checkpoint, counter, processes = sys.argv[1], sys.argv[2], int(sys.argv[3])
torch.set_num_threads(1)
GPT2ForSampling.from_pretrained(checkpoint)
compile_module = XlaRuntime.compile

def counted(self, module):
    with open(counter, "a") as file:
        file.write(module.name + "\\n")
    return compile_module(self, module)

XlaRuntime.compile = counted
children = []
start, go = os.pipe()
for number in range(processes):
    if (child := os.fork()) == 0:
        os.close(go)
        os.read(start, 1)  # ends for all of them at once
        model = GPT2ForSampling.from_pretrained(checkpoint)
        model.to_neuron()
        torch.save(model(torch.tensor([[3, 1, 4, 1, 5]])), f"{counter}.{number}")
        os._exit(0)
    children.append(child)
os.close(start)
os.close(go)
assert [os.waitpid(child, 0)[1] for child in children] == [0] * processes
"""


@pytest.mark.slow
def test_of_processes_that_compile_the_same_at_once_one_does(directory, tmp_path):
    torch.manual_seed(0)
    sizes = {"n_layer": 1, "n_embd": 16, "n_head": 2, "n_positions": 8, "vocab_size": 40}
    model = GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0)).eval()
    model.save_pretrained(tmp_path / "model")
    command = [sys.executable, "-c", AT_ONCE, str(tmp_path / "model"), str(tmp_path / "count"), str(PROCESSES)]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert ran.returncode == 0, ran.stderr
    compiled = [name for name in (tmp_path / "count").read_text().splitlines() if name != "canary"]
    assert len(compiled) == len(set(compiled)) == len(entries(directory)) == 5
    wanted = model(torch.tensor([[3, 1, 4, 1, 5]])).logits[:, -1].detach()
    for number in range(PROCESSES):
        assert torch.load(f"{tmp_path / 'count'}.{number}").allclose(wanted, atol=1e-5)
