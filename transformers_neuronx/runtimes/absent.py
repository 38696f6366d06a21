"""A runtime that is not here: programs can be written for it, and nothing else."""

from __future__ import annotations

from typing import Any


class _Absent:
    """What a decoder asks of its runtime before there is anything to run."""

    def __init__(self, degree: int, panels: bool, loops: bool) -> None:
        self.device_count = degree
        self.panels = panels
        self.loops = loops

    def attends_in_place(self, cached: str, head_dim: int) -> bool:
        return self.panels

    def let_go(self) -> None:
        pass


def absent_runtime(degree: int, panels: bool = False, loops: bool = True) -> Any:
    """Stands for a runtime of so many devices. With `panels`, it is taken to have kernels, as the CPU's does; without
    `loops` it has none, as Neuron's does.
    """
    return _Absent(degree, panels, loops)
