"""The states of a traced function as the host has them: a copy that is brought up to date when it is looked at.

What is newest stands on the device after each call. PyTorch's functions and methods tell a tensor of a class of its own
when they are called with it, so a `State` fetches what the device has before they see it. TorchScript does not tell:
what it saves and copies goes through the module's `__getstate__`, which asks for `current`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import torch

from transformers_neuronx.trace.given import resolved

# Nothing of what such a function leaves in its first argument was there before.
OVERWRITING = {torch.Tensor.copy_, torch.Tensor.fill_, torch.Tensor.zero_}
# `data` would count its writes for itself.
DATA, INSTEAD = torch.Tensor.data.__get__, torch.Tensor.detach  # type: ignore[attr-defined]

plain = torch._C.DisableTorchFunctionSubclass  # a context in which a state is a tensor as any


class Holder(Protocol):
    """Who has the states on the device."""

    def read(self, state: State) -> None: ...


class State(torch.Tensor):
    """A parameter of a traced module, and how it compares with its counterpart on the device.

    `behind` says that the device has what is newer, and `brought` which version of this tensor was brought there last.
    """

    _is_param = True  # by which PyTorch tells parameters
    holder: Holder | None = None
    number = 0
    behind = False
    brought: int | None = None

    @classmethod
    def of(cls, tensor: torch.Tensor) -> State:
        """A state with the elements of a tensor. Tensors of inference mode have no versions; states have."""
        with torch.inference_mode(False), torch.no_grad(), plain():
            return resolved(tensor.detach()).clone().as_subclass(cls)

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Call a function of PyTorch's with states as they are on the device."""
        overwrites = func in OVERWRITING
        for state in _states_in([args[1:] if overwrites else args, kwargs or {}]):
            state.read()
        with plain():
            result = (INSTEAD if func == DATA else func)(*args, **(kwargs or {}))
        if overwrites and isinstance(args[0], State):
            args[0].behind = False
        return result

    def read(self) -> None:
        """Fetch what the device has, where that is newer."""
        if self.behind and self.holder is not None:
            self.holder.read(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        return torch.nn.Parameter(self.detach().clone(), requires_grad=False)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return torch.nn.Parameter(self.detach(), requires_grad=False).__reduce_ex__(protocol)  # type: ignore[no-untyped-call]


def _states_in(value: Any) -> Iterator[State]:
    if isinstance(value, State):
        yield value
    elif isinstance(value, list | tuple | dict):
        for each in value.values() if isinstance(value, dict) else value:
            yield from _states_in(each)


def current(states: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Copies of states as they are on the device."""
    for state in _states_in(list(states)):
        state.read()
    with plain(), torch.no_grad():
        return [state.as_subclass(torch.Tensor).clone() for state in states]


def states_of(module: torch.nn.Module) -> list[State]:
    """Of a traced module, in their order. The kernel that finds its bucket may have parameters as well."""
    return [each for each in module.parameters() if isinstance(each, State)]
