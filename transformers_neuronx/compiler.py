"""From a PyHLO function to an HloModuleProto, what tells modules apart, and `check`, the rules of Neuron for them."""

from __future__ import annotations

import hashlib

from transformers_neuronx.neuron.rules import Finding as Finding, check as check
from transformers_neuronx.pyhlo import HloModuleProto, HloScribe
from transformers_neuronx.pyhlo.scribe import Function


def compile_py_func(py_func: Function) -> HloModuleProto:
    """The module that `py_func(scribe)` describes: valid input for XLA, and what `neuron.form` starts from.

    `py_func` writes its inputs as `dtype[sizes].Parameter(parameter_number=…)` and returns its output, or several.
    """
    return HloScribe()(py_func).module_proto


def identity(module: HloModuleProto) -> str:
    """A digest of what `module` computes: of all of it but its name, and where its instructions were written."""
    bare = HloModuleProto()
    bare.CopyFrom(module)
    bare.ClearField("name")
    for computation in bare.computations:
        for instruction in computation.instructions:
            instruction.ClearField("metadata")
    return hashlib.sha256(bare.SerializeToString(deterministic=True)).hexdigest()
