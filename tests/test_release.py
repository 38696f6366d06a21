"""What is published is whole, and the workflow files call what is there, with versions that the package allows."""

import re
import runpy
import shlex
from unittest.mock import patch

import pytest
import yaml
from documents import ROOT

WORKFLOWS = {path.name: yaml.safe_load(path.read_text()) for path in (ROOT / ".github" / "workflows").iterdir()}
TARGETS = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M))
SETUP = (ROOT / "setup.py").read_text()


@pytest.mark.parametrize("name", WORKFLOWS)
def test_commands_exist(name):
    for job in WORKFLOWS[name]["jobs"].values():
        lines = [line for step in job["steps"] for line in step.get("run", "").splitlines()]
        called = [shlex.split(line) for line in lines if line.startswith(("make ", "bash "))]
        assert called, "each job runs something of the project"
        for command, what, *variables in called:
            assert what in TARGETS if command == "make" else (ROOT / what).is_file()
            for variable in variables:
                key, value = variable.split("=", 1)
                assert re.search(rf"^{key} \?=", (ROOT / "Makefile").read_text(), re.M)
                assert key != "TESTS" or value.startswith("$") or (ROOT / value).exists()


def test_parts_of_the_tests_are_all_of_them():
    parts = WORKFLOWS["nightly.yml"]["jobs"]["all"]["strategy"]["matrix"]["tests"]
    found = {path for part in parts for pattern in part.split() for path in ROOT.glob(pattern)}
    tests = {path.parent for path in (ROOT / "tests").glob("*/test_*.py")} | set((ROOT / "tests").glob("test_*.py"))
    assert tests <= found


def test_versions_are_those_that_the_package_allows():
    matrix = WORKFLOWS["nightly.yml"]["jobs"]["versions"]["strategy"]["matrix"]
    [least] = re.findall(r'python_requires=">=([\d.]+)"', SETUP)
    assert matrix["python"][0] == least
    for requirement in matrix["requirements"][0].split():
        package, version = requirement.split("==")
        assert f'"{package}>={version.removesuffix(".0")}' in SETUP


def test_the_source_archive_has_all_sources_of_the_kernels(monkeypatch):
    monkeypatch.chdir(ROOT)
    with patch("setuptools.setup") as setup:
        folder = runpy.run_path("setup.py")["KERNELS"]
    kernels, _ = setup.call_args.kwargs["ext_modules"]
    sources = {str(path.relative_to(ROOT)) for path in (ROOT / folder).iterdir() if path.suffix in (".cc", ".h")}
    assert sources <= {*kernels.sources, *kernels.depends}
