"""Stand-ins for software that only a Neuron machine has."""

import sys
import tempfile

import pytest
import standin_device
import torch
from standin_cc import VARIABLES, StandIn, install

from transformers_neuronx.neuron import compiling
from transformers_neuronx.runtimes import neuron


@pytest.fixture
def neuronx_cc(tmp_path, monkeypatch):
    """Put the stand-in for the compiler on PATH, without libneuronxla and without options for either."""
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    program = install(tmp_path / "bin")
    standin = StandIn(program, tmp_path / "runs.log", tmp_path / "temporary")
    standin.temporary.mkdir()
    monkeypatch.setenv("PATH", str(program.parent), prepend=":")
    monkeypatch.setenv("TMPDIR", str(standin.temporary))
    monkeypatch.setattr(tempfile, "tempdir", str(standin.temporary))
    monkeypatch.setenv("STANDIN_NEURONX_CC_LOG", str(standin.log))
    monkeypatch.delenv("STANDIN_NEURONX_CC", raising=False)
    monkeypatch.setattr(compiling, "PRODUCT_NAME", tmp_path / "product_name")
    monkeypatch.setattr(compiling, "has_libneuronxla", lambda: False)
    return standin


@pytest.fixture
def neuron_device(monkeypatch):
    """Install the stand-in for `torch_neuronx` and its devices."""
    monkeypatch.setitem(sys.modules, "torch_neuronx", standin_device.PACKAGE)
    monkeypatch.setattr(torch.classes, "neuron", standin_device.CLASSES, raising=False)
    monkeypatch.setattr(torch.ops, "neuron", standin_device.OPERATIONS, raising=False)
    standin_device.loads.clear()
    neuron._library.cache_clear()
    yield
    neuron._library.cache_clear()
