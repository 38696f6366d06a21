"""The one function that is called, with the arguments that public programs call it with, and no others."""

import json
import os
from pathlib import Path


def neuron_xla_compile(
    module_bytes,
    compiler_flags,
    *,
    input_format,
    platform_target,
    cache_key,
    retry_failed_compilation,
    lazy,
    use_cache,
    cache_dir,
):
    """A "NEFF" with its magic line in place of neuronx-cc's, and what it was called with in it."""
    print("libneuronxla compiles")
    if os.environ.get("STANDIN_NEURONX_CC") == "fail":
        raise RuntimeError("neuronx-cc failed with 70")
    if os.environ.get("STANDIN_NEURONX_CC") == "none":
        return None
    said = dict(
        compiler_flags=compiler_flags,
        input_format=input_format,
        platform_target=platform_target,
        cache_key=cache_key,
        retry_failed_compilation=retry_failed_compilation,
        lazy=lazy,
        use_cache=use_cache,
        cache_dir=cache_dir,
        directory=str(Path.cwd()),
    )
    return b"stand-in NEFF of libneuronxla\n" + json.dumps(said).encode() + b"\n" + module_bytes
