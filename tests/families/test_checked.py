"""The table of what was checked of each family: the list of models has it as the tests are, and little is missing."""

import subprocess
import sys

from checked import HERE, PAGE, page_with


def test_the_list_of_models_has_what_the_tests_check():
    """Every family has every check, but for what encoders lack."""
    command = [sys.executable, "-c", "import checked; print(checked.table())"]
    text = subprocess.run(command, cwd=HERE, capture_output=True, text=True, check=True).stdout.strip()
    assert PAGE.read_text() == page_with(text), "run: python tests/families/checked.py"
    header, _, *rows = (line.strip("| ").split(" | ") for line in text.splitlines())
    lacking = {row[0]: [name for name, cell in zip(header, row, strict=True) if cell == "–"] for row in rows}
    assert lacking.pop("t5") == ["published", "drafts"]
    assert lacking.pop("whisper") == ["engine", "drafts"]  # tests/serving has requests with sounds
    assert [each for each in lacking.values() if each] == []
