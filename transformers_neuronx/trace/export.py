"""Export a PyTorch function to a graph of core ATen operations, through `torch.export`.

The function's arguments become inputs. Its parameters, buffers and constants become weights. It may write to its
buffers. The buffers that it writes to and the tensors that are aliased become states.
"""

from __future__ import annotations

import dataclasses
import logging
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.export.graph_signature import InputKind, OutputKind, TensorArgument
from torch.fx import Node

from transformers_neuronx.errors import GraphError, TransformersNeuronxError
from transformers_neuronx.trace.given import (
    argument_names,
    check_aliases,
    check_inputs,
    check_kind,
    function_of,
    resolved,
)
from transformers_neuronx.trace.joining import join_activations, join_attention, narrow_masks
from transformers_neuronx.trace.origin import explained, summary

_LOG = logging.getLogger(__name__)
LOUD = ("torch._subclasses.fake_tensor", "torch.fx.experimental.symbolic_shapes")

aten = torch.ops.aten

# Kept whole, because HLO or a kernel has a better form than PyTorch's decomposition.
KEPT = [
    aten.linear.default,
    aten.scaled_dot_product_attention.default,
    aten.layer_norm.default,
    aten.rms_norm.default,
    aten.group_norm.default,
    aten.gelu.default,
    aten.silu.default,
    aten.softmax.int,
    aten.log_softmax.int,
    aten.roll.default,
    aten.adaptive_avg_pool1d.default,
    aten.adaptive_avg_pool2d.default,
    aten.adaptive_avg_pool3d.default,
    aten.index_add.default,  # decomposed, this and the next three treat negative indices differently
    aten.index_copy.default,
    aten.index_fill.int_Scalar,
    aten.index_fill.int_Tensor,
]

# Decomposed by PyTorch only on request.
TAKEN_APART = [
    aten.bucketize.Tensor,
    aten.grid_sampler_2d.default,
    aten.linalg_vector_norm.default,
    aten.upsample_bicubic2d.default,
    aten.upsample_bilinear2d.default,
    aten.upsample_bilinear2d.vec,
    aten.upsample_nearest2d.vec,
]

# The structure of a function's result, as JSON: None, the number of an output, ["constant", a value that is no tensor],
# ["list", [structures]], ["tuple", [structures]] or ["dict", {name: structure}].
Structure = Any


@dataclass(frozen=True)
class Exported:
    """A function as a graph.

    `inputs` maps each argument's name to its placeholder, or to None if it is no tensor. `weights` and `states` map
    the other placeholders to their tensors. `names` has the function's name for each placeholder. `outputs` are the
    returned nodes, and `structure` says how they are nested. `updates` maps each state to the node of its new value.
    """

    graph: torch.fx.Graph
    names: Mapping[Node, str]
    inputs: Mapping[str, Node | None]
    weights: Mapping[Node, torch.Tensor]
    states: Mapping[Node, torch.Tensor]
    outputs: Sequence[Node]
    structure: Structure
    updates: Mapping[Node, Node]


class _Flat(torch.nn.Module):
    """Wrap a function: return a flat list of tensors, and record their structure and what the function raised."""

    def __init__(self, func: Callable[..., Any], structures: list[Structure], raised: list[Exception]) -> None:
        super().__init__()
        self.func = func
        self._told = [(structures, raised)]  # in a list, because PyTorch tracks what is set on a module

    def forward(self, *arguments: Any) -> list[torch.Tensor]:
        structures, raised = self._told[0]
        tensors: list[torch.Tensor] = []
        try:
            structures.append(_flattened(self.func(*arguments), tensors))
        except Exception as error:
            if (told := explained(error, self.func)) is not error:
                raise told from None
            raised.append(error)
            raise
        return tensors


def _flattened(result: Any, tensors: list[torch.Tensor]) -> Structure:
    if isinstance(result, torch.Tensor):
        tensors.append(result)
        return len(tensors) - 1
    if result is None:
        return None
    if isinstance(result, bool | int | float | str):
        return ["constant", result]
    if dataclasses.is_dataclass(result) and not isinstance(result, type):
        fields = {field.name: getattr(result, field.name) for field in dataclasses.fields(result)}
        return ["dict", {name: _flattened(value, tensors) for name, value in fields.items() if value is not None}]
    if isinstance(result, Mapping):
        if others := [name for name in result if not isinstance(name, str)]:
            raise GraphError(f"a returned dictionary must have strings as keys, got {others[0]!r}")
        return ["dict", {name: _flattened(value, tensors) for name, value in result.items()}]
    if isinstance(result, list | tuple):
        return ["list" if isinstance(result, list) else "tuple", [_flattened(value, tensors) for value in result]]
    kind = type(result).__name__
    cache = ". A Hugging Face model returns a cache unless it is given use_cache=False" if "Cache" in kind else ""
    raise GraphError(
        f"the function must return tensors, or dicts, lists, tuples or dataclasses of them, got {kind}{cache}"
    )


def export(
    func: Callable[..., Any], example_inputs: Sequence[Any], aliases: Mapping[torch.Tensor, int] | None = None
) -> Exported:
    """Export `func` as it runs on the example inputs. `aliases` maps tensors that it uses to their new values' outputs.

    Outputs are numbered in the flattened order of the result.
    """
    function = function_of(func)
    names = argument_names(func, example_inputs)
    check_inputs(names, example_inputs)
    structures: list[Structure] = []
    raised: list[Exception] = []
    # Each a separate object: PyTorch merges arguments whose examples are the same object.
    given = tuple(each if each is None else resolved(each).detach() for each in example_inputs)
    try:
        with torch.no_grad(), _quiet():
            program = torch.export.export(_Flat(function, structures, raised), given, strict=False)
            join_attention(program.graph)
            program = program.run_decompositions(decompositions())
            narrow_masks(program.graph)
            join_activations(program.graph)
    except TransformersNeuronxError as error:
        raise error.with_traceback(None) from None  # most of the traceback is inside PyTorch
    except Exception as error:
        if any(error is each for each in raised):
            raise
        _LOG.debug("torch.export has raised", exc_info=error)
        raise GraphError(f"PyTorch cannot export the function: {summary(error)}") from None
    return _classified(program, names, example_inputs, structures[-1], {} if aliases is None else aliases)


@contextmanager
def _quiet() -> Iterator[None]:
    """Hide PyTorch's warnings about its own code, and the graphs and tracebacks that it logs before it raises."""

    def unimportant(record: logging.LogRecord) -> bool:
        return record.levelno < logging.WARNING

    loggers = [logging.getLogger(name) for name in LOUD]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        for logger in loggers:
            logger.addFilter(unimportant)
        try:
            yield
        finally:
            for logger in loggers:
                logger.removeFilter(unimportant)


def decompositions() -> Any:
    """Return PyTorch's table of decompositions, without the operations that are kept whole."""
    table: Any = torch.export.default_decompositions()
    table.update(torch._decomp.get_decompositions(TAKEN_APART))
    for operation in KEPT:
        table.pop(operation, None)
    return table


def _classified(
    program: Any, names: Sequence[str], inputs: Sequence[Any], structure: Structure, aliases: Mapping[torch.Tensor, int]
) -> Exported:
    """Sort the placeholders into inputs, weights and states."""
    nodes = {node.name: node for node in program.graph.nodes}
    given: list[Node | None] = []
    known: dict[Node, torch.Tensor] = {}
    targets: dict[str, Node] = {}
    for spec in program.graph_signature.input_specs:
        if spec.kind is InputKind.TOKEN:
            continue  # orders checks that are not compiled
        if spec.kind is InputKind.USER_INPUT:
            given.append(nodes[spec.arg.name] if isinstance(spec.arg, TensorArgument) else None)
        elif isinstance(spec.arg, TensorArgument):
            targets[spec.target] = node = nodes[spec.arg.name]
            known[node] = _tensor_of(program, spec.target)
        else:
            raise GraphError(f"trace supports only tensors, but the function uses {spec.target}, a {spec.kind.name}")
    arguments = dict(zip(names, given, strict=True))
    outputs, written = _results(program, nodes, targets, {node.name: name for name, node in arguments.items() if node})
    tensors = known | {node: value for node, value in zip(given, inputs, strict=True) if node}
    check_aliases(aliases, len(outputs))
    updates = {_aliased(tensors, tensor, number): outputs[number] for tensor, number in aliases.items()} | written
    returned = [number for number in range(len(outputs)) if number not in aliases.values()]
    called = {target.removeprefix("func."): node for target, node in targets.items()} | arguments
    return Exported(
        graph=program.graph,
        names={node: name for name, node in called.items() if node},
        inputs={name: node for name, node in arguments.items() if node not in updates},
        weights={node: tensor for node, tensor in known.items() if node not in updates and node.users},
        states={node: tensors[node] for node in updates},
        outputs=[outputs[number] for number in returned],
        structure=_renumbered(structure, {number: place for place, number in enumerate(returned)}),
        updates=updates,
    )


def _results(
    program: Any, nodes: Mapping[str, Node], targets: Mapping[str, Node], arguments: Mapping[str, str]
) -> tuple[list[Node], dict[Node, Node]]:
    """Return the function's outputs, and the new values of its buffers by their placeholders."""
    outputs, written = [], {}
    for spec in program.graph_signature.output_specs:
        if spec.kind is OutputKind.USER_OUTPUT:
            outputs.append(nodes[spec.arg.name])
        elif spec.kind is OutputKind.BUFFER_MUTATION:
            written[targets[spec.target]] = nodes[spec.arg.name]
        elif spec.kind is not OutputKind.TOKEN:
            name = arguments.get(spec.target, spec.target.removeprefix("func."))
            raise GraphError(
                f"the function must not change its inputs and parameters, but writes to {name}: clone it first, or "
                "make it a buffer or name it in input_output_aliases"
            )
    return outputs, written


def _tensor_of(program: Any, target: str) -> torch.Tensor:
    found = program.state_dict.get(target)
    tensor = program.constants[target] if found is None else found
    assert isinstance(tensor, torch.Tensor)
    check_kind(f"the weight {target.removeprefix('func.')}", tensor)
    return tensor.detach()


def same(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Return a key that is equal for tensors that are the same view of the same memory."""
    bits = tensor.is_neg(), tensor.is_conj()
    return tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride(), bits


def _aliased(tensors: Mapping[Node, torch.Tensor], tensor: torch.Tensor, number: int) -> Node:
    """Return the placeholder of the tensor that output `number` replaces."""
    found = [node for node, known in tensors.items() if same(known) == same(tensor)]
    if not found:
        raise GraphError(
            f"input_output_aliases must name tensors that the function uses, but it does not use the tensor "
            f"{list(tensor.shape)} of output {number}"
        )
    if len(found) > 1 and all(node.name.startswith("arguments_") for node in found):
        raise GraphError(
            f"input_output_aliases must say which argument output {number} replaces, but {len(found)} arguments have "
            "that tensor as their example: give the others a clone"
        )
    return found[0]


def _renumbered(structure: Structure, places: Mapping[int, int]) -> Structure:
    """Renumber the outputs of a structure, and drop those that stay on the device."""
    if isinstance(structure, int):
        return places.get(structure)
    if structure is None or structure[0] == "constant":
        return structure

    def stays(part: Structure) -> bool:
        return not isinstance(part, int) or part in places

    kind, parts = structure
    if kind == "dict":
        return [kind, {name: _renumbered(part, places) for name, part in parts.items() if stays(part)}]
    return [kind, [_renumbered(part, places) for part in parts if stays(part)]]
