"""Check whether Neuron is present, before anything of it is imported."""

from __future__ import annotations

import glob
import importlib
import importlib.util
from typing import Any


def torch_neuronx() -> Any:
    """Return `torch_neuronx` if it is installed and there is a device, else None. PyPI's package is empty."""
    if not glob.glob("/dev/neuron*") or importlib.util.find_spec("torch_neuronx") is None:
        return None
    module = importlib.import_module("torch_neuronx")
    return module if hasattr(module, "trace") else None
