"""The documentation site: `make docs` builds it into build/docs.

Pages that are made from other files are written to `docs/api`, `docs/tutorials` and `docs/project` before Sphinx
reads them: the API reference from docs/public.py, tutorials from `examples/`, and documents of the root directory.
"""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parent
ROOT = DOCS.parent
sys.path[:0] = [str(DOCS), str(ROOT)]

from public import modules  # noqa: E402

from transformers_neuronx.version import __version__  # noqa: E402

project = "transformers-neuronx"
release = __version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.viewcode", "sphinx_copybutton"]
myst_heading_anchors = 3
copybutton_prompt_text = "$ "

html_theme = "furo"
html_title = project
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_copy_source = False
html_show_copyright = False

autodoc_member_order = "alphabetical"  # classes first
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
python_maximum_signature_line_length = 88
viewcode_follow_imported_members = False
suppress_warnings = ["ref.python"]  # several classes have a field `bytes`, as an annotation may be

API = """\
The names on these pages are the public API: documented, typed (`py.typed`) and kept. All other names may change at any
time. Shapes are written as in HLO, `f32[batch, tokens, vocab]`. Every error that the package raises on purpose is a
`TransformersNeuronxError`."""


def _write(path: Path, text: str) -> None:
    """Only if it differs, so that Sphinx reads again what has changed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if not path.exists() or path.read_text(encoding="utf-8") != text:
        path.write_text(text, encoding="utf-8")


# Documents outside this folder, and the pages of the site that they become.
COPIED = {
    **{path: f"tutorials/{path.name.replace('README', 'index')}" for path in sorted((ROOT / "examples").glob("*.md"))},
    **{path: f"project/{path.name}" for path in sorted((ROOT / "benchmarks" / "results").glob("*.md"))},
    **{ROOT / f"{name}.md": f"project/{name.lower()}.md" for name in ("CONTRIBUTING", "CHANGELOG", "SECURITY")},
    ROOT / "README.md": "index.md",
}


def _linked(text: str, source: Path, page: str) -> str:
    """The text of a document with its links as they must be on a page of the site."""

    def link(match: re.Match[str]) -> str:
        target, anchor = match[1].partition("#")[0], "".join(match[1].partition("#")[1:])
        path = (source.parent / target).resolve()
        if "://" in target or not target or not path.is_relative_to(ROOT):
            return match[0]
        on_site = DOCS / COPIED[path] if path in COPIED else path
        return f"]({os.path.relpath(on_site, (DOCS / page).parent)}{anchor})"

    return re.sub(r"\]\(([^)\s]+)\)", link, text)


def _reference() -> None:
    """A page for each public module, and a list of them."""
    found = modules()
    for name, module in found.items():
        members = ", ".join(module.__all__)
        lines = [name, "=" * len(name), "", f".. automodule:: {name}", f"   :members: {members}", "   :undoc-members:"]
        _write(DOCS / "api" / f"{name}.rst", "\n".join(lines) + "\n")
    toctree = ["```{toctree}", ":maxdepth: 1", *found, "```"]
    _write(DOCS / "api" / "index.md", "\n".join(["# API reference", "", API, "", *toctree, ""]))


def _gather(app: Any) -> None:
    _reference()
    for source, page in COPIED.items():
        if page != "index.md":
            text = _linked(source.read_text(encoding="utf-8"), source, page)
            if page == "tutorials/index.md":
                names = [path.stem for path in COPIED if path.parent == source.parent and path != source]
                text += "\n".join(["", "```{toctree}", ":hidden:", "", *names, "```", ""])
            _write(DOCS / page, text)


def _read(app: Any, page: str, content: list[str]) -> None:
    if not page.startswith(("api/", "tutorials/", "project/")):
        content[0] = _linked(content[0], DOCS / f"{page}.md", f"{page}.md")


def _as_rst(app: Any, what: str, name: str, value: Any, options: Any, lines: list[str]) -> None:
    """Docstrings use single backticks for code, as Markdown does, and no markup of reStructuredText."""
    parts = re.split(r"`([^`]+)`", "\n".join(lines))
    parts[::2] = [re.sub(r"^(?=\w)", r"\\ ", re.sub(r"([*|]|_\b)", r"\\\1", part)) for part in parts[::2]]
    parts[1::2] = [f"``{code}``" for code in parts[1::2]]
    lines[:] = "".join(parts).removeprefix("\\ ").split("\n")


def setup(app: Any) -> None:
    app.connect("builder-inited", _gather)
    app.connect("source-read", _read)
    app.connect("autodoc-process-docstring", _as_rst)
