"""`trace` and what belongs to it: the calls of `torch_neuronx`, for the runtimes that this package has."""

from __future__ import annotations

import argparse
import logging
import os
import shlex
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from transformers_neuronx import files
from transformers_neuronx.cache import build
from transformers_neuronx.compiler import compile_py_func, identity
from transformers_neuronx.errors import ConfigError, EngineError, GraphError
from transformers_neuronx.pyhlo import HloModuleProto
from transformers_neuronx.runtimes import get_runtime
from transformers_neuronx.runtimes.base import Runtime
from transformers_neuronx.trace import engine
from transformers_neuronx.trace.buckets import BucketModelConfig, check_buckets, kernel_of, model_of, regions_of, whole
from transformers_neuronx.trace.export import Exported, export, same
from transformers_neuronx.trace.given import inputs_of
from transformers_neuronx.trace.lowering import Casting, Lowering, Placement, Region, placements, shape_of
from transformers_neuronx.trace.neuron import torch_neuronx
from transformers_neuronx.trace.program import Input, Program, Traced
from transformers_neuronx.trace.ranges import ranges
from transformers_neuronx.trace.script import ScriptModule, called, quiet, scripted
from transformers_neuronx.trace.states import states_of

_LOG = logging.getLogger(__name__)

Inputs = torch.Tensor | Sequence[torch.Tensor | None]
CompilerArgs = str | Sequence[str] | None
CASTS = dict(bf16="bf16", fp16="f16", tf32="f32")  # what `--auto-cast-type` means


def trace(
    func: Callable[..., Any],
    example_inputs: Inputs,
    *_: Any,
    input_output_aliases: Mapping[torch.Tensor, int] | None = None,
    compiler_workdir: str | os.PathLike[str] | None = None,
    compiler_args: CompilerArgs = None,
    **ignored: Any,
) -> ScriptModule:
    """`func`, a module or a function of tensors, compiled for the sizes and types of the example inputs.

    What it returns does what `func` does, is called with tensors in the same order, and can be saved with
    `torch.jit.save`. Control flow is that of the example. Weights are those of this moment.

    `input_output_aliases` has tensors that `func` knows, parameters, buffers or example inputs, and for each the
    number of the output that replaces it after a call, counted as outputs stand one after the other. Such states stay
    on the device and are not returned; they are the parameters of the result, in this order. Whatever reads or copies
    a parameter gets the state as it is on the device, and what is written to one goes there before the next call.
    HLO goes to `compiler_workdir`. Of `compiler_args` these mean something: `--auto-cast none|matmult|all`, what in
    f32 is computed in fewer bits, and `--auto-cast-type bf16|fp16`; with the type alone it is products.

    Raises GraphError for what cannot be traced. What `func` itself raises comes out as it is. A call of the result
    raises GraphError for other sizes and types than those of the example, and OutOfRangeError, which is an IndexError,
    for an index that is outside of what it looks up.
    """
    if (neuron := torch_neuronx()) is not None:
        where = dict(compiler_workdir=compiler_workdir, compiler_args=compiler_args)
        theirs: ScriptModule = neuron.trace(
            func, example_inputs, input_output_aliases=input_output_aliases or {}, **where, **ignored
        )
        return theirs
    if ignored:
        warnings.warn(f"trace has no use for {', '.join(ignored)}", stacklevel=2)
    exported = export(func, inputs_of(example_inputs), input_output_aliases)
    collected = _Collected(_casting(compiler_args), compiler_workdir)
    states = list(exported.states.values())
    collected.add(exported, [whole(state) for state in states], range(len(states)))
    return collected.scripted(exported, states)


def bucket_model_trace(
    func: Callable[..., tuple[Callable[..., Any], Mapping[torch.Tensor, int]]],
    example_inputs: Sequence[Inputs],
    bucket_config: BucketModelConfig,
    compiler_workdir: str | os.PathLike[str] | None = None,
    compiler_args: CompilerArgs = None,
) -> ScriptModule:
    """One module for several sizes of inputs: `func()` returns a model and its `input_output_aliases`, as in `trace`.

    It is called once for each of the example inputs, which are those of one bucket each. Weights that are equal are
    there once. The result takes what the configuration's bucket kernel takes.
    """
    if (neuron := torch_neuronx()) is not None:
        config = neuron.BucketModelConfig(**vars(bucket_config))
        theirs: ScriptModule = neuron.bucket_model_trace(func, example_inputs, config, compiler_workdir, compiler_args)
        return theirs
    check_buckets(bucket_config, example_inputs)
    collected = _Collected(_casting(compiler_args), compiler_workdir)
    exports = []
    for number, inputs in enumerate(example_inputs):
        model, aliases = model_of(func, bucket_config, number)
        exports.append(export(model, inputs_of(inputs), aliases))
    shared = bucket_config.shared_state_buffer
    states = [*shared] if shared is not None else [state for each in exports for state in each.states.values()]
    regions, first = regions_of(bucket_config, [list(each.states.values()) for each in exports]), 0
    for exported, parts in zip(exports, regions, strict=True):
        collected.add(exported, parts, range(first, first + len(parts)))
        first += 0 if shared is not None else len(parts)
    constants = bucket_config.bucket_kernel_constant_args
    return collected.scripted(exports[-1], states, kernel_of(bucket_config), constants)


def _casting(compiler_args: CompilerArgs) -> Casting:
    """What `--auto-cast` says. Whatever else there is means nothing here, and that is said."""
    wanted = f"compiler_args must be a string or a list of strings, got {compiler_args!r}"
    try:
        words = shlex.split(compiler_args) if isinstance(compiler_args, str) else list(compiler_args or [])
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{wanted}: {error}") from error
    if any(not isinstance(word, str) for word in words):
        raise ConfigError(wanted)
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument("--auto-cast", choices=("none", "matmult", "all"))
    parser.add_argument("--auto-cast-type", choices=tuple(CASTS))
    try:
        options, unknown = parser.parse_known_args(words)
    except argparse.ArgumentError as error:
        raise ConfigError(f"compiler_args: {error}") from error
    if unknown:
        warnings.warn(f"compiler_args that mean nothing to this compiler: {' '.join(unknown)}", stacklevel=3)
    scope = options.auto_cast or ("matmult" if options.auto_cast_type else "none")
    return Casting(scope, CASTS[options.auto_cast_type or "bf16"])


class _Collected:
    """Programs as they are made, and the weights that they share."""

    def __init__(self, casting: Casting, workdir: str | os.PathLike[str] | None) -> None:
        self.casting, self.workdir = casting, workdir
        self.runtime: Runtime = get_runtime(None, 1)
        self.weights: list[torch.Tensor] = []  # as they lie on the device
        self._sources: list[tuple[str, Placement, torch.Tensor]] = []
        self._numbers: dict[tuple[Any, ...], int] = {}
        self._programs: list[Program] = []
        self._structure: Any = None

    def add(self, exported: Exported, regions: Sequence[Region], states: Sequence[int]) -> None:
        """Lower and compile a function. Its states are these regions of the ones with these numbers."""
        if self._programs and exported.structure != self._structure:
            raise GraphError(f"buckets want to return the same, got {exported.structure} after {self._structure}")
        self._structure = exported.structure
        places = placements(exported, self.casting)
        numbers = [self._number(exported.names[n], exported.weights[n], placed) for n, placed in places.items()]
        parts = dict(zip(exported.states, regions, strict=True))
        indices = ranges(exported)
        computed = [node for limits, node in indices if limits.argument is None]
        plain, panelled = (
            compile_py_func(Lowering(exported, places, parts, computed, self.casting, in_panels))
            for in_panels in (False, True)
        )
        plain.name = panelled.name = f"traced_{len(self._programs)}"
        module = panelled if self.runtime.panels else plain
        executable = build(self.runtime, module, identity(module))
        try:
            data = executable.serialize()
        except EngineError as error:
            _LOG.warning(f"the traced module will be compiled again where it is loaded: {error}")
            data = b""
        shapes = [shape_of(node.meta["val"]) if node else None for node in exported.inputs.values()]
        inputs = [Input(shape.dtype.name, shape.sizes) if shape else None for shape in shapes]
        limits = [each for each, _ in indices]
        self._programs.append(Program(inputs, limits, numbers, list(states), plain, panelled, data))
        self._show(module)

    def _number(self, name: str, tensor: torch.Tensor, placed: Placement) -> int:
        """Of a weight, which is there already if it is the same tensor, or an equal one that is called the same."""
        key = *same(tensor), placed
        if key not in self._numbers:
            equal = (
                number
                for number, (other, where, source) in enumerate(self._sources)
                if (other, where) == (name, placed) and torch.equal(source, tensor)
            )
            self._numbers[key] = next(equal, len(self.weights))
            if self._numbers[key] == len(self.weights):
                self.weights.append(placed.laid_out(tensor, self.runtime.panels))
                self._sources.append((name, placed, tensor))
        return self._numbers[key]

    def _show(self, module: HloModuleProto) -> None:
        if self.workdir is not None:
            directory = Path(self.workdir).expanduser()
            directory.mkdir(parents=True, exist_ok=True)
            files.replace(directory / f"{module.name}.hlo.pb", module.SerializeToString(deterministic=True))
            files.replace(directory / f"{module.name}.hlo.txt", self.runtime.module_text(module).encode())

    def scripted(self, exported: Exported, states: Sequence[torch.Tensor], *kernel: Any) -> ScriptModule:
        """All programs as one module, called as this function is."""
        weights = [(name, placed) for name, placed, _ in self._sources]
        fingerprint = dict(self.runtime.fingerprint)
        traced = Traced(list(exported.inputs), self._structure, weights, self._programs, fingerprint)
        return scripted(traced, self.weights, states, *kernel)


def _program_of(trace: ScriptModule) -> torch.Tensor:
    if not isinstance(trace, ScriptModule) or not isinstance(program := getattr(trace, "program", None), torch.Tensor):
        raise GraphError(f"a traced module must be one that trace made, got {type(trace).__name__}")
    return program


def move_trace_to_device(trace: ScriptModule, device_id: int = 0) -> None:
    """Bring a traced module's weights and states to the device now, not at its first call.

    The number is of a Neuron core: the runtimes here have one device for traced modules.
    """
    if (neuron := torch_neuronx()) is not None:
        neuron.move_trace_to_device(trace, device_id)
    else:
        engine.load(_program_of(trace), trace.weights, [*states_of(trace)])


def read_states(trace: ScriptModule) -> list[torch.Tensor]:
    """A traced module's states as they are on the device, brought to its parameters.

    That is done for each state, too, when a function or method of PyTorch's is called with it.
    """
    _program_of(trace)
    states = states_of(trace)
    for state in states:
        state.read()
    return [*states]


def save(trace: ScriptModule, path: str | os.PathLike[str]) -> None:
    """As `torch.jit.save`, and the file is there when it is whole."""
    if not isinstance(trace, ScriptModule):
        raise GraphError(f"save must be given a module that trace made, got {type(trace).__name__}")
    path = Path(path).expanduser()
    with files.staging(path.parent, path.name) as stage, quiet():
        torch.jit.save(trace, str(stage / path.name))
        files.fsync(stage / path.name)
        os.replace(stage / path.name, path)
        files.fsync(path.parent)


def load(path: str | os.PathLike[str]) -> ScriptModule:
    """As `torch.jit.load`, of what `save` or `torch.jit.save` has made; it is machine code, to be trusted as such.

    What a call raises comes as it is, as from a module that `trace` has just made. Of one that `torch.jit.load`
    returns, and within other modules of TorchScript, it comes as a RuntimeError with the text.
    """
    with files.explain(f"{path}: not a traced module"), quiet():
        module: ScriptModule = torch.jit.load(str(Path(path).expanduser()))  # type: ignore[no-untyped-call]
    return called(module)
