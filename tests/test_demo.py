"""The examples run as a stranger would run them."""

import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def run(*command):
    """Run Python in the root of the repository, and check that it leaves no files."""
    before = untracked()
    ran = subprocess.run([sys.executable, *command], cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert untracked() == before
    return ran


def untracked():
    status = ["git", "status", "--porcelain", "--untracked-files=all"]
    return subprocess.run(status, cwd=ROOT, capture_output=True, text=True, check=True).stdout


@pytest.mark.parametrize("options", [[], ["--tp-degree", "2", "--amp", "bf16", "--tokens", "20", "--top-k", "1"]])
def test_the_demo(options):
    result = run("examples/demo.py", *options)
    assert result.returncode == 0, result.stderr
    assert "XLA:CPU" in result.stdout
    assert "And it came to pass in those days, that" in result.stdout
    assert re.search(r"\d+ tokens, \d+ a second, the first after \d+ ms", result.stdout)


def test_the_demo_says_what_is_wrong_with_a_bad_model():
    result = run("examples/demo.py", "--model", "./no-such-model")
    assert result.returncode != 0
    assert "no-such-model" in result.stderr


@pytest.mark.slow
def test_the_script_that_trained_the_checkpoint(tmp_path):
    verses = [f"Ge{chapter}:{verse} And it was so.\n" for chapter in range(1, 90) for verse in range(1, 70)]
    (tmp_path / "text").write_text("".join(verses))
    options = ["--out", str(tmp_path / "model"), "--text", str(tmp_path / "text"), "--epochs", "0.05"]
    result = run("examples/train_tiny_kjv.py", *options)
    assert result.returncode == 0, result.stderr
    assert re.search(r"held-out loss [\d.]+, perplexity [\d.]+", result.stdout)
    shipped = {path.name for path in (ROOT / "examples" / "tiny-kjv").iterdir()} - {"README.md"}
    assert {path.name for path in (tmp_path / "model").iterdir()} == shipped

    options[1] = str(tmp_path / "draft")
    result = run("examples/train_tiny_kjv.py", *options, "--teacher", str(tmp_path / "model"), "--layers", "1")
    assert result.returncode == 0, result.stderr
    assert re.search(r"the most likely token is the teacher's at [\d.]+% of tokens", result.stdout)
    shipped = {path.name for path in (ROOT / "examples" / "tiny-kjv-draft").iterdir()} - {"README.md"}
    assert {path.name for path in (tmp_path / "draft").iterdir()} == shipped

    options[1] = str(tmp_path / "eagle")
    result = run("examples/train_tiny_kjv_eagle.py", *options, "--target", str(tmp_path / "model"))
    assert result.returncode == 0, result.stderr
    assert re.search(r"[\d.]+ tokens right on average", result.stdout)
    shipped = {path.name for path in (ROOT / "examples" / "tiny-kjv-eagle").iterdir()} - {"README.md"}
    assert {path.name for path in (tmp_path / "eagle").iterdir()} == shipped


@pytest.mark.parametrize("script", sorted(ROOT.glob("benchmarks/*.py")), ids=lambda path: path.stem)
def test_the_names_that_a_benchmark_imports_exist(script, monkeypatch):
    monkeypatch.syspath_prepend(str(script.parent))
    runpy.run_path(str(script), run_name="imported")


@pytest.mark.slow
@pytest.mark.parametrize(
    "command",
    [
        "generation.py --rounds 2 --tokens 8",
        "speculation.py --rounds 1 --prompts 1 --tokens 8",
        "compiling.py --layers 1",
        "growth.py --rounds 1",
        "widths.py --rounds 1",
        "tracing.py --models bert --dtypes f32 --turns 1",
        "kernel_times.py --only attention",
        "gate.py --against HEAD --least 0 --only attention",
    ],
)
def test_a_benchmark(command):
    script, *options = command.split()
    result = run(f"benchmarks/{script}", *options)
    assert result.returncode == 0, result.stderr
    assert result.stdout
