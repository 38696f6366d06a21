"""Programs as users of the original wrote them, in tests/clients, run as they stand."""

import runpy
import sys
import warnings
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.compiled_ahead

CLIENTS = Path(__file__).parents[1] / "clients"


NAMES = sorted(path.stem for path in CLIENTS.glob("[!_]*.py"))
# The programs that came first, and two more. The others, of up to a minute, run with the slow tests.
EACH_TIME = set(
    """djl_memory djl_rolling optimum_early rayserve samples_speculative sdk_guide torchserve_stream vllm
    vllm_blocks module_habits triton_backend""".split()
)


@pytest.mark.parametrize(
    "name", [name if name in EACH_TIME else pytest.param(name, marks=pytest.mark.slow) for name in NAMES]
)
@pytest.mark.few(4)
def test_it_runs(name, monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(sys, "argv", [f"{name}.py"])
    monkeypatch.syspath_prepend(str(CLIENTS))
    monkeypatch.chdir(tmp_path)
    threads = torch.get_num_threads()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("default")
            runpy.run_path(str(CLIENTS / f"{name}.py"), run_name="__main__")
    finally:
        torch.set_num_threads(threads)
        sys.modules.pop("_reference", None)
    assert capsys.readouterr().out.splitlines()[-1] == "ok"
