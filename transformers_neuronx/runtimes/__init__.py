"""Where programs run. Which runtime there is, is decided here and nowhere else."""

from __future__ import annotations

from transformers_neuronx import env
from transformers_neuronx.errors import ConfigError
from transformers_neuronx.neuron.presence import torch_neuronx
from transformers_neuronx.runtimes.base import Runtime

RUNTIMES = ("cpu", "cuda", "neuron")


def get_runtime(name: str | None, degree: int, device: bool = True) -> Runtime:
    """The runtime called `name`, or the one NEURONX_RUNTIME names, over `degree` devices.

    By default Neuron's where it is, and otherwise the CPU's. Without a `device`, it is to compile programs only.
    """
    name = name or env.RUNTIME.get() or ("neuron" if torch_neuronx() else "cpu")
    if name not in RUNTIMES:
        raise ConfigError(f"runtime wants to be one of {', '.join(RUNTIMES)}, got {name!r}")
    if name == "neuron":
        from transformers_neuronx.runtimes.neuron import neuron_runtime

        return neuron_runtime(degree, device)
    from transformers_neuronx.runtimes.xla import xla_runtime

    return xla_runtime(name, degree)
