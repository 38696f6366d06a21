"""Adapters that requests choose by name, and the places on the devices where some of them are.

There may be more adapters than places: whoever was not used for the longest time makes room. Plain data; the arrays on
the devices are in `engine.adapters`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from itertools import count

import torch

from transformers_neuronx.errors import InputError
from transformers_neuronx.weights.reading import Key


@dataclass(eq=False)
class HostAdapter:
    """An adapter in the memory of the host: what it has in the rows of `AdapterLayout`, and its place on the devices.

    `number` is its own, also among those that had the same name before.
    """

    name: str
    number: int
    content: Mapping[Key, torch.Tensor]
    place: int | None = None


class Adapters:
    """The adapters of an engine by name, with `places` on the devices."""

    def __init__(self, places: int) -> None:
        self.known: dict[str, HostAdapter] = {}
        self.loads: list[HostAdapter] = []  # those that must come to the devices before the step
        self._numbers, self._places = count(1), places
        self._used: list[HostAdapter] = []  # those that have a place, the latest one last

    def want_new(self, name: str) -> None:
        """Raise InputError if adapters cannot be added, or if one has this name."""
        if not self._places:
            raise InputError("this engine was made without places for adapters: Engine(model, max_loras=…)")
        if name in self.known:
            raise InputError(f"there is an adapter {name!r} already: unload it first")

    def add(self, name: str, content: Mapping[Key, torch.Tensor]) -> None:
        """Let requests choose an adapter by this name."""
        self.want_new(name)
        self.known[name] = HostAdapter(name, next(self._numbers), content)

    def remove(self, name: str) -> None:
        """Let no more requests choose this adapter. Those that have it keep it."""
        gone = self.named(name)
        self.known.pop(name)
        if gone in self._used:  # it makes room first
            self._used.remove(gone)
            self._used.insert(0, gone)

    def named(self, name: str | None) -> HostAdapter | None:
        """Return the adapter of this name; None if it is None. Raises InputError if there is none of the name."""
        if name is not None and name not in self.known:
            names = ", ".join(sorted(self.known)) or "none"
            raise InputError(f"there is no adapter {name!r}; this engine has: {names}")
        return None if name is None else self.known[name]

    def placed(self, adapter: HostAdapter, busy: Collection[HostAdapter | None]) -> bool:
        """Whether an adapter has a place now. It gets that of another one, if it must, which is not `busy`."""
        if adapter.place is None:
            taken = {each.place for each in self._used}
            adapter.place = next((place for place in range(self._places) if place not in taken), None)
            if adapter.place is None:
                gone = next((each for each in self._used if each not in busy), None)
                if gone is None:
                    return False
                adapter.place, gone.place = gone.place, None
                self._used.remove(gone)
            self.loads.append(adapter)
        else:
            self._used.remove(adapter)
        self._used.append(adapter)
        return True

    def forget(self) -> None:
        """Forget what the devices have."""
        for adapter in self._used:
            adapter.place = None
        self._used, self.loads = [], []
