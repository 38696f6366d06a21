"""XLA's runtime: versions, self-test, donation, several devices, errors, and JAX in the same process."""

import importlib
import subprocess
import sys
import textwrap
from importlib import metadata
from pathlib import Path

import numpy as np
import pytest

from transformers_neuronx import hlo
from transformers_neuronx.compiler import compile_py_func
from transformers_neuronx.errors import ConfigError, EngineError
from transformers_neuronx.pyhlo import dtype_named
from transformers_neuronx.runtimes import for_gpus, get_runtime, xla, xla_clients

ROOT = Path(__file__).parents[2]
F32, S32 = dtype_named("f32"), dtype_named("s32")
VERSION = metadata.version("jaxlib")


@pytest.fixture(scope="module")
def cpu():
    return get_runtime("cpu", 1)


class LmHeadHlo:
    """The class of the original's developer guide, unchanged, with the parts that it leaves to the reader."""

    def __init__(self, dtype, hidden_size, n_active_tokens, batch_size, vocab_size):
        self.dtype = dtype
        self.hidden_size = hidden_size
        self.n_active_tokens = n_active_tokens
        self.batch_size = batch_size
        self.vocab_size = vocab_size

    def lm_head(self, scribe):
        dtype = self.dtype
        hidden_size = self.hidden_size
        n_active_tokens = self.n_active_tokens
        batch_size = self.batch_size
        vocab_size = self.vocab_size
        hidden = dtype[hidden_size, n_active_tokens, batch_size].Parameter(parameter_number=0)
        weight = dtype[hidden_size, vocab_size].Parameter(parameter_number=1)
        rhs_size = n_active_tokens * batch_size
        hidden = dtype[hidden_size, rhs_size].Reshape(hidden)
        dot_dims = dict(lhs_contracting_dimensions=[0], rhs_contracting_dimensions=[0])
        logits = dtype[vocab_size, rhs_size].Dot(weight, hidden, dot_dimension_numbers=dot_dims)
        return dtype[vocab_size, n_active_tokens, batch_size].Reshape(logits)


def test_the_guides_language_model_head_equals_numpy(cpu):
    module = compile_py_func(LmHeadHlo(dtype_named("f32"), 8, 3, 2, 11).lm_head)
    assert module.name == "lm_head"
    random = np.random.default_rng(0)
    hidden, weight = (random.standard_normal(sizes, np.float32) for sizes in ((8, 3, 2), (8, 11)))
    (got,) = cpu.compile(module)(cpu.put([hidden]), cpu.put([weight]))
    np.testing.assert_allclose(got.numpy(), np.einsum("hv,hnb->vnb", weight, hidden), atol=1e-5)


# Versions of jaxlib.


@pytest.mark.parametrize("version", ["0.10.2", "0.11.0", "0.12.0.1", "0.10.2.dev20260101"])
def test_versions_that_were_tried_are_accepted(version):
    xla_clients.check_version(version)


@pytest.mark.parametrize("version", ["0.9.2", "0.10.1", "0.13.0", "0.13.0rc1", "1.0"])
def test_other_versions_are_refused_with_what_to_install(version):
    with pytest.raises(EngineError) as caught:
        xla_clients.check_version(version)
    wanted = f'at least 0.10.2 and below 0.13, got {version}: pip install "jaxlib>=0.10.2,<0.13"'
    assert str(caught.value) == f"jaxlib must be {wanted}"


def test_a_missing_jaxlib_is_an_error_that_says_what_to_install(monkeypatch):
    def missing(name):
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", missing)
    with pytest.raises(EngineError, match="need jaxlib, which is not installed: pip install jaxlib"):
        xla_clients.jaxlib.__wrapped__()


def test_the_canary_dies_of_jaxlibs_defaults_and_lives_with_ours(cpu, monkeypatch):
    xla.self_test(cpu)
    monkeypatch.setattr(xla, "CPU_OPTIONS", [])
    if VERSION == "0.10.2":
        with pytest.raises(
            EngineError, match=r"computes wrong results: \d+ of 32769 rows of the self-test differ, the fi"
        ):
            xla.self_test(cpu)
    else:
        xla.self_test(cpu)


def test_an_unknown_runtime_is_refused_with_those_that_there_are(monkeypatch):
    message = "runtime must be one of cpu, cuda, neuron, got 'tpu'"
    with pytest.raises(ConfigError, match=message):
        get_runtime("tpu", 1)
    monkeypatch.setenv("NEURONX_RUNTIME", "tpu")
    with pytest.raises(ConfigError, match=message):
        get_runtime(None, 1)


def test_the_runtime_is_the_cpu_unless_the_environment_says_otherwise(cpu, monkeypatch):
    monkeypatch.delenv("NEURONX_RUNTIME", raising=False)
    assert get_runtime(None, 1) is cpu
    assert cpu.description.startswith(f"XLA:CPU (jaxlib {VERSION}), one device, ")
    assert get_runtime("cpu", 3).description.startswith(f"XLA:CPU (jaxlib {VERSION}), 3 devices, ")


def test_cuda_without_its_plugin_says_what_to_install(monkeypatch):
    monkeypatch.setattr("jaxlib.xla_client.pjrt_plugin_loaded", lambda name: False)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(xla_clients, "_cuda_client", xla_clients._cuda_client.__wrapped__)
    with pytest.raises(
        EngineError, match=r'the cuda runtime needs jaxlib\'s plugin: pip install "transformers-neuronx\['
    ):
        xla.xla_runtime.__wrapped__("cuda", 1)


def test_more_devices_than_there_are_is_an_error_about_tp_degree(monkeypatch):
    monkeypatch.setattr(xla_clients, "_cuda_client", lambda: xla_clients._cpu_client(1))
    with pytest.raises(EngineError, match="tp_degree=2 needs that many devices, but cuda has 1: lower tp_degree"):
        xla.xla_runtime.__wrapped__("cuda", 2)


def test_products_of_f32_are_in_f32_on_gpus(write):
    def graph(x, y):
        narrow = hlo.convert(x, "bf16")
        return hlo.dot(x, y, contract=([1], [0])), hlo.dot(narrow, narrow, contract=([1], [1]))

    module = write(graph, np.zeros((2, 3), np.float32), np.zeros((3, 4), np.float32))
    dots = [
        each for part in for_gpus.for_gpus(module).computations for each in part.instructions if each.opcode == "dot"
    ]
    assert [list(each.precision_config.operand_precision) for each in dots] == [for_gpus.HIGHEST, []]
    assert "operand_precision={highest,highest}" in xla.module_text(for_gpus.for_gpus(module))
    assert "operand_precision" not in xla.module_text(module)


def test_the_only_result_may_be_in_place_of_a_parameter(run):
    def in_place(x):
        y = x + 1.0
        y.set_alias_to(x, must=True)
        return [y]

    assert run(in_place, np.arange(3, dtype=np.float32))[0].tolist() == [1, 2, 3]


def test_products_of_s8_are_in_s32_on_gpus(write):
    """What runs there is run here."""
    a, b = np.array([[127, -128, 3]], np.int8), np.array([[127], [-128], [2]], np.int8)
    module = write(lambda a, b: hlo.dot(a, b, ([1], [0]), dtype="s32"), a, b)
    given = for_gpus.for_gpus(module)
    assert [each.opcode for each in given.computations[0].instructions].count("convert") == 2
    runtime = get_runtime("cpu", 1)
    assert runtime.compile(given)(runtime.put([a]), runtime.put([b]))[0].numpy().tolist() == [[127**2 + 128**2 + 6]]
    assert "convert" not in xla.module_text(module)


def test_copies_are_barriers_on_gpus(write):
    module = write(lambda x: x.shape.Copy(x) + 1.0, np.zeros(3, np.float32))
    assert " copy(" in xla.module_text(module)
    text = xla.module_text(for_gpus.for_gpus(module))
    assert "opt-barrier" in text and " copy(" not in text


def test_a_full_gpu_is_an_error_that_says_what_others_may_have():
    said = "RESOURCE_EXHAUSTED: Out of memory while trying to allocate 16.38MiB with allocator GPU_0_bfc on device 0."
    assert "XLA_PYTHON_CLIENT_PREALLOCATE is false" in for_gpus.full(RuntimeError(said))
    assert for_gpus.full(RuntimeError("INVALID_ARGUMENT: a GPU has no such operation")) == ""


# Memory.


def incrementing(must):
    def incremented(scribe):
        x = F32[1024].Parameter(parameter_number=0, name="x")
        y = x + 1.0
        y.set_alias_to(x, must=must)
        return y

    return compile_py_func(incremented)


@pytest.mark.parametrize("must", [True, False])
@pytest.mark.parametrize("degree", [1, 2])
def test_an_aliased_parameter_is_changed_in_place_and_gone(degree, must):
    runtime = get_runtime("cpu", degree)
    executable = runtime.compile(incrementing(must))
    old = runtime.put([np.full(1024, rank, np.float32) for rank in range(degree)])
    addresses = [array.unsafe_buffer_pointer() for array in old.arrays]
    (new,) = executable(old)
    assert [array.unsafe_buffer_pointer() for array in new.arrays] == addresses
    assert executable.memory() == (4096, 4096, 4096, 0)
    np.testing.assert_array_equal(new.numpy(), np.ones(1024))
    with pytest.raises(EngineError, match="deleted or donated"):
        old.numpy()


@pytest.mark.parametrize("degree", [1, 2])
def test_a_parameter_that_is_gone_cannot_be_passed_again(degree):
    runtime = get_runtime("cpu", degree)
    executable, old = runtime.compile(incrementing(True)), runtime.put([np.zeros(1024, np.float32)])
    executable(old)
    # XLA must not see it: on several devices, jaxlib 0.10.2 ends the process.
    with pytest.raises(EngineError, match=r"incremented got a tensor as x\.1 that was donated to an earlier program"):
        executable(old)


def test_a_parameter_that_is_given_away_cannot_be_another_one_too(cpu):
    def graph(scribe):
        x, y = (F32[8].Parameter(parameter_number=number) for number in (0, 1))
        z = x + y
        z.set_alias_to(x)
        return z

    executable, tensor = cpu.compile(compile_py_func(graph)), cpu.put([np.zeros(8, np.float32)])
    with pytest.raises(EngineError, match="graph got one tensor twice, but can take over its memory only once"):
        executable(tensor, tensor)
    assert executable(tensor, cpu.put([np.ones(8, np.float32)]))[0].numpy().tolist() == [1] * 8


@pytest.mark.parametrize(
    ("shards", "message"),
    [
        ([np.zeros(2), np.zeros(3)], r"put needs shards of one shape and type, got float64\[2\], float64\[3\]"),
        ([np.zeros(2), np.zeros(2, "f")], r"put needs shards of one shape and type, got float64\[2\], float32\[2\]"),
        ([np.zeros(2)] * 3, "put needs one array or 2, one per device, got 3"),
    ],
)
def test_shards_that_do_not_go_together_are_refused(shards, message):
    with pytest.raises(EngineError, match=message):
        get_runtime("cpu", 2).put(shards)


@pytest.mark.parametrize("degree", [0, -1, 65, 1000])
def test_a_runtime_has_a_device_and_no_more_than_can_meet(degree):
    with pytest.raises(ConfigError, match=f"tp_degree must be from 1 to 64, .*, got {degree}"):
        get_runtime("cpu", degree)


def test_an_unaliased_parameter_stays(cpu, write):
    x = np.zeros(4, np.float32)
    executable, tensor = cpu.compile(write(lambda x: x + 1.0, x)), cpu.put([x])
    assert [executable(tensor)[0].numpy().tolist() for _ in range(2)] == [[1] * 4] * 2
    assert executable.memory().aliased == 0


def test_an_array_that_its_owner_changes_after_put_is_not_seen(cpu):
    for array in (np.zeros(1 << 18, np.float32), np.zeros((512, 512), np.float32).T, np.zeros((64, 64))[::2, 1:]):
        tensor = cpu.put([array])
        array[:] = 7
        assert tensor.shape == array.shape
        assert tensor.numpy().max() == 0


# Several devices.


@pytest.mark.parametrize("degree", [2, 3, 16])
def test_collectives_over_all_devices(run, degree):
    shards = [np.arange(2 * degree, dtype=np.float32) + 100 * rank for rank in range(degree)]
    whole = np.stack(shards)

    def graph(x):
        gathered = hlo.all_gather(hlo.reshape(x, 1, -1), degree, 0)
        largest = hlo.all_reduce(x, degree, "Maximum")
        # Gathered, so that the first device has the values of the others.
        summed = hlo.all_gather(hlo.reshape(hlo.all_reduce(x, degree), 1, -1), degree, 0)
        pieces = hlo.all_gather(hlo.reduce_scatter(x, degree, 0), degree, -1)
        ranks = hlo.all_gather(hlo.reshape(hlo.replica_id(), 1), degree, 0)
        return gathered, largest, summed, pieces, ranks

    gathered, largest, summed, pieces, ranks = run(graph, shards, degree=degree)
    np.testing.assert_array_equal(gathered, whole)
    np.testing.assert_array_equal(largest, whole.max(0))
    np.testing.assert_array_equal(summed, np.broadcast_to(whole.sum(0), whole.shape))
    np.testing.assert_array_equal(pieces, whole.sum(0))
    np.testing.assert_array_equal(ranks, np.arange(degree))


def test_collectives_along_another_axis(run):
    shards = [np.arange(8, dtype=np.float32).reshape(2, 4) * scale for scale in (1, 10)]
    whole, piece = run(lambda x: (hlo.all_gather(x, 2, -1), hlo.reduce_scatter(x, 2, 1)), shards, degree=2)
    np.testing.assert_array_equal(whole, np.concatenate(shards, 1))
    np.testing.assert_array_equal(piece, sum(shards)[:, :2])


def test_collectives_of_one_device_are_nothing(write):
    def graph(x):
        assert hlo.all_reduce(x, 1) is hlo.all_gather(x, 1, 0) is hlo.reduce_scatter(x, 1, 0) is x
        return x

    write(graph, np.zeros(3, np.float32))


def test_put_wants_one_array_or_one_per_device():
    runtime = get_runtime("cpu", 3)
    with pytest.raises(EngineError, match="put needs one array or 3, one per device, got 2"):
        runtime.put([np.zeros(2)] * 2)
    assert runtime.put([np.zeros((2, 0))]).shape == (2, 0)


# Errors.


def test_a_module_that_xla_refuses_is_an_error_with_the_line_that_wrote_it(cpu):
    def broken(scribe):
        x = F32[2].Parameter(parameter_number=0)
        return F32[3].Add(x, x)

    with pytest.raises(EngineError) as caught:
        cpu.compile(compile_py_func(broken))
    message = str(caught.value)
    assert message.startswith("XLA:CPU refused the module 'broken': ")
    assert f"{__file__}:{broken.__code__.co_firstlineno + 2}:" in message
    assert "same shape for all operands and results" in message


def test_a_custom_call_that_nobody_registered_is_refused_by_name(cpu):
    def graph(scribe):
        x = F32[2].Parameter(parameter_number=0)
        return hlo.custom_call("no_such_kernel", F32[2], x, attributes="{scale = 2 : i64}", alias={0: 0})

    module = compile_py_func(graph)
    call = module.computations[-1].instructions[-1]
    assert (call.custom_call_target, call.backend_config) == ("no_such_kernel", b"{scale = 2 : i64}")
    assert [alias.operand_index for alias in call.output_operand_aliasing] == [0]
    with pytest.raises(EngineError, match="no_such_kernel"):
        cpu.compile(module)


def test_an_execution_that_fails_is_an_error_and_not_a_number(cpu, write):
    def graph(x):
        return hlo.slice(hlo.sort(hlo.broadcast_to(hlo.reshape(x, 4, 1), [4, 1 << 44]))[0], 1, 0, 1)  # 256 TiB

    executable = cpu.compile(write(graph, x := np.zeros(4, np.float32)))
    assert executable.memory().temporaries > 2**47
    with pytest.raises(RuntimeError, match="Out of memory"):
        executable(cpu.put([x]))[0].numpy()


WRONG = dict(
    too_few=([(2, "f")], "sum needs 2 arguments, got 1"),
    too_many=([(2, "f")] * 3, "sum needs 2 arguments, got 3"),
    another_size=([(2, "f"), (3, "f")], r"sum needs float32\[2\] as parameter 1, y\.2, got float32\[3\]"),
    another_type=([(2, "i"), (2, "f")], r"sum needs float32\[2\] as parameter 0, x\.1, got int32\[2\]"),
)


@pytest.mark.parametrize("case", WRONG)
def test_arguments_that_the_program_does_not_take_are_refused_by_name(cpu, case):
    def sum(scribe):
        x, y = (F32[2].Parameter(parameter_number=number, name=name) for number, name in enumerate("xy"))
        return x + y

    given, message = WRONG[case]
    with pytest.raises(EngineError, match=message):
        cpu.compile(compile_py_func(sum))(*(cpu.put([np.zeros(size, dtype)]) for size, dtype in given))


# JAX in the same process, loaded before or after.


def python(code):
    """Run `code` in a new process; fail with its output."""
    code = "import sys\n" + textwrap.dedent(code)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, cwd=ROOT)
    assert done.returncode == 0, f"{done.returncode}: {done.stdout}{done.stderr}"


OURS = """
    runtime = get_runtime("cpu", 4)
    program = compile_py_func(lambda scribe: hlo.all_reduce(scribe.f32[2].Parameter(parameter_number=0), 4))
    shards = [np.full(2, rank, np.float32) for rank in range(4)]
    assert runtime.compile(program)(runtime.put(shards))[0].numpy().tolist() == [6, 6]
"""
JAXS = """
    import jax
    assert jax.device_count() == 2
    assert float(jax.jit(jax.numpy.sum)(jax.numpy.arange(4.0))) == 6
    assert len(jax.devices()) == 2
"""
SETUP = """
    import os
    os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=2"
    os.environ["JAX_PLATFORMS"] = "cpu"
    import numpy as np
    from transformers_neuronx import hlo
    from transformers_neuronx.compiler import compile_py_func
    from transformers_neuronx.runtimes import get_runtime
"""


@pytest.mark.parametrize("order", [(JAXS, OURS, JAXS), (OURS, JAXS, OURS)], ids=["jax first", "ours first"])
def test_jax_and_this_package_do_not_notice_each_other(order):
    pytest.importorskip("jax", reason="what jaxlib was made for")
    python(SETUP + "".join(order))


@pytest.mark.parametrize("degree", [1, 2])
def test_what_a_program_returns_goes_into_the_next_one_also_without_jax(degree):
    code = f"""
    sys.modules["jax"] = None  # as where it is not installed
    runtime = get_runtime("cpu", {degree})
    add = runtime.compile(compile_py_func(lambda scribe: scribe.f32[3].Parameter(parameter_number=0) + 1.0))
    (x,) = add(*add(runtime.put([np.zeros(3, np.float32)])))
    assert x.shape == (3,) and x.nbytes == {12 * degree}
    assert x.numpy().tolist() == [2, 2, 2]
    """
    python(SETUP + code)


def test_a_program_runs_without_torch():
    python(SETUP + OURS + "    assert 'torch' not in sys.modules\n")


def test_jax_is_not_imported_for_calls_and_small_results():
    alone = """
import sys
import numpy as np
from transformers_neuronx import hlo
from transformers_neuronx.compiler import compile_py_func
from transformers_neuronx.pyhlo import dtype_named
from transformers_neuronx.runtimes import get_runtime

runtime = get_runtime("cpu", 1)
program = compile_py_func(lambda scribe: hlo.exp(dtype_named("f32")[4].Parameter(parameter_number=0)))
[result] = runtime.compile(program)(runtime.put([np.zeros(4, np.float32)]))
assert result.numpy().tolist() == [1] * 4
assert "jax" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", alone], check=True, timeout=120)


def test_large_results_are_not_copied(cpu):
    program = compile_py_func(lambda scribe: hlo.exp(F32[2**20].Parameter(parameter_number=0)))
    [result] = cpu.compile(program)(cpu.put([np.zeros(2**20, np.float32)]))
    read = result.numpy()
    assert read.ctypes.data == result.arrays[0].unsafe_buffer_pointer() and not read.flags.writeable
    assert (read == 1).all()
