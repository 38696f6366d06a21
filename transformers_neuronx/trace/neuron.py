"""The original's own `trace`, where there is a Neuron device for it."""

from __future__ import annotations

from typing import Any

from transformers_neuronx import env
from transformers_neuronx.neuron import presence


def torch_neuronx() -> Any:
    """`torch_neuronx`, if it is installed and there is a device, and no other runtime was asked for; else None."""
    return None if env.RUNTIME.given else presence.torch_neuronx()
