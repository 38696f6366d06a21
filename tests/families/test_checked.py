"""The table of what was checked of each family: the list of models has it as the tests are, and little is missing."""

import subprocess
import sys

from checked import HERE, PAGE, page_with, table


def table_of(items):
    """The table of the tests that pytest has collected, or if files are missing, of those that another process does."""
    if {item.path for item in items} == set(HERE.glob("test_*.py")):
        return table(items)
    command = [sys.executable, "-c", "import checked; print(checked.table(checked.collected()))"]
    return subprocess.run(command, cwd=HERE, capture_output=True, text=True, check=True).stdout.strip()


def test_the_list_of_models_has_what_the_tests_check(request):
    """Every family has every check, but for what encoders lack."""
    text = table_of([item for item in request.config.collected if item.path.parent == HERE])
    assert PAGE.read_text() == page_with(text), "run: python tests/families/checked.py"
    header, _, *rows = (line.strip("| ").split(" | ") for line in text.splitlines())
    lacking = {row[0]: [name for name, cell in zip(header, row, strict=True) if cell == "–"] for row in rows}
    assert lacking.pop("t5") == ["published", "drafts"]
    assert lacking.pop("whisper") == ["engine", "drafts"]  # tests/serving has requests with sounds
    assert [each for each in lacking.values() if each] == []
