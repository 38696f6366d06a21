"""Where programs run. Which runtime there is, is decided here and nowhere else."""

from __future__ import annotations

from transformers_neuronx import env
from transformers_neuronx.errors import ConfigError
from transformers_neuronx.runtimes.base import Runtime

RUNTIMES = ("cpu", "cuda")


def get_runtime(name: str | None, degree: int) -> Runtime:
    """The runtime called `name`, or the one NEURONX_RUNTIME names, over `degree` devices."""
    name = name or env.RUNTIME.get()
    if name not in RUNTIMES:
        raise ConfigError(f"runtime wants to be one of {', '.join(RUNTIMES)}, got {name!r}")
    from transformers_neuronx.runtimes.xla import xla_runtime

    return xla_runtime(name, degree)
