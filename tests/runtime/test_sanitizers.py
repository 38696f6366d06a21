"""The kernels alone, without Python and XLA, under the compiler's sanitizers; then random calls of their handlers.
Last, those of another compiler, and those for ARM, by a cross compiler and an emulator.

FUZZ_CALLS is the number of random calls of each kernel.
"""

import os
import platform
import runpy
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from unittest.mock import patch

import pytest

from transformers_neuronx.runtimes.kernels import KERNELS

ROOT = Path(__file__).parents[2]
HERE = Path(__file__).parent
STACK = 384 * 1024  # bytes; docs/design-notes.md says so
CALLS = int(os.environ.get("FUZZ_CALLS", "20000"))

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not shutil.which("c++"), reason="sanitizers need a C++ compiler"),
]


def sanitized(folder, sanitizers, *sources):
    """Compile sources and the kernels of all levels with sanitizers, and return the program."""
    return made(folder, "c++", ["-O1", "-g", f"-fsanitize={sanitizers}", "-fno-sanitize-recover=all"], *sources)


def made(folder, compiler, flags, *sources, machine=None):
    """Compile sources and the kernels of all levels of a machine, and return the program."""
    with patch("setuptools.setup"), patch("platform.machine", return_value=machine or platform.machine()):
        build = runpy.run_path(str(ROOT / "setup.py"))
    kernels = ROOT / build["KERNELS"]
    headers = [kernels, *(Path(place) / "include" for place in find_spec("jaxlib").submodule_search_locations)]
    flags = ["-std=c++17", *flags, *(f"-I{header}" for header in headers)]

    def compiled(job):
        path, defined = job
        out = folder / f"{path.stem}{len(defined)}{defined[-1] if defined else ''}.o"
        subprocess.run([compiler, *flags, *defined, "-c", path, "-o", out], check=True)
        return out

    levels = [f"-DNEURONX_HAS_{level.upper()}" for level in build["LEVELS"]]
    jobs = [(kernels / name if name == "handlers.cc" else HERE / name, levels) for name in sources]
    for level, own in build["LEVELS"].items():
        jobs += [(kernels / f"{name}.cc", [*own, f"-DNEURONX_LEVEL={level}"]) for name in build["SOURCES"]]
    with ThreadPoolExecutor(2) as pool:
        objects = list(pool.map(compiled, jobs))
    subprocess.run([compiler, *flags, *objects, "-o", folder / "program", "-pthread"], check=True)
    return folder / "program"


def ran(*command):
    """Run a program, and return the numbers that it prints."""
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return [int(word) for word in done.stdout.split() if word.isdigit()]


@pytest.mark.parametrize("sanitizers", ["address,undefined", "thread"])
def test_kernels(sanitizers, tmp_path):
    assert ran(sanitized(tmp_path, sanitizers, "sanitized.cc")) >= [1]


@pytest.fixture(scope="module")
def fuzzed(tmp_path_factory):
    return sanitized(tmp_path_factory.mktemp("fuzzed"), "address,undefined", "fuzzed.cc", "handlers.cc")


@pytest.mark.parametrize("kernel", KERNELS)
def test_any_call_is_computed_or_refused(kernel, fuzzed):
    computed, refused = ran(fuzzed, kernel, str(CALLS))
    assert computed + refused == CALLS and min(computed, refused) > CALLS / 5


def test_stacks_are_bounded(tmp_path):
    """A call of a kernel needs at most STACK bytes of a thread's stack in any of its functions. None asks for more."""
    made(tmp_path, "g++", ["-O3", "-fstack-usage"], "sanitized.cc")
    needs = {}
    for path in tmp_path.glob("*.su"):
        for line in path.read_text().splitlines():
            function, size, kind = line.split("\t")
            assert kind in ("static", "dynamic,bounded"), line
            needs[path.stem, function] = int(size)
    most = max(needs, key=needs.get)
    assert len(needs) > 1000 and 2**16 < needs[most] <= STACK, (most, needs[most])


@pytest.mark.skipif(not shutil.which("clang++"), reason="needs clang")
def test_clang_compiles_them_without_a_warning(tmp_path):
    flags = ["-O3", "-ffp-contract=fast", "-Wall", "-Werror"]
    assert ran(made(tmp_path, "clang++", flags, "sanitized.cc")) >= [1]


ARM, EMULATOR = shutil.which("aarch64-linux-gnu-g++"), shutil.which("qemu-aarch64-static")
emulated = pytest.mark.skipif(not (ARM and EMULATOR), reason="needs g++-aarch64-linux-gnu and qemu-user-static")


@pytest.fixture(scope="module")
def of_arm(tmp_path_factory):
    return made(tmp_path_factory.mktemp("arm"), ARM, ["-O3", "-static"], "sanitized.cc", machine="aarch64")


@emulated
@pytest.mark.parametrize(("processor", "levels"), [("cortex-a72", 1), ("neoverse-n1", 2), ("max", 3)])
def test_levels_of_arm_agree(processor, levels, of_arm):
    """Without products of bytes, with these, and with those of bf16."""
    assert ran(EMULATOR, "-cpu", processor, of_arm) == [levels]
