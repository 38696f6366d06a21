"""Sampling settings: from options, or else from the checkpoint's generation_config.json."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Annotated, Any

import typer

from transformers_neuronx.cli import options as o
from transformers_neuronx.cli.prompts import printable
from transformers_neuronx.engine.rules import Rules
from transformers_neuronx.errors import CheckpointError, InputError

# Transformers' defaults for what a generation_config.json does not set: when sampling, and when greedy.
DRAWN = dict(top_k=50, top_p=1.0, temperature=1.0, min_p=0.0, repetition_penalty=1.0)
GREEDY = DRAWN | dict(top_k=1)
# Other settings that change the tokens in Transformers, unless they are None, False, 0, 1 or an empty list.
UNHEARD = """
    num_beams num_beam_groups penalty_alpha typical_p epsilon_cutoff eta_cutoff top_h no_repeat_ngram_size
    encoder_no_repeat_ngram_size encoder_repetition_penalty exponential_decay_length_penalty bad_words_ids
    suppress_tokens begin_suppress_tokens forced_bos_token_id forced_eos_token_id sequence_bias guidance_scale
    min_length min_new_tokens stop_strings force_words_ids constraints dola_layers watermarking_config
""".split()

TOP_K = "Sample from this many most likely tokens; 1 is greedy, 0 is all."


def option(*names: str, help: str, otherwise: float, least: float | None = None) -> Any:  # noqa: A002
    """Return a sampling option; `otherwise` is its default if the checkpoint sets none."""
    return o.option(*names, help=help, panel=o.CHOICE, default=f"the checkpoint's, or {otherwise}", least=least)


TopP = Annotated[
    float | None, option("--top-p", help="Of those, keep the fewest whose probabilities reach this sum.", otherwise=1.0)
]
MinP = Annotated[
    float | None,
    option("--min-p", help="Drop tokens below this fraction of the highest probability.", otherwise=0.0),
]
Temperature = Annotated[float | None, option("--temperature", help="Divide the logits by this.", otherwise=1.0)]
Penalty = Annotated[
    float | None,
    option("--repetition-penalty", help="Divide the logits of tokens already in the text by this.", otherwise=1.0),
]


@dataclass(frozen=True)
class SamplingOptions:
    """Sampling options of a command; None if not given."""

    top_k: int | None
    top_p: float | None
    temperature: float | None
    min_p: float | None
    repetition_penalty: float | None

    def rules(self, source: o.Source, otherwise: int, seed: int | None) -> dict[str, Any]:
        """Return keywords of `sample`; `otherwise` is the top-k if neither options nor the checkpoint set anything.

        An InputError is about an option, a CheckpointError about a setting of the checkpoint that no option overrides.
        """
        given = {name: value for name, value in asdict(self).items() if value is not None}
        found = _defaults(source.generation, given.get("top_k"))
        found = found or DRAWN | dict(top_k=otherwise)
        _check(source.path, {name: value for name, value in found.items() if name not in given})
        rules = found | given
        Rules(**rules, seed=seed)
        _tell(source.generation, rules, given)
        return dict(**rules, seed=seed)


def _defaults(generation: dict[str, Any], top_k: int | None) -> dict[str, Any]:
    """Return its sampling settings as Transformers reads them; empty if it has none.

    Without `do_sample` the choice is greedy, whatever else is set, unless an option gives another `top_k`.
    """
    said = {name: generation[name] for name in DRAWN if generation.get(name) is not None}
    samples = generation.get("do_sample")
    if samples is None and not said:
        return {}
    if samples is True or top_k not in (None, 1):
        return DRAWN | said
    return GREEDY | {name: value for name, value in said.items() if name == "repetition_penalty"}


def _check(path: str, found: dict[str, Any]) -> None:
    try:
        if lists := [name for name, value in found.items() if isinstance(value, list)]:
            raise InputError(f"{lists[0]} must be one number, got {found[lists[0]]}")
        Rules(**found)
    except InputError as error:
        advice = "an option of that name overrides it"
        raise CheckpointError(f"{path}, generation_config.json: {error}; {advice}") from error


def _tell(generation: dict[str, Any], rules: dict[str, Any], given: dict[str, Any]) -> None:
    """Report on standard error which settings have no effect."""
    if unheard := [
        f"{name}={generation[name]}" for name in UNHEARD if generation.get(name) not in (None, False, 1, [])
    ]:
        told = printable(", ".join(unheard))[:200]
        typer.echo(f"generation_config.json also has {told}, which this command ignores", err=True)
    if rules["top_k"] == 1 and (idle := given.keys() & {"top_p", "temperature", "min_p"}):
        names = ", ".join(f"--{name.replace('_', '-')}" for name in sorted(idle))
        typer.echo(f"{names}: no effect, as the choice is greedy; --top-k 50 would sample", err=True)
