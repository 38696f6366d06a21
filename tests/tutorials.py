"""The tutorials of `examples`, run as their readers would run them."""

import os
import subprocess
import sys
from pathlib import Path

import documents

EXAMPLES = Path(__file__).parents[1] / "examples"


def blocks(tutorial, language):
    """What stands in the blocks of a language, in order."""
    return [block.text for block in documents.blocks(EXAMPLES / tutorial) if block.language == language]


def run(tutorial, directory):
    """What the tutorial prints as one program in a directory where `examples` is, too, and where it leaves nothing."""
    program = directory / "program.py"
    program.write_text("\n".join(blocks(tutorial, "python")))
    if not (directory / EXAMPLES.name).exists():
        (directory / EXAMPLES.name).symlink_to(EXAMPLES)
    temporary = directory / "temporary"
    temporary.mkdir(exist_ok=True)
    environment = os.environ | dict(
        PYTHONPATH=str(EXAMPLES.parent), HF_HUB_OFFLINE="1", OMP_NUM_THREADS="1", TMPDIR=str(temporary)
    )
    before = listing(directory)
    ran = subprocess.run(
        [sys.executable, program.name], cwd=directory, env=environment, capture_output=True, text=True, timeout=600
    )
    assert ran.returncode == 0, ran.stderr
    left = listing(directory) ^ before
    assert not left, f"{tutorial} leaves {', '.join(map(str, sorted(left)))}"
    return ran.stdout


def listing(directory):
    """All that is there, also behind the link to `examples`; but not what Python keeps of what it imports."""
    found = {*directory.rglob("*"), *(directory / EXAMPLES.name).rglob("*")}
    return {path.relative_to(directory) for path in found if "__pycache__" not in path.parts}
