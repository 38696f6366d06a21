"""The inputs of a model's matrices over a text, from Transformers' own model with one layer in memory at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeAlias

import torch

from transformers_neuronx.config.multimodal import MODELS, text_half
from transformers_neuronx.errors import CheckpointError
from transformers_neuronx.support.files import AGAIN, explain
from transformers_neuronx.weights.checkpoint import Checkpoint

EXPERTS = "if experts are stacked there, matrices can only be rounded to nearest: leave the calibration out"

Call: TypeAlias = tuple[tuple[Any, ...], dict[str, Any]]  # a layer's arguments besides the hidden states


class Skeleton:
    """A model of Transformers whose weights are read from a checkpoint when they are needed.

    Names are those of the whole model; a checkpoint of the bare one lacks a prefix. `head` is the name of the output
    layer's module.
    """

    def __init__(self, checkpoint: Checkpoint) -> None:
        from transformers import AutoConfig, AutoModelForCausalLM  # takes seconds

        self.checkpoint = checkpoint
        self.calls: list[Call] = []
        with explain(f"{checkpoint.directory}: not a decoder that Transformers knows", "take another checkpoint"):
            config = AutoConfig.from_pretrained(checkpoint.directory)
            if config.model_type in MODELS:
                config = AutoConfig.for_model(**text_half(config.to_dict()))
            with _without_weights():
                kind: Any = AutoModelForCausalLM
                model = kind.from_config(config, dtype=torch.float32, attn_implementation="eager")
        self.model = model.eval()
        names = {module: name for name, module in self.model.named_modules()}
        self.head = names.get(self.model.get_output_embeddings(), "lm_head")
        self._base = names[self.model.base_model]
        count = getattr(config.get_text_config(), "num_hidden_layers", None)
        lists = [module for module in names if isinstance(module, torch.nn.ModuleList) and len(module) == count]
        if not lists:
            raise CheckpointError(f"{checkpoint.directory}: {type(self.model).__name__} has no list of {count} layers")
        self.layers, self.place = lists[0], names[lists[0]]

    def matrices(self, number: int) -> dict[str, torch.nn.Module]:
        """Return a layer's linear modules by their names. Routers stay whole: rounded, they would choose others."""
        found = self.layers[number].named_modules(prefix=f"{self.place}.{number}")
        linear = ((name, each) for name, each in found if isinstance(each, torch.nn.Linear) or is_transposed(each))
        return {name: each for name, each in linear if "router" not in name.split(".")}

    def stored(self, name: str, advice: str = AGAIN) -> str:
        """Return a tensor's name in the checkpoint. CheckpointError, with this advice, if it is not there."""
        for each in (name, name.removeprefix(f"{self._base}.")):
            if each in self.checkpoint:
                return each
        raise CheckpointError(
            f"{self.checkpoint.directory}: expected a tensor {name!r}, as {type(self.model).__name__} has; {advice}"
        )

    def begin(self, windows: Iterable[Sequence[int]]) -> list[torch.Tensor]:
        """Return the inputs of the first layer for windows of equal length, f32[1, n, h] each.

        Also note how each layer is called: with masks and positions, which are the same for all windows.
        """
        base = self.model.base_model
        outside = [name for name in _names(base, self._base) if not name.startswith(f"{self.place}.")]
        self._fill([*outside, *_names(self.layers[0], f"{self.place}.0")])
        inputs: list[torch.Tensor] = []
        calls: dict[int, Call] = {}
        with torch.inference_mode(), _recorded(self.layers, inputs, calls):
            for window in windows:
                base(input_ids=torch.tensor([list(window)]), use_cache=False)
        self._empty(outside)
        self.calls = [calls[number] for number in range(len(self.layers))]
        return inputs

    @contextmanager
    def layer(self, number: int) -> Iterator[dict[str, torch.nn.Module]]:
        """Hold the weights of a layer in f32, and yield its linear modules by their names."""
        names = _names(self.layers[number], f"{self.place}.{number}")
        self._fill(names)
        yield self.matrices(number)
        self._empty(names)

    def hessians(self, number: int, inputs: Iterable[torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return for each linear module of a layer the sum of x xᵀ over its inputs x, f32[in, in].

        Modules with the same inputs share a tensor. Those without any, as experts that no token chose, have none.
        """
        sums: dict[str, torch.Tensor] = {}
        last: list[tuple[torch.Tensor, str]] = []  # the input that came last, and the module that took it

        def hook(name: str) -> Callable[..., None]:
            def add(_: torch.nn.Module, arguments: tuple[torch.Tensor, ...]) -> None:
                x = arguments[0]
                if last and last[0][0] is x:
                    sums[name] = sums[last[0][1]]
                    return
                last[:] = [(x, name)]
                rows = x.flatten(0, -2)
                if name not in sums:
                    sums[name] = torch.zeros(rows.shape[1], rows.shape[1])
                sums[name].addmm_(rows.T, rows)

            return add

        hooks = [module.register_forward_pre_hook(hook(name)) for name, module in self.matrices(number).items()]
        for x in inputs:
            self.apply(number, x)
        for each in hooks:
            each.remove()
        return sums

    @torch.inference_mode()
    def apply(self, number: int, x: torch.Tensor) -> torch.Tensor:
        """Return a layer's output for a window. f32[1, n, h] -> f32[1, n, h]"""
        more, named = self.calls[number]
        output = self.layers[number](x, *more, **named)
        found: torch.Tensor = output[0] if isinstance(output, tuple) else output
        return found

    def _fill(self, names: Iterable[str]) -> None:
        for name in names:
            self._put(name, self.checkpoint.read(self.stored(name, EXPERTS)).float())

    def _empty(self, names: Iterable[str]) -> None:
        for name in names:
            place, _, own = name.rpartition(".")
            self._put(name, getattr(self.model.get_submodule(place), own).to("meta"))

    def _put(self, name: str, tensor: torch.Tensor) -> None:
        place, _, own = name.rpartition(".")
        owner = self.model.get_submodule(place)
        if own in owner._parameters:
            owner._parameters[own] = torch.nn.Parameter(tensor, requires_grad=False)
        else:
            owner._buffers[own] = tensor


def is_transposed(module: torch.nn.Module) -> bool:
    """Whether a linear module's weight is [in, out], as in GPT-2."""
    return type(module).__name__ == "Conv1D"


def _names(module: torch.nn.Module, prefix: str) -> list[str]:
    """The names of a module's tensors that checkpoints have."""
    return [f"{prefix}.{name}" if prefix else name for name in module.state_dict()]


@contextmanager
def _without_weights() -> Iterator[None]:
    """Make modules whose parameters have no data. Buffers have theirs: not all of them are in checkpoints."""
    module_class: Any = torch.nn.Module
    register = module_class.register_parameter

    def on_meta(module: torch.nn.Module, name: str, parameter: torch.nn.Parameter | None) -> None:
        if parameter is not None:
            parameter = torch.nn.Parameter(parameter.to("meta"), requires_grad=False)
        register(module, name, parameter)

    module_class.register_parameter = on_meta
    try:
        yield
    finally:
        module_class.register_parameter = register


@contextmanager
def _recorded(layers: Iterable[torch.nn.Module], inputs: list[torch.Tensor], calls: dict[int, Call]) -> Iterator[None]:
    """Let layers return their inputs, and note those of the first layer, and how each one is called."""
    as_tuples: list[bool] = []  # whether layers of this family return tuples

    def recorder(number: int, forward: Callable[..., Any]) -> Callable[..., Any]:
        def record(*given: Any, **named: Any) -> Any:
            if number == 0 and not as_tuples:
                as_tuples.append(isinstance(forward(*given, **named), tuple))
            x = given[0] if given else named.pop("hidden_states")
            if number == 0:
                inputs.append(x)
            calls.setdefault(number, (given[1:], named))
            return (x,) if as_tuples[0] else x

        return record

    for number, layer in enumerate(layers):
        layer.forward = recorder(number, layer.forward)
    try:
        yield
    finally:
        for layer in layers:
            del layer.forward
