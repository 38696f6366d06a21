"""A runtime that is not present: programs can be written for it, but not compiled or run."""

from __future__ import annotations

from typing import Any


class _Absent:
    """The properties of a runtime that a decoder uses before it runs anything."""

    scatters = False

    def __init__(self, degree: int, panels: bool, loops: bool) -> None:
        self.device_count, self.here = degree, range(degree)
        self.panels = panels
        self.loops = self.pages = loops

    def attends_in_place(self, cached: str, head_dim: int) -> bool:
        return self.panels

    def let_go(self) -> None:
        pass


def absent_runtime(degree: int, panels: bool = False, loops: bool = True) -> Any:
    """Return a placeholder for a runtime of `degree` devices.

    With `panels` it counts as having kernels, like the CPU's. Without `loops` it has no loops, like Neuron's.
    """
    return _Absent(degree, panels, loops)
