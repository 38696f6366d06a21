"""Prompts: token ids of texts and chats, and what tokens look like."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

from jinja2 import TemplateError

from transformers_neuronx.server.errors import ApiError
from transformers_neuronx.server.fields import Chat, Completion, Tokenize


class Prompts:
    """A model's tokenizer, one of Transformers'. Making prompts may take long: a server does it in other threads."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.text_of_token = cache(self._text_of_token)

    def of_completion(self, asked: Completion) -> list[list[int]]:
        """Return the token ids of each prompt."""
        given, special = asked.prompt, asked.add_special_tokens is not False
        if isinstance(given, str):
            return [self.encoded(given, special)]
        if given and all(isinstance(each, int) for each in given):
            return [[each for each in given if isinstance(each, int)]]
        found = [self.encoded(each, special) if isinstance(each, str) else each for each in given]
        if not found or any(isinstance(each, int) for each in found):
            raise ApiError(400, "prompt must be text, token ids, or a list of either", param="prompt")
        return [each for each in found if not isinstance(each, int)]

    def of_chat(self, asked: Chat | Tokenize) -> list[int]:
        """Return the token ids of a chat, by the tokenizer's template."""
        messages = [_plain(message, number) for number, message in enumerate(asked.messages or ())]
        if not messages:
            raise ApiError(400, "messages must have one message or more", param="messages")
        if not getattr(self.tokenizer, "chat_template", None):
            raise ApiError(400, "the model's tokenizer has no chat template: use /v1/completions", param="messages")
        goes_on = bool(asked.continue_final_message)
        begins = not goes_on if asked.add_generation_prompt is None else asked.add_generation_prompt
        if begins and goes_on:
            message = "add_generation_prompt and continue_final_message cannot both be true"
            raise ApiError(400, message, param="continue_final_message")
        try:
            text = self.tokenizer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=begins, continue_final_message=goes_on,
                **asked.chat_template_kwargs or {},
            )  # fmt: skip
        except (TemplateError, TypeError, ValueError, KeyError, AttributeError, IndexError) as error:
            raise ApiError(400, f"the chat template refuses these messages: {error}", param="messages") from error
        return self.encoded(text, special=False)

    def encoded(self, text: str, special: bool = True) -> list[int]:
        """Return the token ids of a text, by default with those that a sequence begins or ends with."""
        try:
            ids: list[int] = self.tokenizer(text, add_special_tokens=special).input_ids
        except Exception as error:  # a tokenizer may raise anything
            raise ApiError(400, f"the tokenizer cannot encode this text: {error}", param="prompt") from error
        return ids

    def decoded(self, ids: Sequence[int]) -> str:
        """Return the text of token ids."""
        text: str = self.tokenizer.decode(ids, skip_special_tokens=False)
        return text

    def shown(self, ids: Sequence[int]) -> str:
        """Return the text of token ids as an answer shows it, without special tokens."""
        text: str = self.tokenizer.decode(ids, skip_special_tokens=True)
        return text

    def _text_of_token(self, token: int) -> str:
        return self.decoded([token])

    def facts(self) -> Mapping[str, Any]:
        """Return what a client must know to make prompts itself."""
        names = ("bos_token", "eos_token", "pad_token", "unk_token", "chat_template")
        return {name: getattr(self.tokenizer, name, None) for name in names}


def _plain(message: Mapping[str, Any], number: int) -> dict[str, Any]:
    """Return a message with its content as one text, which is all that most templates know."""
    where = f"messages[{number}]"
    if not isinstance(message.get("role"), str):
        raise ApiError(400, f"{where} must have a role", param=where)
    content = message.get("content")
    if content is None or isinstance(content, str):
        return dict(message) | dict(content=content or "")
    if not isinstance(content, list):
        raise ApiError(400, f"{where}.content must be text, or a list of parts", param=where)
    texts = []
    for part in content:
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise ApiError(400, f"{where}.content may only have parts of type text", param=where)
        texts.append(part["text"])
    return dict(message) | dict(content="".join(texts))
