"""The size of the architecture: python docs/house.py [package directory]

Prints the entries at the top of the package, the arrows between them (imports), the longest chain of arrows, and the
blocks of lines that occur twice.
"""

from __future__ import annotations

import ast
import sys
from collections import defaultdict
from functools import cache
from pathlib import Path

BLOCK = 6  # lines, without imports and empty ones


def arrows(package: Path) -> dict[str, set[str]]:
    """Return what each entry at the top imports of the others; an import in a function counts, too."""
    found: dict[str, set[str]] = defaultdict(set)
    entries = {path.stem for path in package.iterdir() if path.name not in ("__pycache__", "py.typed")}
    for path in package.rglob("*.py"):
        own = path.relative_to(package).parts[0].removesuffix(".py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == package.name:
                _, *inside = node.module.split(".")
                names = inside[:1] or [alias.name for alias in node.names]
                found[own] |= {name for name in names if name in entries and name != own}
    return found


def longest_chain(graph: dict[str, set[str]]) -> int:
    """Return the number of entries on the longest way along the arrows, without the package's own `__init__`."""

    @cache
    def length(entry: str) -> int:
        return 1 + max((length(other) for other in graph.get(entry, ()) if other != "__init__"), default=0)

    return max(length(entry) for entry in graph if entry != "__init__")


def repeated(package: Path) -> int:
    """Return how many blocks of BLOCK lines or more occur twice, in one file or in two."""
    places: dict[tuple[str, ...], list[tuple[Path, int]]] = defaultdict(list)
    for path in package.rglob("*.py"):
        if path.name.endswith("_pb2.py"):
            continue
        text = [line.strip() for line in path.read_text(encoding="utf-8").splitlines()]
        lines = [line for line in text if line and not line.startswith(("import ", "from ", "#"))]
        for first in range(len(lines) - BLOCK + 1):
            places[tuple(lines[first : first + BLOCK])].append((path, first))
    pairs = {(a, b) for spots in places.values() for n, a in enumerate(spots) for b in spots[n + 1 :]}
    begins = [(a, b) for a, b in pairs if ((a[0], a[1] - 1), (b[0], b[1] - 1)) not in pairs]
    return len(begins)


def main() -> None:
    package = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parents[1] / "transformers_neuronx"
    families = {path.parent.name for path in package.glob("*/model.py")}
    entries = {path.name for path in package.iterdir() if path.name != "__pycache__"}
    graph = arrows(package)
    print(f"entries at the top, besides {len(families)} families: {len(entries - families)}")
    print(f"arrows: {sum(map(len, graph.values()))}")
    print(f"longest chain: {longest_chain(graph)}")
    print(f"blocks of {BLOCK} lines that occur twice: {repeated(package)}")


if __name__ == "__main__":
    main()
