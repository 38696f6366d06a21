"""Describe the processor that XLA:CPU compiles for."""

from __future__ import annotations

import os
import platform
from pathlib import Path

# The flags of /proc/cpuinfo by which a compiler chooses instructions. Most other flags matter only to Linux.
INSTRUCTION_SETS = tuple("abm adx aes amx avx bmi f16c fma gfni movbe pclmul popcnt sha sse ssse vaes vpclmul".split())


def processor() -> dict[str, str]:
    """Return what XLA:CPU compiles for: the kind of processor, its instructions, and how many divide a loop."""
    try:
        lines = Path("/proc/cpuinfo").read_text().split("\n\n")[0].splitlines()
    except OSError:  # without a description, executables are for this machine only
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
