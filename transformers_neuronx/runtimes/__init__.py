"""Runtimes: where programs run. The choice of a runtime is made only here."""

from __future__ import annotations

from transformers_neuronx import env
from transformers_neuronx.config.workers import Workers
from transformers_neuronx.errors import ConfigError
from transformers_neuronx.neuron.presence import torch_neuronx
from transformers_neuronx.runtimes.base import Runtime

RUNTIMES = ("cpu", "cuda", "neuron")


def get_runtime(name: str | None, degree: int, device: bool = True, workers: Workers | None = None) -> Runtime:
    """Return the runtime `name`, or the one that NEURONX_RUNTIME names, over `degree` devices.

    The default is Neuron's if it is present, otherwise the CPU's. Without a `device`, it only compiles programs. With
    `workers`, these processes have the devices.
    """
    name = name or env.RUNTIME.get() or ("neuron" if torch_neuronx() else "cpu")
    if name not in RUNTIMES:
        raise ConfigError(f"runtime must be one of {', '.join(RUNTIMES)}, got {name!r}")
    if workers is not None:
        if name == "neuron":
            raise ConfigError("workers need the runtime cpu or cuda, got neuron")
        from transformers_neuronx.runtimes.remote import remote_runtime

        return remote_runtime(workers, name, degree)
    if name == "neuron":
        from transformers_neuronx.runtimes.neuron import neuron_runtime

        return neuron_runtime(degree, device)
    from transformers_neuronx.runtimes.xla import xla_runtime

    return xla_runtime(name, degree)
