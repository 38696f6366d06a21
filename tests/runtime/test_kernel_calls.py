"""Calls of the CPU's kernels: found by the names of operands, and refused with a message if they are damaged."""

import re

import numpy as np
import pytest

from transformers_neuronx import hlo
from transformers_neuronx.compiler import compile_py_func
from transformers_neuronx.errors import EngineError
from transformers_neuronx.layers.attention import _attend
from transformers_neuronx.layers.storage import put_rows
from transformers_neuronx.pyhlo import dtype_named
from transformers_neuronx.pyhlo.dtypes import element_type, from_numpy
from transformers_neuronx.pyhlo.hlo_pb2 import API_VERSION_TYPED_FFI
from transformers_neuronx.runtimes import get_runtime, kernels

pytestmark = pytest.mark.skipif(not kernels.built(), reason="the kernels were not built: they need a C++ compiler")


def zeros(*sizes, dtype="f32"):
    return np.zeros(sizes, element_type(dtype).numpy)


RULES = dict(scale="1.0 : f32", softcap="0.0 : f32", window="0 : i64", chunk="0 : i64")
LINEAR = dict(rounded="0 : i64", activation='""', codes='""')
NEW = dict(q=zeros(2, 1, 4, 8), k=zeros(2, 1, 2, 8), v=zeros(2, 1, 2, 8))
ROW, PAIRS = zeros(2, dtype="s32"), zeros(2, 2, dtype="s32")
CACHE = {"cache.0": zeros(4, 16, 8), "cache.1": zeros(4, 16, 8)}
SCALES = {"cache.2": zeros(4, 16, 1), "cache.3": zeros(4, 16, 1)}
LEVELS = {"parts.0.scale": zeros(2, 4, 16, 1, dtype="s8"), "parts.0.scale_unit": zeros(2, 2, 16, 1, dtype="f16")}
EIGHT = {"parts.0.weight": zeros(2, 8, 16, 4, dtype="s8"), "parts.0.scale": zeros(2, 4, 16, 1)}
# Calls that kernels take: the kernel, its operands, its attributes, and the results before those in place.
CALLS = {
    "linear": ("linear", {"x": zeros(3, 32), "parts.0.weight": zeros(2, 32, 16, 1)}, LINEAR, [zeros(3, 20)]),
    "linear of s8": ("linear", {"x": zeros(3, 32), **EIGHT}, LINEAR, [zeros(3, 20)]),
    "linear of six bits": (
        "linear",
        {"x": zeros(3, 32), "parts.0.weight": zeros(2, 6, 16, 4, dtype="u8"), "parts.0.scale": zeros(2, 2, 16, 1)},
        LINEAR,
        [zeros(3, 20)],
    ),
    "linear of experts": (
        "linear",
        {"x": zeros(3, 32), "experts": zeros(3, dtype="s32"), "parts.0.weight": zeros(4, 2, 32, 16, 1)},
        LINEAR,
        [zeros(3, 20)],
    ),
    "linear of two levels": ("linear", {"x": zeros(3, 32), **EIGHT, **LEVELS}, LINEAR, [zeros(3, 20)]),
    "attention": ("attention", NEW | dict(start=ROW, length=ROW) | CACHE, RULES, [NEW["q"]]),
    "paged_attention": ("paged_attention", NEW | dict(segments=zeros(2, 6, dtype="s32")) | CACHE, RULES, [NEW["q"]]),
    "attend_to": (
        "attend_to",
        dict(q=NEW["q"], keys=zeros(2, 5, 2, 8), values=zeros(2, 5, 2, 8), lengths=ROW, bias=zeros(1, 4, 5, 1)),
        dict(scale="1.0 : f32"),
        [NEW["q"]],
    ),
    "sample": (
        "sample",
        dict(logits=zeros(2, 9), seen=zeros(2, 9, dtype="pred"), policy=zeros(2, 7, dtype="s32"), position=ROW),
        {},
        [ROW],
    ),
    "put_rows": ("put_rows", dict(x=zeros(3, 2, 8), rows=zeros(2, 2, 8), at=zeros(dtype="s32")), {}, []),
    "cut": ("cut", dict(x=zeros(12, dtype="s32")), dict(places="array<i64: 0, 2, 3, 2, 8, 1, 4, 4>"), [PAIRS, PAIRS]),
    "with_tokens": ("with_tokens", dict(seen=zeros(3, 9, dtype="pred"), tokens=ROW, slots=ROW), {}, []),
    "advance": (
        "advance",
        dict(sampled=ROW, token=ROW, left=ROW, eos=PAIRS, at=zeros(dtype="s32"), tokens=zeros(2, 5, dtype="s32")),
        {},
        [ROW, ROW, ROW],
    ),
    "layer_norm": (
        "layer_norm",
        dict(x=zeros(2, 3, 8), weight=zeros(8), bias=zeros(8)),
        dict(eps="1.0 : f32"),
        [zeros(2, 3, 8)],
    ),
    "rms_norm": ("rms_norm", dict(x=zeros(2, 3, 8), weight=zeros(8)), dict(eps="1.0 : f32"), [zeros(2, 3, 8)]),
    "lora": (
        "lora",
        dict(y=zeros(2, 3, 8), x=zeros(2, 3, 16), a=zeros(8, 16), b=zeros(8, 8), adapters=ROW),
        dict(rank="4 : i64"),
        [],
    ),
}


def shape_of(array):
    return dtype_named(from_numpy(array.dtype).name)[array.shape]


def ran(kernel, operands, attributes, results, names=None, in_place=True):
    """Run a call that is written as `with_kernels` writes it, whatever its operands are."""
    updated = kernels.KERNELS[kernel].updated if kernel in kernels.KERNELS else ""
    cache = [place for place, name in enumerate(operands) if updated and name.partition(".")[0] == updated]
    first, results = len(results), [*results, *(list(operands.values())[place] for place in cache)]
    attributes = attributes | dict(operands=f'"{" ".join(operands) if names is None else names}"')

    def graph(scribe):
        tensors = [shape_of(array).Parameter(parameter_number=i) for i, array in enumerate(operands.values())]
        called = scribe.tuple(*map(shape_of, results)).CustomCall(
            *tensors,
            custom_call_target=kernels.target(kernel),
            custom_call_api_version=API_VERSION_TYPED_FFI,
            constrain_layout=True,
            operand_shapes_with_layout=[tensor.shape_proto for tensor in tensors],
            backend_config=f"{{{', '.join(f'{key} = {value}' for key, value in attributes.items())}}}",
        )
        for array, place in enumerate(cache if in_place else [], first):
            called.proto.output_operand_aliasing.add(output_shape_index=[array], operand_index=place)
        return [hlo.element(called, index) for index in range(len(results))]

    runtime = get_runtime("cpu", 1)
    program = runtime.compile(compile_py_func(graph))
    return [x.numpy() for x in program(*(runtime.put([array]) for array in operands.values()))]


@pytest.mark.parametrize("name", CALLS)
def test_calls_that_are_whole_are_taken(name):
    assert ran(*CALLS[name])


def test_a_call_without_an_optional_operand_is_taken():
    kernel, operands, attributes, results = CALLS["attend_to"]
    assert ran(kernel, {name: array for name, array in operands.items() if name != "bias"}, attributes, results)
    kernel, operands, attributes, results = CALLS["attention"]
    assert ran(
        kernel, operands | dict(slots=ROW, alibi=zeros(4), distances=zeros(4, 3), sinks=zeros(4)), attributes, results
    )


S32 = zeros(3, 32, dtype="s32")
DAMAGED = [  # a call, operands that are changed or left out, and the error
    ("linear", {"x": S32}, "linear: x must be f32, bf16 or f16[?,?], got s32[3,32]"),
    ("linear", {"x": zeros(3, 33)}, "linear: weights must be in panels of all inputs of x"),
    ("linear", {"parts.0.weight": zeros(32, 16)}, "must be f32, s8, u8 or f8e4m3fn[2,?,16,?], got f32[32,16]"),
    ("linear", {"parts.0.weight": zeros(2, 32, 16, 1, dtype="bf16")}, "u8 or f8e4m3fn[2,?,16,?], got bf16[2,32,16,1]"),
    ("linear", {"parts.0.weight": zeros(1, 32, 16, 1)}, "[2,?,16,?], got f32[1,32,16,1]"),
    ("linear", {"parts.0.weight": None}, "linear: the next operand must be parts.0.weight, got no more"),
    ("linear", {"parts.0.bias": zeros(19)}, "linear: parts.0.bias must be f32[20], got f32[19]"),
    ("linear", {"parts.1.weight": zeros(2, 32, 16, 1)}, "linear: result y is missing"),
    ("linear", {"residual": zeros(3, 19)}, "linear: residual must be f32[3,20], got f32[3,19]"),
    ("linear", {"other": zeros(3)}, "linear: there must be no operand other here"),
    ("linear of s8", {"parts.0.scale": None}, "the next operand must be parts.0.scale, got no more"),
    ("linear of s8", {"parts.0.scale": zeros(2, 3, 16, 1)}, "linear: each scale must be of as many inputs"),
    ("linear of s8", {"parts.0.scale": zeros(2, 16, 16, 1)}, "linear: groups must be of whole words, and small"),
    ("linear of s8", {"parts.0.scale": zeros(20, dtype="bf16")}, "parts.0.scale must be f32[20], got bf16[20]"),
    ("linear of six bits", {"parts.0.scale": zeros(2, 4, 16, 1)}, "linear: groups must be of whole words, and small"),
    (
        "linear of six bits",
        {"parts.0.weight": zeros(2, 5, 16, 4, dtype="u8")},
        "groups must be of whole words, and small",
    ),
    (
        "linear of six bits",
        {"parts.0.weight": zeros(2, 7, 16, 4, dtype="u8")},
        "weights must be in panels of all inputs",
    ),
    ("linear of experts", {"experts": zeros(2, dtype="s32")}, "linear: experts must be s32[3], got s32[2]"),
    (
        "linear of experts",
        {"experts": None},
        "parts.0.weight must be f32, s8, u8 or f8e4m3fn[2,?,16,?], got f32[4,2,32,16,1]",
    ),
    ("linear of experts", {"parts.0.weight": zeros(2, 32, 16, 1)}, "[2,?,16,?], got f32[32,16,1]"),
    ("linear of experts", {"parts.0.weight": zeros()}, "parts.0.weight must be"),
    (
        "linear of experts",
        {"parts.0.bias": zeros(3, 20)},
        "parts.0.bias must be of as many experts as the first weight",
    ),
    ("linear of experts", {"parts.0.bias": zeros(20)}, "parts.0.bias must be f32[20], got f32[]"),
    ("linear of experts", {"residual": zeros(3, 20)}, "linear: with experts there must be no residual"),
    ("linear of two levels", {"parts.0.scale_unit": None}, "the next operand must be parts.0.scale_unit, got no more"),
    ("linear of two levels", {"parts.0.scale_unit": zeros(2, 3, 16, 1)}, "each unit must be of as many groups"),
    ("linear of two levels", {"parts.0.scale_unit": zeros(2, 0, 16, 1)}, "each unit must be of as many groups"),
    ("linear of two levels", {"parts.0.scale_unit": zeros(1, 2, 16, 1)}, "f16[2,?,16,1], got f32[1,2,16,1]"),
    (
        "linear of two levels",
        {"parts.0.minimum_unit": LEVELS["parts.0.scale_unit"]},
        "there must be no operand parts.0.m",
    ),
    (
        "linear of s8",
        {"parts.0.scale_unit": LEVELS["parts.0.scale_unit"]},
        "there must be no operand parts.0.scale_unit",
    ),
    ("attention", {"q": zeros(2, 1, 8)}, "attention: q must be f32, bf16 or f16[?,?,?,?], got f32[2,1,8]"),
    ("attention", {"k": zeros(2, 1, 2, 7)}, "attention: k must be f32[2,1,?,8], got f32[2,1,2,7]"),
    ("attention", {"k": zeros(2, 1, 3, 8), "v": zeros(2, 1, 3, 8)}, "attention: k must be of as many queries"),
    ("attention", {"v": None}, "attention: there must be no operand cache.1 here"),
    ("attention", {"v": None, "cache.1": None, "cache.2": zeros(4, 16, 1)}, "must be no operand cache.2 here"),
    ("attention", {"length": zeros(2)}, "attention: length must be s32[2], got f32[2]"),
    ("attention", {"length": zeros(1, dtype="s32")}, "attention: length must be s32[2], got s32[1]"),
    ("attention", {"cache.0": zeros(3, 16, 8), "cache.1": zeros(3, 16, 8)}, "cache.0 must be of whole slots"),
    ("attention", {"cache.1": zeros(4, 15, 8)}, "attention: cache.1 must be f32[4,16,8], got f32[4,15,8]"),
    ("attention", {"cache.1": None}, "attention: the next operand must be cache.1, got no more"),
    ("attention", {f"cache.{i}": zeros(4, 16, 8, dtype="s8") for i in (0, 1)}, "the next operand must be cache.2"),
    ("attention", SCALES, "attention: there must be no operand cache.2 here"),
    ("attention", {"alibi": zeros(3)}, "attention: alibi must be f32[4], got f32[3]"),
    ("attention", {"sinks": zeros(2)}, "attention: sinks must be f32[4], got f32[2]"),
    ("attention", {"distances": zeros(4, 0)}, "attention: distances must be of one distance or more"),
    ("paged_attention", {"segments": zeros(2, 4, dtype="s32")}, "segments must be of one page or more"),
    ("paged_attention", {f"cache.{i}": zeros(4, 24, 8) for i in (0, 1)}, "cache.0 must be of pages of 16 positions"),
    ("paged_attention", {"slots": ROW}, "paged_attention: there must be no operand slots here"),
    ("attend_to", {"keys": zeros(2, 4, 2, 8)}, "attend_to: values must be f32[2,4,2,8], got f32[2,5,2,8]"),
    ("attend_to", {name: zeros(3, 5, 2, 8) for name in ("keys", "values")}, "lengths must be s32[3], got s32[2]"),
    (
        "attend_to",
        {name: zeros(3, 5, 2, 8) for name in ("keys", "values")} | dict(lengths=zeros(3, dtype="s32")),
        "attend_to: keys must be of as many rows as q, or of those that slots name",
    ),
    ("attend_to", {"bias": zeros(3, 4, 5, 1)}, "attend_to: bias must be of all rows, heads and tokens"),
    ("sample", {"policy": zeros(2, 6, dtype="s32")}, "sample: policy must be s32[2,7], got s32[2,6]"),
    ("put_rows", {"rows": zeros(4, 2, 8)}, "put_rows: rows must be of no more rows than x, got f32[4,16]"),
    ("put_rows", {"rows": zeros(1, 2, 7)}, "put_rows: rows must be f32[?,16], got f32[1,14]"),
    ("put_rows", {"rows": zeros(1, 2, 8, dtype="bf16")}, "put_rows: rows must be f32[?,16], got bf16[1,16]"),
    (
        "cut",
        {"x": zeros(11, dtype="s32")},
        "cut: x must be of all the numbers that attribute places names, got s32[1,11]",
    ),
    ("cut", {"x": zeros(12)}, "cut: x must be s32[?,?], got f32[1,12]"),
    ("with_tokens", {"slots": zeros(3, dtype="s32")}, "with_tokens: slots must be s32[2], got s32[3]"),
    ("with_tokens", {"seen": zeros(3, 9, dtype="s8")}, "with_tokens: seen must be pred[?,?], got s8[3,9]"),
    ("advance", {"eos": zeros(3, 2, dtype="s32")}, "advance: eos must be s32[2,?], got s32[3,2]"),
    ("advance", {"tokens": zeros(2, 0, dtype="s32")}, "advance: tokens must be of at least one round, got s32[2,0]"),
    ("layer_norm", {"bias": None}, "layer_norm: the next operand must be bias, got no more"),
    ("rms_norm", {"weight": zeros(9)}, "rms_norm: weight must be f32[8], got f32[9]"),
    ("rms_norm", {"weight": zeros(8, dtype="bf16")}, "rms_norm: weight must be f32[8], got bf16[8]"),
    ("rms_norm", {"x": zeros()}, "rms_norm: x must be f32, bf16 or f16[?,?], got f32[]"),
    ("lora", {"a": zeros(8, 15)}, "lora: a must be f32[?,16], got f32[8,15]"),
    ("lora", {"a": zeros(6, 16), "b": zeros(6, 8)}, "lora: a must be of whole adapters, got f32[6,16]"),
    ("lora", {"b": zeros(4, 8)}, "lora: b must be f32[8,8], got f32[4,8]"),
    ("lora", {"y": zeros(2, 3, 8, dtype="bf16")}, "lora: y must be of the type of x, or f32, got bf16[6,8]"),
    ("lora", {"adapters": zeros(4, dtype="s32")}, "lora: adapters must be of as many rows of x each, got s32[4]"),
]


@pytest.mark.parametrize(("name", "changed", "message"), DAMAGED)
def test_what_is_wrong_with_an_operand_is_said(name, changed, message):
    kernel, operands, attributes, results = CALLS[name]
    operands = {key: array for key, array in (operands | changed).items() if array is not None}
    with pytest.raises(EngineError, match=re.escape(message)):
        ran(kernel, operands, attributes, results)


def test_what_is_wrong_with_names_results_and_attributes_is_said():
    kernel, operands, attributes, results = CALLS["rms_norm"]

    def says(message, kernel=kernel, operands=operands, attributes=attributes, results=results, **how):
        with pytest.raises(EngineError, match=re.escape(message)):
            ran(kernel, operands, attributes, results, **how)

    says("rms_norm: operands must have names, got more", operands=operands | dict(more=ROW), names="x weight")
    says("rms_norm: operand weight is missing", operands=dict(x=operands["x"]), names="x weight")
    says("rms_norm: the next operand must be x, got xy", names="xy weight")
    says("rms_norm: y must be f32[6,8], got f32[6,9]", results=[zeros(2, 3, 9)])
    says("rms_norm: y must be f32[6,8], got bf16[6,8]", results=[zeros(2, 3, 8, dtype="bf16")])
    says("rms_norm: there are more results", results=results * 2)
    says("rms_norm: attribute eps is missing or has another type", attributes={})
    says("rms_norm: attribute eps is missing or has another type", attributes=dict(eps="1 : i64"))
    _, *attention = CALLS["attention"]
    says("cache.0 must be returned in its own memory", "attention", *attention, in_place=False)
    _, operands, attributes, results = CALLS["linear"]
    says("activation must be one that", "linear", operands, attributes | dict(activation='"other"'), results)
    says("activations must be rounded in", "linear", operands, attributes | dict(rounded="32 : i64"), results)


def test_operands_are_found_by_name(write):
    """A body with its parameters in another order has the same kernel."""
    normalized = hlo.composite("rms_norm", lambda weight, x, *, eps: x * weight)
    x, weight = np.arange(1, 9, dtype=np.float32).reshape(2, 4), np.float32([1, 2, 3, 4])
    program = get_runtime("cpu", 1).compile(write(lambda w, x: normalized(w, x, eps=0.0), weight, x))
    assert kernels.target("rms_norm") in program.text()
    [got] = program(*(get_runtime("cpu", 1).put([array]) for array in (weight, x)))
    wanted = x / np.sqrt((x**2).mean(-1, keepdims=True)) * weight
    np.testing.assert_allclose(got.numpy(), wanted, rtol=1e-6)


def test_operands_that_a_kernel_does_not_know_are_left_to_the_body(write):
    arrays = [*NEW.values(), ROW, ROW, *CACHE.values()]
    near = zeros(2, 1, 16, dtype="pred")

    def taken(*near):
        graph = lambda *t: list(_attend(*t[:5], t[5:7], width=16, scale=1.0, near=[*t[7:], None][0]))  # noqa: E731
        return kernels.target("attention") in str(kernels.with_kernels(write(graph, *arrays, *near)))

    assert taken() and not taken(near)


@pytest.mark.parametrize("dtype", ["f32", "bf16", "f16", "s8"])
def test_rows_are_put_in_place(write, dtype):
    """A place outside of the array is moved inside, as by XLA."""
    numpy = element_type(dtype).numpy
    x, rows = np.arange(-8, 8).reshape(4, 2, 2).astype(numpy), np.full((2, 2, 2), 9, numpy)
    runtime = get_runtime("cpu", 1)
    program = runtime.compile(write(lambda x, rows, at: put_rows(x, rows, at), x, rows, np.int32(0)))
    assert kernels.target("put_rows") in program.text()
    for at, first in [(0, 0), (1, 1), (2, 2), (7, 2), (-1, 0)]:
        wanted = x.copy()
        wanted[first : first + 2] = rows
        [got] = program(*(runtime.put([array]) for array in (x, rows, np.int32(at))))
        np.testing.assert_array_equal(got.numpy(), wanted)


def test_limits_are_those_of_the_library(write, monkeypatch):
    largest = kernels.built().limits()["head"]

    def taken(size):
        q, cache = zeros(1, 1, 1, size), zeros(1, 16, size)
        arrays = [q, q, q, *[zeros(1, dtype="s32")] * 2, cache, cache]
        graph = lambda *tensors: list(_attend(*tensors[:5], tensors[5:], width=16, scale=1.0))  # noqa: E731
        return kernels.target("attention") in str(kernels.with_kernels(write(graph, *arrays)))

    assert taken(largest) and not taken(largest + 1)
    monkeypatch.setattr(kernels, "limits", lambda: dict(head=8))
    assert taken(8) and not taken(9)
    q, cache = zeros(1, 1, 1, largest + 1), zeros(1, 16, largest + 1)
    row = zeros(1, dtype="s32")
    operands = {"q": q, "k": q, "v": q, "start": row, "length": row, "cache.0": cache, "cache.1": cache}
    with pytest.raises(EngineError, match="attention: q must be of no more features than the kernel takes"):
        ran("attention", operands, RULES, [q])
