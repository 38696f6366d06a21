"""Stand-ins for what only a Neuron machine has."""

import tempfile

import pytest
from standin_cc import VARIABLES, StandIn, install

from transformers_neuronx.neuron import compiling


@pytest.fixture
def neuronx_cc(tmp_path, monkeypatch):
    """The stand-in for the compiler on PATH, no libneuronxla, and an environment without options for either."""
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
