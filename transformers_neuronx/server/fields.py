"""The bodies of requests: their fields, as OpenAI's and vLLM's clients send them."""

from __future__ import annotations

import logging
import re
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta, Struct

from transformers_neuronx.server.errors import ApiError
from transformers_neuronx.serving.structured import StructuredOutputs

_LOG = logging.getLogger(__name__)
_told: set[str] = set()  # unknown fields that were logged

Count = Annotated[int, Meta(ge=1)]
Positive = Annotated[int, Meta(ge=0)]
Likeliest = Annotated[int, Meta(ge=0, le=20)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]
Share = Annotated[float, Meta(ge=0, le=1)]
Seed = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]


class StreamOptions(Struct):
    """When a stream tells the numbers of tokens: at its end, or in each chunk."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class JsonSchema(Struct):
    """A schema with its name."""

    schema: dict[str, Any]
    name: str | None = None
    strict: bool | None = None


class ResponseFormat(Struct):
    """What the text of an answer must be."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class Function(Struct, omit_defaults=True):
    """A function that a chat model may call: its parameters are a JSON schema of an object."""

    name: Annotated[str, Meta(pattern=r"^[\w.-]{1,64}$")]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Struct):
    """A tool of a chat model."""

    type: Literal["function"]
    function: Function


class Sampled(Struct, kw_only=True):
    """Fields of all requests that generate. Those that OpenAI does not have are vLLM's."""

    model: str | None = None
    max_tokens: Count | None = None
    temperature: Annotated[float, Meta(ge=0)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    n: Count | None = None
    stop: str | list[str] | None = None
    seed: Seed | None = None
    logit_bias: dict[str, Annotated[float, Meta(ge=-100, le=100)]] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = None
    top_k: Annotated[int, Meta(ge=-1, le=2**31 - 1)] | None = None
    min_p: Share | None = None
    repetition_penalty: Annotated[float, Meta(ge=0.01, le=100)] | None = None
    min_tokens: Positive | None = None
    ignore_eos: bool | None = None
    stop_token_ids: list[Positive] | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    add_special_tokens: bool | None = None
    return_token_ids: bool | None = None
    priority: int | None = None
    cache_salt: str | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None


class Completion(Sampled, kw_only=True):
    """The body of /v1/completions. A prompt is text or token ids; there may be several of them."""

    prompt: str | list[str | int | list[Positive]]
    echo: bool | None = None
    logprobs: Likeliest | None = None


class Chat(Sampled, kw_only=True):
    """The body of /v1/chat/completions."""

    messages: list[dict[str, Any]]
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: Likeliest | None = None
    tools: list[Tool] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class Embeddings(Struct, kw_only=True):
    """The body of /v1/embeddings. An input is text or token ids; there may be several of them."""

    input: str | list[str | int | list[Positive]]
    model: str | None = None
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Count | None = None
    user: str | None = None
    add_special_tokens: bool | None = None
    priority: int | None = None
    cache_salt: str | None = None


class Judging(Struct, kw_only=True):
    """Fields of all requests to a score head. Without `use_activation`, numbers are those of the head: no softmax."""

    model: str | None = None
    use_activation: bool | None = None
    user: str | None = None
    priority: int | None = None
    cache_salt: str | None = None


class Classify(Judging, kw_only=True):
    """The body of /classify. An input is text or token ids; there may be several of them."""

    input: str | list[str | int | list[Positive]]
    add_special_tokens: bool | None = None


class Score(Judging, kw_only=True):
    """The body of /score: pairs of texts. One text on a side is paired with each on the other."""

    text_1: str | list[str]
    text_2: str | list[str]


class Rerank(Judging, kw_only=True):
    """The body of /rerank: a query, and documents to bring into order."""

    query: str
    documents: list[str]
    top_n: Count | None = None
    return_documents: bool | None = None


class Tokenize(Struct, kw_only=True):
    """The body of /tokenize: text, or messages of a chat."""

    model: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    tools: list[Tool] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class Detokenize(Struct, kw_only=True):
    """The body of /detokenize."""

    tokens: list[Positive]
    model: str | None = None


class LoadAdapter(Struct, kw_only=True):
    """The body of /v1/load_lora_adapter: a name for requests, and a directory of the server. Names are vLLM's."""

    lora_name: Annotated[str, Meta(min_length=1, max_length=256)]
    lora_path: str
    model: str | None = None


class UnloadAdapter(Struct, kw_only=True):
    """The body of /v1/unload_lora_adapter."""

    lora_name: str
    model: str | None = None


Fields = TypeVar("Fields", bound=Struct)

# Fields that OpenAI or vLLM knows and this server does not. With a value that changes something, ignoring them would
# answer another question.
REFUSED = (
    "audio", "best_of", "function_call", "functions", "guided_choice", "guided_grammar", "guided_json", "guided_regex",
    "length_penalty", "lora_request", "prediction", "prompt_embeds", "suffix", "truncate_prompt_tokens",
    "use_beam_search", "web_search_options",
)  # fmt: skip
DEEPEST = 200  # levels of a body
ONE_CHANGES_NOTHING = ("best_of", "length_penalty")


def _deeper(value: Any, most: int) -> bool:
    """Return whether JSON has more levels, which code that recurses could not read."""
    level = [value]
    for _ in range(most):
        nested = [each for each in level if isinstance(each, dict | list)]
        level = [inner for each in nested for inner in (each.values() if isinstance(each, dict) else each)]
        if not level:
            return False
    return True


def fields_of(kind: type[Fields], body: bytes) -> Fields:
    """Read a body. Unknown fields are logged, once each. Raises ApiError, which names the field."""
    try:
        given = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ApiError(400, f"the body must be JSON: {error}") from error
    if not isinstance(given, dict):
        raise ApiError(400, f"the body must be a JSON object, got {type(given).__name__}")
    if _deeper(given, DEEPEST):
        raise ApiError(400, f"the body must have at most {DEEPEST} levels")
    unknown = given.keys() - {each.encode_name for each in msgspec.structs.fields(kind)}
    for name in sorted(unknown):
        if name in REFUSED and given[name] and not (name in ONE_CHANGES_NOTHING and given[name] == 1):
            raise ApiError(400, f"{name} is not supported", param=name, code="unsupported_parameter")
        if name not in _told and len(_told) < 100:
            _told.add(name)
            _LOG.warning("requests have a field that this server does not know, and ignores: %r", name[:100])
    try:
        return msgspec.convert(given, kind)
    except msgspec.ValidationError as error:
        what, _, place = str(error).partition(" - at `$")
        name = re.match(r"\.(\w+)", place)
        missing = re.match(r"Object missing required field `(\w+)`", what)
        param = name[1] if name else missing[1] if missing else None
        raise ApiError(400, f"{place.strip('.`') or 'the body'}: {what}", param=param) from error
