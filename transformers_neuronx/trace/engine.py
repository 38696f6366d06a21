"""A traced function on a runtime: its executables, its weights and its states on the device.

TorchScript calls it through `torch.ops.transformers_neuronx`, by the tensor that holds the program's bytes.
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

from transformers_neuronx.cache import ArtifactSource, build
from transformers_neuronx.compiler import identity
from transformers_neuronx.errors import EngineError, GraphError
from transformers_neuronx.pyhlo.dtypes import numpy_to_torch, torch_to_numpy
from transformers_neuronx.runtimes import get_runtime
from transformers_neuronx.runtimes.base import DeviceTensor, Executable, Runtime
from transformers_neuronx.trace.given import check_kind, resolved
from transformers_neuronx.trace.program import Program, Traced
from transformers_neuronx.trace.ranges import check_computed, check_given
from transformers_neuronx.trace.states import State, current, plain


class Engine:
    """Programs that are ready to run, and what they keep on the device."""

    def __init__(
        self, traced: Traced, weights: Sequence[torch.Tensor], states: Sequence[torch.Tensor], runtime: Runtime
    ) -> None:
        self.traced, self.runtime = traced, runtime
        self.executables = [self._built(program) for program in traced.programs]
        self.weights = [
            self._put(placed.moved(tensor, runtime.panels))
            for tensor, (_, placed) in zip(weights, traced.weights, strict=True)
        ]
        self._on_device: dict[int, DeviceTensor] = {}  # the states; one that a failed call was given is not there
        self._lock = threading.Lock()
        self._adopt(states)

    def _built(self, program: Program) -> Executable:
        module = program.module(self.runtime.panels)
        same = dict(self.runtime.fingerprint) == self.traced.fingerprint
        data = program.executable or None
        source = ArtifactSource(lambda _: None, lambda _: data if same else None)
        return build(self.runtime, module, identity(module), source)

    def _put(self, tensor: torch.Tensor) -> DeviceTensor:
        array = torch_to_numpy(tensor)
        return self.runtime.put([array], donate=self.runtime.usable(array))

    def _adopt(self, states: Sequence[torch.Tensor]) -> None:
        """Bring the states to the device. They are nobody else's, and not this engine's unless all of them are."""
        adopted = [self._held(number, state, None) for number, state in enumerate(states)]
        with plain():
            for number, state in enumerate(adopted):
                state.number = number
                self._bring(state)
        for state in adopted:
            state.holder = self

    def _held(self, number: int, state: torch.Tensor, holder: Engine | None) -> State:
        """A parameter as the state that it is, and whose."""
        if not isinstance(state, State) or state.holder is not holder:
            raise _replaced(number)
        return state

    def _bring(self, state: State) -> None:
        """Bring a state to the device if the host has written to it since."""
        if state._version == state.brought and state.number in self._on_device:
            return
        if state.behind:
            raise _lost(state) if state._version == state.brought else _outdated(state)
        self._on_device[state.number] = self.runtime.put([torch_to_numpy(state)])
        state.brought = state._version

    def run(
        self, bucket: int, inputs: Sequence[torch.Tensor | None], states: Sequence[torch.Tensor]
    ) -> list[torch.Tensor]:
        """The outputs of a program, on the host; its new states stay on the device."""
        if not 0 <= bucket < len(self.executables):
            raise GraphError(f"the bucket kernel wants to name one of {len(self.executables)} buckets, got {bucket}")
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
        """A program's outputs. What it was given as states is its own: the new ones take their places, if there are."""
        given = [self._on_device.pop(state.number) for state in states]
        results = self.executables[bucket](*operands, *given)
        count = len(results) - len(states)
        for state, new in zip(states, results[count:], strict=True):
            self._on_device[state.number], state.behind = new, True
        return results[:count]

    def _check(self, program: Program, inputs: Sequence[torch.Tensor | None]) -> None:
        if len(inputs) != len(program.inputs):
            raise GraphError(f"the program wants {len(program.inputs)} inputs, got {len(inputs)}")
        for name, want, got in zip(self.traced.arguments, program.inputs, inputs, strict=True):
            if got is not None:
                check_kind(name, got)
            if (want is None and got is None) or (want is not None and got is not None and want.takes(got)):
                continue
            described = f"{got.dtype}{list(got.shape)}" if got is not None else "None"
            raise GraphError(
                f"{name} wants to be {want or 'None'}, as in the example inputs, got {described}: "
                "pad or convert it, or trace for these sizes as well (bucket_model_trace)"
            )

    def read(self, state: State) -> None:
        """Bring a state to the host, unless the host has it."""
        with self._lock, torch.no_grad(), plain():
            if state.behind:
                if state.number not in self._on_device:
                    raise _lost(state)
                state.copy_(_on_host(self._on_device[state.number]))
                state.brought, state.behind = state._version, False


def _replaced(number: int) -> GraphError:
    return GraphError(
        f"state_{number} must be the tensor that trace made, got another in its place. For load_state_dict, leave out "
        "assign=True; of a module that went through torch.jit.freeze, save or copy the one that it was made of"
    )


def _outdated(state: State) -> GraphError:
    return GraphError(
        f"state_{state.number} was written to through a view that is older than the last call: what the view leaves "
        "alone is newer on the device. Take the view of the parameter anew, and write to that"
    )


def _lost(state: State) -> EngineError:
    return EngineError(
        f"state_{state.number} was given to a call that failed, and is lost: write all of it with copy_, or load the "
        "module again"
    )


def _on_host(tensor: DeviceTensor) -> torch.Tensor:
    """A copy that may be written to."""
    return numpy_to_torch(np.array(tensor.numpy())).reshape(tensor.shape)


ENGINES: Any = WeakTensorKeyDictionary()  # by the tensor with a program's bytes: it lives as long as its module
_LOADING = threading.Lock()


def load(program: torch.Tensor, weights: list[torch.Tensor], states: list[torch.Tensor]) -> None:
    """Bring a traced module to the device, unless it is there."""
    if isinstance(program, FakeTensor):
        raise GraphError("a traced module cannot be traced or exported again: use the module that it was made of")
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


_ERRORS = threading.local()  # `noted` has what operations have raised in this thread, if it is wanted


@contextmanager
def noted() -> Iterator[list[BaseException]]:
    """What operations raise meanwhile, as it is. TorchScript makes a RuntimeError of it, with much around its text."""
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
# TorchScript leaves out, or calls once, what writes to nothing: these write to `program`, as far as it knows.
for _schema, _function in {
    "loaded(Tensor(a!) program) -> bool": _loaded,
    "load(Tensor(a!) program, Tensor[] weights, Tensor[] states) -> ()": load,
    "run(Tensor(a!) program, int bucket, Tensor?[] inputs, Tensor[] states) -> Tensor[]": _run,
    "state(Tensor tensor) -> Tensor": State.of,
    "current(Tensor[] states) -> Tensor[]": current,
}.items():
    OPERATIONS.define(_schema)
    OPERATIONS.impl(_schema.partition("(")[0], _noting(_function), "CompositeExplicitAutograd")
