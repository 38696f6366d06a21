"""The bundled checkpoint."""

from pathlib import Path

ROOT = Path(__file__).parents[2]
TINY_KJV = ROOT / "examples" / "tiny-kjv"
