"""The TorchScript module of a traced function: a shell around an engine, saved with everything that it needs.

`program` has the bytes, `weights` has the weights as laid out for the device, and the parameters are the states.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from transformers_neuronx.errors import GraphError
from transformers_neuronx.trace.engine import noted
from transformers_neuronx.trace.export import Structure
from transformers_neuronx.trace.given import check_kind
from transformers_neuronx.trace.program import Traced
from transformers_neuronx.trace.states import State

ScriptModule = torch.jit.ScriptModule


@contextmanager
def quiet() -> Iterator[None]:
    """Hide PyTorch's deprecation warnings about TorchScript, which this package uses on purpose."""
    with warnings.catch_warnings():
        for kind in (DeprecationWarning, FutureWarning):  # the second since PyTorch 2.14
            warnings.filterwarnings("ignore", r"`torch\.jit\.", kind)
        yield


def scripted(
    traced: Traced,
    weights: Sequence[torch.Tensor],
    states: Sequence[torch.Tensor],
    kernel: Callable[..., Any] | None = None,
    constants: Sequence[Any] = (),
) -> ScriptModule:
    """Return a module that calls the programs of `traced` and returns their outputs.

    With several programs, the scripted function `kernel(inputs, *constants)` returns the prepared inputs and the
    number of the program to call.
    """
    attributes: dict[str, Any] = {f"state_{number}": State.of(state) for number, state in enumerate(states)}
    attributes |= {f"constant_{number}": value for number, value in enumerate(constants)}
    if kernel is not None:
        attributes["bucket_kernel"] = kernel
    if states and isinstance(kernel, torch.nn.Module):  # `__getstate__` cannot return a module
        raise GraphError(
            "with states, bucket_kernel must return a scripted function, torch.jit.script(function), got a "
            f"module, {getattr(kernel, 'original_name', type(kernel).__name__)}"
        )
    annotations = dict(weights=list[torch.Tensor])
    # A separate class, because TorchScript compiles one `forward` for each class.
    shell = type("Traced", (torch.nn.Module,), dict(__annotations__=annotations, __module__=__name__))()
    shell.register_buffer("program", torch.frombuffer(bytearray(traced.to_bytes()), dtype=torch.uint8))
    shell.weights = list(weights)
    for name, value in attributes.items():
        setattr(shell, name, value)
    with quiet():
        module = torch.jit.script(shell.eval())
        module.define(_source(traced, len(states), kernel is not None, len(constants)))
        if states:
            module.define(_saving(len(states), constants))
    assert isinstance(module, ScriptModule)
    return called(module)


class Forward:
    """A module's `forward` for Python callers, which raises this package's exceptions unchanged."""

    def __init__(self, method: Any) -> None:
        self._method = method

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        with noted() as errors:
            try:
                return self._method(*arguments, **keywords)
            except RuntimeError:
                if errors:
                    raise errors.pop() from None
                for number, value in enumerate(arguments):  # PyTorch rejects some kinds before it calls an operation
                    if isinstance(value, torch.Tensor):
                        check_kind(f"input {number}", value)
                raise

    def __getattr__(self, name: str) -> Any:
        return getattr(self._method, name)


def called(module: ScriptModule) -> ScriptModule:
    """Set a traced module to be called through `Forward`. Copies, and calls inside other modules, are unaffected."""
    module.forward = Forward(module.forward)
    return module


def _source(traced: Traced, states: int, bucketed: bool, constants: int) -> str:
    """Return the source of the module's `forward`. Its variables start with an underscore, unlike most arguments."""
    given = [each is not None for each in traced.programs[0].inputs]
    arguments = [
        f"{name}: {'Tensor' if is_tensor else 'Optional[Tensor] = None'}"
        for name, is_tensor in zip(traced.arguments, given, strict=True)
    ]
    listed = ", ".join(traced.arguments)
    lines = [f"def forward({', '.join(['self', *_defaulted(arguments)])}):"]
    if bucketed:
        more = "".join(f", self.constant_{number}" for number in range(constants))
        lines += [
            f"_given: List[Tensor] = [{listed}]",
            f"_prepared, _bucket = self.bucket_kernel(_given{more})",
            "_inputs: List[Optional[Tensor]] = []",
            "for _each in _prepared:",
            "    _inputs.append(_each)",
        ]
    else:
        lines += [f"_inputs: List[Optional[Tensor]] = [{listed}]"]
    lines += [
        f"_states: List[Tensor] = [{_attributes('state', states)}]",
        "if not torch.ops.transformers_neuronx.loaded(self.program):",
        "    torch.ops.transformers_neuronx.load(self.program, self.weights, _states)",
        f"_number = {'int(_bucket)' if bucketed else 0}",
        "_outputs = torch.ops.transformers_neuronx.run(self.program, _number, _inputs, _states)",
        *_result(traced.structure),
    ]
    return "\n    ".join(lines) + "\n"


def _attributes(name: str, count: int) -> str:
    return ", ".join(f"self.{name}_{number}" for number in range(count))


def _saving(states: int, constants: Sequence[Any]) -> str:
    """Return the source of the methods with which TorchScript saves and copies a module with states.

    They also work inside another module. A copy has its own program and states. Copies share the weights, which are
    never written to.
    """
    types = ["bool", "Tensor", "List[Tensor]", "List[Tensor]"]
    types += [torch._C._jit_try_infer_type(value).type().annotation_str for value in constants]
    held = ["self.training", "self.program.clone()", "self.weights", "torch.ops.transformers_neuronx.current(states)"]
    held += [f"self.constant_{number}" for number in range(len(constants))]
    lines = [
        "def __getstate__(self):",
        f"    states: List[Tensor] = [{_attributes('state', states)}]",
        f"    return ({', '.join(held)},)",
        f"def __setstate__(self, given: Tuple[{', '.join(types)}]):",
        "    self.training = given[0]",
        "    self.program = given[1]",
        "    self.weights = given[2]",
        *(f"    self.state_{n} = torch.ops.transformers_neuronx.state(given[3][{n}])" for n in range(states)),
        *(f"    self.constant_{number} = given[{4 + number}]" for number in range(len(constants))),
    ]
    return "\n".join(lines) + "\n"


def _defaulted(arguments: Sequence[str]) -> list[str]:
    """Remove the defaults of arguments that precede one without a default."""
    last = max((number for number, text in enumerate(arguments) if "=" not in text), default=-1)
    return [text.partition(" =")[0] if number < last else text for number, text in enumerate(arguments)]


def _result(structure: Structure) -> list[str]:
    """Return source lines that return the outputs in the function's structure."""
    lines: list[str] = []
    value = _expression(structure, lines)
    return [*lines, f"return {value}"]


def _expression(structure: Structure, lines: list[str]) -> str:
    if structure is None or isinstance(structure, int):
        return "None" if structure is None else f"_outputs[{structure}]"
    kind, parts = structure
    if kind == "constant":
        return f"float({str(parts)!r})" if isinstance(parts, float) and not math.isfinite(parts) else repr(parts)
    if kind == "dict":
        return _dictionary(parts, lines)
    values = [_expression(each, lines) for each in parts]
    if kind == "list" and all(isinstance(each, int) for each in parts):
        return f"[{', '.join(values)}]" if values else "_outputs[:0]"
    return f"({', '.join(values)},)" if values else "()"


def _dictionary(parts: dict[str, Structure], lines: list[str]) -> str:
    """Add lines that make a dictionary, and return its variable. Its values are typed if all are tensors."""
    kind = "Tensor" if all(isinstance(each, int) for each in parts.values()) else "Any"
    items = [(name, _expression(each, lines)) for name, each in parts.items()]
    variable = f"_result_{len(lines)}"
    lines += [f"{variable}: Dict[str, {kind}] = {{}}", *(f"{variable}[{name!r}] = {value}" for name, value in items)]
    return variable
