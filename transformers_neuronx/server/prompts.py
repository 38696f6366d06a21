"""Prompts: token ids of texts and chats, and what tokens look like."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from functools import cache, cached_property
from typing import Any

import msgspec
from jinja2 import TemplateError
from transformers.convert_slow_tokenizer import bytes_to_unicode

from transformers_neuronx.server.errors import ApiError
from transformers_neuronx.server.fields import Chat, Classify, Completion, Embeddings, Tokenize
from transformers_neuronx.server.pictures import Pictures
from transformers_neuronx.server.tool_formats import knows_tools, told_as_text

PAIR = ("query", "document")  # roles that templates of rerankers have, as Sentence Transformers calls them


class Prompts:
    """A model's tokenizer, one of Transformers', and what reads images, if it does.

    Making prompts may take long: a server does it in other threads.
    """

    def __init__(self, tokenizer: Any, pictures: Pictures | None = None) -> None:
        self.tokenizer, self._pictures = tokenizer, pictures
        self.reads_images = pictures is not None
        self.text_of_token = cache(self._text_of_token)

    def of_completion(self, asked: Completion) -> list[list[int]]:
        """Return the token ids of each prompt."""
        return self._several(asked.prompt, asked.add_special_tokens is not False, "prompt")

    def of_pair(self, first: str, second: str) -> list[int]:
        """Return the token ids of two texts, a query and a document.

        A chat template that knows these two roles makes a text of them. Otherwise the tokenizer joins them, which may
        be without anything between them.
        """
        template = getattr(self.tokenizer, "chat_template", None)
        if not isinstance(template, str) or not all(role in template for role in PAIR):
            return self.encoded(first, second=second)
        return self.encoded(self._of_pair(first, second, self._pair_content), special=False)

    def _of_pair(self, first: str, second: str, content: Callable[[str], Any]) -> str:
        messages = [dict(role=role, content=content(text)) for role, text in zip(PAIR, (first, second), strict=True)]
        return self._told(messages, "documents", add_generation_prompt=True)

    @cached_property
    def _pair_content(self) -> Callable[[str], Any]:
        """What the template reads as content of a message: text, or a list of parts. Raises ApiError for neither."""
        for content in (str, _as_part):
            text = self._of_pair("a7Qx", "z9Kw", content)
            if "a7Qx" in text and "z9Kw" in text:
                return content
        raise ApiError(400, "the chat template does not show the query and the document", param="documents")

    def of_embeddings(self, asked: Embeddings | Classify) -> list[list[int]]:
        """Return the token ids of each input."""
        return self._several(asked.input, asked.add_special_tokens is not False, "input")

    def _several(self, given: str | list[str | int | list[int]], special: bool, name: str) -> list[list[int]]:
        """Return the token ids of one text or of several, or those that are given."""
        if isinstance(given, str):
            return [self.encoded(given, special)]
        if given and all(isinstance(each, int) for each in given):
            return [[each for each in given if isinstance(each, int)]]
        found = [self.encoded(each, special) if isinstance(each, str) else each for each in given]
        if not found or any(isinstance(each, int) for each in found):
            raise ApiError(400, f"{name} must be text, token ids, or a list of either", param=name)
        return [each for each in found if not isinstance(each, int)]

    def template(self, tools: bool = False) -> str:
        """Return the tokenizer's template of chats, maybe one of its own for tools. Raises ApiError without one."""
        if not getattr(self.tokenizer, "chat_template", None):
            raise ApiError(400, "the model's tokenizer has no chat template: use /v1/completions", param="messages")
        found: str = self.tokenizer.get_chat_template(tools=[] if tools else None)
        return found

    @cached_property
    def special(self) -> dict[str, int]:
        """The ids of special tokens."""
        names = self.tokenizer.all_special_tokens
        return dict(zip(names, self.tokenizer.convert_tokens_to_ids(names), strict=True))

    def of_chat(self, asked: Chat | Tokenize, tools: bool = False) -> tuple[list[int], dict[str, Any]]:
        """Return the token ids of a chat, by the tokenizer's template, with or without the request's tools; and its
        images, as the model takes them.
        """
        urls: list[tuple[str, str]] = []  # of images, and where they are
        messages = [_plain(message, number, urls) for number, message in enumerate(asked.messages or ())]
        if urls and self._pictures is None:
            raise ApiError(400, f"{urls[0][1]}: this model reads no images", param=urls[0][1])
        if not messages:
            raise ApiError(400, "messages must have one message or more", param="messages")
        told = [msgspec.to_builtins(tool) for tool in asked.tools or ()] if tools else []
        template = self.template(tools)
        if not knows_tools(template) and (told or any(message.get("tool_calls") for message in messages)):
            if urls:
                raise ApiError(400, "the chat template knows no tools: a chat has images or tools", param="tools")
            messages, told = told_as_text(messages, told), []
        goes_on = bool(asked.continue_final_message)
        begins = not goes_on if asked.add_generation_prompt is None else asked.add_generation_prompt
        if begins and goes_on:
            message = "add_generation_prompt and continue_final_message cannot both be true"
            raise ApiError(400, message, param="continue_final_message")
        how = dict(tools=told or None, chat_template=template, continue_final_message=goes_on)
        how |= dict(add_generation_prompt=begins) | (asked.chat_template_kwargs or {})
        ids = self.encoded(self._told(messages, "messages", **how), special=False)
        if self._pictures is None or not urls:
            return ids, {}
        images = self._pictures.read(urls)
        return self._pictures.expanded(ids, images["image_grid_thw"]), images

    def _told(self, messages: Sequence[Mapping[str, Any]], param: str, **how: Any) -> str:
        """Return the text of messages by a template. Raises ApiError if it refuses them."""
        try:
            text: str = self.tokenizer.apply_chat_template(messages, tokenize=False, **how)
        except (TemplateError, TypeError, ValueError, LookupError, AttributeError, RecursionError) as error:
            raise ApiError(400, f"the chat template refuses these messages: {error}", param=param) from error
        return text

    def encoded(self, text: str, special: bool = True, second: str | None = None) -> list[int]:
        """Return the token ids of a text, or of two, by default with those that a sequence begins or ends with."""
        try:
            ids: list[int] = self.tokenizer(text, second, add_special_tokens=special).input_ids
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
        """Return the text of a token that follows another one: at the beginning, some tokenizers leave out a space."""
        letter, before = self._letter
        both = self.decoded([*letter, token])
        return both.removeprefix(before) if both.startswith(before) else self.decoded([token])

    @cached_property
    def _letter(self) -> tuple[list[int], str]:
        """A token that ends with a letter, if the tokenizer has one, and its text."""
        token = self.encoded("a", special=False)[-1:]
        return token, self.decoded(token)

    def bytes_of_token(self, token: int) -> bytes:
        """Return the bytes of a token, which may be a part of a character."""
        text = self.text_of_token(token)
        if "\N{REPLACEMENT CHARACTER}" not in text:
            return text.encode()
        piece = self.tokenizer.convert_ids_to_tokens(token)
        if named := re.fullmatch("<0x([0-9A-F]{2})>", piece):
            return bytes.fromhex(named[1])
        known = {character: byte for byte, character in bytes_to_unicode().items()}  # type: ignore[no-untyped-call]
        return bytes(known[each] for each in piece) if known.keys() >= set(piece) else text.encode()

    def facts(self) -> Mapping[str, Any]:
        """Return what a client must know to make prompts itself."""
        names = ("bos_token", "eos_token", "pad_token", "unk_token", "chat_template")
        return {name: getattr(self.tokenizer, name, None) for name in names}


def _as_part(text: str) -> list[dict[str, str]]:
    return [dict(type="text", text=text)]


def _plain(message: Mapping[str, Any], number: int, urls: list[tuple[str, str]]) -> dict[str, Any]:
    """Return a message as templates know it: its content is one text, or with images, a list of parts.

    The URLs of images are added to `urls`, with where they are.
    """
    where = f"messages[{number}]"
    if not isinstance(message.get("role"), str):
        raise ApiError(400, f"{where} must have a role", param=where)
    content = message.get("content")
    plain = dict(message) | _with_arguments(message, where)
    if content is None or isinstance(content, str):
        return plain | dict(content=content or "")
    if not isinstance(content, list):
        raise ApiError(400, f"{where}.content must be text, or a list of parts", param=where)
    before = len(urls)
    parts = [_part(part, f"{where}.content[{place}]", urls) for place, part in enumerate(content)]
    return plain | dict(content=parts if len(urls) > before else "".join(part["text"] for part in parts))


def _part(part: Any, where: str, urls: list[tuple[str, str]]) -> dict[str, str]:
    """Return a part of a message: text, or the place of an image, whose URL is added to `urls`."""
    kind = part.get("type") if isinstance(part, dict) else None
    given = part.get(kind) if kind in ("text", "image_url") else None
    url = given.get("url") if isinstance(given, dict) else given
    if kind == "text" and isinstance(given, str):
        return dict(type="text", text=given)
    if kind == "image_url" and isinstance(url, str):
        urls.append((url, f"{where}.image_url"))
        return dict(type="image")
    raise ApiError(400, f"{where} must be of type text or image_url, with what it is", param=where)


def _with_arguments(message: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return the calls of a message with arguments as templates read them, not as JSON."""
    if not message.get("tool_calls"):
        return {}
    try:
        calls = [dict(call, function=dict(call["function"])) for call in message["tool_calls"]]
        for call in calls:
            given = call["function"].get("arguments")
            call["function"]["arguments"] = json.loads(given or "{}") if isinstance(given, str | None) else given
    except (TypeError, KeyError, ValueError, RecursionError) as error:
        raise ApiError(400, f"{where}.tool_calls must be functions whose arguments are JSON", param=where) from error
    return dict(tool_calls=calls)
