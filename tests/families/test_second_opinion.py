"""Every family once more, without kernels, and as XLA compiles it without its optimizations.

The other tests compare the optimized programs with Transformers. These are as near to it, so no kernel and no pass of
XLA's makes up for what another does wrong; and where one of both fails, it says which.
"""

import numpy as np
import pytest
import test_t5
import test_whisper
from parity import DECODERS, ONE_FILE
from test_every_family import tiny
from test_t5 import saved as checkpoint_of_t5  # noqa: F401
from test_whisper import saved as checkpoint_of_whisper  # noqa: F401

from transformers_neuronx.huggingface.auto import family_of
from transformers_neuronx.runtimes import get_runtime, kernels, xla

pytestmark = pytest.mark.slow

PASSES = "cse_barrier_expander,algsimp,cse,dot-merger,fusion,cpu-instruction-fusion,reshape-mover,while-loop-simplifier"
UNOPTIMIZED = [
    ("xla_disable_hlo_passes", PASSES),
    ("xla_backend_optimization_level", 0),
    ("xla_llvm_disable_expensive_passes", True),
    ("xla_cpu_experimental_ynn_fusion_type", ""),
    ("xla_cpu_use_fusion_emitters", False),
]


@pytest.fixture(autouse=True)
def unoptimized(monkeypatch):
    monkeypatch.setattr(xla, "CPU_OPTIONS", UNOPTIMIZED)
    monkeypatch.setattr(kernels, "level", lambda: "off")


def test_there_is_less_in_a_program_then(write, monkeypatch):
    module = write(lambda x: x * 2 + x * 2 - x, np.ones(2, np.float32))
    plain = get_runtime("cpu", 1).compile(module).text()
    monkeypatch.undo()
    assert "fusion" in get_runtime("cpu", 1).compile(module).text() and "fusion" not in plain


@pytest.mark.parametrize("family", [*DECODERS, *ONE_FILE])
def test_decoders(family, parity):
    parity(family_of(family), tiny(family))


def test_with_the_encoder_of_text(checkpoint_of_t5):  # noqa: F811
    reference, directory = checkpoint_of_t5()
    test_t5.check(test_t5.made(directory), reference)


def test_with_the_encoder_of_sound(checkpoint_of_whisper):  # noqa: F811
    reference, directory = checkpoint_of_whisper()
    test_whisper.check(test_whisper.made(directory), reference)
