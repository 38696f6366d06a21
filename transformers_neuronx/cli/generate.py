"""`generate`: complete a prompt, or chat, and write tokens as they come."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from resource import RUSAGE_SELF, getrusage
from typing import Annotated, Any

import typer

from transformers_neuronx.cli import options as o, sampling as s
from transformers_neuronx.cli.text import complete, encodable, room
from transformers_neuronx.errors import CheckpointError, ConfigError, InputError, TransformersNeuronxError
from transformers_neuronx.models.sampling import ForSampling

DRAWN = 50  # top-k, unless the checkpoint sets one
CHAT = 2048  # tokens of a chat, unless the model takes fewer
LIMITED = {  # why not all new tokens fit, by whether the model is an artifact
    False: "the model takes {} tokens in all",
    True: "the artifact takes {} tokens in all; compile one with a larger --n-positions",
}

Prompt = Annotated[
    str | None,
    typer.Argument(metavar="PROMPT", help="Text to complete; standard input if not given.", show_default=False),
]
Chat = Annotated[bool, o.option("--chat", help="Chat, one message per line, with the tokenizer's chat template.")]
System = Annotated[str | None, o.option("--system", help="System message of the chat.")]
TopK = Annotated[int | None, s.option("--top-k", help=s.TOP_K, otherwise=DRAWN, least=0)]
Tokens = Annotated[int, o.option("--max-new-tokens", "-n", help="Most tokens to generate.", default=True, least=1)]


def generate(
    model: o.Model,
    prompt: Prompt = None,
    chat: Chat = False,
    system: System = None,
    max_new_tokens: Tokens = 128,
    top_k: TopK = None,
    top_p: s.TopP = None,
    temperature: s.Temperature = None,
    min_p: s.MinP = None,
    repetition_penalty: s.Penalty = None,
    seed: o.Seed = None,
    adapter: o.Adapter = None,
    cache_dir: o.CacheDir = None,
    amp: o.Amp = None,
    tp: o.Degree = None,
    quant: o.Quant = None,
    rounded: o.Rounded = False,
    runtime: o.Runtime = None,
    as_json: o.Json = False,
) -> None:
    """Complete a prompt, or chat."""
    source = o.Source(model, cache_dir, adapter)
    tokenizer = source.tokenizer()
    _check(chat, system, tokenizer)
    text = "" if chat else encodable(_text(prompt), "PROMPT")
    ids = [] if chat else tokenizer(text).input_ids
    sizes = source.fitting(max(CHAT - max_new_tokens, CHAT // 2) if chat else len(ids), max_new_tokens)
    rules = s.SamplingOptions(top_k, top_p, temperature, min_p, repetition_penalty).rules(source, DRAWN, seed)
    compiled = source.open(o.How(amp, tp, quant, rounded, runtime), **sizes)
    writer = Writer(compiled, tokenizer, max_new_tokens, as_json, rules, LIMITED[source.is_artifact])
    if not chat:
        writer.write(text, ids)
        return
    messages = [dict(role="system", content=encodable(system, "--system"))] if system else []
    with closing(writer):
        writer.chat(messages, prompt)


def _check(chat: bool, system: str | None, tokenizer: Any) -> None:
    if system is not None and not chat:
        raise ConfigError("--system needs --chat")
    if chat and not tokenizer.chat_template:
        raise CheckpointError("the tokenizer has no chat template; without --chat the model completes a prompt")


@dataclass
class Writer:
    """Writes completions as they are generated, and then how long they took."""

    model: ForSampling
    tokenizer: Any
    count: int
    as_json: bool
    rules: dict[str, Any]
    limited: str
    started: bool = False

    def start(self, ahead: bool | Sequence[int] = True) -> None:
        """Load the model onto its devices, once."""
        if not self.started:
            self.model.to_neuron(ahead)
            self.started = True

    def close(self) -> None:
        """Report how fast all answers were, and how much memory was used; nothing if there are none."""
        if not self.started:
            return
        metrics = self.model.metrics
        totals, held = metrics.totals, metrics.held
        if self.as_json or not totals.new_tokens:
            return
        rate = totals.new_tokens / (totals.first.total + totals.each.total)
        peak = getrusage(RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)  # kibibytes on Linux
        sizes = dict(weights=held.weights, cache=held.caches, peak=peak)
        memory = ", ".join(f"{what} {size / 2**20:,.0f} MiB" for what, size in sizes.items())
        typer.secho(f"[{totals.new_tokens} tokens in all, {rate:.0f} a second; {memory}]", err=True, dim=True)

    def chat(self, messages: list[dict[str, str]], prompt: str | None) -> None:
        """Answer the user's messages, after earlier ones."""
        if prompt is None and sys.stdin.isatty():
            self.start()  # before the first question
        for line in _lines(prompt):
            messages.append(dict(role="user", content=encodable(line, "a line")))
            messages.append(dict(role="assistant", content=self.answer(line, messages)))

    def answer(self, line: str, messages: list[dict[str, str]]) -> str:
        options: dict[str, Any] = dict(add_generation_prompt=True, tokenize=True, return_dict=True)
        ids = self.tokenizer.apply_chat_template(messages, **options)["input_ids"]
        if len(messages) > 2 and len(ids) > (takes := room(self.model, 1)):
            raise TransformersNeuronxError(
                f"the conversation has {len(ids)} tokens, and the model takes {takes}: start a new one"
            )
        return self.write(line, ids, hide=True)

    def write(self, prompt: str, ids: list[int], hide: bool = False) -> str:
        """Write and return the completion of `ids`, after the prompt itself unless `hide` is set."""
        takes = room(self.model, 1)
        if not 1 <= len(ids) <= takes:
            raise InputError(f"the prompt must have 1 to {takes} tokens, got {len(ids)}")
        reads = self.model.family.encoder is not None
        self.start([1 if reads else len(ids)])
        longest = self.model.options.buckets.longest
        count = min(self.count, longest - (1 if reads else len(ids)))
        if count < self.count:
            typer.echo(f"only {count} of {self.count} new tokens fit: {self.limited.format(longest)}", err=True)
        import torch
        from transformers import TextStreamer

        hidden = dict(skip_prompt=hide or reads, skip_special_tokens=True)
        streamer = None if self.as_json else TextStreamer(self.tokenizer, **hidden)
        if streamer is not None and not (hide or reads):
            streamer.put(torch.tensor([ids]))  # type: ignore[no-untyped-call]
        [new] = complete(self.model, [ids], count, streamer=streamer, **self.rules)
        completion: str = self.tokenizer.decode(new, skip_special_tokens=True)
        metrics = self.model.metrics
        if self.as_json:
            facts = dict(prompt=prompt, completion=completion, metrics=metrics.as_dict())
            typer.echo(json.dumps(facts, ensure_ascii=False))
        else:
            first, rate = (metrics.call.time_to_first_token or 0) * 1e3, metrics.tokens_per_second
            typer.secho(f"[{len(new)} tokens, {rate:.0f} a second, the first after {first:.0f} ms]", err=True, dim=True)
        return completion


def _text(prompt: str | None) -> str:
    """Return the prompt, or the text of standard input."""
    if prompt is None and sys.stdin.isatty():
        raise typer.BadParameter("expected a PROMPT, text on standard input, or --chat")
    return sys.stdin.read().removesuffix("\n") if prompt is None else prompt


def _lines(prompt: str | None) -> Iterator[str]:
    """Yield the user's messages: the prompt alone, or the lines of standard input."""
    if prompt is not None:
        yield prompt
    elif not sys.stdin.isatty():
        yield from (line.strip() for line in sys.stdin if line.strip())
    else:
        with suppress(EOFError):
            while True:
                if line := input("> ").strip():
                    yield line
