"""`check`: compare a model with another, token by token and layer by layer."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from typing import Annotated, Any, Self

import numpy as np
import typer

from transformers_neuronx.analysis.comparison import compare
from transformers_neuronx.cli import options as o
from transformers_neuronx.cli.text import encodable
from transformers_neuronx.config import QuantizationConfig
from transformers_neuronx.errors import CheckpointError, ConfigError, InputError
from transformers_neuronx.models.sampling import ForSampling
from transformers_neuronx.pyhlo.dtypes import to_torch
from transformers_neuronx.support.files import explain
from transformers_neuronx.weights.directories import is_multimodal, resolve

NONE = "none"
RANDOM = 64  # tokens, if no text is given
SETTINGS = dict(amp="amp", tp="tp_degree", quant="neuron_config", runtime="neuron_config")  # options they set

Text = Annotated[
    str | None,
    typer.Argument(metavar="TEXT", help=f"Text to compare on; by default {RANDOM} random tokens.", show_default=False),
]
Against = Annotated[
    list[str] | None,
    o.option(
        "--against",
        help="The reference: hf (Transformers in f32, the default), another MODEL, or settings that differ: amp=f32, "
        "tp=2, quant=s8 or none, runtime=cuda; may be repeated.",
    ),
]
New = Annotated[
    int, o.option("--max-new-tokens", "-n", help="Tokens that the reference generates.", default=True, least=0)
]
Tolerance = Annotated[
    float | None,
    o.option(
        "--tolerance",
        help="Largest allowed error, relative to the largest logit; by default what rounding explains.",
        least=0,
    ),
]


def check(
    model: o.Model,
    text: Text = None,
    against: Against = None,
    max_new_tokens: New = 32,
    tolerance: Tolerance = None,
    cache_dir: o.CacheDir = None,
    amp: o.Amp = None,
    tp: o.Degree = None,
    quant: o.Quant = None,
    rounded: o.Rounded = False,
    runtime: o.Runtime = None,
    as_json: o.Json = False,
) -> None:
    """Compare a model with Transformers, or with another model.

    Shows how much the logits differ, and which layers and weights are to blame.
    Both models read the text and the tokens that the reference generates. Each
    layer gets the reference's input, so that its error is its own. Small errors
    are easiest to find in f32.

    Exit status: 0 if the models agree, 4 if logits or a layer differ by more
    than the tolerance, or if a weight differs.
    """
    source, other = o.Source(model, cache_dir), Other.of(against or [])
    _refuse(source, other)
    tokenizer = _tokenizer(source, wanted=text is not None)
    ids = None if text is None else tokenizer(encodable(text, "TEXT")).input_ids
    compiled = _fitting(source, o.How(amp, tp, quant, rounded, runtime), ids, max_new_tokens)
    reference = other.open(source, compiled)
    compiled.to_neuron()
    random = np.random.default_rng(0).integers(0, compiled.config.vocab_size, RANDOM)
    found = compare(compiled, reference, random if ids is None else ids, max_new_tokens, tolerance)
    shown = str if tokenizer is None else lambda token: repr(tokenizer.decode([token]) or token)
    typer.echo(json.dumps(found.as_dict()) if as_json else found.text(shown))
    if not found.agree:
        raise typer.Exit(o.NO)


def _refuse(source: o.Source, other: Other) -> None:
    if source.cls.family.encoder:
        raise CheckpointError("check needs a model without an encoder")
    if source.is_artifact and other.hf and other.path is None:
        wanted = "add --against PATH with its checkpoint or another model"
        raise ConfigError(f"{source.path} is an artifact, which Transformers cannot read: {wanted}")


def _fitting(source: o.Source, how: o.How, ids: list[int] | None, new: int) -> ForSampling:
    """Return the model, not on a device yet, with room for the text."""
    count = RANDOM if ids is None else len(ids)
    model = source.open(how, tag=source.path, **source.fitting(count, new))
    if count > (longest := model.options.buckets.longest) - new:
        raise InputError(f"the model takes {longest} tokens, got {count} and {new} new ones")
    return model


def _tokenizer(source: o.Source, wanted: bool) -> Any:
    """Return the model's tokenizer. If it has none, raise an error if one is needed, or return None."""
    with nullcontext() if wanted else suppress(CheckpointError):
        return source.tokenizer()


@dataclass(frozen=True)
class Other:
    """The reference, as given by the values of --against."""

    hf: bool
    path: str | None
    settings: dict[str, str]

    @classmethod
    def of(cls, words: Sequence[str]) -> Self:
        hf, paths = not words, []
        settings: dict[str, str] = {}
        for word in words:
            named = dict(part.partition("=")[::2] for part in word.split(",")) if "=" in word else {}
            if named and named.keys() <= SETTINGS.keys():
                settings |= named
            elif word == "hf":
                hf = True
            elif "=" in word and not os.path.exists(word):
                wanted = ", ".join(f"{name}=" for name in SETTINGS)
                raise typer.BadParameter(f"--against must be hf, a model, or some of {wanted}, got {word!r}")
            else:
                paths.append(word)
        if len(paths) > 1:
            raise typer.BadParameter(f"--against takes one other model, got {', '.join(paths)}")
        if hf and settings.keys() - {"amp"}:
            raise typer.BadParameter("--against hf is Transformers, which takes no setting but amp")
        return cls(hf, paths[0] if paths else None, settings)

    def open(self, source: o.Source, model: ForSampling) -> Any:
        """Return a model ready to run, with the settings of `model` unless others are given."""
        other = source if self.path is None else o.Source(self.path, source.cache_dir)
        return self._transformers(other) if self.hf else self._ours(other, model)

    def _transformers(self, source: o.Source) -> Any:
        from transformers import AutoModelForCausalLM, AutoModelForImageTextToText  # takes seconds
        from transformers.utils import logging

        if not sys.stderr.isatty():
            logging.disable_progress_bar()  # type: ignore[no-untyped-call]
        amp = self.settings.get("amp", "f32")
        if amp not in o.DTYPES.values():
            raise ConfigError(f"--against amp must be one of {', '.join(o.DTYPES.values())}, got {amp!r}")
        directory = resolve(source.path, source.cache_dir)
        with explain(f"{source.path}: Transformers cannot load it"):
            kind: Any = AutoModelForImageTextToText if is_multimodal(directory) else AutoModelForCausalLM
            return kind.from_pretrained(directory, dtype=to_torch(amp))

    def _ours(self, source: o.Source, model: ForSampling) -> ForSampling:
        said, switches, buckets = self.settings, model.switches, model.options.buckets
        if "quant" in said:
            switches = replace(switches, quant=None if said["quant"] == NONE else QuantizationConfig(said["quant"]))
        options: dict[str, Any] = dict(
            amp=said.get("amp", model.options.amp),
            tp_degree=_whole(said["tp"]) if "tp" in said else model.options.tp_degree,
            neuron_config=replace(switches, runtime=said.get("runtime", switches.runtime)),
        )
        if source.is_artifact:  # it has its own options, and rejects different ones
            options = {name: options[name] for name in {SETTINGS[name] for name in said}}
        else:
            options |= dict(n_positions=buckets.positions, context_length_estimate=buckets.context or 0)
        other = source.open(o.How(None, None, None, False, None), tag=source.path, **options)
        other.to_neuron()
        return other


def _whole(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise typer.BadParameter(f"--against tp= must be a whole number, got {text!r}") from None
