"""`run`: complete a file of prompts into a file of results. A run that was stopped can be continued."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from typing import Annotated, Any

import typer

from transformers_neuronx.cli import options as o, sampling as s
from transformers_neuronx.cli.prompts import Place, Prompt, printable, read_prompts
from transformers_neuronx.cli.results import Results
from transformers_neuronx.cli.text import complete, room
from transformers_neuronx.errors import CheckpointError, ConfigError
from transformers_neuronx.models.sampling import ForSampling
from transformers_neuronx.support.progress import bar

GREEDY = 1  # top-k, unless the checkpoint sets one
SEPARATOR = "-" * 20
SOME_FAILED = 3  # exit status if some lines could not be used

Data = Annotated[str, o.option("--data-dir", help='A .json or .jsonl file, or a folder: objects with a "prompt".')]
Output = Annotated[str, o.option("--output", "-o", help="File to write the results to.", default=True)]
Examples = Annotated[int, o.option("--examples-to-generate", help="Most prompts to complete.", default=True, least=1)]
TopK = Annotated[int | None, s.option("--top-k", help=s.TOP_K, otherwise=GREEDY, least=0)]
Tokens = Annotated[
    int, o.option("--max-tokens-to-generate", help="Most tokens to generate for each.", default=True, least=1)
]
Length = Annotated[
    int,
    o.option(
        "--max-seq-length",
        help="Prompt and new tokens together; longer prompts are cut. -1: as long as needed.",
        least=1,
        also=-1,
    ),
]
Restart = Annotated[bool, o.option("--restart", help="Discard earlier results and start over.")]


def run(
    data_dir: Data,
    model: o.MaybeModel = None,
    model_name_or_path: o.NameOrPath = None,
    config_name: o.ConfigName = None,
    checkpoint_name: o.CheckpointName = None,
    cache_dir: o.CacheDir = None,
    output: Output = "predictions.jsonl",
    examples_to_generate: Examples = 20,
    max_tokens_to_generate: Tokens = 20,
    max_seq_length: Length = -1,
    restart: Restart = False,
    top_k: TopK = None,
    top_p: s.TopP = None,
    temperature: s.Temperature = None,
    min_p: s.MinP = None,
    repetition_penalty: s.Penalty = None,
    seed: o.Seed = 0,
    batch_size: o.Batch = None,
    amp: o.Amp = None,
    tp: o.Degree = None,
    quant: o.Quant = None,
    rounded: o.Rounded = False,
    runtime: o.Runtime = None,
    as_json: o.Json = False,
) -> None:
    """Complete the prompts of a file.

    Each result is a line of JSON. After Ctrl-C or a crash, the same command continues.
    """
    source = o.Source(o.one_of(model, model_name_or_path, config_name), cache_dir)
    job = Job(_first(data_dir, examples_to_generate, output), source, max_tokens_to_generate)
    sizes = source.fitting(job.longest, job.count, max_seq_length)
    how = o.How(amp, tp, quant, rounded, runtime)
    rules = s.SamplingOptions(top_k, top_p, temperature, min_p, repetition_penalty).rules(source, GREEDY, seed or 0)
    compiled = job.fitting(source.open(how, weights=checkpoint_name, batch_size=batch_size, **sizes))
    made = dict(model=source.path, weights=checkpoint_name, data=data_dir, tokens=job.count, rules=rules)
    with Results.at(output, made | compiled.description, restart) as results:
        job.complete(compiled, results, rules)
    raise typer.Exit(job.show(results, output, as_json))


def _first(data_dir: str, count: int, output: str) -> list[Prompt]:
    """Return the first `count` prompts, and report on standard error if there are more."""
    found = read_prompts(data_dir, output)
    prompts = list(islice(found, count))
    if not prompts:
        raise CheckpointError(f'{data_dir} has no prompts: expected objects with "prompt", one per line')
    if next(found, None):
        typer.echo(f"only the first {count} prompts are read: --examples-to-generate sets how many", err=True)
    return prompts


class Job:
    """Prompts, and up to `count` tokens to generate for each with the model of a `source`."""

    def __init__(self, prompts: list[Prompt], source: o.Source, count: int) -> None:
        self.prompts = prompts
        self.tokenizer = source.tokenizer()
        self.vocabulary = source.config.vocab_size
        self.count = count
        self.ids: dict[Place, list[int]] = {}
        for number, prompt in enumerate(self.prompts):
            if prompt.error is None:
                try:
                    self.ids[prompt.place] = self._ids(prompt.text)
                except ValueError as error:
                    self.prompts[number] = replace(prompt, error=str(error))

    def _ids(self, text: str) -> list[int]:
        """Return the tokens of a prompt. A ValueError says why it has none."""
        try:
            ids: list[int] = self.tokenizer(text).input_ids
        except Exception as error:  # a tokenizer may raise anything, and only this prompt fails
            raise ValueError(f"the tokenizer cannot encode it: {printable(str(error))[:200]}") from error
        if not ids:
            raise ValueError("the prompt is empty")
        if max(ids) >= self.vocabulary:
            raise ValueError(f"the tokenizer gives token {max(ids)}, and the model has {self.vocabulary} tokens")
        return ids

    @property
    def longest(self) -> int:
        return max(map(len, self.ids.values()), default=1)

    @property
    def bad(self) -> list[Prompt]:
        return [prompt for prompt in self.prompts if prompt.error is not None]

    def fitting(self, model: ForSampling) -> ForSampling:
        """Return the model, before it is compiled. Raises ConfigError if new tokens leave no room for prompts."""
        longest = model.options.buckets.longest
        if room(model, self.count) < 1:
            raise ConfigError(f"{self.count} new tokens leave no room for a prompt in {longest}")
        if self.count >= longest:
            raise ConfigError(f"{self.count} new tokens are more than the {longest - 1} that the model can generate")
        return model

    def complete(self, model: ForSampling, results: Results, rules: dict[str, Any]) -> None:
        """Compute missing results group by group. Groups are always the same, so that results are, too."""
        for prompt in self.prompts:
            results.check(prompt)
        for prompt in self.bad:
            typer.echo(f"{printable(prompt.file)}, line {prompt.line}: {prompt.error}", err=True)
        missing = [group for group in self._groups(model) if any(each.place not in results.done for each in group)]
        if any(prompt.error is None for group in missing for prompt in group):
            model.to_neuron()
        done = len(self.prompts) - sum(map(len, missing))
        with bar("prompts", len(self.prompts), done) as shown:
            for group in missing:
                results.add(list(self._completed(model, group, rules)))
                shown.update(len(group))

    def _groups(self, model: ForSampling) -> Iterator[list[Prompt]]:
        """Yield batches of prompts, in order, each with the bad lines between its prompts."""
        group: list[Prompt] = []
        for prompt in self.prompts:
            if sum(each.error is None for each in group) == model.options.batch_size:
                yield group
                group = []
            group.append(prompt)
        if group:
            yield group

    def _completed(self, model: ForSampling, group: list[Prompt], rules: dict[str, Any]) -> Iterator[dict[str, Any]]:
        most = room(model, self.count)
        rows = {each.place: self._cut(self.ids[each.place], most) for each in group if each.error is None}
        first = self.prompts.index(group[0])
        seeds = [rules["seed"] + number for number, each in enumerate(group, first) if each.error is None]
        made = complete(model, list(rows.values()), self.count, **rules | dict(seed=seeds)) if rows else []
        new = dict(zip(rows, made, strict=True))
        for prompt in group:
            told: dict[str, Any] = dict(file=prompt.file, line=prompt.line)
            if prompt.error is not None:
                yield told | dict(error=prompt.error)
                continue
            ids, row = new[prompt.place], rows[prompt.place]
            completion = self.tokenizer.decode(ids, skip_special_tokens=True)
            cut = dict(truncated=True) if len(row) < len(self.ids[prompt.place]) else {}
            yield (
                told
                | dict(prompt=prompt.text, completion=completion, prompt_tokens=len(row), new_tokens=len(ids))
                | cut
            )

    def _cut(self, ids: list[int], most: int) -> list[int]:
        return ids[-most:] if self.tokenizer.truncation_side == "left" else ids[:most]

    def show(self, results: Results, output: str, as_json: bool) -> int:
        """Print all results, or a summary as JSON. Returns the exit status."""
        records = [results.done[prompt.place] for prompt in self.prompts]
        good = [record for record in records if "error" not in record]
        if as_json:
            tokens = sum(record["new_tokens"] for record in good)
            typer.echo(json.dumps(dict(output=output, results=len(good), bad=len(self.bad), new_tokens=tokens)))
        else:
            texts = [record["prompt"] + record["completion"] for record in good]
            typer.echo(f"\n{SEPARATOR}\n".join(texts))
        return SOME_FAILED if self.bad else 0
