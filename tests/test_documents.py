"""All blocks of README and of the documentation's pages run and print what the page shows."""

import os
import re
from pathlib import Path

import pytest
from documents import ROOT, blocks, like, run_console, run_python

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), *sorted((ROOT / "docs").glob("[cg][ou]*/*.md"))]
# What a block in another language is for. Of `bash`, the commands that install are what CI does itself.
SHOWN = {"text", "text about", "bash"}


@pytest.fixture
def directory(tmp_path, monkeypatch):
    """An empty directory with a link to `examples`, which is the current one."""
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    return tmp_path


AHEAD = {"command-line.md"}  # of programs that are compiled ahead, such as those of an artifact


@pytest.mark.parametrize(
    "page",
    [pytest.param(page, marks=[pytest.mark.compiled_ahead] * (page.name in AHEAD)) for page in PAGES],
    ids=[page.relative_to(ROOT).as_posix() for page in PAGES],
)
def test_the_blocks_of_a_page(page, directory):
    names = {"__name__": "__main__"}
    for block in blocks(page):
        where = f"{page.relative_to(ROOT)}:{block.line}"
        if block.language == "python":
            printed = run_python(block, page, names)
            if wanted := block.printed:
                about = wanted.language == "text about"
                assert like(wanted.text, printed, numbers=about), f"{where} prints\n{printed}"
        elif block.language == "console":
            for command, wanted, printed in run_console(block, directory):
                assert like(wanted, printed, numbers=True), f"{where}: {command} prints\n{printed}"
        else:
            assert block.language in SHOWN, f"{where}: nothing runs {block.language}"
    left = {path.name for path in Path(os.curdir).iterdir()} - {"examples"}
    assert not left or "$ " in page.read_text(), f"{page.relative_to(ROOT)} leaves {', '.join(sorted(left))}"


def test_links_between_documents_lead_somewhere():
    """As files of the repository, where README and the pages are read as well."""
    for document in [*ROOT.glob("*.md"), *(ROOT / "examples").glob("*.md"), *PAGES]:
        prose = re.sub(r"^```.*?^```$", "", document.read_text(), flags=re.S | re.M)
        for target in re.findall(r"\]\(([^)#\s]+)", prose):
            there = (document.parent / target).resolve()
            assert "://" in target or there.exists(), f"{document.relative_to(ROOT)} links to {target}"
