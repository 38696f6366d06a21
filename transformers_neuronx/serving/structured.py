"""Structured outputs: requests whose text must follow a grammar, such as JSON by a schema.

llguidance says which tokens may come next; the devices leave out the others when they choose. It comes with the extra
`serve`, and is imported when the first such request is submitted.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import lru_cache
from typing import Any

import numpy as np

from transformers_neuronx.errors import ConfigError, GrammarError

Array = np.ndarray[Any, Any]
KEPT = 256  # grammars, of those that were used last
VALUES = {"const", "enum", "default", "examples"}  # of a schema: what they have is no schema
NAMED = {"properties", "patternProperties", "$defs", "definitions"}
OTHERS = {"additionalProperties", "patternProperties", "unevaluatedProperties"}
FUEL = 200_000  # for the lexer of a grammar: a fifth of a second, at most
# Space between the parts of JSON. Without an end to it, a model may write nothing else.
SPACE = r"( |\n[ \t]{0,12})?"


@dataclass(frozen=True)
class StructuredOutputs:
    """What the text of an answer must be. One of these must be given:

    - `json`: JSON that is valid by this schema, a mapping or its text.
    - `json_object`: True for any JSON object.
    - `regex`: text that this regular expression matches from its beginning to its end.
    - `choice`: one of these texts.
    - `grammar`: text that this grammar describes, in the dialect of Lark that llguidance reads.

    Raises GrammarError for none of them, or several.
    """

    json: Mapping[str, Any] | str | None = None
    json_object: bool | None = None
    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | None = None

    def __post_init__(self) -> None:
        values = {each.name: getattr(self, each.name) for each in fields(self)}
        given = [name for name, value in values.items() if value or value == {}]
        if len(given) != 1:
            names = ", ".join(each.name for each in fields(self))
            raise GrammarError(f"structured_outputs must have one of {names}, got {', '.join(given) or 'none'}")
        if isinstance(self.choice, str) or not all(isinstance(each, str) and each for each in self.choice or ()):
            raise GrammarError(f"choice must be a list of texts that are not empty, got {self.choice!r}")

    def source(self) -> str:
        """Return the grammar as llguidance reads it. Raises GrammarError for a schema that is no JSON object."""
        from llguidance import LLMatcher

        if self.regex is not None:
            return LLMatcher.grammar_from_regex(self.regex.removeprefix("^").removesuffix("$"))
        if self.choice:
            return LLMatcher.grammar_from_lark("start: " + " | ".join(map(json.dumps, self.choice)))
        if self.grammar is not None:
            return LLMatcher.grammar_from_lark(self.grammar)
        return LLMatcher.grammar_from_json_schema(_spaced(self.schema() or {}))

    def schema(self) -> Mapping[str, Any] | None:
        """Return the schema of JSON, None for another text. Raises GrammarError if it is no JSON object."""
        if self.json_object:
            return dict(type="object")
        if self.json is None or isinstance(self.json, Mapping):
            return self.json
        try:
            schema = json.loads(self.json)
        except (ValueError, RecursionError) as error:
            raise GrammarError(f"the schema must be a JSON object: {error}") from error
        if not isinstance(schema, dict):
            raise GrammarError(f"the schema must be a JSON object, got {type(schema).__name__}")
        return schema


def json_rule(schema: Mapping[str, Any]) -> str:
    """Return JSON by this schema as a part of a rule in a grammar."""
    return f"%json {_spaced(schema)}"


def _spaced(schema: Mapping[str, Any]) -> str:
    """Return a schema as text, with how much space may be in JSON. Its other options for llguidance stay."""
    try:
        options = dict(schema.get("x-guidance", {})) | dict(whitespace_pattern=SPACE)
        return json.dumps(dict(schema) | {"x-guidance": options})
    except (ValueError, TypeError, RecursionError) as error:
        raise GrammarError(f"the schema must be a JSON object: {error}") from error


def closed(schema: Any) -> Any:
    """Return a schema whose objects have the properties that it names and no others, as OpenAI's strict schemas do.

    What says itself which others there may be stays as it is, and so does a schema that joins several by `allOf`.
    """
    return schema if '"allOf"' in json.dumps(schema) else _closed(schema)


def _closed(schema: Any) -> Any:
    if isinstance(schema, list):
        return [_closed(each) for each in schema]
    if not isinstance(schema, Mapping):
        return schema
    found = {name: _closed_in(name, value) for name, value in schema.items()}
    open_ = isinstance(found.get("properties"), dict) and not found.keys() & OTHERS
    return found | dict(additionalProperties=False) if open_ else found


def _closed_in(name: str, value: Any) -> Any:
    """Return what a keyword of a schema has, with schemas closed: some have values, and some schemas by name."""
    if name in VALUES:
        return value
    if name in NAMED and isinstance(value, Mapping):
        return {each: _closed(schema) for each, schema in value.items()}
    return _closed(value)


class Parser:
    """Follows the tokens of one sequence, and says which may come next."""

    def __init__(self, matcher: Any, row: Array) -> None:
        self._matcher, self._row = matcher, row

    def add(self, token: int) -> bool:
        """Take the next token. Return whether the text is complete, so that nothing can follow."""
        self._matcher.consume_token(token)
        return bool(self._matcher.is_stopped() and not self._matcher.is_error())

    def fill(self, allowed: Array, after: Sequence[int]) -> None:
        """Write which tokens may come after some more: a bit for each, s32[·], the lowest one first.

        If these can never come themselves, all may. Raises GrammarError if the grammar has become too complex.
        """
        from llguidance.numpy import fill_next_token_bitmask

        taken = self._matcher.try_consume_tokens(list(after)) if after else 0
        if taken == len(after) and not (after and self._matcher.is_stopped()):
            fill_next_token_bitmask(self._matcher, self._row, 0)
            allowed[:] = self._row[0, : len(allowed)]
        if taken:
            self._matcher.rollback(taken)
        if self._matcher.is_error():
            raise GrammarError(_told(self._matcher))


class Grammars:
    """Makes parsers for a tokenizer of Transformers, for a model with so many tokens and these end tokens."""

    def __init__(self, tokenizer: Any, vocab: int, ends: Collection[int]) -> None:
        try:
            from llguidance.hf import from_tokenizer
            from llguidance.numpy import allocate_token_bitmask
        except ModuleNotFoundError as error:
            needed = f'structured outputs need {error.name}: pip install "transformers-neuronx[serve]"'
            raise ConfigError(needed) from error
        self._tokenizer = from_tokenizer(tokenizer, max(vocab, len(tokenizer)), sorted(ends) or None)
        self._row = allocate_token_bitmask(1, self._tokenizer.vocab_size)
        self._compiled = lru_cache(KEPT)(self._compile)
        self._lock = threading.Lock()

    def parsers(self, outputs: StructuredOutputs, count: int) -> list[Parser]:
        """Return parsers for so many sequences. Raises GrammarError for a grammar that cannot be followed."""
        source = outputs.source()
        with self._lock:
            matcher = self._compiled(source)
            return [Parser(matcher.deep_copy(), self._row) for _ in range(count)]

    def _compile(self, source: str) -> Any:
        from llguidance import LLMatcher, LLParserLimits
        from llguidance.numpy import fill_next_token_bitmask

        limits = LLParserLimits(initial_lexer_fuel=FUEL, verbose_errors=False)
        matcher = LLMatcher(self._tokenizer, source, log_level=0, limits=limits)
        if not matcher.is_error():  # the first mask takes longest, and shows what the grammar cannot do
            fill_next_token_bitmask(matcher, self._row.copy(), 0)
        if matcher.is_error():
            raise GrammarError(f"the grammar cannot be followed: {_told(matcher)}")
        return matcher


def _told(matcher: Any) -> str:
    """Return what is wrong, without llguidance's mark that its state is left out."""
    error: str = matcher.get_error()
    return error.replace("<non-verbose/>", "").strip()
