"""The tutorials of `examples`, run as their readers would run them."""

import os
import re
import subprocess
import sys
from pathlib import Path

EXAMPLES = Path(__file__).parents[1] / "examples"


def blocks(tutorial, language):
    """What stands in the blocks of a language, in order."""
    return re.findall(rf"^```{language}\n(.*?)^```", (EXAMPLES / tutorial).read_text(), re.S | re.M)


def run(tutorial, directory):
    """What the tutorial prints as one program in a directory where `examples` is, too."""
    program = directory / "program.py"
    program.write_text("\n".join(blocks(tutorial, "python")))
    if not (directory / EXAMPLES.name).exists():
        (directory / EXAMPLES.name).symlink_to(EXAMPLES)
    environment = os.environ | dict(PYTHONPATH=str(EXAMPLES.parent), HF_HUB_OFFLINE="1", OMP_NUM_THREADS="1")
    ran = subprocess.run(
        [sys.executable, program.name], cwd=directory, env=environment, capture_output=True, text=True, timeout=600
    )
    assert ran.returncode == 0, ran.stderr
    return ran.stdout
