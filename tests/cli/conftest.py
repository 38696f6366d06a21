"""Fixtures that run the command line as a user does: 80 columns, and the bundled checkpoint."""

import io
import os
import subprocess
import sys

import pytest
from bundled import ROOT

from transformers_neuronx import cli


@pytest.fixture
def command(tmp_path, monkeypatch, capsys):
    """`command("run", …, input=…, status=0)`: its two outputs, when run in a new directory."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("NO_COLOR", "1")

    def ran(*arguments, input="", status=0):  # noqa: A002
        monkeypatch.setattr(sys, "argv", ["transformers-neuronx", *map(str, arguments)])
        monkeypatch.setattr(sys, "stdin", io.StringIO(input))
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            cli.main()
        printed, said = capsys.readouterr()
        assert ended.value.code == status, said
        return printed, said

    return ran


@pytest.fixture
def process(tmp_path):
    """Like `command`, in a separate process, with additional environment variables."""

    def ran(*arguments, status=0, **variables):
        command = [sys.executable, "-m", "transformers_neuronx", *map(str, arguments)]
        environment = os.environ | dict(COLUMNS="80", NO_COLOR="1", PYTHONPATH=str(ROOT)) | variables
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
        assert done.returncode == status, done.stderr
        return done.stdout, done.stderr

    return ran
