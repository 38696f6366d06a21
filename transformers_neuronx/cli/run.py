"""`run`: complete a file of prompts into a file of results. A run that was stopped can be continued."""

from __future__ import annotations

import json
import re
from collections.abc import Generator, Sequence
from contextlib import closing
from dataclasses import replace
from itertools import islice
from typing import Annotated, Any

import typer

from transformers_neuronx.cli import nodes as n, options as o, sampling as s
from transformers_neuronx.cli.engines import Ask, engine_for_job, has_pages, in_order, open_for_engine
from transformers_neuronx.cli.prompts import Place, Prompt, printable, read_prompts
from transformers_neuronx.cli.results import Results
from transformers_neuronx.cli.text import room
from transformers_neuronx.errors import CheckpointError, ConfigError, EngineError
from transformers_neuronx.models.sampling import ForSampling
from transformers_neuronx.serving.handles import Handle
from transformers_neuronx.serving.request import SamplingParams
from transformers_neuronx.support.progress import bar

GREEDY = 1  # top-k, unless the checkpoint sets one
SEPARATOR = "-" * 20
SOME_FAILED = 3  # exit status if some lines could not be used
Records = Generator[dict[str, Any], None, None]

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
AtOnce = Annotated[
    int | None,
    o.option("--batch-size", help="Most prompts that run at once; 16 by default.", panel=o.HOW, least=1),
]
OneOf = Annotated[
    str | None, o.option("--shard", help="Complete every n-th prompt only: i/n, from 1/n to n/n, each to its own file.")
]
Restart = Annotated[bool, o.option("--restart", help="Discard earlier results and start over.")]


def run(
    data_dir: Data, model: o.MaybeModel = None, model_name_or_path: o.NameOrPath = None,
    config_name: o.ConfigName = None, checkpoint_name: o.CheckpointName = None, adapter: o.Adapter = None,
    cache_dir: o.CacheDir = None,
    output: Output = "predictions.jsonl", examples_to_generate: Examples = 20, max_tokens_to_generate: Tokens = 20,
    max_seq_length: Length = -1, shard: OneOf = None, restart: Restart = False,
    top_k: TopK = None, top_p: s.TopP = None, temperature: s.Temperature = None, min_p: s.MinP = None,
    repetition_penalty: s.Penalty = None, seed: o.Seed = 0,
    batch_size: AtOnce = None,
    amp: o.Amp = None, tp: o.Degree = None, quant: o.Quant = None, rounded: o.Rounded = False,
    runtime: o.Runtime = None, expert_parallel: o.Experts = False,
    processes: n.Processes = False, nnodes: n.Nodes = 1, node_rank: n.NodeRank = 0,
    master_addr: n.Address = None, master_port: n.Port = n.PORT,
    as_json: o.Json = False,
) -> None:  # fmt: skip
    """Complete the prompts of a file.

    Each result is a line of JSON, in the order of the prompts. After Ctrl-C or a crash, the same command continues.
    """
    others = n.workers(tp, processes, nnodes, node_rank, master_addr, master_port)
    source = o.Source(o.one_of(model, model_name_or_path, config_name), cache_dir, adapter)
    mine = _shard(shard)
    job = Job(_first(data_dir, examples_to_generate, output), mine, source, max_tokens_to_generate, batch_size)
    sizes = source.fitting(job.longest, job.count, max_seq_length)
    how = o.How(amp, tp, quant, rounded, runtime, others, expert_parallel)
    rules = s.SamplingOptions(top_k, top_p, temperature, min_p, repetition_penalty).rules(source, GREEDY, seed or 0)
    compiled = job.fitting(open_for_engine(source, how, batch_size, sizes, weights=checkpoint_name))
    made = dict(model=source.path, weights=checkpoint_name, data=data_dir, tokens=job.count, rules=rules)
    made |= o.said(shard=shard, adapter=adapter)
    with Results.at(output, made | compiled.description, restart) as results:
        job.complete(compiled, results, rules)
    raise typer.Exit(job.show(results, output, as_json))


def _shard(text: str | None) -> slice:
    """Return which prompts a shard i/n has."""
    match = re.fullmatch(r"([1-9][0-9]*)/([1-9][0-9]*)", text or "1/1")
    if match is None or int(match[1]) > int(match[2]):
        raise ConfigError(f"--shard must be i/n, from 1/n to n/n, got {text!r}")
    return slice(int(match[1]) - 1, None, int(match[2]))


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
    """A shard of prompts, and up to `count` tokens to generate for each with the model of a `source`.

    At most `at_once` prompts run at once, by default as many as `engines` says.
    """

    def __init__(
        self, prompts: list[Prompt], mine: slice, source: o.Source, count: int, at_once: int | None = None
    ) -> None:
        self.prompts = prompts[mine]
        self._numbers = {prompt.place: number for number, prompt in enumerate(prompts)}
        self.tokenizer = source.tokenizer()
        self.vocabulary = source.config.vocab_size
        self.count, self.at_once = count, at_once
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
        """Compute missing results, and write each as soon as it and all before it are there."""
        for prompt in self.prompts:
            results.check(prompt)
        for prompt in self.bad:
            typer.echo(f"{printable(prompt.file)}, line {prompt.line}: {prompt.error}", err=True)
        missing = [prompt for prompt in self.prompts if prompt.place not in results.done]
        if any(prompt.error is None for prompt in missing):
            model.to_neuron(ahead=not has_pages(model))
            way = self._by_engine
        else:
            way = self._without_model
        shown = bar("prompts", len(self.prompts), len(self.prompts) - len(missing))
        with shown, closing(way(model, missing, rules)) as made:
            for record in made:
                results.add(record)
                shown.update()

    def _without_model(self, model: ForSampling, missing: list[Prompt], rules: dict[str, Any]) -> Records:
        yield from map(self._record, missing)

    def _by_engine(self, model: ForSampling, missing: list[Prompt], rules: dict[str, Any]) -> Records:
        """Let an engine answer. Prompts take each other's place as they end, and share what they begin with."""
        most = room(model, self.count)

        def asked(prompt: Prompt) -> Ask | None:
            if prompt.error is not None:
                return None
            own = rules | dict(seed=rules["seed"] + self._numbers[prompt.place])
            return self._fed(prompt, most), SamplingParams(max_tokens=self.count, **own)

        with engine_for_job(model, len(self.ids), self.at_once) as engine:
            requests = ((prompt, asked(prompt)) for prompt in missing)
            for prompt, handle in in_order(engine, requests, engine.scheduler.limits.waiting):
                yield self._record(prompt, most, _tokens(prompt, handle))

    def _record(self, prompt: Prompt, most: int = 0, ids: Sequence[int] = ()) -> dict[str, Any]:
        """Return the result of a prompt, cut to `most` tokens and continued with `ids`; or a bad one's error."""
        told: dict[str, Any] = dict(file=prompt.file, line=prompt.line)
        if prompt.error is not None:
            return told | dict(error=prompt.error)
        completion = self.tokenizer.decode(ids, skip_special_tokens=True)
        length = len(self.ids[prompt.place])
        cut = dict(truncated=True) if length > most else {}
        made = dict(prompt=prompt.text, completion=completion, prompt_tokens=min(length, most), new_tokens=len(ids))
        return told | made | cut

    def _fed(self, prompt: Prompt, most: int) -> list[int]:
        """Return at most `most` tokens of a prompt."""
        ids = self.ids[prompt.place]
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


def _tokens(prompt: Prompt, handle: Handle | None) -> list[int]:
    """Return the tokens of a request that has ended. An EngineError names the prompt."""
    try:
        return handle.result() if handle else []
    except EngineError as error:
        raise EngineError(f"{printable(prompt.file)}, line {prompt.line}: {error}") from error
