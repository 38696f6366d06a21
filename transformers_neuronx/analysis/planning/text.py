"""A plan as a table of at most 80 columns, from the dictionary that JSON is made of."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from transformers_neuronx.analysis.inspection.text import scaled, wrapped

Facts = Mapping[str, Any]
LINE = "{:14}{:>3}{:>10}{:>9}{:>9}{:>9}  {:5}{:>9}{:>9}"
TIMES = ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"))
ESTIMATED = (
    "Bytes are per device. Temporaries are an estimate of the working memory that XLA would need; neuronx-cc may need "
    "more or less."
)
ROOFLINE = (
    "Times are those of a roofline: moving bytes at full bandwidth, or products at peak FLOPs, whichever takes longer, "
    "without sums over devices. The time of a token is for the last token of every sequence."
)


def plan_text(facts: Facts) -> str:
    """Format a plan: a heading, a line for each place and degree, and notes."""
    quant = f", weights in {facts['quant']}" if facts["quant"] else ""
    rows, tokens = facts["prompts"]
    prompts = f"prompts of {tokens} tokens, {rows} at a time" if tokens > 1 else "prompts token by token"
    head = f"{facts['family']}, {facts['parameters']:,} parameters, {facts['amp']}{quant}: "
    head += f"batch size {facts['batch_size']}, {facts['positions']} positions, {prompts}"
    heads = "place", "tp", "weights", "caches", "temp.", "memory", "fits", "token", "prompt"
    lines = [wrapped(head), "", LINE.format(*heads).rstrip(), *map(_line, facts["fits"]), ""]
    if facts["hosts"]:
        lines += [LINE.format("hosts", *heads[1:]).rstrip(), *map(_line, facts["hosts"]), ""]
    lines += map(wrapped, _notes(facts))
    return "\n".join(lines)


def _line(fit: Facts) -> str:
    needs = fit["needs"] or {}
    sizes = [needs.get(name) for name in ("weights", "caches", "temporaries")]
    cells = [_scaled(size) for size in (*sizes, fit["memory"])]
    fits = "no tp" if not needs else "yes" if fit["fits"] else "no"
    times = [_time(fit[name]) for name in ("token_seconds", "prompt_seconds")]
    return LINE.format(fit["place"], fit["degree"], *cells, fits, *times).rstrip()


def _scaled(value: float | None) -> str:
    return "-" if value is None else scaled(value, "B")


def _time(seconds: float | None) -> str:
    if not seconds:
        return "-"
    size, unit = next((each for each in TIMES if seconds >= each[0]), TIMES[-1])
    return f"{seconds / size:.{2 if seconds / size < 10 else 1}f} {unit}"


def _notes(facts: Facts) -> Iterator[str]:
    yield ESTIMATED
    yield ROOFLINE
    yield from (f"{place['name']}: {place['told']}." for place in facts["places"] if place["told"])
    if facts["hosts"]:
        yield from _hosts(facts["hosts"], facts["network"])
    heads, there = facts["heads"], facts["heads_by_degree"]
    if padded := {degree: count for degree, count in there.items() if count != heads}:
        divisors = _listed(degree for degree in there if degree not in padded)
        yield (
            f"{heads} heads: tp {_listed(padded)} does not divide them, so they are padded to "
            f"{_listed(padded.values())}. The original library's guide asks for a degree that does"
            + (f": {divisors}." if divisors else ".")
        )


def _hosts(hosts: Sequence[Facts], network: Facts) -> Iterator[str]:
    yield (
        f"Hosts: each is one device. Sums take a round trip of {_time(network['round_trip'])}, and work, for each "
        f"further host, and their bytes come at {scaled(network['bandwidth'], 'B')}/s. This was measured with 2 to 4."
    )
    holding = [fit for fit in hosts if fit["fits"]]
    if not holding:
        return
    fewest, timed = holding[0]["degree"], [fit for fit in holding if fit["token_seconds"]]
    best = min(timed, key=lambda fit: fit["token_seconds"])["degree"] if timed else fewest
    hold = f"{fewest} host{'s hold' if fewest > 1 else ' holds'} it"
    fastest = f" Tokens are fastest on {best}." if best != fewest else ""
    command = f" transformers-neuronx serve --tp {best} --nnodes {best} divides it." if best > 1 else ""
    yield f"{hold}.{fastest}{command} More requests need more replicas rather than more hosts for each."


def _listed(values: Iterable[Any]) -> str:
    *most, last = [*map(str, values)] or [""]
    return f"{', '.join(most)} or {last}" if most else last
