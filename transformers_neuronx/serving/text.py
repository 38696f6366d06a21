"""The text of a request's tokens as they come, and the strings that end it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from transformers_neuronx.errors import InputError


class TextStream:
    """Text of tokens that follow a prompt.

    `shown` is the text that is certain: without the bytes of an incomplete character, and without what may become one
    of the strings `stop`. Such a string ends the text, which does not have it unless `keeps_stop`. Special tokens have
    no text, unless `shows_special`.

    Raises InputError for a tokenizer that is not one of the `tokenizers` package.
    """

    def __init__(
        self, tokenizer: Any, prompt: Sequence[int], stop: Sequence[str] = (), keeps_stop: bool = False,
        shows_special: bool = False,
    ) -> None:  # fmt: skip
        if not hasattr(tokenizer, "backend_tokenizer"):
            raise InputError(f"text needs a fast tokenizer, got {type(tokenizer).__name__}: load it with use_fast=True")
        self._decoder: Tokenizer = tokenizer.backend_tokenizer
        self._stop, self._keeps_stop, self._skips = stop, keeps_stop, not shows_special
        self._stream = DecodeStream(ids=list(prompt), skip_special_tokens=self._skips)
        self._pending: list[int] = []  # tokens that gave no text yet
        self._text = self.shown = ""

    def add(self, token: int, may_stop: bool = True) -> bool:
        """Add a token. Return whether one of the strings is complete now; never, if not `may_stop`."""
        self._pending.append(token)
        if (piece := self._piece(token)) is None:
            return False
        self._pending.clear()
        return self._grow(piece, may_stop)

    def _piece(self, token: int) -> str | None:
        """Return the text that a token completes, or None if it ends within a character."""
        try:
            return self._stream.step(self._decoder, token)
        except Exception as error:  # tokenizers has no class of its own for it
            if "Invalid prefix" not in str(error):
                raise
        # Where pieces may be bytes, one that fits no character makes earlier bytes invalid, too, which were shown as
        # characters. These stay, and the text goes on with the pieces after them.
        self._stream = DecodeStream(ids=list(self._pending), skip_special_tokens=self._skips)
        return self._decoded()

    def finish(self) -> None:
        """Show all text, also that of an incomplete character."""
        if self._pending:
            self._text += self._decoded()
            self._pending.clear()
        self.shown = self._text

    def _decoded(self) -> str:
        return self._decoder.decode(self._pending, skip_special_tokens=self._skips)

    def _grow(self, piece: str, may_stop: bool) -> bool:
        before = len(self._text)
        self._text += piece
        found = [
            (place + len(stop), place)
            for stop in self._stop
            if may_stop and (place := self._text.find(stop, max(0, before - len(stop) + 1))) >= 0
        ]
        if found:
            end, place = min(found)
            self._text = self._text[: end if self._keeps_stop else place]
            self.shown = self._text
            return True
        self.shown = self._text[: len(self._text) - max((begun(self._text, stop) for stop in self._stop), default=0)]
        return False


def begun(text: str, stop: str) -> int:
    """Return how many characters at the end of the text are the beginning of `stop`."""
    return next((count for count in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:count])), 0)
