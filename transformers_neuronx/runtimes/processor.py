"""What tells processors apart for which XLA:CPU compiles."""

from __future__ import annotations

import os
import platform
from pathlib import Path

# What of /proc/cpuinfo a compiler chooses instructions by; most of the other flags are the kernel's.
INSTRUCTION_SETS = tuple("abm adx aes amx avx bmi f16c fma gfni movbe pclmul popcnt sha sse ssse vaes vpclmul".split())


def processor() -> dict[str, str]:
    """What XLA:CPU compiles for: the kind of processor, its instructions, and how many there are to divide loops."""
    try:
        lines = Path("/proc/cpuinfo").read_text().split("\n\n")[0].splitlines()
    except OSError:  # without a description, executables are for this machine
        lines = [f"model: {platform.processor()} {platform.node()}"]
    facts = {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    flags = [flag for flag in facts.get("flags", "").split() if flag.startswith(INSTRUCTION_SETS)]
    kind = [facts.get(name, "") for name in ("vendor_id", "cpu family", "model", "CPU implementer", "CPU part")]
    able = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
    return dict(
        processor=" ".join([platform.machine(), *filter(None, kind)]),
        instructions=" ".join(sorted(flags) or facts.get("Features", "").split()),
        processors=str(len(able)),
    )
