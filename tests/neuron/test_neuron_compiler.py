"""The compiler for Neuron as a child: what it is given, and what is said, kept and killed when it fails.

It is a stand-in, `neuronx-cc` in this directory. The real one has not run here.
"""

import os
import re
import signal
import subprocess
import sys
import textwrap
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from standin_cc import LIBNEURONXLA, MAGIC

from transformers_neuronx import hlo
from transformers_neuronx.compiler import compile_py_func
from transformers_neuronx.errors import ConfigError, EngineError
from transformers_neuronx.neuron import compiling
from transformers_neuronx.neuron.compiling import (
    compile_module,
    compile_target,
    compiler_version,
    flags,
    has_libneuronxla,
)
from transformers_neuronx.neuron.targets import TARGETS
from transformers_neuronx.pyhlo import HloModuleProto, dtype_named

ROOT = Path(__file__).parents[2]


def doubling(size=4, name="doubling"):
    def double(_):
        return hlo.multiply(dtype_named("f32")[size].Parameter(parameter_number=0), 2.0)

    module = compile_py_func(double)
    module.name = name
    return module


def binary(module):
    return MAGIC + module.SerializeToString(deterministic=True)


def soon(condition, seconds=60):
    """Wait for something that another process does."""
    until = time.monotonic() + seconds
    while not (found := condition()) and time.monotonic() < until:
        time.sleep(0.02)
    return found


def gone(standin):
    """Whether nothing of the stand-in runs. What was killed needs a moment."""
    return soon(lambda: not standin.processes(), 10)


# What the compiler is given.


def test_a_module_becomes_a_neff(neuronx_cc):
    module = doubling()
    assert compile_module(module) == binary(module)
    [note] = neuronx_cc.notes("compile")
    assert note["words"] == [
        *("compile", "--framework=XLA", "--target=trn1", "module.pb", "--output=module.neff"),
        *("--model-type=transformer", "--auto-cast=none"),
    ]
    assert note["directory"].startswith(str(neuronx_cc.temporary)), "the work directory"
    assert not list(neuronx_cc.temporary.iterdir()), "nothing is left"


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("", ["--model-type=transformer", "--auto-cast=none"]),
        ("-O1", ["--model-type=transformer", "--auto-cast=none", "-O1"]),
        ("--auto-cast=matmult", ["--model-type=transformer", "--auto-cast=matmult"]),
        ("--auto-cast matmult", ["--model-type=transformer", "--auto-cast", "matmult"]),
        ("--auto-cast-type=bf16", ["--model-type=transformer", "--auto-cast=none", "--auto-cast-type=bf16"]),
        ("--model-type generic --auto-cast all --lnc=1", "--model-type generic --auto-cast all --lnc=1".split()),
        ("--target=inf2 --lnc=2 --target trn2", ["--model-type=transformer", "--auto-cast=none", "--lnc=2"]),
        ("--cache_dir=/x --no_cache --cache_dir y -O2", ["--model-type=transformer", "--auto-cast=none", "-O2"]),
        ("--logfile='a b'", ["--model-type=transformer", "--auto-cast=none", "--logfile=a b"]),
    ],
)
def test_options_of_the_user_are_added_or_take_the_place_of_ours(neuronx_cc, monkeypatch, given, expected):
    monkeypatch.setenv("NEURON_CC_FLAGS", given)
    assert flags() == expected
    assert flags(TARGETS["inf2"]) == ["--target=inf2", *expected]
    compile_module(doubling())  # the stand-in takes none that it does not know, and none twice
    [note] = neuronx_cc.notes("compile")
    assert note["words"][5:] == expected


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("--auto-cast='none", "NEURON_CC_FLAGS wants options as in a shell, got .*: No closing quotation"),
        ("-O1 --output=x.neff", "NEURON_CC_FLAGS wants no --output: this package says that itself"),
        ("--framework XLA", "NEURON_CC_FLAGS wants no --framework"),
        ("--target=gpu", "NEURON_CC_FLAGS: --target wants to be one of trn1, inf2, trn2, got 'gpu'"),
        ("--target", "NEURON_CC_FLAGS: --target wants to be one of .*, got ''"),
    ],
)
def test_options_that_cannot_be(neuronx_cc, monkeypatch, given, message):
    monkeypatch.setenv("NEURON_CC_FLAGS", given)
    with pytest.raises(ConfigError, match=message):
        compile_module(doubling())
    assert not neuronx_cc.notes("compile") and not list(neuronx_cc.temporary.iterdir())


@pytest.mark.parametrize(
    ("options", "override", "product", "expected"),
    [
        (None, None, None, "trn1"),
        (None, None, "trn1.32xlarge\n", "trn1"),
        (None, None, "trn1n.32xlarge\n", "trn1"),
        (None, None, "inf2.8xlarge\n", "inf2"),
        (None, None, "trn2u.48xlarge\n", "trn2"),
        (None, None, "m5.large\n", "trn1"),
        (None, None, "Not trn2\n", "trn1"),
        (None, "inf2", "trn2.48xlarge\n", "inf2"),
        ("--target=trn2 -O1", "inf2", "inf2.xlarge\n", "trn2"),
        ("--target trn2", "inf2", None, "trn2"),
        ("--target=inf2 --target=trn2", None, None, "trn2"),
        ("-O1", "trn2", None, "trn2"),
    ],
)
def test_the_kind_of_instance(neuronx_cc, monkeypatch, options, override, product, expected):
    if options:
        monkeypatch.setenv("NEURON_CC_FLAGS", options)
    if override:
        monkeypatch.setenv("NEURON_PLATFORM_TARGET_OVERRIDE", override)
    if product:
        compiling.PRODUCT_NAME.write_text(product)
    assert compile_target() is TARGETS[expected]
    compile_module(doubling())
    [note] = neuronx_cc.notes("compile")
    assert note["words"][2] == f"--target={expected}"


def test_a_kind_of_instance_that_there_is_not(neuronx_cc, monkeypatch):
    monkeypatch.setenv("NEURON_PLATFORM_TARGET_OVERRIDE", "trn9")
    with pytest.raises(ConfigError, match=r"^NEURON_PLATFORM_TARGET_OVERRIDE wants to be one of trn1, .*, got 'trn9'"):
        compile_target()


@pytest.mark.parametrize("seconds", ["soon", "-1", "nan", "inf", ""])
def test_a_time_limit_that_is_none(neuronx_cc, monkeypatch, seconds):
    monkeypatch.setenv("NEURONX_COMPILE_TIMEOUT", seconds)
    with pytest.raises(ConfigError, match=f"^NEURONX_COMPILE_TIMEOUT wants a number of seconds, .*, got '{seconds}'$"):
        compile_module(doubling())


def test_no_time_limit(neuronx_cc, monkeypatch):
    monkeypatch.setenv("NEURONX_COMPILE_TIMEOUT", "0")
    assert compile_module(doubling()) == binary(doubling())


# Which compiler there is.


def test_without_a_compiler_the_message_says_what_to_install(neuronx_cc, monkeypatch):
    monkeypatch.setenv("PATH", "")
    advice = re.escape('pip install "transformers-neuronx[neuron]" --extra-index-url https://pip.repos.neuron.')
    with pytest.raises(EngineError, match=f"wants libneuronxla or the program neuronx-cc, .* neither: {advice}"):
        compile_module(doubling())
    with pytest.raises(EngineError, match=advice):
        compiler_version()
    assert not list(neuronx_cc.temporary.iterdir())


def test_a_program_that_cannot_be_started(neuronx_cc):
    neuronx_cc.program.write_text("#!/no/such/interpreter\n")
    with pytest.raises(EngineError, match=r"^doubling: the compiler for Neuron could not be run: .*No such file"):
        compile_module(doubling())
    assert not list(neuronx_cc.temporary.iterdir())


def test_the_version_is_the_packages(neuronx_cc, tmp_path, monkeypatch):
    information = tmp_path / "packages" / "neuronx_cc-2.14.1.dist-info"
    information.mkdir(parents=True)
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: neuronx-cc\nVersion: 2.14.1\n")
    monkeypatch.syspath_prepend(information.parent)
    assert compiler_version() == "2.14.1"
    assert not neuronx_cc.notes("version")


def test_the_version_is_what_the_program_prints_where_there_is_no_package(neuronx_cc):
    assert compiler_version() == compiler_version() == "2.99.0.1+standin"
    assert len(neuronx_cc.notes("version")) == 1


def test_a_program_that_does_not_say_its_version(neuronx_cc):
    for script, message in [("exit 3", "does not say its version: .* status 3"), ("echo hello", "but 'hello'")]:
        neuronx_cc.program.write_text(f"#!/bin/sh\n{script}\n")
        with pytest.raises(EngineError, match=message):
            compiler_version()


@pytest.fixture
def libneuronxla(neuronx_cc, monkeypatch):
    """The stand-in for that package, where this process and its children find it."""
    monkeypatch.syspath_prepend(LIBNEURONXLA)
    monkeypatch.setenv("PYTHONPATH", os.path.relpath(LIBNEURONXLA))  # the child has another directory
    monkeypatch.setattr(compiling, "has_libneuronxla", has_libneuronxla)
    return neuronx_cc


def test_through_libneuronxla(libneuronxla, monkeypatch):
    monkeypatch.setenv("NEURON_CC_FLAGS", "--target=inf2 -O1 --logfile='a b'")
    module = doubling()
    magic, said, data = compile_module(module).split(b"\n", 2)
    assert magic == b"stand-in NEFF of libneuronxla" and HloModuleProto.FromString(data) == module
    said = eval(said, dict(null=None, true=True, false=False))
    assert said.pop("directory").startswith(str(libneuronxla.temporary))
    assert said == dict(
        compiler_flags="--model-type=transformer --auto-cast=none -O1 '--logfile=a b'",
        input_format="hlo",
        platform_target="inf2",
        cache_key=None,
        retry_failed_compilation=False,
        lazy=True,
        use_cache=False,
        cache_dir=None,
    )
    assert not libneuronxla.notes("compile") and not list(libneuronxla.temporary.iterdir())
    assert "libneuronxla" not in sys.modules


@pytest.mark.parametrize(
    ("how", "last"),
    [
        ("fail", "RuntimeError: neuronx-cc failed with 70"),
        ("none", ".*EngineError: neuron_xla_compile wants to return the bytes of a NEFF, got NoneType"),
    ],
)
def test_libneuronxla_fails(libneuronxla, monkeypatch, how, last):
    monkeypatch.setenv("STANDIN_NEURONX_CC", how)
    with pytest.raises(EngineError) as failed:
        compile_module(doubling())
    lines = str(failed.value).splitlines()
    assert lines[0] == "libneuronxla did not compile doubling for trn1: it exited with status 1. The end of its log:"
    assert re.fullmatch(f"    {last}", lines[-2])


def test_the_empty_package_of_that_name_is_not_taken(neuronx_cc, tmp_path, monkeypatch):
    (tmp_path / "empty" / "libneuronxla").mkdir(parents=True)
    (tmp_path / "empty" / "libneuronxla" / "__init__.py").write_text("raise ImportError('WRONG PACKAGE')\n")
    monkeypatch.syspath_prepend(tmp_path / "empty")
    assert not has_libneuronxla()
    monkeypatch.syspath_prepend(LIBNEURONXLA)
    assert has_libneuronxla()


# How it fails.


def failure(module, first):
    """What an EngineError has after its `first` line: the end of the log, and the directory that was kept."""
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
    log, _ = failure(doubling(), f"was ended by {said}, without a word.")
    assert log == []


@pytest.mark.parametrize("script", ["exit 0", "touch module.neff"])
def test_a_compiler_that_leaves_nothing(neuronx_cc, script):
    neuronx_cc.program.write_text(f"#!/bin/sh\necho all is well\n{script}\n")
    log, _ = failure(doubling(), "exited with status 0, but left no NEFF. The end of its log:")
    assert log == ["all is well"]


def test_half_a_neff_is_for_whoever_loads_it_to_refuse(neuronx_cc, monkeypatch):
    # What a NEFF is made of is not public, so here half of one is as good as any.
    monkeypatch.setenv("STANDIN_NEURONX_CC", "truncated")
    whole = binary(doubling())
    assert compile_module(doubling()) == whole[: len(whole) // 2]


def test_a_log_that_is_no_text(neuronx_cc):
    neuronx_cc.program.write_text("#!/bin/sh\nprintf '\\377\\033[31mred\\033[0m\\r%0500d\\n\\n' 7\nexit 1\n")
    with pytest.raises(EngineError, match="exited with status 1") as failed:
        compile_module(doubling())
    assert str(failed.value).splitlines()[1:-1] == ["    \ufffdred", "    " + "0" * 300]


# What is left of it.


@pytest.mark.parametrize("how", ["hang", "stubborn"])
def test_a_compiler_that_hangs_is_killed_with_all_it_has_started(neuronx_cc, monkeypatch, how):
    monkeypatch.setattr(compiling, "GRACE", 0.5)  # the stubborn one is asked in vain
    monkeypatch.setenv("STANDIN_NEURONX_CC", how)
    monkeypatch.setenv("NEURONX_COMPILE_TIMEOUT", "2")
    failure(doubling(), "was stopped after 2 s, the limit that NEURONX_COMPILE_TIMEOUT sets, without a word.")
    assert gone(neuronx_cc)


def test_what_a_compiler_leaves_running_ends_with_it(neuronx_cc):
    neuronx_cc.program.write_text("#!/bin/sh\nsleep 600 &\nkill -6 $$\n")
    failure(doubling(), "was ended by SIGABRT, without a word.")
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
        from pathlib import Path
        from transformers_neuronx.neuron import compiling
        from transformers_neuronx.pyhlo import HloModuleProto
        compiling.has_libneuronxla = lambda: False
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


def test_several_at_once(neuronx_cc, monkeypatch):
    modules = [doubling(size) for size in range(1, 7)]
    here = os.getcwd()
    with ThreadPoolExecutor(len(modules)) as pool:
        assert list(pool.map(compile_module, modules)) == list(map(binary, modules))
    notes = neuronx_cc.notes("compile")
    assert len({note["directory"] for note in notes}) == len(notes) == len(modules)
    assert os.getcwd() == here and not list(neuronx_cc.temporary.iterdir())
