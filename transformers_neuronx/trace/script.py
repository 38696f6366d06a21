"""The TorchScript module that a traced function becomes: a shell around an engine, which is saved with all it needs.

`program` has the bytes, `weights` the weights as they lie on the device, and the parameters are the states.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from transformers_neuronx.trace.export import Structure
from transformers_neuronx.trace.program import Traced

ScriptModule = torch.jit.ScriptModule


@contextmanager
def quiet() -> Iterator[None]:
    """PyTorch calls all of TorchScript deprecated, which is what was asked for here."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        yield


def scripted(
    traced: Traced,
    weights: Sequence[torch.Tensor],
    states: Sequence[torch.Tensor],
    kernel: Callable[..., Any] | None = None,
    constants: Sequence[Any] = (),
) -> ScriptModule:
    """A module that calls the programs of `traced` and returns what they do.

    With several programs, `kernel(inputs, *constants)`, a scripted function, makes inputs of other inputs and says
    which program is to be called.
    """
    attributes: dict[str, Any] = {
        f"state_{n}": torch.nn.Parameter(s, requires_grad=False) for n, s in enumerate(states)
    }
    attributes |= {f"constant_{number}": value for number, value in enumerate(constants)}
    if kernel is not None:
        attributes["bucket_kernel"] = kernel
    annotations = dict(weights=list[torch.Tensor])
    # A class of its own, since TorchScript has one `forward` for all modules of a class.
    shell = type("Traced", (torch.nn.Module,), dict(__annotations__=annotations, __module__=__name__))()
    shell.register_buffer("program", torch.frombuffer(bytearray(traced.to_bytes()), dtype=torch.uint8))
    shell.weights = list(weights)
    for name, value in attributes.items():
        setattr(shell, name, value)
    with quiet():
        module = torch.jit.script(shell.eval())
        module.define(_source(traced, len(states), kernel is not None, len(constants)))
    assert isinstance(module, ScriptModule)
    return module


def _source(traced: Traced, states: int, bucketed: bool, constants: int) -> str:
    """The module's `forward`."""
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
            f"given: List[Tensor] = [{listed}]",
            f"prepared, bucket = self.bucket_kernel(given{more})",
            "inputs: List[Optional[Tensor]] = []",
            "for each in prepared:",
            "    inputs.append(each)",
        ]
    else:
        lines += [f"inputs: List[Optional[Tensor]] = [{listed}]"]
    stored = ", ".join(f"self.state_{number}" for number in range(states))
    lines += [
        "if not torch.ops.transformers_neuronx.loaded(self.program):",
        f"    states: List[Tensor] = [{stored}]",
        "    torch.ops.transformers_neuronx.load(self.program, self.weights, states)",
        f"outputs = torch.ops.transformers_neuronx.run(self.program, {'int(bucket)' if bucketed else 0}, inputs)",
        *_result(traced.structure),
    ]
    return "\n    ".join(lines) + "\n"


def _defaulted(arguments: Sequence[str]) -> list[str]:
    """Only last arguments may have a default."""
    last = max((number for number, text in enumerate(arguments) if "=" not in text), default=-1)
    return [text.partition(" =")[0] if number < last else text for number, text in enumerate(arguments)]


def _result(structure: Structure) -> list[str]:
    """Lines that return the outputs as the function does."""
    lines: list[str] = []
    value = _expression(structure, lines)
    return [*lines, f"return {value}"]


def _expression(structure: Structure, lines: list[str]) -> str:
    if structure is None or isinstance(structure, int):
        return "None" if structure is None else f"outputs[{structure}]"
    kind, parts = structure
    if kind == "constant":
        return repr(parts)
    if kind == "dict":
        return _dictionary(parts, lines)
    values = [_expression(each, lines) for each in parts]
    if kind == "list" and all(isinstance(each, int) for each in parts):
        return f"[{', '.join(values)}]" if values else "outputs[:0]"
    return f"({', '.join(values)},)" if values else "()"


def _dictionary(parts: dict[str, Structure], lines: list[str]) -> str:
    """A dictionary, of tensors if it has nothing else."""
    kind = "Tensor" if all(isinstance(each, int) for each in parts.values()) else "Any"
    items = [(name, _expression(each, lines)) for name, each in parts.items()]
    variable = f"result_{len(lines)}"
    lines += [f"{variable}: Dict[str, {kind}] = {{}}", *(f"{variable}[{name!r}] = {value}" for name, value in items)]
    return variable
