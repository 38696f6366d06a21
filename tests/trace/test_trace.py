"""A traced function is a ScriptModule: it is called, saved, loaded and nested like any other."""

import dataclasses
import gc
import importlib.machinery
import subprocess
import sys
import threading
import types
from collections import namedtuple

import pytest
import torch

from transformers_neuronx.errors import CheckpointError, ConfigError, GraphError
from transformers_neuronx.trace import engine, load, move_trace_to_device, read_states, save, trace
from transformers_neuronx.trace.program import Traced

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning", "ignore:.*torch.jit:FutureWarning")
X, Y = torch.randn(3, 4), torch.randn(3, 4)


class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.table = torch.nn.Embedding(40, 16)
        self.norm = torch.nn.LayerNorm(16)
        self.up, self.head = torch.nn.Linear(16, 24), torch.nn.Linear(16, 40, bias=False)
        self.down = torch.nn.Parameter(torch.randn(24, 16))  # [in, out], as a Conv1D has it
        self.head.weight = self.table.weight

    def forward(self, ids, scale=None):
        x = self.table(ids)
        x = x + torch.nn.functional.gelu(self.up(self.norm(x))) @ self.down
        return dict(logits=self.head(x if scale is None else x * scale), hidden=x)


IDS = torch.tensor([[3, 7, 1], [30, 2, 39]])


def test_the_programs_of_the_original_s_guide(tmp_path):
    def func(x, y):
        return 2 * x + y

    traced = trace(func, (torch.rand(3), torch.rand(3)))
    torch.jit.save(traced, tmp_path / "func.pt")
    loaded = torch.jit.load(tmp_path / "func.pt")
    a, b = torch.rand(3), torch.rand(3)
    torch.testing.assert_close(loaded(a, b), 2 * a + b)

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = torch.nn.Conv2d(1, 1, 3)

        def forward(self, x):
            return self.conv(x) + 1

    model = Model().eval()
    traced = trace(model, torch.rand(1, 1, 3, 3))
    assert isinstance(traced, torch.jit.ScriptModule)
    x = torch.rand(1, 1, 3, 3)
    torch.testing.assert_close(traced(x), model(x).detach())


def test_structures_of_outputs():
    @dataclasses.dataclass
    class Pair:
        first: torch.Tensor
        second: torch.Tensor | None = None

    point = namedtuple("point", "x y")
    cases = {
        "tensor": (lambda x: x + 1, X + 1),
        "tuple": (lambda x: (x, x * 2), (X, X * 2)),
        "list": (lambda x: [x, x * 2], [X, X * 2]),
        "dict": (lambda x: dict(a=x, b=x * 2), dict(a=X, b=X * 2)),
        "nested": (lambda x: dict(a=x, b=(x, [x, dict(c=x)])), dict(a=X, b=(X, ([X, dict(c=X)])))),
        "dataclass": (lambda x: Pair(x), dict(first=X)),
        "namedtuple": (lambda x: point(x, x + 1), (X, X + 1)),
        "others": (lambda x: (x, None, 3, True), (X, None, 3, True)),
        "twice": (lambda x: (x, x), (X, X)),
        "scalar": (lambda x: x.sum(), X.sum()),
    }

    def same(got, want):
        if isinstance(want, torch.Tensor):
            torch.testing.assert_close(got, want)
            assert got.shape == want.shape
        elif isinstance(want, dict):
            assert list(got) == list(want)
            [same(got[name], want[name]) for name in want]
        elif isinstance(want, list | tuple):
            assert len(got) == len(want)
            [same(*pair) for pair in zip(got, want, strict=True)]
        else:
            assert got == want

    for function, want in cases.values():
        same(trace(function, X)(X), want)


def test_weights_are_there_once_and_are_parameters_of_the_program():
    traced = trace(Block().eval(), IDS)
    program = Traced.from_bytes(bytes(traced.program))
    assert sorted(name for name, _ in program.weights) == [
        "down",
        "head.weight",  # and the table
        "norm.bias",
        "norm.weight",
        "up.bias",
        "up.weight",
    ]
    assert len(traced.weights) == 6
    constants = [i for c in program.programs[0].plain.computations for i in c.instructions if i.opcode == "constant"]
    assert all(len(each.literal.SerializeToString()) < 100 for each in constants)


def test_a_matrix_that_is_also_one_of_several_operands():
    weight = torch.randn(4, 4)
    function = lambda x: torch.cat([torch.nn.functional.linear(x, weight), weight])  # noqa: E731
    torch.testing.assert_close(trace(function, X)(X), function(X), atol=1e-5, rtol=1e-5)


def test_a_model_with_a_tied_head_an_argument_less_and_keywords():
    model = Block().eval()
    want = model(IDS)
    for inputs in (IDS, (IDS, None)):
        traced = trace(model, inputs)
        got = traced(IDS)
        torch.testing.assert_close(got, {name: value.detach() for name, value in want.items()}, atol=1e-5, rtol=1e-5)
    scaled = trace(model, (IDS, torch.tensor(2.0)))
    torch.testing.assert_close(scaled(ids=IDS, scale=torch.tensor(2.0))["hidden"], want["hidden"].detach())


def test_arguments_with_the_same_tensor_as_their_example_are_apart():
    traced = trace(lambda a, b, c: (a - b, c), (X, X, None))
    torch.testing.assert_close(traced(X, Y)[0], X - Y)
    with pytest.raises(GraphError, match="which argument output 1 replaces, but 2 arguments have that tensor"):
        trace(lambda x, total: (x * 2, total + x), (X, X), input_output_aliases={X: 1})


def test_outputs_are_the_caller_s_to_write_to():
    traced = trace(lambda x: x + 1, X)
    first = traced(X)
    first.zero_()
    torch.testing.assert_close(traced(X), X + 1)


def test_a_saved_trace_in_a_new_process_neither_exports_nor_compiles(tmp_path):
    model = Block().eval()
    traced = trace(model, IDS)
    torch.jit.save(traced, tmp_path / "block.pt")
    want = traced(IDS)
    torch.save(want, tmp_path / "want.pt")
    program = f"""
import torch
import transformers_neuronx.trace
from transformers_neuronx.runtimes.xla import XlaRuntime
def refuse(*_): raise AssertionError("compiled")
XlaRuntime.compile, compiled = refuse, XlaRuntime.compile
torch.export.export = refuse
import transformers_neuronx.runtimes.xla as xla
xla.self_test = lambda runtime: None
traced = torch.jit.load({str(tmp_path / "block.pt")!r})
got, want = traced(torch.tensor({IDS.tolist()})), torch.load({str(tmp_path / "want.pt")!r})
assert all(torch.equal(got[name], want[name]) for name in want)
print("equal")
"""
    ran = subprocess.run([sys.executable, "-W", "ignore", "-c", program], capture_output=True, text=True)
    assert ran.returncode == 0 and "equal" in ran.stdout, ran.stderr


def test_it_lives_in_other_modules_and_has_attributes():
    traced = trace(Block().eval(), IDS)
    traced.main_input_name = "ids"
    assert traced.main_input_name == "ids"

    class Outer(torch.nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.inner = inner

        def forward(self, ids):
            return self.inner(ids)["logits"].argmax(-1)

    outer = Outer(traced)
    assert torch.equal(torch.jit.script(outer)(IDS), outer(IDS))
    assert torch.equal(torch.jit.trace(outer, IDS)(IDS), outer(IDS))


def test_engines_end_with_their_modules():
    traced = trace(lambda x: x + 1, X)
    traced(X)
    count = len(engine.ENGINES)
    del traced
    gc.collect()
    assert len(engine.ENGINES) == count - 1


class Counter(torch.nn.Module):
    """Two states: a shifted history, which is returned, and a count, which is written in place."""

    def __init__(self):
        super().__init__()
        self.history = torch.nn.Parameter(torch.zeros(2, 4), requires_grad=False)
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    def forward(self, x):
        self.count += 1
        history = torch.cat([self.history[:, 1:], x[:, None]], 1)
        return [history.sum(1) * self.count, history]


def test_states_stay_on_the_device_and_can_be_written_and_read():
    module = Counter()
    traced = trace(module, torch.zeros(2), input_output_aliases={module.history: 1})
    states = list(traced.parameters())
    assert [tuple(state.shape) for state in states] == [(2, 4), ()]
    ones = torch.ones(2)
    assert [traced(ones)[0].tolist() for _ in range(3)] == [[1, 1], [4, 4], [9, 9]]
    assert len(traced(ones)) == 1
    assert read_states(traced)[0].tolist() == [[1] * 4] * 2
    with torch.inference_mode():
        states[0].copy_(torch.full((2, 4), 5.0))
        assert traced(ones)[0].tolist() == [16 * 5] * 2
    assert read_states(traced)[1].item() == 5
    assert module.history.sum() == 0 and module.count.item() in (0, 1)  # those of the module are its own


def test_an_input_can_be_a_state():
    start = torch.zeros(3)
    traced = trace(lambda x, total: (x * 2, total + x), (torch.zeros(3), start), input_output_aliases={start: 1})
    for _ in range(2):
        (doubled,) = traced(torch.ones(3))
        assert doubled.tolist() == [2, 2, 2]
    assert read_states(traced)[0].tolist() == [2, 2, 2]


def test_a_state_that_is_only_read_stays(tmp_path):
    class Reader(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.memory = torch.nn.Parameter(torch.arange(3.0), requires_grad=False)

        def forward(self, x):
            return x + self.memory, self.memory

    module = Reader()
    traced = trace(module, torch.zeros(3), input_output_aliases={module.memory: 1})
    torch.jit.save(traced, tmp_path / "reader.pt")
    loaded = torch.jit.load(tmp_path / "reader.pt")
    move_trace_to_device(loaded, 0)
    next(loaded.parameters()).copy_(torch.ones(3))
    assert [loaded(torch.zeros(3))[0].tolist() for _ in range(2)] == [[1, 1, 1]] * 2


def test_calls_from_several_threads():
    traced = trace(Block().eval(), IDS)
    want, wrong = traced(IDS)["logits"], []

    def call():
        wrong.extend(1 for _ in range(20) if not torch.equal(traced(IDS)["logits"], want))

    threads = [threading.Thread(target=call) for _ in range(4)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    assert not wrong


@pytest.mark.parametrize(
    ("inputs", "wanted"),
    [
        ((torch.zeros(2, 3), Y), r"x must be torch.float32\[3, 4\].*got torch.float32\[2, 3\]"),
        ((X, Y.double()), r"other must be torch.float32\[3, 4\].*got torch.float64\[3, 4\]"),
        ((X, Y, X), "expected at most 3"),
    ],
)
def test_other_inputs_than_the_example_s_are_refused(inputs, wanted):
    def func(x, other):
        return x + other

    traced = trace(func, (X, Y))
    with pytest.raises((GraphError, RuntimeError), match=wanted):
        traced(*inputs)


def test_either_branch():
    class Branches(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.other = torch.nn.Linear(4, 4), torch.nn.Parameter(torch.randn(4, 4))

        def forward(self, x):
            scaled, total = torch.cond(x.sum() > 0, self.on_true, self.on_false, (x,))
            return self.layer(x) + scaled, total

        def on_true(self, x):
            return self.layer(x), x.sum()

        def on_false(self, x):
            return x @ self.other, torch.cond(x[0, 0] > 0, lambda x: x.amax(), lambda x: x.amin(), (x,))

    module = Branches()
    traced = trace(module, X)
    with torch.no_grad():
        for given in (X, -X, X - 20):
            torch.testing.assert_close(traced(given), module(given), atol=1e-5, rtol=1e-5)


class Odd(torch.nn.Module):
    def forward(self, x):
        return torch.nonzero(x)


class WithOdd(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = Odd()

    def forward(self, x):
        return torch.special.bessel_j0(x) if x.ndim == 1 else self.inner(x)


def test_an_unknown_operation_is_named_with_its_module_and_line():
    with pytest.raises(
        GraphError, match=r"special_bessel_j0.*has no lowering.*test_trace.py, line \d+.*bessel_j0\(x\)"
    ):
        trace(WithOdd(), torch.zeros(3))


@pytest.mark.parametrize(
    ("call", "wanted"),
    [
        (lambda: trace(lambda x: x, [3]), "example input must be a tensor or None, got int for 'x'"),
        (lambda: trace(lambda x: object(), X), "the function must return tensors"),
        (lambda: trace(lambda x: x, (X, X)), "takes 1 arguments, got 2"),
        (lambda: trace(lambda x: x + 1, X, input_output_aliases={Y: 0}), "does not use the tensor"),
        (lambda: trace(lambda x: x + 1, X, input_output_aliases={X: 3}), "one of the 1 outputs, got 3"),
        (lambda: trace(lambda x: x.sum(), X, input_output_aliases={X: 0}), "output of the state's sizes"),
        (lambda: trace(lambda x: x.add_(1), X.clone()), "writes to"),
        (lambda: trace(lambda x: x[x > 0], X), "returns a size that depends on tensor values"),
    ],
)
def test_what_cannot_be_traced_is_said(call, wanted):
    with pytest.raises(GraphError, match=wanted):
        call()


def test_a_damaged_module_is_refused():
    traced = trace(lambda x: x + 1, X)
    traced.program[len(traced.program) // 2] ^= 255
    with pytest.raises(CheckpointError, match="damaged"):
        traced(X)


def test_auto_cast():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU(), torch.nn.Linear(64, 8)).eval()
    x = torch.randn(5, 64)
    want = model(x).detach()
    far = (model.to(torch.bfloat16)(x.bfloat16()).float() - want).abs().max()
    model.float()
    exact = trace(model, x, compiler_args="--auto-cast none")(x)
    torch.testing.assert_close(exact, trace(model, x)(x), atol=0, rtol=0)
    for arguments in ("--auto-cast-type bf16", ["--auto-cast", "all"], "--auto-cast=matmult --auto-cast-type=fp16"):
        traced = trace(model, x, compiler_args=arguments)
        got = traced(x)
        assert got.dtype == torch.float32
        assert 0 < (got - want).abs().max() <= 2 * far
        assert all(weight.element_size() == 2 for weight in traced.weights if weight.ndim > 1)
    with pytest.warns(UserWarning, match="ignores these compiler_args: --logfile log.txt -O1"):
        trace(model, x, compiler_args="--auto-cast-type fp16 --logfile log.txt -O1")
    with pytest.raises(ConfigError, match="auto-cast"):
        trace(model, x, compiler_args="--auto-cast sometimes")


def test_hlo_goes_to_the_work_directory(tmp_path):
    with pytest.warns(UserWarning, match="ignores these arguments: inline_weights_to_neff"):
        trace(Block().eval(), IDS, compiler_workdir=tmp_path / "work", inline_weights_to_neff=False)
    assert "ENTRY" in (tmp_path / "work" / "traced_0.hlo.txt").read_text()
    assert (tmp_path / "work" / "traced_0.hlo.pb").stat().st_size > 1000


def test_a_module_saved_with_kernels_runs_without(tmp_path):
    model = Block().eval()
    torch.jit.save(trace(model, IDS), tmp_path / "block.pt")
    torch.save(model(IDS)["logits"].detach(), tmp_path / "want.pt")
    program = f"""
import torch
import transformers_neuronx.trace
traced = torch.jit.load({str(tmp_path / "block.pt")!r})
got, want = traced(torch.tensor({IDS.tolist()}))["logits"], torch.load({str(tmp_path / "want.pt")!r})
torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)
print("close")
"""
    import os

    ran = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program], capture_output=True, text=True,
        env=os.environ | dict(NEURONX_KERNELS="off"),
    )  # fmt: skip
    assert ran.returncode == 0 and "close" in ran.stdout, ran.stderr


def test_calls_go_to_neuron_s_own_where_it_is(monkeypatch):
    """A stand-in that records the caller's arguments."""
    theirs = types.ModuleType("torch_neuronx")
    theirs.__spec__ = importlib.machinery.ModuleSpec("torch_neuronx", None)
    calls = []
    theirs.trace = lambda *arguments, **options: calls.append((arguments, options)) or "traced"
    theirs.move_trace_to_device = lambda *arguments: calls.append(arguments)
    monkeypatch.setitem(sys.modules, "torch_neuronx", theirs)
    monkeypatch.setattr("glob.glob", lambda pattern: ["/dev/neuron0"] if pattern == "/dev/neuron*" else [])
    monkeypatch.delenv("NEURONX_RUNTIME", raising=False)
    assert trace("func", X, compiler_args="-O1", inline_weights_to_neff=False) == "traced"
    options = dict(input_output_aliases={}, compiler_workdir=None, compiler_args="-O1", inline_weights_to_neff=False)
    assert calls.pop() == (("func", X), options)
    move_trace_to_device("traced", 3)
    assert calls.pop() == ("traced", 3)
    monkeypatch.setenv("NEURONX_RUNTIME", "cpu")
    assert isinstance(trace(lambda x: x + 1, X), torch.jit.ScriptModule) and not calls


def test_saved_with_states_as_they_are(tmp_path):
    module = Counter()
    traced = trace(module, torch.zeros(2), input_output_aliases={module.history: 1})
    for _ in range(3):
        traced(torch.ones(2))
    save(traced, tmp_path / "counter.pt")
    again = load(tmp_path / "counter.pt")
    assert again(torch.ones(2))[0].tolist() == traced(torch.ones(2))[0].tolist() == [16, 16]
    assert [path.name for path in tmp_path.iterdir()] == ["counter.pt"]
    (tmp_path / "counter.pt").write_bytes(b"no module")
    with pytest.raises(CheckpointError, match=r"counter\.pt: not a traced"):
        load(tmp_path / "counter.pt")
