"""What is published is whole, and the workflow files call what is there, with versions that the package allows."""

import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
from unittest.mock import patch
from zipfile import ZipFile

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


@pytest.mark.slow
@pytest.mark.skipif(not shutil.which("aarch64-linux-gnu-g++"), reason="needs g++-aarch64-linux-gnu")
def test_a_wheel_for_another_machine(tmp_path):
    shutil.copytree(ROOT / "transformers_neuronx", tmp_path / "transformers_neuronx")
    for name in ("setup.py", "README.md", "LICENSE", "pyproject.toml"):
        shutil.copy(ROOT / name, tmp_path)
    compilers = dict(CC="aarch64-linux-gnu-gcc", CXX="aarch64-linux-gnu-g++", NEURONX_BUILD_LEVELS="all")
    others = os.environ | compilers | dict(_PYTHON_HOST_PLATFORM="linux-aarch64")
    subprocess.run([sys.executable, "setup.py", "-q", "bdist_wheel"], cwd=tmp_path, env=others, check=True)
    [wheel] = (tmp_path / "dist").iterdir()
    assert wheel.name.endswith("-cp311-abi3-linux_aarch64.whl")
    with ZipFile(wheel) as files:
        libraries = [files.read(name) for name in files.namelist() if name.endswith(".so")]
    assert [library[:4] + library[18:20] for library in libraries] == 2 * [b"\x7fELF\xb7\x00"]  # for AArch64
    assert any(b"neon_bf16" in library for library in libraries)
