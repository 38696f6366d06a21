"""Fixtures that run the command line as a user does: 80 columns, and the bundled checkpoint."""

import os
import subprocess
import sys

import pytest
from bundled import ROOT


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
