"""Programs as users of the original wrote them, in tests/clients, run as they stand."""

import os
import runpy
import sys
import warnings
from pathlib import Path

import pytest
import torch

CLIENTS = Path(__file__).parents[1] / "clients"


@pytest.mark.parametrize("name", sorted(path.stem for path in CLIENTS.glob("[!_]*.py")))
def test_it_runs(name, monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(sys, "argv", [f"{name}.py"])
    monkeypatch.syspath_prepend(str(CLIENTS))
    monkeypatch.chdir(tmp_path)
    before, threads = dict(os.environ), torch.get_num_threads()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("default")
            runpy.run_path(str(CLIENTS / f"{name}.py"), run_name="__main__")
    finally:
        os.environ.clear()
        os.environ.update(before)
        torch.set_num_threads(threads)
        sys.modules.pop("_reference", None)
    assert capsys.readouterr().out.splitlines()[-1] == "ok"
