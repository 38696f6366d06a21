"""`trace` and the related calls of `torch_neuronx`, for this package's runtimes."""

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

from transformers_neuronx.compiler import compile_py_func
from transformers_neuronx.engine.compile_cache import SavedModule, build
from transformers_neuronx.errors import ConfigError, EngineError, GraphError
from transformers_neuronx.pyhlo import HloModuleProto
from transformers_neuronx.runtimes import get_runtime
from transformers_neuronx.runtimes.base import Runtime
from transformers_neuronx.support import files
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
CASTS = dict(bf16="bf16", fp16="f16", tf32="f32")  # values of `--auto-cast-type`


def trace(
    func: Callable[..., Any],
    example_inputs: Inputs,
    *_: Any,
    input_output_aliases: Mapping[torch.Tensor, int] | None = None,
    compiler_workdir: str | os.PathLike[str] | None = None,
    compiler_args: CompilerArgs = None,
    **ignored: Any,
) -> ScriptModule:
    """Compile `func`, a module or a function of tensors, for the sizes and types of the example inputs.

    The result computes what `func` computes, takes tensors in the same order, and can be saved with `torch.jit.save`.
    Control flow is fixed as the example inputs take it. Weights keep their current values.

    `input_output_aliases` maps tensors that `func` uses (parameters, buffers or example inputs) to output numbers.
    After a call, that output replaces the tensor. Outputs are numbered in flattened order. These states stay on the
    device and are not returned. They are the result's parameters, in this order. Reading or copying a parameter gets
    the device's values. Writes to a parameter reach the device before the next call. HLO files go to
    `compiler_workdir`. `compiler_args` can have `--auto-cast none|matmult|all`, which selects the f32 operations to
    compute in fewer bits, and `--auto-cast-type bf16|fp16`. The type alone casts matrix products.

    Raises GraphError for functions that cannot be traced; exceptions of `func` itself pass through unchanged. Calling
    the result raises GraphError for sizes and types other than the example's, and OutOfRangeError (an IndexError) for
    an index out of range.
    """
    if (neuron := torch_neuronx()) is not None:
        where = dict(compiler_workdir=compiler_workdir, compiler_args=compiler_args)
        theirs: ScriptModule = neuron.trace(
            func, example_inputs, input_output_aliases=input_output_aliases or {}, **where, **ignored
        )
        return theirs
    if ignored:
        warnings.warn(f"trace ignores these arguments: {', '.join(ignored)}", stacklevel=2)
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
    """Compile one module for several input sizes: `func()` returns a model and its `input_output_aliases`.

    `func` is called once per bucket, and `example_inputs` has the inputs of each bucket, as in `trace`. Equal weights
    are stored once. The result takes the inputs of the configuration's bucket kernel.
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
    """Return the casting that `--auto-cast` selects, and warn about other options."""
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
        warnings.warn(f"this compiler ignores these compiler_args: {' '.join(unknown)}", stacklevel=3)
    scope = options.auto_cast or ("matmult" if options.auto_cast_type else "none")
    return Casting(scope, CASTS[options.auto_cast_type or "bf16"])


class _Collected:
    """The programs compiled so far, and the weights that they share."""

    def __init__(self, casting: Casting, workdir: str | os.PathLike[str] | None) -> None:
        self.casting, self.workdir = casting, workdir
        self.runtime: Runtime = get_runtime(None, 1)
        self.weights: list[torch.Tensor] = []  # laid out for the device
        self._sources: list[tuple[str, Placement, torch.Tensor]] = []
        self._numbers: dict[tuple[Any, ...], int] = {}
        self._programs: list[Program] = []
        self._structure: Any = None

    def add(self, exported: Exported, regions: Sequence[Region], states: Sequence[int]) -> None:
        """Lower and compile a function. Each of its states is a region of the state with that number."""
        if self._programs and exported.structure != self._structure:
            raise GraphError(f"buckets must return one structure, got {exported.structure} after {self._structure}")
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
        executable = build(self.runtime, SavedModule.of(module))
        try:
            data = executable.serialize()
        except EngineError as error:
            _LOG.warning(f"the traced module will be compiled again when it is loaded: {error}")
            data = b""
        shapes = [shape_of(node.meta["val"]) if node else None for node in exported.inputs.values()]
        inputs = [Input(shape.dtype.name, shape.sizes) if shape else None for shape in shapes]
        limits = [each for each, _ in indices]
        self._programs.append(Program(inputs, limits, numbers, list(states), plain, panelled, data))
        self._show(module)

    def _number(self, name: str, tensor: torch.Tensor, placed: Placement) -> int:
        """Return a weight's number. The same tensor, or an equal one with the same name, has one number."""
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
        """Return one module of all programs, with the arguments of this function."""
        weights = [(name, placed) for name, placed, _ in self._sources]
        fingerprint = dict(self.runtime.fingerprint)
        traced = Traced(list(exported.inputs), self._structure, weights, self._programs, fingerprint)
        return scripted(traced, self.weights, states, *kernel)


def _program_of(trace: ScriptModule) -> torch.Tensor:
    if not isinstance(trace, ScriptModule) or not isinstance(program := getattr(trace, "program", None), torch.Tensor):
        raise GraphError(f"expected a module that trace returned, got {type(trace).__name__}")
    return program


def move_trace_to_device(trace: ScriptModule, device_id: int = 0) -> None:
    """Copy a traced module's weights and states to the device now, not at its first call.

    `device_id` is the number of a Neuron core. This package's runtimes ignore it: they have one device for this.
    """
    if (neuron := torch_neuronx()) is not None:
        neuron.move_trace_to_device(trace, device_id)
    else:
        engine.load(_program_of(trace), trace.weights, [*states_of(trace)])


def read_states(trace: ScriptModule) -> list[torch.Tensor]:
    """Copy a traced module's states from the device to its parameters, and return these.

    A PyTorch function or method that is called with a state also fetches it.
    """
    _program_of(trace)
    states = states_of(trace)
    for state in states:
        state.read()
    return [*states]


def save(trace: ScriptModule, path: str | os.PathLike[str]) -> None:
    """Save like `torch.jit.save`. The file appears only when it is complete."""
    if not isinstance(trace, ScriptModule):
        raise GraphError(f"save expects a module that trace returned, got {type(trace).__name__}")
    path = Path(path).expanduser()
    with files.staging(path.parent, path.name) as stage, quiet():
        torch.jit.save(trace, str(stage / path.name))
        files.fsync(stage / path.name)
        os.replace(stage / path.name, path)
        files.fsync(path.parent)


def load(path: str | os.PathLike[str]) -> ScriptModule:
    """Load a file that `save` or `torch.jit.save` made. It has machine code: load only files that you trust.

    Calls of the returned module raise this package's exceptions, as calls of `trace`'s result do. In a module that
    `torch.jit.load` returns, or inside another TorchScript module, they become a RuntimeError with the same text.
    """
    with files.explain(f"{path}: not a traced module"), quiet():
        module: ScriptModule = torch.jit.load(str(Path(path).expanduser()))  # type: ignore[no-untyped-call]
    return called(module)
