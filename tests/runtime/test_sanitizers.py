"""The kernels alone, without Python and XLA, under the compiler's sanitizers."""

import runpy
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest.mock import patch

import pytest

ROOT = Path(__file__).parents[2]
SOURCE = Path(__file__).with_name("sanitized.cc")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not shutil.which("c++"), reason="sanitizers need a C++ compiler"),
]


@pytest.mark.parametrize("sanitizers", ["address,undefined", "thread"])
def test_kernels(sanitizers, tmp_path):
    with patch("setuptools.setup"):
        build = runpy.run_path(str(ROOT / "setup.py"))
    kernels = ROOT / build["KERNELS"]
    flags = ["-std=c++17", "-O1", "-g", f"-fsanitize={sanitizers}", "-fno-sanitize-recover=all", f"-I{kernels}"]

    def compiled(job):
        path, defined = job
        out = tmp_path / f"{path.stem}{len(defined)}{defined[-1] if defined else ''}.o"
        subprocess.run(["c++", *flags, *defined, "-c", path, "-o", out], check=True)
        return out

    jobs = [(SOURCE, [f"-DNEURONX_HAS_{level.upper()}" for level in build["LEVELS"]])]
    for level, own in build["LEVELS"].items():
        jobs += [(kernels / f"{name}.cc", [*own, f"-DNEURONX_LEVEL={level}"]) for name in build["SOURCES"]]
    with ThreadPoolExecutor(2) as pool:
        objects = list(pool.map(compiled, jobs))
    subprocess.run(["c++", *flags, *objects, "-o", tmp_path / "run", "-pthread"], check=True)
    ran = subprocess.run([tmp_path / "run"], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    assert int(ran.stdout.split()[0]) >= 1
