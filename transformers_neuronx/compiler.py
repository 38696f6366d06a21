"""Compile PyHLO functions to HloModuleProto, identify modules, and `check` them by Neuron's rules."""

from __future__ import annotations

import hashlib

from transformers_neuronx.neuron.rules import Finding as Finding, check as check
from transformers_neuronx.pyhlo import HloModuleProto, HloScribe
from transformers_neuronx.pyhlo.scribe import Function


def compile_py_func(py_func: Function) -> HloModuleProto:
    """Return the module that `py_func(scribe)` writes: valid input for XLA, and the input of `neuron.form`.

    `py_func` writes its inputs as `dtype[sizes].Parameter(parameter_number=…)` and returns one output or several.
    """
    return HloScribe()(py_func).module_proto


def identity(module: HloModuleProto) -> str:
    """Return a digest of what `module` computes, ignoring its name and the source lines of its instructions."""
    bare = HloModuleProto()
    bare.CopyFrom(module)
    bare.ClearField("name")
    for computation in bare.computations:
        for instruction in computation.instructions:
            instruction.ClearField("metadata")
    return hashlib.sha256(bare.SerializeToString(deterministic=True)).hexdigest()
