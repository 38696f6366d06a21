"""`quantize`: write a checkpoint in fewer bits, in a format that other programs read."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer

from transformers_neuronx.analysis.perplexity import perplexity as perplexity_of
from transformers_neuronx.cli import options as o
from transformers_neuronx.cli.text import encodable
from transformers_neuronx.errors import CheckpointError, InputError
from transformers_neuronx.support import files
from transformers_neuronx.weights.directories import load_config
from transformers_neuronx.weights.quantizing import SCHEMES, Written, quantize as write_quantized, want_place
from transformers_neuronx.weights.quantizing.schemes import GROUP, Scheme, scheme_named

LONGEST = 2048  # tokens of a window by default
HELD_OUT = 10  # one part in so many of a calibration's text is measured, if no other text is

Source = Annotated[
    str, typer.Argument(metavar="CHECKPOINT", help="Directory of a checkpoint, or a name on the Hugging Face hub.")
]
Target = Annotated[str, typer.Argument(metavar="OUTPUT_DIRECTORY", help="New directory to write to.")]
SchemeName = Annotated[str, o.option("--scheme", help=f"How matrices are stored: {', '.join(SCHEMES)}.", default=True)]
Group = Annotated[
    int | None,
    o.option("--group-size", help=f"Inputs that share a scale of 4 bits; {GROUP} by default.", least=8),
]
Calibration = Annotated[
    str | None, o.option("--calibration", help="Text file: compensate errors for inputs like it (GPTQ).")
]
Samples = Annotated[
    int, o.option("--samples", help="Windows of the calibration's text at most.", default=True, least=1)
]
Length = Annotated[
    int | None,
    o.option(
        "--sequence-length", help=f"Tokens of a window; by default what the model takes, up to {LONGEST}.", least=2
    ),
]
Measured = Annotated[str | None, o.option("--perplexity", help="Text file to measure perplexity on, before and after.")]
Ignore = Annotated[
    list[str] | None,
    o.option("--ignore", help='Module that stays as it is, or a pattern after "re:"; may be repeated.'),
]


class Texts(NamedTuple):
    """Windows to calibrate with, tokens to measure perplexity on, and the tokens of a window."""

    windows: list[list[int]]
    measured: list[int]
    length: int


def quantize(
    checkpoint: Source,
    output: Target,
    scheme: SchemeName = "W4A16",
    group_size: Group = None,
    calibration: Calibration = None,
    samples: Samples = 128,
    sequence_length: Length = None,
    perplexity: Measured = None,
    ignore: Ignore = None,
    cache_dir: o.CacheDir = None,
    amp: o.Amp = None,
    as_json: o.Json = False,
) -> None:
    """Write a checkpoint in fewer bits, for this and other programs.

    The format is compressed-tensors, which Transformers and vLLM read too.
    Matrices of the decoder's layers are rounded to nearest, or with GPTQ if
    there is a text for --calibration. Its last tenth is then held out, and
    perplexity is measured on it, unless --perplexity has another text. --amp
    is for that measurement.
    """
    chosen, place = scheme_named(scheme, group_size), want_place(output)
    texts = _texts(checkpoint, cache_dir, calibration, perplexity, samples, sequence_length)
    if calibration and not perplexity and (reason := _unsupported(checkpoint, cache_dir)):
        typer.echo(f"perplexity is not measured: {reason}", err=True)
        texts = texts._replace(measured=[])
    before = _measured(checkpoint, cache_dir, amp, texts)
    started = time.monotonic()
    written = write_quantized(
        checkpoint, place, chosen, windows=texts.windows, ignore=ignore or [], cache_dir=cache_dir
    )
    seconds = time.monotonic() - started
    found = dict(before=before, after=_measured(str(place), cache_dir, amp, texts), tokens=len(texts.measured))
    _show(output, chosen, written, texts, found, seconds, as_json)


def _texts(
    source: str, cache_dir: str | None, calibration: str | None, measured: str | None, samples: int, length: int | None
) -> Texts:
    """Read and split the texts. Raises InputError if one is too short."""
    attributes = load_config(source, cache_dir)
    positions = attributes.get("max_position_embeddings") or attributes.get("n_positions") or LONGEST
    length = length or min(LONGEST, positions)
    if calibration is None and measured is None:
        return Texts([], [], length)
    tokenizer = o.tokenizer_of(source, cache_dir)
    calibrating = _tokens(tokenizer, calibration) if calibration else []
    measuring = _tokens(tokenizer, measured) if measured else []
    if calibration and not measured:
        cut = len(calibrating) - len(calibrating) // HELD_OUT
        calibrating, measuring = calibrating[:cut], calibrating[cut:]
    count = len(calibrating) // length
    if calibration and not count:
        raise InputError(
            f"{calibration} has {len(calibrating)} tokens to calibrate with, expected a window of {length} or more; "
            "take a longer text, or a smaller --sequence-length"
        )
    chosen = sorted({number * count // samples for number in range(samples)} if samples < count else range(count))
    return Texts([calibrating[each * length :][:length] for each in chosen], measuring, length)


def _tokens(tokenizer: Any, path: str) -> list[int]:
    file = files.want_file(Path(path).expanduser(), "with text")
    text = encodable(file.read_bytes().decode("utf-8", "surrogateescape"), path)
    ids: list[int] = tokenizer(text, verbose=False).input_ids
    if len(ids) < 2:
        raise InputError(f"{path}: expected a text of 2 tokens or more, got {len(ids)}; take a longer one")
    return ids


def _unsupported(path: str, cache_dir: str | None) -> str:
    """Return why a model cannot run here; empty if it can."""
    try:
        o.Source(path, cache_dir)
    except CheckpointError as error:
        return str(error)
    return ""


def _measured(path: str, cache_dir: str | None, amp: str | None, texts: Texts) -> float | None:
    """Return a model's perplexity, if there is a text to measure it on."""
    if not texts.measured:
        return None
    sizes: dict[str, Any] = dict(n_positions=[texts.length], context_length_estimate=texts.length)
    model = o.Source(path, cache_dir).open(o.How(amp, None, None, False, None), **sizes)
    model.to_neuron()
    return perplexity_of(model, texts.measured, texts.length)


def _show(
    output: str, scheme: Scheme, written: Written, texts: Texts, found: dict[str, Any], seconds: float, as_json: bool
) -> None:
    if as_json:
        facts = dict(output=output, scheme=scheme.name, group_size=scheme.group, windows=len(texts.windows))
        sizes = dict(matrices=written.matrices, bytes_before=written.bytes_before, bytes=written.bytes)
        typer.echo(json.dumps(facts | sizes | dict(perplexity=found, seconds=seconds)))
        return
    grouped = f", groups of {scheme.group}" if scheme.group else ""
    typer.echo(f"{written.matrices} matrices   {scheme.name}{grouped}, {_method(texts.windows)}")
    typer.echo(f"weights       {written.bytes_before / 1e6:,.2f} MB, now {written.bytes / 1e6:,.2f} MB")
    if found["before"] is not None:
        before, after = found["before"], found["after"]
        rise = f"{100 * after / before - 100:+.2f} %"
        typer.echo(f"perplexity    {before:.3f}, now {after:.3f} ({rise}), {found['tokens']:,} tokens")
    typer.echo(f"saved to {output} in {seconds:.1f} s")


def _method(windows: Sequence[Sequence[int]]) -> str:
    if not windows:
        return "rounded to nearest"
    return f"GPTQ with {len(windows)} windows of {len(windows[0])} tokens"
