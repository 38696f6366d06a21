"""Run a traced function: its executables, and its weights and states on the device.

TorchScript calls it through `torch.ops.transformers_neuronx`, which finds it by the tensor of the program's bytes.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils.weak import WeakTensorKeyDictionary

from transformers_neuronx.engine.compile_cache import ArtifactSource, SavedModule, build
from transformers_neuronx.errors import EngineError, GraphError
from transformers_neuronx.pyhlo.dtypes import numpy_to_torch, torch_to_numpy
from transformers_neuronx.runtimes import get_runtime
from transformers_neuronx.runtimes.base import DeviceTensor, Executable, Runtime
from transformers_neuronx.trace.given import check_kind, resolved
from transformers_neuronx.trace.program import Program, Traced
from transformers_neuronx.trace.ranges import check_computed, check_given
from transformers_neuronx.trace.states import State, current, plain


class Engine:
    """Executables that are ready to run, and their weights and states on the device."""

    def __init__(
        self, traced: Traced, weights: Sequence[torch.Tensor], states: Sequence[torch.Tensor], runtime: Runtime
    ) -> None:
        self.traced, self.runtime = traced, runtime
        self.executables = [self._built(program) for program in traced.programs]
        self.weights = [
            self._put(placed.moved(tensor, runtime.panels))
            for tensor, (_, placed) in zip(weights, traced.weights, strict=True)
        ]
        self._on_device: dict[int, DeviceTensor] = {}  # the states, except those that a failed call took
        self._lock = threading.Lock()
        self._adopt(states)

    def _built(self, program: Program) -> Executable:
        module = program.module(self.runtime.panels)
        same = dict(self.runtime.fingerprint) == self.traced.fingerprint
        data = program.executable or None
        source = ArtifactSource(lambda _: None, lambda _: data if same else None)
        return build(self.runtime, SavedModule.of(module), source)

    def _put(self, tensor: torch.Tensor) -> DeviceTensor:
        array = torch_to_numpy(tensor)
        return self.runtime.put([array], donate=self.runtime.usable(array))

    def _adopt(self, states: Sequence[torch.Tensor]) -> None:
        """Copy unowned states to the device. This engine owns all of them afterwards, or none after an error."""
        adopted = [self._held(number, state, None) for number, state in enumerate(states)]
        with plain():
            for number, state in enumerate(adopted):
                state.number = number
                self._bring(state)
        for state in adopted:
            state.holder = self

    def _held(self, number: int, state: torch.Tensor, holder: Engine | None) -> State:
        """Check that a parameter is a state of this holder, and return it."""
        if not isinstance(state, State) or state.holder is not holder:
            raise _replaced(number)
        return state

    def _bring(self, state: State) -> None:
        """Copy a state to the device if the host has written to it."""
        if state._version == state.brought and state.number in self._on_device:
            return
        if state.behind:
            raise _lost(state) if state._version == state.brought else _outdated(state)
        self._on_device[state.number] = self.runtime.put([torch_to_numpy(state)])
        state.brought = state._version

    def run(
        self, bucket: int, inputs: Sequence[torch.Tensor | None], states: Sequence[torch.Tensor]
    ) -> list[torch.Tensor]:
        """Run a program and return its outputs on the host. Its new states stay on the device."""
        if not 0 <= bucket < len(self.executables):
            raise GraphError(f"the bucket kernel must return one of {len(self.executables)} buckets, got {bucket}")
        program = self.traced.programs[bucket]
        self._check(program, inputs)
        check_given(program.ranges, self.traced.arguments, inputs)
        given = [self.runtime.put([torch_to_numpy(resolved(tensor))]) for tensor in inputs if tensor is not None]
        weights = [self.weights[number] for number in program.weights]
        with self._lock, plain():
            held = [self._held(number, states[number], self) for number in program.states]
            for state in held:
                self._bring(state)
            results = self._called(bucket, [*given, *weights], held)
            outputs = [_on_host(result) for result in results]
        if any(each.argument is None for each in program.ranges):
            check_computed(program.ranges, outputs.pop())
        return outputs

    def _called(self, bucket: int, operands: Sequence[DeviceTensor], states: Sequence[State]) -> list[DeviceTensor]:
        """Run a program and return its outputs. It consumes its states, and its new states replace them."""
        given = [self._on_device.pop(state.number) for state in states]
        results = self.executables[bucket](*operands, *given)
        count = len(results) - len(states)
        for state, new in zip(states, results[count:], strict=True):
            self._on_device[state.number], state.behind = new, True
        return results[:count]

    def _check(self, program: Program, inputs: Sequence[torch.Tensor | None]) -> None:
        if len(inputs) != len(program.inputs):
            raise GraphError(f"the program needs {len(program.inputs)} inputs, got {len(inputs)}")
        for name, want, got in zip(self.traced.arguments, program.inputs, inputs, strict=True):
            if got is not None:
                check_kind(name, got)
            if (want is None and got is None) or (want is not None and got is not None and want.takes(got)):
                continue
            described = f"{got.dtype}{list(got.shape)}" if got is not None else "None"
            raise GraphError(
                f"{name} must be {want or 'None'}, as in the example inputs, got {described}: "
                "pad or convert it, or trace these sizes too with bucket_model_trace"
            )

    def read(self, state: State) -> None:
        """Copy a state to the host if the device copy is newer."""
        with self._lock, torch.no_grad(), plain():
            if state.behind:
                if state.number not in self._on_device:
                    raise _lost(state)
                state.copy_(_on_host(self._on_device[state.number]))
                state.brought, state.behind = state._version, False


def _replaced(number: int) -> GraphError:
    return GraphError(
        f"state_{number} must be the tensor that trace made, got another tensor. Call load_state_dict without "
        "assign=True. If the module is from torch.jit.freeze, save or copy the module that was frozen"
    )


def _outdated(state: State) -> GraphError:
    return GraphError(
        f"state_{state.number} was written to through a view that is older than the last call: its other elements "
        "are newer on the device. Take a new view of the parameter, and write to that"
    )


def _lost(state: State) -> EngineError:
    return EngineError(
        f"state_{state.number} is lost, because a call that used it failed: write all of it with copy_, or load the "
        "module again"
    )


def _on_host(tensor: DeviceTensor) -> torch.Tensor:
    """A copy that may be written to."""
    return numpy_to_torch(np.array(tensor.numpy())).reshape(tensor.shape)


ENGINES: Any = WeakTensorKeyDictionary()  # keyed by a program's bytes, which live as long as the module
_LOADING = threading.Lock()


def load(program: torch.Tensor, weights: list[torch.Tensor], states: list[torch.Tensor]) -> None:
    """Load a traced module onto the device unless it is loaded."""
    if isinstance(program, FakeTensor):
        raise GraphError("a traced module cannot be traced or exported again: use the module that it was made from")
    with _LOADING:
        if program not in ENGINES:
            traced = Traced.from_bytes(torch_to_numpy(program).tobytes())
            ENGINES[program] = Engine(traced, weights, states, get_runtime(None, 1))


def _loaded(program: torch.Tensor) -> bool:
    return program in ENGINES


def _run(
    program: torch.Tensor, bucket: int, inputs: list[torch.Tensor | None], states: list[torch.Tensor]
) -> list[torch.Tensor]:
    outputs: list[torch.Tensor] = ENGINES[program].run(bucket, inputs, states)
    return outputs


_ERRORS = threading.local()  # `noted` lists what operations raised in this thread, inside `noted()`


@contextmanager
def noted() -> Iterator[list[BaseException]]:
    """Collect the exceptions that operations raise, because TorchScript replaces each with a long RuntimeError."""
    before, _ERRORS.noted = getattr(_ERRORS, "noted", None), []
    try:
        yield _ERRORS.noted
    finally:
        _ERRORS.noted = before


def _noting(function: Any) -> Callable[..., Any]:
    def call(*arguments: Any) -> Any:
        try:
            return function(*arguments)
        except BaseException as error:
            if (errors := getattr(_ERRORS, "noted", None)) is not None:
                errors.append(error)
            raise

    return call


OPERATIONS: Any = torch.library.Library("transformers_neuronx", "DEF")  # type: ignore[no-untyped-call]
# TorchScript removes or merges calls without side effects, so these schemas declare writes to `program`.
for _schema, _function in {
    "loaded(Tensor(a!) program) -> bool": _loaded,
    "load(Tensor(a!) program, Tensor[] weights, Tensor[] states) -> ()": load,
    "run(Tensor(a!) program, int bucket, Tensor?[] inputs, Tensor[] states) -> Tensor[]": _run,
    "state(Tensor tensor) -> Tensor": State.of,
    "current(Tensor[] states) -> Tensor[]": current,
}.items():
    OPERATIONS.define(_schema)
    OPERATIONS.impl(_schema.partition("(")[0], _noting(_function), "CompositeExplicitAutograd")
