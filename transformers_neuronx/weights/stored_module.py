"""What makes a compiled model a `torch.nn.Module`: hooks, and weights under the checkpoint's names.

The weights that programs use are on the devices. What `parameters()` and `state_dict()` give are those of the
checkpoint, mapped from its files when they are read, so that counting them or asking for a type costs nothing.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Self

import torch

from transformers_neuronx.errors import InputError

Readers = Mapping[str, Callable[[str], torch.Tensor]]


class StoredParameters(Mapping[str, torch.nn.Parameter]):
    """The `_parameters` of a module whose weights are files: each access reads one."""

    def __init__(self, model: PretrainedModel) -> None:
        self._model = weakref.ref(model)  # a cycle would hold the devices' memory until Python's collector runs

    @property
    def _readers(self) -> Readers:
        model = self._model()
        return model.stored if model else {}

    def __getitem__(self, name: str) -> torch.nn.Parameter:
        return torch.nn.Parameter(self._readers[name](name), requires_grad=False)

    def __contains__(self, name: object) -> bool:
        return name in self._readers

    def __iter__(self) -> Iterator[str]:
        return iter(self._readers)

    def __len__(self) -> int:
        return len(self._readers)


class PretrainedModel(torch.nn.Module):
    """A model that `from_pretrained` makes. `eval()`, `train()` and moves to devices or types have no effect."""

    def __init__(self) -> None:
        super().__init__()
        self._parameters = StoredParameters(self)  # type: ignore[assignment]

    @property
    def stored(self) -> Readers:
        """The stored weights: for each name, a function that reads it."""
        return {}

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> Self:
        return self

    def register_parameter(self, name: str, param: torch.nn.Parameter | None) -> None:
        """Raise InputError: a compiled model has the parameters of its checkpoint."""
        raise InputError(f"{type(self).__name__} has the parameters of its checkpoint, got another: {name}")

    @property
    def hooked(self) -> bool:
        """Whether hooks of calls are registered."""
        return bool(self._forward_hooks or self._forward_pre_hooks)

    def with_hooks(self, call: Callable[..., Any], *args: Any) -> Any:
        """Call a function in place of `forward`, with the hooks that a call of the model has."""
        for key, before in self._forward_pre_hooks.items():
            before(self, args, {}) if key in self._forward_pre_hooks_with_kwargs else before(self, args)
        result = call(*args)
        for key, after in self._forward_hooks.items():
            named: Any = ({},) if key in self._forward_hooks_with_kwargs else ()
            changed = after(self, args, *named, result)
            result = result if changed is None else changed
        return result


class StoredModule(torch.nn.Module):
    """A part of a model as its checkpoint names it: `stored.model.embed_tokens.weight`. Calls are those of a linear
    or an embedding. What the checkpoint does not have is found in the model.
    """

    def __init__(self, model: PretrainedModel, prefix: str = "") -> None:
        super().__init__()
        self.__dict__.update(_model=model, _prefix=prefix)

    def __getattr__(self, name: str) -> Any:
        path, stored = self.__dict__["_prefix"] + name, self.__dict__["_model"].stored
        if path in stored:
            return torch.nn.Parameter(stored[path](path), requires_grad=False)
        if any(each.startswith(f"{path}.") for each in stored):
            return StoredModule(self.__dict__["_model"], f"{path}.")
        if self.__dict__["_prefix"]:
            raise AttributeError(f"the checkpoint has no {path!r}")
        return getattr(self.__dict__["_model"], name)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Look up rows of the weight for integers; multiply other numbers by it, and add the bias, if there is one."""
        weight: torch.Tensor = self.weight
        if not x.is_floating_point():
            return torch.nn.functional.embedding(x, weight)
        return torch.nn.functional.linear(x, weight, getattr(self, "bias", None))
