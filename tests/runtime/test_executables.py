"""Executables as bytes: the same program in another process, at any degree, with donations; and their memory."""

import os
import subprocess
import sys

import numpy as np
import pytest

from transformers_neuronx import hlo
from transformers_neuronx.compiler import compile_py_func
from transformers_neuronx.errors import EngineError
from transformers_neuronx.pyhlo import dtype_named
from transformers_neuronx.runtimes import get_runtime, processor, xla, xla_clients

# Reads an executable from a file, and sums over the devices, in the memory of the parameter.
ELSEWHERE = """
import sys
import numpy as np
sys.path.insert(0, sys.argv[3])
from test_executables import summing
from transformers_neuronx.runtimes import get_runtime
runtime = get_runtime("cpu", int(sys.argv[1]))
runtime.compile = None
executable = runtime.load(open(sys.argv[2], "rb").read(), summing(runtime.device_count))
shards = [np.arange(4, dtype=np.float32) + rank for rank in range(runtime.device_count)]
print([shard.tolist() for shard in executable(runtime.put(shards))[0].shards()])
"""


def summing(degree):
    def graph(_):
        x = dtype_named("f32")[4].Parameter(parameter_number=0)
        out = hlo.all_reduce(x, degree) if degree > 1 else x + 0.0
        out.set_alias_to(x, must=True)
        return [out, out * 2.0]

    return compile_py_func(graph)


@pytest.mark.parametrize("degree", [1, 2, 3])
def test_an_executable_runs_in_another_process(degree, tmp_path):
    runtime = get_runtime("cpu", degree)
    compiled = runtime.compile(summing(degree))
    (tmp_path / "bytes").write_bytes(compiled.serialize())
    command = [sys.executable, "-c", ELSEWHERE, str(degree), str(tmp_path / "bytes"), os.path.dirname(__file__)]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert ran.returncode == 0, ran.stderr
    total = sum(np.arange(4.0) + rank for rank in range(degree)).tolist()
    assert ran.stdout == f"{[total] * degree}\n"


@pytest.mark.parametrize("degree", [1, 2])
def test_a_loaded_executable_is_the_compiled_one(degree):
    runtime = get_runtime("cpu", degree)
    module = summing(degree)
    compiled = runtime.compile(module)
    loaded = runtime.load(compiled.serialize(), module)
    assert loaded.memory() == compiled.memory()
    assert loaded.memory().aliased == 16
    assert loaded.text() == compiled.text()
    again = runtime.load(loaded.serialize(), module)
    old = runtime.put([np.ones(4, np.float32)] * degree)
    assert again(old)[0].numpy().tolist() == [degree] * 4
    with pytest.raises(EngineError, match="was donated to an earlier program"):
        again(old)


def test_a_program_with_a_sort_that_has_run():
    def ordered(_):
        return hlo.sort(dtype_named("f32")[2000].Parameter(parameter_number=0))[0]

    runtime, module = get_runtime("cpu", 1), compile_py_func(ordered)
    x = runtime.put([np.arange(2000, dtype=np.float32)[::-1]])
    compiled = runtime.compile(module)
    for program in (compiled, runtime.load(compiled.serialize(), module)):
        assert program(x)[0].numpy().tolist() == list(range(2000))


def test_an_engine_that_has_no_bytes(monkeypatch):
    runtime = get_runtime("cpu", 1)
    monkeypatch.setattr(runtime, "_as_bytes", lambda loaded: None)
    with pytest.raises(EngineError, match="graph cannot be serialized by this engine"):
        runtime.compile(summing(1)).serialize()


def test_bytes_that_are_no_executable():
    runtime = get_runtime("cpu", 1)
    with pytest.raises(EngineError, match=r"loading graph failed on the device: .*INVALID_ARGUMENT"):
        runtime.load(b"nothing of the kind", summing(1))


def test_every_shard_comes_to_the_host():
    shards = [np.full(2, rank, np.float32) for rank in range(3)]
    assert [shard.tolist() for shard in get_runtime("cpu", 3).put(shards).shards()] == [[0, 0], [1, 1], [2, 2]]


def test_the_fingerprint_has_all_that_an_executable_depends_on(monkeypatch):
    runtime = get_runtime("cpu", 2)
    facts = runtime.fingerprint
    assert facts["platform"] == "cpu" and facts["devices"] == "2 cpu"
    assert "INDIVIDUAL_DOT" in facts["options"]
    assert all(isinstance(value, str) for value in facts.values())
    assert facts.keys() >= {"jaxlib", "XLA_FLAGS", "processor", "instructions", "processors"}
    assert facts != get_runtime("cpu", 1).fingerprint
    monkeypatch.setenv("XLA_FLAGS", "--xla_other")
    another = xla.XlaRuntime("cpu", xla_clients.devices("cpu", 2))
    assert {name for name in facts if facts[name] != another.fingerprint[name]} == {"XLA_FLAGS"}


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="the processors of a process are known on Linux only")
def test_the_number_of_processors_tells_executables_apart(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1, 2})
    assert processor.processor()["processors"] == "3"


def test_a_processor_that_nothing_describes_is_this_machine(monkeypatch, tmp_path):
    monkeypatch.setattr(processor, "Path", lambda name: tmp_path / name.lstrip("/"))
    monkeypatch.setattr("platform.node", lambda: "here")
    assert processor.processor()["processor"].endswith("here")


def test_a_module_as_text():
    assert get_runtime("cpu", 1).module_text(summing(1)).startswith("HloModule graph")
