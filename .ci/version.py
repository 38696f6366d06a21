"""Check that the version is that of the tag of this commit, unless it is under development."""

import subprocess
import sys
from pathlib import Path

version = {}
exec((Path(__file__).parents[1] / "transformers_neuronx" / "version.py").read_text(), version)
wanted = f"v{version['__version__']}"
tags = subprocess.run(["git", "tag", "--points-at", "HEAD"], capture_output=True, text=True, check=True).stdout.split()
if ".dev" not in wanted and wanted not in tags:
    sys.exit(f"version.py has {version['__version__']}, so this commit must have the tag {wanted}, got {tags}")
print(f"version {version['__version__']}")
