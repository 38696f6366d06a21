"""Errors for what cannot be traced or called: one exception with the cause, the source line and what to do."""

import copy
import io
import logging

import pytest
import torch

from transformers_neuronx.errors import ConfigError, GraphError
from transformers_neuronx.trace import (
    BucketModelConfig,
    bucket_model_trace,
    load,
    move_trace_to_device,
    read_states,
    save,
    trace,
)

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning", "ignore::FutureWarning")
F = torch.nn.functional
X = torch.arange(12.0).reshape(3, 4) - 5
SQUARE = torch.eye(3)
IMAGE = torch.randn(1, 1, 4, 4)


class If(torch.nn.Module):
    def forward(self, x):
        if x.sum() > 0:  # the line
            return x * 2
        return x


class Outer(torch.nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return self.inner(x) + 1


def while_positive(x):
    while x.sum() > 0:  # the line
        x = x - 1
    return x


def asserted(x):
    assert (x > 0).all()  # the line
    return x


def counted(x):
    for _ in range(int(x[0, 0])):  # the line
        x = x + 1
    return x


def cut(x):
    return x[: int(x.sum())]  # the line


def picked(x):
    return x[x > 0]  # the line


def inverse(x):
    return torch.linalg.inv(x)  # the line


def written(x):
    x += 1
    return x


class WritesToItsWeight(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(4))

    def forward(self, x):
        with torch.no_grad():
            self.weight.add_(1)
        return x * self.weight


class Helper(torch.nn.Module):
    def forward(self, x):
        return self.step(x * 2)  # the line

    def step(self, x):
        return torch.special.bessel_j0(x)


class Draws(torch.nn.Module):
    def forward(self, x):
        return x + torch.rand(4)  # the line


class Normalizes(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = torch.nn.BatchNorm1d(4)

    def forward(self, x):
        return self.norm(x)  # the line


VALUES = r"sizes depend on tensor values here, but a program is the same for all values\. Source: {} in {}.* Use "
SIZES = (
    r"aten\.{}\.\w+ returns a size that depends on tensor values, but a program has fixed sizes\. Source: the function"
)
NUMBER = r"aten\._local_scalar_dense\.default reads a number from a tensor, .* Source: the function"
HERE = r"\S*test_refusals\.py, line \d+, `{}"
IN = HERE.format(".*# the line`")

# Functions, their inputs, and the expected message.
FUNCTIONS = {
    "if": (If(), X, VALUES.format("If", IN)),
    "if inside": (Outer(If()), X, VALUES.format(r"inner \(If\)", IN)),
    "while": (while_positive, X, VALUES.format("the function", IN)),
    "assert": (asserted, X, VALUES.format("the function", IN)),
    "range": (counted, X, VALUES.format("the function", IN)),
    "slice": (cut, X, VALUES.format("the function", IN)),
    "classes": (lambda i: F.one_hot(i), X.long(), VALUES.format("the function", HERE.format(""))),
    "item": (lambda x: x * x.max().item(), X, NUMBER),
    "tolist": (lambda x: x * x.tolist()[0][0], X, NUMBER),
    "numpy": (lambda x: torch.from_numpy(x.numpy() * 2), X, r"cannot trace this: \.numpy\(\) is not supported.*, line"),
    "mask": (picked, X, SIZES.format("index") + " in " + IN),
    "masked_select": (lambda x: x.masked_select(x > 0), X, SIZES.format("masked_select")),
    "nonzero": (torch.nonzero, X, SIZES.format("nonzero")),
    "where": (lambda x: torch.where(x > 0), X, SIZES.format("nonzero")),
    "unique": (lambda x: x.unique(), X, SIZES.format("_unique2")),
    "repeat_interleave": (lambda i: X.repeat_interleave(i, 0), torch.arange(3), SIZES.format("repeat_interleave")),
    "bincount": (torch.bincount, torch.arange(3), SIZES.format("bincount")),
    "inverse": (inverse, SQUARE, r"aten\.linalg_inv_ex\.default has no lowering.*\. Source: the function in " + IN),
    "solve": (lambda x: torch.linalg.solve(x, x), SQUARE, r"aten\._linalg_solve_ex\.default has no lowering"),
    "cholesky": (torch.linalg.cholesky, SQUARE, r"aten\.linalg_cholesky_ex\.default has no lowering to HLO"),
    "helper": (Helper(), X, r"special_bessel_j0\.default has no lowering to HLO\. Source: Helper in " + IN),
    "statistics": (
        lambda x: torch.native_layer_norm(x, [4], None, None, 1e-5)[1],
        X,
        "no lowering to HLO for its result 1",
    ),
    "while_loop": (
        lambda x: torch.while_loop(lambda x: x.sum() < 9, lambda x: (x + 1,), (x,))[0],
        X,
        "while_loop has no",
    ),
    "random": (Draws(), X, r"aten\.rand\.default draws random numbers, .* Source: Draws .*line`\. Draw them"),
    "training": (Normalizes(), X, r"in training mode\. Source: norm \(BatchNorm1d\) .* Call the model's eval\(\)"),
    "gradient": (
        lambda x: torch.autograd.grad((x.requires_grad_() ** 2).sum(), x),
        X,
        r"cannot trace this: .*, line \d+",
    ),
    "sizes": (lambda x: x @ x, X, r"cannot trace this: .*same reduction dim.*\. Source: the function .*line"),
    "view": (lambda x: x.view(5, 5), X, r"cannot trace this: shape '\[5, 5\]' is invalid for input of size 12"),
    "vmap": (lambda x: torch.vmap(lambda a: a * 2)(x), X, "PyTorch cannot export the function: "),
    "script": (lambda x: torch.jit.script(torch.nn.ReLU())(x), X, "a ScriptModule cannot be traced: use what"),
    "input": (written, X.clone(), "must not change its inputs and parameters, but writes to x: clone it first"),
    "weight": (WritesToItsWeight(), X, "must not change its inputs and parameters, but writes to weight: clone"),
    "set": (lambda x: {x}, X, "the function must return tensors, .* got set$"),
    "keys": (lambda x: {1: x}, X, "a returned dictionary must have strings as keys, got 1"),
}


@pytest.mark.parametrize("case", FUNCTIONS)
def test_what_a_function_asks_for(case, capfd, caplog):
    function, given, said = FUNCTIONS[case]
    with caplog.at_level(logging.WARNING), pytest.raises(GraphError, match=said) as raised:
        trace(function, given)
    assert len(str(raised.value)) < 700 and "\n" not in str(raised.value)
    assert raised.value.__suppress_context__ or raised.value.__context__ is None  # or that would be printed as well
    assert not caplog.records and capfd.readouterr() == ("", "")


def test_a_traced_module_is_no_function_to_trace():
    traced = trace(lambda x: x + 1, X)
    with pytest.raises(
        GraphError, match="a traced module cannot be traced or exported again: use the module that it was"
    ):
        trace(lambda x: traced(x) * 2, X)


class MyError(Exception):
    pass


def test_what_a_function_raises_itself_comes_out_as_it_is():
    def raises(error):
        def function(x):
            raise error from KeyError("why")

        return function

    for error in (MyError("mine"), RuntimeError("mine"), AssertionError()):
        with pytest.raises(type(error)) as raised:
            trace(raises(error), X)
        assert raised.value is error and isinstance(error.__cause__, KeyError)


KINDS = {
    "meta": (lambda: X.to("meta"), "got a tensor on device meta: it has a shape, but no elements"),
    "sparse": (X.to_sparse, r"got a tensor of layout torch\.sparse_coo: call to_dense\(\)"),
    "mkldnn": (X.to_mkldnn, r"got a tensor of layout torch\._mkldnn: call to_dense\(\)"),
    "quantized": (
        lambda: torch.quantize_per_tensor(X, 0.1, 0, torch.qint8),
        r"got a quantized tensor: call dequantize",
    ),
    "nested": (lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]), "got a nested tensor: "),
}


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("kind", KINDS)
def test_kinds_of_tensors(kind):
    make, said = KINDS[kind]
    with pytest.raises(GraphError, match=r"^x must be a dense tensor on the CPU, " + said):
        trace(lambda x: x + 1, make())
    traced = trace(lambda x: x + 1, X)
    with pytest.raises(GraphError, match=r"^(x|input 0) must be a dense tensor on the CPU, " + said):
        traced(make())


def test_tensors_that_are_negated_or_conjugated_in_memory():
    negated = torch._neg_view(X)
    traced = trace(lambda x: x + 1, negated)
    torch.testing.assert_close(traced(negated), 1 - X)
    torch.testing.assert_close(traced(X), X + 1)
    torch.testing.assert_close(trace(lambda x: (x * negated, x + X), X)(X), (-X * X, X + X))  # in one memory
    traced = trace(lambda x, z: (x + z, z * 2), (X, negated), input_output_aliases={negated: 1})
    assert [traced(X)[0][0, 0].item() for _ in range(3)] == [0, 5, 15]
    conjugated = torch.complex(X, X).conj()
    for given in (conjugated, conjugated.imag):
        torch.testing.assert_close(trace(lambda x: x * 2, given)(given), (given * 2).resolve_conj().resolve_neg())


def test_a_weight_of_another_kind():
    class Weighted(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("weight", torch.ones(4, device="meta"))

        def forward(self, x):
            return x + torch.zeros(4) if x.is_meta else x + 1, self.weight * 2

    with pytest.raises(
        GraphError, match="the weight weight must be a dense tensor on the CPU, got a tensor on device meta"
    ):
        trace(Weighted(), X)


@pytest.mark.parametrize(
    ("function", "given", "said"),
    [
        (lambda x: x, None, "^example_inputs must be a tensor, or a tuple or list with .* got None"),
        (lambda x: x, 3, "^example_inputs must be .* got int"),
        (lambda x: x, "abc", "^example_inputs must be .* got str"),
        (lambda x: x, dict(x=X), "^example_inputs must be .* in order, got dict"),
        (lambda x: x, X.numpy(), "^example_inputs must be .* got ndarray: convert an array with torch.from_numpy"),
        (lambda x, y: x, X, "the 1 example inputs as positional arguments: missing a required argument: 'y'"),
        (lambda x, *, y: x, X, r"as positional arguments: missing a required .*argument: 'y'"),
        (3, X, "trace expects a module or a function, got int"),
        (torch.nn.ReLU, X, "a module or a function, got the class ReLU: pass an instance of it"),
    ],
)
def test_functions_and_inputs_that_are_none(function, given, said):
    with pytest.raises(GraphError, match=said):
        trace(function, given)


def test_script_modules_are_not_traced():
    with pytest.raises(
        GraphError, match="a Python module or function, got a ScriptModule, ReLU: trace the module that it"
    ):
        trace(torch.jit.script(torch.nn.ReLU()), X)
    torch.testing.assert_close(trace(torch.jit.trace(torch.nn.ReLU(), X), X)(X), X.relu())


@pytest.mark.parametrize(
    ("options", "error", "said"),
    [
        (dict(input_output_aliases=[X]), GraphError, "must map tensors to the numbers .* got list"),
        (dict(input_output_aliases={"x": 0}), GraphError, "must map tensors to .* got str"),
        (dict(input_output_aliases={X: None}), GraphError, "must number one of the 1 outputs, got None"),
        (dict(compiler_args=3), ConfigError, "compiler_args must be a string or a list of strings, got 3"),
        (dict(compiler_args=[3]), ConfigError, r"compiler_args must be a string or a list of strings, got \[3\]"),
        (dict(compiler_args="--logfile 'a"), ConfigError, "compiler_args must be .*: No closing quotation"),
    ],
)
def test_options(options, error, said):
    with pytest.raises(error, match=said):
        trace(lambda x: x + 1, X, **options)


def whole(inputs: list[torch.Tensor]):
    return inputs, torch.tensor([0])


def double():
    return lambda x: x * 2, {}


@pytest.mark.parametrize(
    ("function", "given", "config", "said"),
    [
        (double, [X], None, "bucket_config must be a BucketModelConfig, got NoneType"),
        (double, X, BucketModelConfig(lambda: whole), "must be a list with the example inputs of .*, got Tensor"),
        (double, [], BucketModelConfig(lambda: whole), "must be a list with the example inputs of .*, got none"),
        (lambda: If(), [X], BucketModelConfig(lambda: whole), "must return a pair of .* got If: return model, {}"),
        (double, [X], BucketModelConfig(lambda: None), r"a function that torch\.jit\.script accepts, got NoneType"),
    ],
)
def test_buckets(function, given, config, said):
    with pytest.raises(GraphError, match=said):
        bucket_model_trace(function, given, config)


def test_a_kernel_is_made_by_a_function_and_scripted_if_it_is_not_yet():
    with pytest.raises(GraphError, match="a function that returns a scripted function, got a scripted function"):
        bucket_model_trace(double, [X], BucketModelConfig(torch.jit.script(whole)))
    assert bucket_model_trace(double, [X], BucketModelConfig(lambda: whole))(X)[0, 0] == -10


def test_what_is_no_traced_module(tmp_path):
    for use in (read_states, move_trace_to_device, lambda module: save(module, tmp_path / "module.pt")):
        with pytest.raises(GraphError, match=r"expect.* a module that trace returned, got If"):
            use(If())


def test_errors_of_a_call_come_as_they_are(tmp_path):
    traced = trace(lambda x: x + 1, X)
    save(traced, tmp_path / "traced.pt")
    for module in (traced, load(tmp_path / "traced.pt")):
        with pytest.raises(GraphError, match=r"^x must be torch\.float32\[3, 4\]"):
            module(X[:2])
    file = io.BytesIO()
    torch.jit.save(traced, file)
    for module in (torch.jit.load(io.BytesIO(file.getvalue())), copy.deepcopy(traced)):
        with pytest.raises(RuntimeError, match=r"GraphError: x must be torch\.float32\[3, 4\]"):
            module(X[:2])
    assert "transformers_neuronx.run" in traced.code  # as of any ScriptModule


def test_names_that_torchscript_needs_itself():
    for function in (
        lambda self: self * 2,
        lambda torch: torch * 2,
        lambda größe: größe * 2,
        lambda inputs: inputs * 2,
        lambda outputs: outputs * 2,
        lambda program: program * 2,
    ):
        torch.testing.assert_close(trace(function, X)(X), X * 2)
    torch.testing.assert_close(trace(lambda states, outputs: states * outputs, (X, X))(outputs=X, states=X), X * X)


def test_names_of_a_function_in_another():
    @torch.no_grad()
    def function(ids, scale):
        return ids * scale

    torch.testing.assert_close(trace(function, (X, X))(scale=X, ids=X + 1), (X + 1) * X)


def test_constants_that_are_not_finite():
    _, nan, infinite = trace(lambda x: (x, float("nan"), -float("inf")), X)(X)
    assert nan != nan and infinite == -float("inf")
