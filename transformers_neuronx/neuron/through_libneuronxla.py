"""Compile a module: `python -m transformers_neuronx.neuron.through_libneuronxla IN.pb OUT.neff TARGET FLAG…`.

libneuronxla runs `neuronx-cc` with the options of PyTorch's programs. It is imported only here, in a process that
`compiling` starts and ends, so what it does to its process does not affect the user's.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from transformers_neuronx.errors import EngineError
from transformers_neuronx.support import files


def main(arguments: Sequence[str]) -> None:
    """Write the NEFF, complete or not at all. Any error of libneuronxla ends the process with a traceback."""
    source, neff, target, *flags = arguments
    import libneuronxla

    data = libneuronxla.neuron_xla_compile(
        Path(source).read_bytes(),
        shlex.join(flags),
        input_format="hlo",
        platform_target=target,
        cache_key=None,
        retry_failed_compilation=False,
        lazy=True,
        use_cache=False,  # transformers_neuronx.engine.compile_cache is the one that users can switch off
        cache_dir=None,
    )
    if not isinstance(data, bytes):
        raise EngineError(f"neuron_xla_compile must return the bytes of a NEFF, got {type(data).__name__}")
    files.replace(Path(neff), data)


if __name__ == "__main__":
    main(sys.argv[1:])
