"""Packaging. `pip install .` gives the CPU; the extras add what else there is."""

from pathlib import Path

from setuptools import find_packages, setup

HERE = Path(__file__).parent
version: dict[str, str] = {}
exec((HERE / "transformers_neuronx" / "version.py").read_text(), version)

JAXLIB = "jaxlib>=0.10.2,<0.13"

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
    package_data={"transformers_neuronx": ["py.typed", "pyhlo/hlo.proto", "pyhlo/hlo_pb2.pyi"]},
    install_requires=[
        JAXLIB,
        "huggingface-hub>=0.30",
        "ml-dtypes>=0.5",
        "numpy>=1.26",
        "protobuf>=6.31.1,<8",
        "safetensors>=0.5",
        "torch>=2.6",
        "tqdm>=4.66",
        "transformers>=5,<6",
    ],
    extras_require={
        "cuda": ["jax-cuda12-plugin[with-cuda]>=0.10.2,<0.13"],
        "test": [
            "grpcio-tools==1.75.1",
            "jax>=0.10.2,<0.13",
            "mypy",
            "pytest",
            "pytest-xdist",
            "ruff",
            "types-protobuf",
            "types-tqdm",
        ],
    },
)
