"""Host copies of a traced function's states, refreshed when they are read.

After each call the newest values are on the device. PyTorch passes each call on a tensor subclass to
`__torch_function__`, where a `State` first fetches the device's values. TorchScript does not do that.
It saves and copies a module through `__getstate__`, which calls `current`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import torch

from transformers_neuronx.trace.given import resolved

# These functions overwrite all of their first argument, so its old values need no fetch.
OVERWRITING = {torch.Tensor.copy_, torch.Tensor.fill_, torch.Tensor.zero_}
# A tensor from `data` has its own version counter; one from `detach` shares the state's.
DATA, INSTEAD = torch.Tensor.data.__get__, torch.Tensor.detach  # type: ignore[attr-defined]

plain = torch._C.DisableTorchFunctionSubclass  # a context that treats a state as a plain tensor


class Holder(Protocol):
    """The owner of the states on the device."""

    def read(self, state: State) -> None: ...


class State(torch.Tensor):
    """A parameter of a traced module, which tracks whether its device copy differs.

    `behind` is true if the device copy is newer. `brought` is the version of this tensor last copied to the device.
    """

    _is_param = True  # PyTorch recognizes parameters by this
    holder: Holder | None = None
    number = 0
    behind = False
    brought: int | None = None

    @classmethod
    def of(cls, tensor: torch.Tensor) -> State:
        """Return a state with a tensor's elements. A state has versions, unlike tensors made in inference mode."""
        with torch.inference_mode(False), torch.no_grad(), plain():
            return resolved(tensor.detach()).clone().as_subclass(cls)

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Fetch the states' newest values from the device, then call a PyTorch function."""
        overwrites = func in OVERWRITING
        for state in _states_in([args[1:] if overwrites else args, kwargs or {}]):
            state.read()
        with plain():
            result = (INSTEAD if func == DATA else func)(*args, **(kwargs or {}))
        if overwrites and isinstance(args[0], State):
            args[0].behind = False
        return result

    def read(self) -> None:
        """Fetch the device's values if they are newer."""
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
    """Return copies of states with their newest values."""
    for state in _states_in(list(states)):
        state.read()
    with plain(), torch.no_grad():
        return [state.as_subclass(torch.Tensor).clone() for state in states]


def states_of(module: torch.nn.Module) -> list[State]:
    """Return a traced module's states in order, without the parameters that its bucket kernel may have."""
    return [each for each in module.parameters() if isinstance(each, State)]
