"""From a PyTorch function to a graph of core ATen operations, through `torch.export`.

What the function is given becomes its inputs, and every tensor that it knows besides, parameters, buffers and
constants, a weight. It may write to its buffers; what it was asked to alias, and what it writes to, are states.
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

# What stays as it is, because HLO or a kernel has better than what PyTorch would make of it.
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
    aten.index_add.default,  # it and its like would become operations with other ideas of negative indices
    aten.index_copy.default,
    aten.index_fill.int_Scalar,
    aten.index_fill.int_Tensor,
]

# And what PyTorch takes apart only if it is asked to.
TAKEN_APART = [
    aten.bucketize.Tensor,
    aten.grid_sampler_2d.default,
    aten.linalg_vector_norm.default,
    aten.upsample_bicubic2d.default,
    aten.upsample_bilinear2d.default,
    aten.upsample_bilinear2d.vec,
    aten.upsample_nearest2d.vec,
]

# What a function returns, as JSON has it: None, the number of an output, ["constant", a value that is no tensor],
# ["list", [structures]], ["tuple", [structures]] or ["dict", {name: structure}].
Structure = Any


@dataclass(frozen=True)
class Exported:
    """A function as a graph.

    `inputs` has, for each argument by its name, the placeholder of the graph, or None for one that is no tensor;
    `weights` and `states` have the tensors that other placeholders stand for, and `names` what the function calls
    all of them. `outputs` are the nodes that come out, and `structure` says how; `updates` has, for each state, the
    node with its new value.
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
    """A function that returns a flat list of tensors, and says besides how they belong together, and what it raised."""

    def __init__(self, func: Callable[..., Any], structures: list[Structure], raised: list[Exception]) -> None:
        super().__init__()
        self.func = func
        self._told = [(structures, raised)]  # in a list of its own: what is set on a module is watched

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
            raise GraphError(f"a dictionary that is returned must have strings as its keys, got {others[0]!r}")
        return ["dict", {name: _flattened(value, tensors) for name, value in result.items()}]
    if isinstance(result, list | tuple):
        return ["list" if isinstance(result, list) else "tuple", [_flattened(value, tensors) for value in result]]
    kind = type(result).__name__
    cache = ". A Hugging Face model returns a cache unless it is given use_cache=False" if "Cache" in kind else ""
    raise GraphError(
        f"trace wants tensors to be returned, or dicts, lists, tuples and dataclasses of them; got {kind}{cache}"
    )


def export(
    func: Callable[..., Any], example_inputs: Sequence[Any], aliases: Mapping[torch.Tensor, int] | None = None
) -> Exported:
    """`func` as it runs on the example inputs. `aliases` has, for tensors that it knows, the output that replaces each.

    Outputs are counted as they stand one after the other in all that is returned.
    """
    function = function_of(func)
    names = argument_names(func, example_inputs)
    check_inputs(names, example_inputs)
    structures: list[Structure] = []
    raised: list[Exception] = []
    # Each an object of its own: PyTorch takes arguments for one that have the same object as their examples.
    given = tuple(each if each is None else resolved(each).detach() for each in example_inputs)
    try:
        with torch.no_grad(), _quiet():
            program = torch.export.export(_Flat(function, structures, raised), given, strict=False)
            join_attention(program.graph)
            program = program.run_decompositions(decompositions())
            narrow_masks(program.graph)
            join_activations(program.graph)
    except TransformersNeuronxError as error:
        raise error.with_traceback(None) from None  # which has gone through much of PyTorch
    except Exception as error:
        if any(error is each for each in raised):
            raise
        _LOG.debug("torch.export has raised", exc_info=error)
        raise GraphError(f"PyTorch cannot export the function: {summary(error)}") from None
    return _classified(program, names, example_inputs, structures[-1], {} if aliases is None else aliases)


@contextmanager
def _quiet() -> Iterator[None]:
    """PyTorch warns about its own code, and logs graphs and tracebacks besides the errors that it raises."""

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
    """How PyTorch takes operations apart: its own table, but for what is kept."""
    table: Any = torch.export.default_decompositions()
    table.update(torch._decomp.get_decompositions(TAKEN_APART))
    for operation in KEPT:
        table.pop(operation, None)
    return table


def _classified(
    program: Any, names: Sequence[str], inputs: Sequence[Any], structure: Structure, aliases: Mapping[torch.Tensor, int]
) -> Exported:
    """Tell inputs, weights and states apart."""
    nodes = {node.name: node for node in program.graph.nodes}
    given: list[Node | None] = []
    known: dict[Node, torch.Tensor] = {}
    targets: dict[str, Node] = {}
    for spec in program.graph_signature.input_specs:
        if spec.kind is InputKind.TOKEN:
            continue  # an order of checks that come to nothing here
        if spec.kind is InputKind.USER_INPUT:
            given.append(nodes[spec.arg.name] if isinstance(spec.arg, TensorArgument) else None)
        elif isinstance(spec.arg, TensorArgument):
            targets[spec.target] = node = nodes[spec.arg.name]
            known[node] = _tensor_of(program, spec.target)
        else:
            raise GraphError(f"trace knows tensors only, but the function uses {spec.target}, a {spec.kind.name}")
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
    """What the function returns, and, by their placeholders, what it writes to its buffers."""
    outputs, written = [], {}
    for spec in program.graph_signature.output_specs:
        if spec.kind is OutputKind.USER_OUTPUT:
            outputs.append(nodes[spec.arg.name])
        elif spec.kind is OutputKind.BUFFER_MUTATION:
            written[targets[spec.target]] = nodes[spec.arg.name]
        elif spec.kind is not OutputKind.TOKEN:
            name = arguments.get(spec.target, spec.target.removeprefix("func."))
            raise GraphError(
                f"the function must leave its inputs and parameters alone, but writes to {name}: clone it first, or "
                "make it a state, which a buffer is, and what input_output_aliases names"
            )
    return outputs, written


def _tensor_of(program: Any, target: str) -> torch.Tensor:
    found = program.state_dict.get(target)
    tensor = program.constants[target] if found is None else found
    assert isinstance(tensor, torch.Tensor)
    check_kind(f"the weight {target.removeprefix('func.')}", tensor)
    return tensor.detach()


def same(tensor: torch.Tensor) -> tuple[Any, ...]:
    """What is alike in tensors that are one."""
    bits = tensor.is_neg(), tensor.is_conj()
    return tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride(), bits


def _aliased(tensors: Mapping[Node, torch.Tensor], tensor: torch.Tensor, number: int) -> Node:
    """The placeholder that stands for a tensor which output `number` is to replace."""
    found = [node for node, known in tensors.items() if same(known) == same(tensor)]
    if not found:
        raise GraphError(
            f"input_output_aliases wants tensors that the function uses, but it does not use the one "
            f"{list(tensor.shape)} of output {number}"
        )
    if len(found) > 1 and all(node.name.startswith("arguments_") for node in found):
        raise GraphError(
            f"input_output_aliases must say which argument output {number} replaces, but {len(found)} arguments have "
            "that tensor as their example: clone it for the others"
        )
    return found[0]


def _renumbered(structure: Structure, places: Mapping[int, int]) -> Structure:
    """The structure without outputs that have no place: they stay on the device."""
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
