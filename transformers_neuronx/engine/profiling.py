"""Measure the time of a call: in programs, in their kernels, and on the host between programs."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from transformers_neuronx.engine.decoder import Decoder
from transformers_neuronx.runtimes.base import DeviceTensor, Executable, Runtime


@dataclass
class Spent:
    calls: int = 0
    seconds: float = 0.0

    def add(self, calls: int, seconds: float) -> None:
        self.calls += calls
        self.seconds += seconds


@dataclass
class Profile:
    """Seconds of one call, of each program in it by name, and of each kernel in a program.

    The host waits for each program, so they do not overlap as they otherwise may. A program's time outside its kernels
    is spent in code that the compiler generated. `str()` of a profile is a table.
    """

    seconds: float = 0.0
    programs: dict[str, Spent] = field(default_factory=lambda: defaultdict(Spent))
    kernels: dict[str, dict[str, Spent]] = field(default_factory=lambda: defaultdict(lambda: defaultdict(Spent)))

    @property
    def host(self) -> float:
        """Seconds outside programs."""
        return self.seconds - sum(program.seconds for program in self.programs.values())

    def __str__(self) -> str:
        lines = [("", "calls", "ms", "of all")]
        for name, program in self.programs.items():
            lines.append(self._line(name, program.calls, program.seconds))
            kernels = self.kernels[name]
            lines += [self._line(f"  {kernel}", spent.calls, spent.seconds) for kernel, spent in kernels.items()]
            if kernels:
                rest = program.seconds - sum(spent.seconds for spent in kernels.values())
                lines.append(self._line("  the rest", "", rest))
        lines += [self._line("host", "", self.host), self._line("all", "", self.seconds)]
        width = max(len(line[0]) for line in lines)
        return "\n".join(f"{name:{width}}{calls:>8}{ms:>10}{share:>8}" for name, calls, ms, share in lines)

    def _line(self, name: str, calls: int | str, seconds: float) -> tuple[str, str, str, str]:
        return name, str(calls), f"{seconds * 1e3:.2f}", f"{seconds / self.seconds:.1%}"


@dataclass
class _Watched:
    """A program that is waited for and timed at each call."""

    executable: Executable
    name: str
    runtime: Runtime
    profile: Profile

    def __call__(self, *tensors: DeviceTensor) -> list[DeviceTensor]:
        before, began = self.runtime.spent(), time.perf_counter()
        results = self.executable(*tensors)
        results[0].numpy()
        self.profile.programs[self.name].add(1, time.perf_counter() - began)
        for kernel, (calls, seconds) in self.runtime.spent().items():
            calls, seconds = calls - before[kernel][0], seconds - before[kernel][1]
            if calls:  # the devices run it at the same time
                self.profile.kernels[self.name][kernel].add(calls, seconds / self.runtime.device_count)
        return results

    def __getattr__(self, name: str) -> Any:
        return getattr(self.executable, name)


def profile(decoder: Decoder, call: Callable[[], object]) -> Profile:
    """Profile `call`, which uses the decoder. It runs once before, so that nothing is compiled while it is timed."""
    call()
    taken = Profile()
    with decoder.store.watched(lambda name, executable: _Watched(executable, name, decoder.runtime, taken)):
        began = time.perf_counter()
        call()
        taken.seconds = time.perf_counter() - began
    return taken
