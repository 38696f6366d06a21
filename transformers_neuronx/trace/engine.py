"""A traced function on a runtime: its executables, its weights and its states on the device.

TorchScript calls it through `torch.ops.transformers_neuronx`, by the tensor that holds the program's bytes.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch.utils.weak import WeakTensorKeyDictionary

from transformers_neuronx.cache import Saved, build
from transformers_neuronx.compiler import identity
from transformers_neuronx.errors import GraphError
from transformers_neuronx.pyhlo.dtypes import numpy_to_torch, torch_to_numpy
from transformers_neuronx.runtimes import get_runtime
from transformers_neuronx.runtimes.base import DeviceTensor, Executable, Runtime
from transformers_neuronx.trace.program import Program, Traced


class Engine:
    """Programs that are ready to run, and what they keep on the device."""

    def __init__(
        self, traced: Traced, weights: Sequence[torch.Tensor], states: Sequence[torch.Tensor], runtime: Runtime
    ) -> None:
        self.traced, self.runtime, self.states = traced, runtime, list(states)
        self.executables = [self._built(program) for program in traced.programs]
        self.weights = [
            self._put(placed.moved(tensor, runtime.panels))
            for tensor, (_, placed) in zip(weights, traced.weights, strict=True)
        ]
        self._on_device: dict[int, DeviceTensor] = {}
        self._versions: dict[int, int] = {}  # of the host's tensors that were brought there
        self._lock = threading.Lock()
        self._bring_states(range(len(states)))

    def _built(self, program: Program) -> Executable:
        module = program.module(self.runtime.panels)
        same = dict(self.runtime.fingerprint) == self.traced.fingerprint
        data = program.executable or None
        return build(self.runtime, module, identity(module), Saved(lambda _: None, lambda _: data if same else None))

    def _put(self, tensor: torch.Tensor) -> DeviceTensor:
        array = torch_to_numpy(tensor)
        return self.runtime.put([array], given=self.runtime.usable(array))

    def _bring_states(self, numbers: Sequence[int]) -> None:
        """States that the host has written to since."""
        for number in numbers:
            state = self.states[number]
            if self._versions.get(number) != state._version:
                self._versions[number] = state._version
                self._on_device[number] = self.runtime.put([torch_to_numpy(state)])

    def run(self, bucket: int, inputs: Sequence[torch.Tensor | None]) -> list[torch.Tensor]:
        """The outputs of a program, on the host; its new states stay on the device."""
        if not 0 <= bucket < len(self.executables):
            raise GraphError(f"the bucket kernel wants to name one of {len(self.executables)} buckets, got {bucket}")
        program = self.traced.programs[bucket]
        self._check(program, inputs)
        given = [self.runtime.put([torch_to_numpy(tensor)]) for tensor in inputs if tensor is not None]
        weights = [self.weights[number] for number in program.weights]
        with self._lock:
            self._bring_states(program.states)
            states = [self._on_device[number] for number in program.states]
            try:
                results = self.executables[bucket](*given, *weights, *states)
                count = len(results) - len(states)
                for number, state in zip(program.states, results[count:], strict=True):
                    self._on_device[number] = state
                return [_on_host(result) for result in results[:count]]
            except BaseException:
                for number in program.states:  # they were given away: the host's are what there is
                    self._versions.pop(number, None)
                raise

    def _check(self, program: Program, inputs: Sequence[torch.Tensor | None]) -> None:
        if len(inputs) != len(program.inputs):
            raise GraphError(f"the program wants {len(program.inputs)} inputs, got {len(inputs)}")
        for name, want, got in zip(self.traced.arguments, program.inputs, inputs, strict=True):
            if (want is None and got is None) or (want is not None and got is not None and want.takes(got)):
                continue
            described = f"{got.dtype}{list(got.shape)}" if got is not None else "None"
            raise GraphError(
                f"{name} wants to be {want or 'None'}, as in the example inputs, got {described}: "
                "pad or convert it, or trace for these sizes as well (bucket_model_trace)"
            )

    def read_states(self) -> None:
        """Bring the states to the host's tensors."""
        with self._lock, torch.no_grad():
            for number, state in enumerate(self.states):
                if state._version == self._versions.get(number):
                    state.copy_(_on_host(self._on_device[number]))
                    self._versions[number] = state._version


def _on_host(tensor: DeviceTensor) -> torch.Tensor:
    """A copy that may be written to."""
    return numpy_to_torch(np.array(tensor.numpy())).reshape(tensor.shape)


ENGINES: Any = WeakTensorKeyDictionary()  # by the tensor with a program's bytes: it lives as long as its module
_LOADING = threading.Lock()


def load(program: torch.Tensor, weights: list[torch.Tensor], states: list[torch.Tensor]) -> None:
    """Bring a traced module to the device, unless it is there."""
    with _LOADING:
        if program not in ENGINES:
            traced = Traced.from_bytes(torch_to_numpy(program).tobytes())
            ENGINES[program] = Engine(traced, weights, states, get_runtime(None, 1))


def _loaded(program: torch.Tensor) -> bool:
    return program in ENGINES


def _run(program: torch.Tensor, bucket: int, inputs: list[torch.Tensor | None]) -> list[torch.Tensor]:
    outputs: list[torch.Tensor] = ENGINES[program].run(bucket, inputs)
    return outputs


OPERATIONS: Any = torch.library.Library("transformers_neuronx", "DEF")  # type: ignore[no-untyped-call]
# TorchScript leaves out, or calls once, what writes to nothing: these write to `program`, as far as it knows.
for _schema, _function in {
    "loaded(Tensor(a!) program) -> bool": _loaded,
    "load(Tensor(a!) program, Tensor[] weights, Tensor[] states) -> ()": load,
    "run(Tensor(a!) program, int bucket, Tensor?[] inputs) -> Tensor[]": _run,
}.items():
    OPERATIONS.define(_schema)
    OPERATIONS.impl(_schema.partition("(")[0], _function, "CompositeExplicitAutograd")
