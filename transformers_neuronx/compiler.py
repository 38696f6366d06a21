"""From a PyHLO function to an HloModuleProto. It does not know what will run the module."""

from __future__ import annotations

from transformers_neuronx.pyhlo import HloModuleProto, HloScribe
from transformers_neuronx.pyhlo.scribe import Function


def compile_py_func(py_func: Function) -> HloModuleProto:
    """The module that `py_func(scribe)` describes: valid input for XLA and for `neuronx-cc`.

    `py_func` writes its inputs as `dtype[sizes].Parameter(parameter_number=…)` and returns its output, or several.
    """
    return HloScribe()(py_func).module_proto
