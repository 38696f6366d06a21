"""A compiler for Neuron that fails: the message, the files that are kept, and that no process remains.

It is a stand-in, `neuronx-cc` in this directory. The real one has not run here.
"""

import os
import re
import signal
import subprocess
import sys
import textwrap
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from standin_cc import binary, doubling, gone, soon

from transformers_neuronx.errors import EngineError
from transformers_neuronx.neuron import compiling
from transformers_neuronx.neuron.compiling import compile_module
from transformers_neuronx.pyhlo import HloModuleProto

ROOT = Path(__file__).parents[2]


def failure(module, first):
    """Return the end of the log, and the kept directory, that an EngineError names after its `first` line."""
    with pytest.raises(EngineError) as failed:
        compile_module(module)
    head, *log, last = str(failed.value).splitlines()
    assert re.fullmatch(f"neuronx-cc did not compile {module.name} for trn1: it {first}", head)
    directory = Path(re.fullmatch("module.pb and log.txt are kept in (.+)", last)[1])
    assert HloModuleProto.FromString((directory / "module.pb").read_bytes()) == module
    log = [line.strip() for line in log]
    written = [line[:300].strip() for line in (directory / "log.txt").read_text().splitlines() if line.strip()]
    assert log == written[-24:]
    return log, directory


def test_a_compiler_that_refuses(neuronx_cc, monkeypatch):
    monkeypatch.setenv("STANDIN_NEURONX_CC", "fail")
    log, directory = failure(doubling(), "exited with status 70. The end of its log:")
    assert log[0] == "[INFO] pass 17" and log[-2:] == [
        "[INFO] pass 39",
        "[ERROR] [NCC_STANDIN] the tensorizer gave up",
    ]
    assert "[INFO] pass 0\n" in (directory / "log.txt").read_text()
    assert directory.parent == neuronx_cc.temporary and directory.name.startswith("neuronx-doubling-")


def test_a_run_that_failed_is_kept_among_the_dumps(neuronx_cc, tmp_path, monkeypatch):
    monkeypatch.setenv("STANDIN_NEURONX_CC", "fail")
    monkeypatch.setenv("NEURONX_DUMP_TO", str(tmp_path / "deep" / "dumps"))
    kept = [failure(doubling(name="a/b c"), "exited with status 70. .*")[1] for _ in range(2)]
    assert kept[0] != kept[1] and not list(neuronx_cc.temporary.iterdir())
    for directory in kept:
        assert directory.parent == tmp_path / "deep" / "dumps" and directory.name.startswith("failed-a_b_c-")


def test_a_run_that_failed_stays_where_the_dumps_cannot_be(neuronx_cc, tmp_path, monkeypatch):
    monkeypatch.setenv("STANDIN_NEURONX_CC", "fail")
    (tmp_path / "dumps").write_text("a file")
    monkeypatch.setenv("NEURONX_DUMP_TO", str(tmp_path / "dumps"))
    assert failure(doubling(), "exited with status 70. .*")[1].parent == neuronx_cc.temporary


def test_an_option_that_it_does_not_know(neuronx_cc, monkeypatch):
    monkeypatch.setenv("NEURON_CC_FLAGS", "--fast")
    log, _ = failure(doubling(), "exited with status 2. The end of its log:")
    assert log == ["neuronx-cc: error: unrecognized argument: --fast"]


@pytest.mark.parametrize("field", ["shape", "operands", "opcode"])
def test_a_module_that_is_not_valid(neuronx_cc, field):
    module = doubling()
    root = module.computations[-1].instructions[-1]
    if field == "shape":
        root.shape.dimensions[:] = [3]
    elif field == "operands":
        root.operand_ids.pop()
    else:
        root.opcode = "nonsense"
    log, _ = failure(module, "exited with status 70. The end of its log:")
    assert any(line.startswith("[ERROR] the module is not valid") for line in log)


def test_a_compiler_that_crashes(neuronx_cc, monkeypatch):
    monkeypatch.setenv("STANDIN_NEURONX_CC", "crash")
    log, _ = failure(doubling(), "was ended by SIGSEGV. The end of its log:")
    assert log == ["[INFO] about to crash"]


@pytest.mark.parametrize(("signal", "said"), [(9, "SIGKILL, as when memory runs out"), (40, "signal 40")])
def test_a_compiler_that_is_killed(neuronx_cc, signal, said):
    neuronx_cc.program.write_text(f"#!/bin/sh\nkill -{signal} $$\n")
    log, _ = failure(doubling(), f"was ended by {said}, with an empty log.")
    assert log == []


@pytest.mark.parametrize("script", ["exit 0", "touch module.neff"])
def test_a_compiler_that_leaves_nothing(neuronx_cc, script):
    neuronx_cc.program.write_text(f"#!/bin/sh\necho all is well\n{script}\n")
    log, _ = failure(doubling(), "exited with status 0, but left no NEFF. The end of its log:")
    assert log == ["all is well"]


def test_half_a_neff_is_for_whoever_loads_it_to_refuse(neuronx_cc, monkeypatch):
    # The contents of a NEFF are not public, so half of one serves as a damaged one.
    monkeypatch.setenv("STANDIN_NEURONX_CC", "truncated")
    whole = binary(doubling())
    assert compile_module(doubling()) == whole[: len(whole) // 2]


def test_a_log_that_is_no_text(neuronx_cc):
    neuronx_cc.program.write_text("#!/bin/sh\nprintf '\\377\\033[31mred\\033[0m\\r%0500d\\n\\n' 7\nexit 1\n")
    with pytest.raises(EngineError, match="exited with status 1") as failed:
        compile_module(doubling())
    assert str(failed.value).splitlines()[1:-1] == ["    \ufffdred", "    " + "0" * 300]


# Processes and files that remain.


@pytest.mark.parametrize("how", ["hang", "stubborn"])
def test_a_compiler_that_hangs_is_killed_with_all_it_has_started(neuronx_cc, monkeypatch, how):
    monkeypatch.setattr(compiling, "GRACE", 0.5)  # the stubborn one ignores the request to end
    monkeypatch.setenv("STANDIN_NEURONX_CC", how)
    monkeypatch.setenv("NEURONX_COMPILE_TIMEOUT", "2")
    failure(doubling(), "was stopped after 2 s, the limit that NEURONX_COMPILE_TIMEOUT sets, with an empty log.")
    assert gone(neuronx_cc)


def test_what_a_compiler_leaves_running_ends_with_it(neuronx_cc):
    neuronx_cc.program.write_text("#!/bin/sh\nsleep 600 &\nkill -6 $$\n")
    failure(doubling(), "was ended by SIGABRT, with an empty log.")
    assert gone(neuronx_cc)


def test_another_thread_stops_it(neuronx_cc, monkeypatch):
    monkeypatch.setenv("STANDIN_NEURONX_CC", "hang")
    stop = threading.Event()
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(compile_module, doubling(), stop)
        try:
            assert soon(lambda: neuronx_cc.notes("hangs"))
            assert len(neuronx_cc.processes()) == 2
        finally:
            stop.set()
        with pytest.raises(KeyboardInterrupt):
            running.result()
    assert gone(neuronx_cc) and not list(neuronx_cc.temporary.iterdir())


def test_ctrl_c_leaves_no_process_and_no_directory(neuronx_cc, tmp_path, monkeypatch):
    monkeypatch.setenv("STANDIN_NEURONX_CC", "hang")
    (tmp_path / "module.pb").write_bytes(doubling().SerializeToString())
    program = f"""
        import signal
        from pathlib import Path
        from transformers_neuronx.neuron import compiling
        from transformers_neuronx.pyhlo import HloModuleProto
        compiling.has_libneuronxla = lambda: False
        signal.signal(signal.SIGINT, signal.default_int_handler)  # what a shell starts in the background ignores it
        try:
            compiling.compile_module(HloModuleProto.FromString(Path({str(tmp_path / "module.pb")!r}).read_bytes()))
        except KeyboardInterrupt:
            print("stopped")
    """
    command = [sys.executable, "-c", textwrap.dedent(program)]
    environment = os.environ | dict(PYTHONPATH=str(ROOT))
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert soon(lambda: neuronx_cc.notes("hangs") or process.poll() is not None)
            assert len(neuronx_cc.processes()) == 3, "ours, the compiler, its child"
            process.send_signal(signal.SIGINT)
            said, _ = process.communicate(timeout=60)
        finally:
            process.kill()
    assert said == "stopped\n"
    assert gone(neuronx_cc) and not list(neuronx_cc.temporary.iterdir())
