"""What the tests of several folders share."""

import os
import shutil
import tempfile

import numpy as np
import pytest
import torch
from lines import family_lines

from transformers_neuronx.compiler import compile_py_func
from transformers_neuronx.pyhlo import dtype_named
from transformers_neuronx.pyhlo.dtypes import from_numpy
from transformers_neuronx.runtimes import get_runtime

# Between two operations torch's threads go on spinning for milliseconds, on the cores that the programs need.
torch.set_num_threads(1)


def pytest_configure(config):
    """All workers share a cache of compiled programs, which is not the user's."""
    if not hasattr(config, "workerinput"):
        config.cache_of_programs = tempfile.mkdtemp(prefix="transformers_neuronx_tests_")
        os.environ |= dict(NEURONX_CACHE="on", NEURONX_CACHE_DIR=config.cache_of_programs, NEURONX_DUMP_TO="")


def pytest_unconfigure(config):
    shutil.rmtree(getattr(config, "cache_of_programs", ""), ignore_errors=True)


def pytest_terminal_summary(terminalreporter):
    """What each family costs; `tests/test_structure.py` holds it to its budget."""
    terminalreporter.section("lines of each family")
    for family, files in family_lines().items():
        columns = "  ".join(f"{name.removesuffix('.py')} {lines:3}" for name, lines in files.items())
        terminalreporter.write_line(f"{family:10}{columns}  all {sum(files.values()):3}")


@pytest.fixture(scope="session")
def write():
    """`write(function, *arrays)`: the module of `function(*tensors)`, with a parameter like each of the arrays."""

    def written(function, *arrays):
        def graph(_):
            shapes = [dtype_named(from_numpy(array.dtype).name)[array.shape] for array in arrays]
            return function(*(shape.Parameter(parameter_number=i) for i, shape in enumerate(shapes)))

        return compile_py_func(graph)

    return written


@pytest.fixture(scope="session")
def run(write):
    """`run(function, *arrays, degree=1)`: what the module of `function` computes on the CPU, as a list of arrays.

    An array goes to every device; a list of arrays gives each device its own. Outputs are those of the first device.
    """

    def ran(function, *arrays, degree=1):
        shards = [array if isinstance(array, list) else [np.asarray(array)] for array in arrays]
        runtime = get_runtime("cpu", degree)
        executable = runtime.compile(write(function, *(pieces[0] for pieces in shards)))
        return [output.numpy() for output in executable(*map(runtime.put, shards))]

    return ran
