"""How long the files of the families are."""

from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "transformers_neuronx"


def family_lines():
    """Family -> file -> lines."""
    folders = {
        model.parent.name: {
            path.name: path.read_text().count("\n")
            for path in sorted(model.parent.glob("*.py"))
            if path.name != "__init__.py"
        }
        for model in sorted(PACKAGE.glob("*/model.py"))
    }
    files = {
        path.stem: {path.name: path.read_text().count("\n")}
        for path in sorted(PACKAGE.glob("families/*.py"))
        if path.name != "__init__.py"
    }
    return folders | files
