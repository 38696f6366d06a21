"""Facts as tables of at most WIDTH columns, made from the same dictionaries as JSON."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

WIDTH = 80
MOST = 12  # kinds of operations with their own line
LEAST = 1000  # kinds with less than 1/LEAST of the total have no line
_UNITS = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"), (1.0, ""))

Facts = Mapping[str, Any]


def scaled(value: float, unit: str) -> str:
    """Format 1234567 B as 1.23 MB."""
    size, letter = _unit(value)
    digits = 0 if size == 1 else 2 if value / size < 10 else 1
    return f"{value / size:.{digits}f} {letter}{unit}"


def _unit(value: float) -> tuple[float, str]:
    return next(((size, letter) for size, letter in _UNITS if value >= size), _UNITS[-1])


def cut(text: str, width: int) -> str:
    """Cut a text to `width` characters, with … at the end if it was longer."""
    return text if len(text) <= width else f"{text[: width - 1]}…"


def wrapped(text: str) -> str:
    """Wrap a text into lines of WIDTH."""
    return textwrap.fill(text, WIDTH, subsequent_indent="  ")


def _share(part: float, whole: float) -> str:
    return f"{part / whole:.1%}" if whole else "-"


def _costs(title: str, rows: Sequence[Facts], total: Facts) -> Iterator[str]:
    """Yield a line for each row, summed over its repeats."""
    (flop, flop_unit), (byte, byte_unit) = _unit(total["flops"]), _unit(total["read"] + total["written"])
    heads = "", f"{flop_unit}FLOP", "share", f"{byte_unit}B read", f"{byte_unit}B written", "share"
    yield "{:26}{:>6}{:>11}{:>8}{:>11}{:>11}{:>7}".format(title, *heads)
    moved = total["read"] + total["written"]
    for row in rows:
        times = row["repeats"]
        name = row["name"] if times == 1 else f"{row['name']} … {row['last']}"
        flops, read, written = (times * row[key] for key in ("flops", "read", "written"))
        numbers = f"{flops / flop:.3f}", _share(flops, total["flops"]), f"{read / byte:.3f}", f"{written / byte:.3f}"
        count = f"× {times}" if times > 1 else ""
        cells = (*numbers, _share(read + written, moved))
        yield "  {:24}{:>6}{:>11}{:>8}{:>11}{:>11}{:>7}".format(cut(name, 24), count, *cells)


def _with_rest(rows: Sequence[Facts], total: Facts) -> list[Facts]:
    """Return the first MOST rows that deserve a line, and the sum of the others."""
    moved = total["read"] + total["written"]

    def counts(row: Facts) -> bool:
        return bool(row["flops"] * LEAST > total["flops"] or (row["read"] + row["written"]) * LEAST > moved)

    shown = [row for row in rows if counts(row)][:MOST]
    if rest := [row for row in rows if row not in shown]:
        sums = {key: sum(row[key] for row in rest) for key in ("count", "flops", "read", "written")}
        shown.append(dict(name=f"({len(rest)} other kinds)", repeats=1, **sums))
    return shown


def program_text(facts: Facts) -> str:
    """Format a program: what it holds, and what it costs by layer and by kind of operation."""
    held, total = facts["held"], facts["total"]
    sizes = [f"{scaled(size, 'B')} of {kind}s" for kind, size in held.items() if size]
    results = sum(result["bytes"] for result in facts["outputs"] if result["takes"] is None)
    in_place = sum(result["takes"] is not None for result in facts["outputs"])
    lines = [cut(facts["name"], WIDTH)]
    if facts["runs"] > 1:
        lines.append(f"runs {facts['runs']} times in a step, for groups of layers; numbers are for one run")
    lines.append(wrapped(", ".join(sizes) + f"; {scaled(facts['temporaries'], 'B')} of temporaries (estimated)"))
    lines.append(wrapped(f"{scaled(results, 'B')} of new results, {in_place} results in place"))
    moved = total["read"] + total["written"]
    costs = f"{scaled(total['flops'], 'FLOP')}, {_share(total['products'], total['flops'])} in products"
    lines.append(wrapped(f"{costs}; {scaled(moved, 'B')} read and written"))
    if facts["loops"]:
        lines.append("Loops are counted for one iteration.")
    lines += [
        "",
        *_costs("layer", facts["layers"], total),
        "",
        *_costs("operation", _with_rest(facts["ops"], total), total),
    ]
    return "\n".join(lines)


def model_text(facts: Facts) -> str:
    """Format a model: its configuration, its weights, and its programs one after the other."""
    options, degree = facts["options"], facts["degree"]
    config = ", ".join(f"{name}={value}" for name, value in facts["config"].items())
    devices = "one device" if degree == 1 else f"each of {degree} devices"
    lines = [
        f"{facts['family']}, {facts['weight_count']:,} parameters, {options['amp']}, on {devices}:",
        f"  weights {scaled(facts['weight_bytes'], 'B')}, caches {scaled(facts['caches'], 'B')}, "
        f"temporaries at most {scaled(facts['temporaries'], 'B')}",
        wrapped(config),
        "",
        *_weights(facts["weights"]),
    ]
    for program in facts["programs"]:
        lines += ["", "─" * WIDTH, program_text(program)]
    return "\n".join(lines)


def split_text(weight: Facts) -> str:
    """Format how devices share a weight, as in axis 0 by 3."""
    if weight["degree"] == 1:
        return "whole"
    return f"axis {weight['axis']} by {weight['degree']}"


def _weights(weights: Sequence[Facts]) -> Iterator[str]:
    yield "{:25}{:>23}{:>8}{:>13}{:>11}".format("weight", "shape", "layers", "split", "bytes")
    for row in weights:
        dtype = row["shape"].partition("[")[0]
        shape = f"{dtype}[{','.join(map(str, row['whole']))}]"
        size = scaled(row["bytes"] * row["layers"], "B") if row["same_as"] is None else f"= {row['same_as']}"
        layers = f"× {row['layers']}" if row["layers"] > 1 else ""
        cells = cut(row["name"], 25), cut(shape, 23), layers, split_text(row), cut(size, 11)
        yield "{:25}{:>23}{:>8}{:>13}{:>11}".format(*cells)
