"""A stand-in for `torch.classes.neuron` and `torch.ops.neuron`, which `torch_neuronx` adds to PyTorch: a test fixture.

It is not Neuron. Its devices are lists of CPU tensors, and XLA:CPU runs a "NEFF" of the stand-in compiler, with custom
calls of Neuron's compiler replaced as below. It is stricter than Neuron's: tensors must have the module's shapes and
types, and results that alias a parameter must be that parameter's tensor.
"""

import functools
import math
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace

import torch
from standin_cc import MAGIC

from transformers_neuronx import hlo
from transformers_neuronx.compiler import compile_py_func
from transformers_neuronx.pyhlo import HloModuleProto
from transformers_neuronx.pyhlo.dtypes import element_type, numpy_to_torch, torch_to_numpy
from transformers_neuronx.pyhlo.hlo_pb2 import TUPLE, PrimitiveType
from transformers_neuronx.pyhlo.rewriting import shape_of
from transformers_neuronx.runtimes import get_runtime

STORED = {"pred": torch.bool, "u32": torch.int32, "u16": torch.int16, "f8e4m3fn": torch.int8, "f8e5m2": torch.int8}

loads: list[int] = []  # the degree of every model that was loaded


def gelu(x, _):
    return x * (hlo.erf(x * math.sqrt(0.5)) + 1.0) * 0.5


def gelu_by_tanh(x, _):
    return x * (hlo.tanh((x + x * x * x * 0.044715) * math.sqrt(2 / math.pi)) + 1.0) * 0.5


def softmax(x, axis):
    e = hlo.exp(x - hlo.max(x, int(axis), keep=True))
    return e / hlo.sum(e, int(axis), keep=True)


def rms_norm(x, weight, eps, axis):
    assert x.dtype.name == "f32" and int(axis) == len(x.sizes) - 1 and not eps.sizes
    return x * hlo.rsqrt(hlo.mean(x * x, -1, keep=True) + eps) * weight


def top_k(x, k):
    assert len(x.sizes) == 2 and x.dtype.name in ("f32", "bf16", "f16")
    values, places = hlo.top_k(x, int(k))
    return values, hlo.convert(places, "u32")


CUSTOM = {
    "AwsNeuronErf": lambda x, _: hlo.erf(x),
    "AwsNeuronGelu": gelu,
    "AwsNeuronGeluApprxTanh": gelu_by_tanh,
    "AwsNeuronSilu": lambda x, _: x * hlo.logistic(x),
    "AwsNeuronSoftmax": softmax,
    "AwsNeuronRmsNorm": rms_norm,
    "AwsNeuronTopK": top_k,
    "AwsNeuronTransferWithStaticRing": lambda x, _: x.shape.Copy(x),
}


def without_custom_calls(module):
    """Return the module with custom calls replaced by those of CUSTOM."""
    module = HloModuleProto.FromString(module.SerializeToString())
    last = max(i.id for c in module.computations for i in [c, *c.instructions])
    added = []
    for computation in module.computations:
        shapes = {instruction.id: instruction.shape for instruction in computation.instructions}
        for instruction in computation.instructions:
            if instruction.opcode == "custom-call":
                body = written_out(instruction, [shape_of(shapes[number]) for number in instruction.operand_ids])
                for each in body.computations:
                    shift(each, last)
                added += body.computations
                instruction.opcode = "call"
                instruction.called_computation_ids[:] = [body.computations[-1].id]
                instruction.ClearField("custom_call_target")
                instruction.ClearField("backend_config")
                last = max(i.id for c in body.computations for i in [c, *c.instructions])
    entry = list(module.computations)
    del module.computations[:]
    module.computations.extend([*added, *entry])
    return module


def written_out(instruction, shapes):
    def body(_):
        operands = [shape.Parameter(parameter_number=number) for number, shape in enumerate(shapes)]
        return CUSTOM[instruction.custom_call_target](*operands, instruction.backend_config.decode())

    return compile_py_func(body)


def shift(computation, by):
    computation.id += by
    computation.name = f"written_out.{computation.id}"
    computation.root_id += by
    for instruction in computation.instructions:
        instruction.id += by
        instruction.name = f"written_out.{instruction.id}"
        instruction.operand_ids[:] = [number + by for number in instruction.operand_ids]
        instruction.called_computation_ids[:] = [number + by for number in instruction.called_computation_ids]


class OnDevice:
    """A tensor on every core."""

    def __init__(self, shards):
        assert shards and all(isinstance(shard, torch.Tensor) and shard.device.type == "cpu" for shard in shards)
        self.shards = [shard.clone() for shard in shards]


@functools.cache
def compiled(neff, degree):
    """Compile what runs a NEFF, cached since tests load many of them repeatedly."""
    runtime = get_runtime("cpu", degree)
    return runtime, runtime.compile(without_custom_calls(HloModuleProto.FromString(neff[len(MAGIC) :])))


class ParallelModel:
    def __init__(self, neff, degree, first, count):
        assert isinstance(neff, bytes) and (first, count) == (0, degree)
        self.neff, self.degree = neff, degree

    def load(self):
        if not self.neff.startswith(MAGIC):
            raise RuntimeError("nrt_load: this is not a NEFF")
        try:
            self.module = HloModuleProto.FromString(self.neff[len(MAGIC) :])
        except Exception as error:
            raise RuntimeError("nrt_load: the NEFF is damaged") from error
        loads.append(self.degree)
        self.runtime, self.executable = compiled(self.neff, self.degree)


class ParallelTensorSet:
    def __init__(self, names, degree):
        self.names, self.degree = names, degree
        self.tensors = None

    def init(self):
        self.tensors = {}

    def add(self, number, tensor):
        assert isinstance(tensor, OnDevice) and len(tensor.shards) == self.degree
        self.tensors[self.names[number]] = tensor


def array_of(shard, shape):
    """Return a tensor's content as an array for a parameter of this shape."""
    name = PrimitiveType.Name(shape.element_type).lower()
    element = element_type(name)
    want = STORED.get(name) or getattr(torch, element.torch)
    if shard.dtype != want or list(shard.shape) != list(shape.dimensions):
        raise RuntimeError(f"wanted {name}{list(shape.dimensions)}, got {shard.dtype}{list(shard.shape)}")
    return torch_to_numpy(shard).view(element.numpy).reshape(shard.shape)


def run(model, inputs, outputs):
    shape, aliases = model.module.host_program_shape, model.module.input_output_alias.entries
    results = list(shape.result.tuple_shapes) if shape.result.element_type == TUPLE else [shape.result]
    given = [inputs.tensors[f"input{number}"] for number in range(len(shape.parameters))]
    taken = [outputs.tensors[f"output{number}"] for number in range(len(results))]
    for entry in aliases:
        assert taken[(*entry.output_shape_index, 0)[0]] is given[entry.parameter_number], "not in place"
    arrays = [
        model.runtime.put([array_of(shard, want) for shard in tensor.shards])
        for tensor, want in zip(given, shape.parameters, strict=True)
    ]
    for tensor, got, want in zip(taken, model.executable(*arrays), results, strict=True):
        for shard, array in zip(tensor.shards, got.shards(), strict=True):
            array_of(shard, want)
            shard.copy_(numpy_to_torch(array.copy()).view(shard.dtype).reshape(shard.shape))


def write(tensor, shards):
    for old, new in zip(tensor.shards, shards, strict=True):
        assert old.dtype == new.dtype and old.shape == new.shape
        old.copy_(new)


CLASSES = SimpleNamespace(ParallelModel=ParallelModel, ParallelTensorSet=ParallelTensorSet)
OPERATIONS = SimpleNamespace(
    _parallel_to_neuron=OnDevice,
    _parallel_from_neuron=lambda tensor: [shard.clone() for shard in tensor.shards],
    _parallel_write_neuron=write,
    _parallel_run_neuron=run,
)

PACKAGE = ModuleType("torch_neuronx")
PACKAGE.__spec__ = ModuleSpec("torch_neuronx", None)
PACKAGE.trace = lambda *_, **__: None
