"""Find `torch_neuronx`, whose own `trace` is used on Neuron devices."""

from __future__ import annotations

from typing import Any

from transformers_neuronx import env
from transformers_neuronx.neuron import presence


def torch_neuronx() -> Any:
    """Return `torch_neuronx` if it is installed, has a device, and `NEURONX_RUNTIME` is not set; otherwise None."""
    return None if env.RUNTIME.given else presence.torch_neuronx()
