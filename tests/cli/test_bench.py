"""`bench`: one line per size, and the same numbers as text, as JSON and in a figure."""

import json
import sys

import pytest
from bundled import TINY_KJV

SIZES = ("-b", 1, "-b", 2, "--prompt", 5, "--prompt", 20, "--new", 6, "--rounds", 2)


def test_a_line_for_each_size(command, tmp_path):
    printed, _ = command("bench", TINY_KJV, *SIZES)
    heading, *lines = printed.splitlines()
    assert heading.split("  ") == [
        "batch", "prompt", "new", "first ms", "token p50 ms", "token p99 ms", "tokens per second"
    ]  # fmt: skip
    assert [line.split()[:3] for line in lines] == [
        ["1", "5", "6"],
        ["1", "20", "6"],
        ["2", "5", "6"],
        ["2", "20", "6"],
    ]
    assert max(map(len, printed.splitlines())) <= 80


def test_for_programs_and_drawn(command, tmp_path):
    printed, _ = command("bench", TINY_KJV, *SIZES, "--json", "--plot", "speed.svg")
    results = json.loads(printed)
    assert [(result["batch"], result["prompt"]) for result in results] == [(1, 5), (1, 20), (2, 5), (2, 20)]
    assert all(0 < result["token_p50_ms"] <= result["token_p99_ms"] and result["first_ms"] > 0 for result in results)
    drawn = (tmp_path / "speed.svg").read_text()
    assert "</svg>" in drawn and drawn.count('id="axes_') == 2


def test_without_matplotlib_nothing_is_measured(command, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    printed, said = command("bench", TINY_KJV, *SIZES, "--plot", "speed.svg", status=1)
    assert printed == "" and 'pip install "transformers-neuronx[plot]"' in said


@pytest.mark.parametrize("option", ["--prompt", "--new"])
def test_more_than_the_model_takes(command, option):
    _, said = command("bench", TINY_KJV, option, 5000, status=2)
    assert "is the longest sequence this model takes" in said
