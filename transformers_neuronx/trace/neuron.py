"""The original's own `trace`, where there is a Neuron device for it."""

from __future__ import annotations

import glob
import importlib
import importlib.util
from typing import Any

from transformers_neuronx import env


def torch_neuronx() -> Any:
    """`torch_neuronx`, if it is installed and there is a device, and no other runtime was asked for; else None.

    The packages of that name on PyPI are empty.
    """
    if env.RUNTIME.given or not glob.glob("/dev/neuron*") or importlib.util.find_spec("torch_neuronx") is None:
        return None
    module = importlib.import_module("torch_neuronx")
    return module if hasattr(module, "trace") else None
