# ruff: noqa: UP006, UP035
"""States show the device's values however the host reads them."""

import copy
import gc
import io
import sys
from pathlib import Path
from typing import List

import numpy as np
import pytest
import torch

from transformers_neuronx import trace as torch_neuronx
from transformers_neuronx.errors import EngineError, GraphError
from transformers_neuronx.runtimes import get_runtime
from transformers_neuronx.trace import BucketModelConfig, bucket_model_trace, engine, read_states, save, trace

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*torch.jit:DeprecationWarning", "ignore:.*torch.jit:FutureWarning", "ignore:.*Lite:DeprecationWarning"
)


class Total(torch.nn.Module):
    """A total, which is returned and kept, and a count of calls, which is written in place."""

    def __init__(self):
        super().__init__()
        self.register_buffer("total", torch.zeros(2))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x):
        self.calls += 1
        total = self.total + x
        return total * 1, total


def number(value):
    return torch.tensor([float(value), 0.0])


def called():
    """Return a traced `Total` after calls with 4 and 5. A further call with 4 must return 13."""
    module = Total()
    traced = trace(module, number(0), input_output_aliases={module.total: 1})
    traced(number(4))
    traced(number(5))
    return traced


def further(module):
    return module(number(4))[0][0].item()


class Outer(torch.nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return (self.inner(x)[0],)


def reloaded(write):
    file = io.BytesIO()
    write(file)
    return torch.jit.load(io.BytesIO(file.getvalue()))


def with_state_dict(traced):
    fresh = trace(module := Total(), number(0), input_output_aliases={module.total: 1})
    fresh.load_state_dict(traced.state_dict(), strict=True)
    return fresh


def with_saved_state_dict(traced):
    file = io.BytesIO()
    torch.save({name: each for name, each in traced.state_dict(keep_vars=True).items() if name != "program"}, file)
    fresh = trace(module := Total(), number(0), input_output_aliases={module.total: 1})
    fresh.load_state_dict(torch.load(io.BytesIO(file.getvalue())), strict=False)
    return fresh


COPIES = {
    "torch.jit.save": lambda traced: reloaded(lambda file: torch.jit.save(traced, file)),
    "save_to_buffer": lambda traced: torch.jit.load(io.BytesIO(traced.save_to_buffer())),
    "deepcopy": copy.deepcopy,
    "twice": lambda traced: copy.deepcopy(reloaded(lambda file: torch.jit.save(traced, file))),
    "in a module": lambda traced: copy.deepcopy(Outer(traced)).inner,
    "in a scripted module": lambda traced: reloaded(lambda f: torch.jit.save(torch.jit.script(Outer(traced)), f)).inner,
    "in a traced module": lambda traced: (
        reloaded(lambda file: torch.jit.save(torch.jit.trace(Outer(traced), number(0)), file)).inner
    ),
    "state_dict": with_state_dict,
    "torch.save of state_dict": with_saved_state_dict,
    "freeze": torch.jit.freeze,
}


@pytest.mark.parametrize("how", COPIES)
def test_a_copy_goes_on_where_the_original_stands(how):
    traced = called()
    made = COPIES[how](traced)
    assert further(made) == 13
    assert further(made) == 17
    assert further(traced) == 13  # the two are apart


def test_trace_save(tmp_path):
    save(called(), tmp_path / "total.pt")
    assert further(torch_neuronx.load(tmp_path / "total.pt")) == 13


def test_what_has_been_loaded_is_current_as_well():
    loaded = COPIES["torch.jit.save"](called())
    further(loaded)
    for how in ("torch.jit.save", "deepcopy", "state_dict"):
        assert further(COPIES[how](loaded)) == 17


LOOKS = {
    "state_dict": lambda traced: traced.state_dict()["state_0"],
    "parameters": lambda traced: next(traced.parameters()),
    "attribute": lambda traced: traced.state_0,
    "scripted": lambda traced: next(torch.jit.script(Outer(traced)).parameters()),
    "numpy": lambda traced: torch.from_numpy(traced.state_0.numpy()),
    "an operation": lambda traced: torch.stack([traced.state_0, traced.state_0])[0],
    "detach": lambda traced: traced.state_0.detach(),
    "data": lambda traced: traced.state_0.data,
    "pointer": lambda traced: torch.tensor(
        np.ctypeslib.as_array((np.ctypeslib.ctypes.c_float * 2).from_address(traced.state_0.data_ptr()))
    ),
    "deepcopy": lambda traced: copy.deepcopy(traced.state_0),
    "read_states": lambda traced: read_states(traced)[0],
}


@pytest.mark.parametrize("how", LOOKS)
def test_a_state_is_what_it_is_on_the_device(how):
    for traced in (called(), COPIES["torch.jit.save"](called())):
        assert LOOKS[how](traced).tolist() == [9, 0]
        further(traced)
        assert LOOKS[how](traced).tolist() == [13, 0]
        assert traced.state_1.item() == 3


def test_a_call_brings_no_state_to_the_host(monkeypatch):
    traced, brought = called(), []
    fetch = engine._on_host
    monkeypatch.setattr(engine, "_on_host", lambda tensor: brought.append(tensor.nbytes) or fetch(tensor))
    for _ in range(3):
        further(traced)
    assert brought == [8] * 3  # the output's
    assert traced.state_0.tolist() == traced.state_0.tolist() == [21, 0]
    assert brought == [8] * 4  # once, however often it is read


def test_what_is_written_to_a_part_leaves_the_rest_as_it_is_on_the_device():
    traced = called()
    traced.state_0[1] = 7
    assert traced(number(4))[0].tolist() == [13, 7]
    traced.state_0.data[1] = 8
    assert traced(number(4))[0].tolist() == [17, 8]
    traced.state_0.add_(1)
    assert traced(number(4))[0].tolist() == [22, 9]
    with torch.inference_mode():
        for state in traced.parameters():
            state.zero_()
    assert traced(number(4))[0].tolist() == [4, 0] and traced.state_1.item() == 1


def test_writing_all_of_a_state_does_not_fetch_it(monkeypatch):
    traced = called()
    monkeypatch.setattr(engine.Engine, "read", None)
    traced.state_0.copy_(number(1))
    assert further(traced) == 5
    with pytest.raises(RuntimeError, match="size"):
        traced.state_0.copy_(torch.zeros(3))
    monkeypatch.undo()
    assert traced.state_0.tolist() == [5, 0]  # what was refused has changed nothing


def test_a_view_that_is_older_than_a_call_is_not_written_through():
    traced = called()
    view = traced.state_0[1:]
    further(traced)
    view.fill_(3)
    with pytest.raises((GraphError, RuntimeError), match="state_0 was written to through a view that is older"):
        traced(number(4))


def test_another_tensor_in_the_place_of_a_state_is_refused():
    for traced in (called(), trace(module := Total(), number(0), input_output_aliases={module.total: 1})):
        traced.load_state_dict(dict(state_0=number(3)), strict=False, assign=True)
        with pytest.raises((GraphError, RuntimeError), match="state_0 must be the tensor that trace made, got another"):
            traced(number(4))


def test_a_frozen_module_that_has_been_called_is_not_copied():
    frozen = torch.jit.freeze(called())
    further(frozen)
    for how in ("torch.jit.save", "deepcopy"):
        with pytest.raises((GraphError, RuntimeError), match=r"torch\.jit\.freeze"):
            further(COPIES[how](frozen))


def test_states_that_a_failed_call_has_taken_are_lost_and_not_those_of_before(monkeypatch):
    traced = called()
    (executable,) = engine.ENGINES[traced.program].executables

    def fail(*_):
        raise EngineError("out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(type(executable), "__call__", fail)
        with pytest.raises((EngineError, RuntimeError), match="out of memory"):
            traced(number(4))
    for use in (further, copy.deepcopy, lambda traced: traced.state_0.tolist()):
        with pytest.raises((EngineError, RuntimeError), match="state_0 is lost, because a call that used it failed"):
            use(traced)
    for state, value in zip(traced.parameters(), (number(9), torch.tensor(2)), strict=True):
        state.copy_(value)
    assert further(traced) == 13
    fresh = trace(module := Total(), number(0), input_output_aliases={module.total: 1})
    with monkeypatch.context() as patch:
        patch.setattr(type(executable), "__call__", fail)
        with pytest.raises((EngineError, RuntimeError), match="out of memory"):
            fresh(number(4))
    assert further(fresh) == 4  # the host still has them


def test_states_made_and_loaded_in_inference_mode():
    with torch.inference_mode():
        traced = COPIES["torch.jit.save"](called())
        assert [further(traced), further(copy.deepcopy(traced))] == [13, 17]


def test_an_engine_ends_with_its_module_or_with_the_last_of_its_states():
    traced = called()
    state, before = traced.state_0, len(engine.ENGINES)
    del traced
    gc.collect()
    assert len(engine.ENGINES) == before - 1
    assert state.tolist() == [9, 0]


def padded(inputs: List[torch.Tensor], sizes: List[int], numbers: torch.Tensor):
    bucket = 0 if inputs[0].shape[0] <= sizes[0] else 1
    return [torch.nn.functional.pad(inputs[0], [0, sizes[bucket] - inputs[0].shape[0]])], numbers[bucket]


class Part(torch.nn.Module):
    def __init__(self, size):
        super().__init__()
        self.total = torch.nn.Parameter(torch.zeros(size), requires_grad=False)

    def forward(self, x):
        total = self.total + x
        return total * 1, total


def part(size):
    module = Part(size)
    return module, {module.total: 1}


def test_buckets_with_shared_states_and_constants():
    config = BucketModelConfig(
        lambda: torch.jit.script(padded),
        bucket_kernel_constant_args=([2, 4], torch.arange(2)),
        shared_state_buffer=[torch.zeros(4)],
        shared_state_buffer_preprocessor=lambda: lambda sizes, states, n: [states[0][: sizes[n.item()][0][0]]],
        func_kwargs=[dict(size=2), dict(size=4)],
    )
    traced = bucket_model_trace(part, [torch.zeros(2), torch.zeros(4)], config)
    traced(torch.ones(1))
    traced(torch.full([4], 2.0))
    for made in (COPIES["torch.jit.save"](traced), COPIES["deepcopy"](traced), traced):
        assert made.state_dict()["state_0"].tolist() == [3, 2, 2, 2]
        assert made(torch.ones(2))[0].tolist() == [4, 3]


class Kernel(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.bias = torch.nn.Parameter(torch.zeros(1))

    def forward(self, inputs: List[torch.Tensor]):
        return inputs, torch.tensor([0])


def test_a_bucket_kernel_that_is_a_module():
    config = BucketModelConfig(lambda: torch.jit.script(Kernel()))
    traced = bucket_model_trace(lambda: (lambda x: x + 1, {}), [torch.zeros(2)], config)
    assert copy.deepcopy(traced)(torch.zeros(2)).tolist() == [1, 1] and not read_states(traced)
    with pytest.raises(GraphError, match=r"bucket_kernel must return a scripted function, .* got a module, Kernel"):
        bucket_model_trace(lambda: part(2), [torch.zeros(2)], config)


class Apart:
    """A runtime whose devices have their own memory, as GPUs do."""

    def __init__(self, runtime):
        self.runtime = runtime

    def __getattr__(self, name):
        return getattr(self.runtime, name)

    def usable(self, array):
        return False


def test_on_a_runtime_with_memory_of_its_own(monkeypatch):
    monkeypatch.setattr(engine, "get_runtime", lambda *_: Apart(get_runtime("cpu", 1)))
    for how in ("torch.jit.save", "deepcopy", "state_dict"):
        assert further(COPIES[how](called())) == 13


def test_on_the_stand_in_for_neuron(tmp_path, monkeypatch):
    """The runtime keeps tensors on the host until a program needs them; its devices are lists of tensors."""
    monkeypatch.syspath_prepend(Path(__file__).parents[1] / "neuron")
    import standin_cc
    import standin_device

    from transformers_neuronx.runtimes import neuron

    program = standin_cc.install(tmp_path / "bin")
    monkeypatch.setenv("PATH", str(program.parent), prepend=":")
    monkeypatch.setenv("STANDIN_NEURONX_CC_LOG", str(tmp_path / "runs.log"))
    monkeypatch.setitem(sys.modules, "torch_neuronx", standin_device.PACKAGE)
    monkeypatch.setattr(torch.classes, "neuron", standin_device.CLASSES, raising=False)
    monkeypatch.setattr(torch.ops, "neuron", standin_device.OPERATIONS, raising=False)
    monkeypatch.setenv("NEURONX_RUNTIME", "neuron")
    neuron._library.cache_clear()
    try:
        for how in ("torch.jit.save", "deepcopy", "state_dict"):
            traced = called()
            assert "Neuron" in engine.ENGINES[traced.program].runtime.description
            assert further(COPIES[how](traced)) == 13
    finally:
        neuron._library.cache_clear()
