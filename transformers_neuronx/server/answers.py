"""Answers: what handles say, as one response or as a stream of events, in the forms of completions and chats."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from secrets import token_hex
from typing import Any, ClassVar

import msgspec

from transformers_neuronx.errors import EngineError
from transformers_neuronx.server.calls import CallPart, CallReader
from transformers_neuronx.server.errors import api_error
from transformers_neuronx.server.fields import Chat, Completion, Sampled
from transformers_neuronx.server.prompts import Prompts
from transformers_neuronx.server.tools import Tools
from transformers_neuronx.serving.handles import Handle, changes
from transformers_neuronx.serving.request import Logprob

QUIET = 15.0  # seconds without an event, after which a comment keeps the connection open
DONE = b"data: [DONE]\n\n"
Scored = tuple[int, Logprob | None]  # a token with its log-probability; the first of a prompt has none


def event(data: Any) -> bytes:
    """Return an event of a stream, with data as JSON."""
    return b"data: " + msgspec.json.encode(data) + b"\n\n"


@dataclass
class Piece:
    """What is new of a choice: text, tokens, their log-probabilities, if these are wanted, and parts of calls."""

    text: str
    tokens: list[int]
    scored: list[Scored] | None
    calls: Sequence[CallPart] = ()


@dataclass
class Choice:
    """One of the sequences of an answer, and how much of it was told. `before` is text that it repeats first, and
    `reader` finds calls of tools in it, if there are some.
    """

    index: int
    handle: Handle
    before: str = ""
    reader: CallReader | None = None
    characters: int = 0
    told: int = 0
    ended: bool = False
    offset: int = 0  # of the next token in the text, for log-probabilities

    def news(self, scores: bool) -> Piece | None:
        """Return what was not told yet; None if nothing is."""
        self.ended = self.handle.finish_reason is not None  # first: after the end nothing changes
        tokens, text = self.handle.tokens[self.told :], self.handle.text[self.characters :]
        # There may be text without tokens: an engine takes over a token, and then what it shows.
        if not (tokens or text or (self.ended and self.reader)):
            return None
        scored = self._scored(tokens) if scores else None
        begun = self.before if self.told == 0 else ""
        self.told += len(tokens)
        self.characters += len(text)
        shown, calls = self.reader.add(text, self.ended) if self.reader else (text, [])
        return Piece(begun + shown, tokens, scored, calls)

    def _scored(self, tokens: Sequence[int]) -> list[Scored]:
        handle = self.handle
        prompt = zip(handle.request.tokens, handle.prompt_logprobs, strict=False) if self.told == 0 else ()
        return [*prompt, *zip(tokens, handle.logprobs[self.told :], strict=False)]


class Answer(ABC):
    """An answer to one request: its choices, in the order of their numbers."""

    kind: ClassVar[str]  # of the response
    chunk: ClassVar[str]  # of an event
    prefix: ClassVar[str]  # of its id

    def __init__(self, asked: Sampled, model: str, prompts: Prompts, handles: Sequence[Handle], scores: bool) -> None:
        self.asked, self.prompts, self.scores = asked, prompts, scores
        self.handles = handles  # the first of each prompt
        numbered = enumerate(choice for handle in handles for choice in handle.choices)
        self.choices = [Choice(number, handle, self.before(handle), self.reader()) for number, handle in numbered]
        self.about = dict(id=f"{self.prefix}-{token_hex(12)}", created=int(time.time()), model=model)

    def before(self, handle: Handle) -> str:
        """Return the text that a choice repeats before its own."""
        return ""

    def reader(self) -> CallReader | None:
        """Return what finds calls of tools in the text of a choice."""
        return None

    def opening(self, choice: Choice) -> Mapping[str, Any] | None:
        """Return what a stream tells of a choice before any text."""
        return None

    @abstractmethod
    def part(self, choice: Choice, piece: Piece | None, reason: str | None) -> dict[str, Any]:
        """Return a choice in an event: what is new of it, or why it ended."""

    @abstractmethod
    def whole(self, choice: Choice, piece: Piece) -> dict[str, Any]:
        """Return a choice in a response."""

    def reason(self, choice: Choice) -> str | None:
        """Return why a choice ended."""
        return choice.handle.finish_reason

    def cancel(self) -> None:
        """End all choices now."""
        for choice in self.choices:
            choice.handle.cancel()

    def usage(self) -> dict[str, Any]:
        """Return the numbers of tokens. An end token counts; those after a stop string do not."""
        prompt = sum(handle.usage.prompt_tokens for handle in self.handles)
        made = sum(choice.handle.usage.completion_tokens for choice in self.choices)
        cached = dict(cached_tokens=sum(handle.usage.cached_tokens for handle in self.handles))
        totals = dict(prompt_tokens=prompt, completion_tokens=made, total_tokens=prompt + made)
        return totals | dict(prompt_tokens_details=cached)

    async def response(self) -> bytes:
        """Wait for all choices, and return the response. Raises EngineError if one failed."""
        async for _ in changes([choice.handle for choice in self.choices]):
            pass
        told = []
        for choice in self.choices:
            choice.handle.result()  # raises its error
            told.append(self.whole(choice, choice.news(self.scores) or Piece("", [], [])))
            if self.asked.return_token_ids:
                told[-1]["token_ids"] = choice.handle.tokens
        return msgspec.json.encode(dict(self.about, object=self.kind, choices=told, usage=self.usage()))

    async def events(self) -> AsyncIterator[bytes]:
        """Yield the events of a stream: for each choice its text, then why it ended; then the usage; then the end."""
        options = self.asked.stream_options
        always = bool(options and options.continuous_usage_stats)
        for choice in self.choices:
            if (first := self.opening(choice)) is not None:
                yield self._event([first], always)
        running = list(self.choices)
        async for changed in changes([choice.handle for choice in self.choices], QUIET):
            if not changed:
                yield b": nothing new\n\n"
                continue
            try:
                for choice in running:
                    for part in self._parts(choice):
                        yield self._event([part], always)
            except EngineError as error:
                yield event(api_error(error).body)
                return
            running = [choice for choice in running if not choice.ended]
        if options and options.include_usage:
            yield self._event([], usage=True)
        yield DONE

    def _parts(self, choice: Choice) -> Iterator[Mapping[str, Any]]:
        piece = choice.news(self.scores)
        if piece and (piece.text or piece.calls or piece.scored or self.asked.return_token_ids):
            part = self.part(choice, piece, None)
            if self.asked.return_token_ids:
                part["token_ids"] = piece.tokens
            yield part
        if choice.ended:
            choice.handle.result()  # raises its error
            yield self.part(choice, None, self.reason(choice))

    def _event(self, choices: Sequence[Mapping[str, Any]], usage: bool) -> bytes:
        told = dict(self.about, object=self.chunk, choices=choices)
        return event(told | dict(usage=self.usage()) if usage else told)


class CompletionAnswer(Answer):
    """An answer to /v1/completions."""

    kind = chunk = "text_completion"
    prefix = "cmpl"
    asked: Completion

    def before(self, handle: Handle) -> str:
        request = handle.request
        return self.prompts.shown(request.tokens[: request.prompt_length]) if self.asked.echo else ""

    def part(self, choice: Choice, piece: Piece | None, reason: str | None) -> dict[str, Any]:
        scored = self._logprobs(choice, piece.scored) if piece and piece.scored else None
        return dict(index=choice.index, text=piece.text if piece else "", logprobs=scored, finish_reason=reason)

    def whole(self, choice: Choice, piece: Piece) -> dict[str, Any]:
        return self.part(choice, piece, self.reason(choice))

    def _logprobs(self, choice: Choice, scored: Sequence[Scored]) -> dict[str, list[Any]]:
        """Return parallel lists. The likeliest tokens have the chosen one among them."""
        found: dict[str, list[Any]] = dict(tokens=[], token_logprobs=[], top_logprobs=[], text_offset=[])
        name = self.prompts.text_of_token
        for token, score in scored:
            text = name(token)
            likeliest = None
            if score:
                own, others = score
                likeliest = {name(each): value for each, value in others.items()} | {text: own}
            row = text, score and score[0], likeliest, choice.offset
            choice.offset += len(text)
            for column, value in zip(found.values(), row, strict=True):
                column.append(value)
        return found


class ChatAnswer(Answer):
    """An answer to /v1/chat/completions."""

    kind, chunk = "chat.completion", "chat.completion.chunk"
    prefix = "chatcmpl"

    def __init__(
        self, asked: Chat, model: str, prompts: Prompts, handles: Sequence[Handle], tools: Tools | None
    ) -> None:
        self.tools = tools
        super().__init__(asked, model, prompts, handles, bool(asked.logprobs))

    def reader(self) -> CallReader | None:
        return self.tools.reader() if self.tools else None

    def reason(self, choice: Choice) -> str | None:
        reason = super().reason(choice)
        called = choice.reader and choice.reader.calls and self.tools and not self.tools.named
        return "tool_calls" if called and reason == "stop" else reason

    def opening(self, choice: Choice) -> Mapping[str, Any]:
        delta = dict(role="assistant", content="")
        return dict(index=choice.index, delta=delta, logprobs=None, finish_reason=None)

    def part(self, choice: Choice, piece: Piece | None, reason: str | None) -> dict[str, Any]:
        delta: dict[str, Any] = dict(content=piece.text) if piece and (piece.text or not piece.calls) else {}
        if piece and piece.calls:
            delta["tool_calls"] = [part.told() for part in piece.calls]
        scored = self._logprobs(piece.scored) if piece and piece.scored else None
        return dict(index=choice.index, delta=delta, logprobs=scored, finish_reason=reason)

    def whole(self, choice: Choice, piece: Piece) -> dict[str, Any]:
        message: dict[str, Any] = dict(role="assistant", content=piece.text, refusal=None)
        if choice.reader and choice.reader.calls:
            message |= dict(content=piece.text or None, tool_calls=[call.told() for call in choice.reader.calls])
        scored = self._logprobs(piece.scored) if piece.scored else None
        return dict(index=choice.index, message=message, logprobs=scored, finish_reason=self.reason(choice))

    def _logprobs(self, scored: Sequence[Scored]) -> dict[str, Any]:
        def told(token: int, logprob: float) -> dict[str, Any]:
            text, data = self.prompts.text_of_token(token), self.prompts.bytes_of_token(token)
            return dict(token=text, logprob=logprob, bytes=list(data))

        content = []
        for token, score in scored:
            if score:
                likeliest = [told(*each) for each in score[1].items()]
                content.append(told(token, score[0]) | dict(top_logprobs=likeliest))
        return dict(content=content, refusal=None)
