"""From the fields of a request to the parameters of the engine."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from transformers_neuronx.errors import GrammarError, InputError
from transformers_neuronx.server.errors import ApiError
from transformers_neuronx.server.fields import Chat, Completion, Sampled
from transformers_neuronx.server.tools import Tools
from transformers_neuronx.serving.request import SamplingParams
from transformers_neuronx.serving.structured import StructuredOutputs, closed

# Fields that SamplingParams have under the same name, unless they are null.
SAME = (
    "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "seed",
    "min_tokens", "ignore_eos", "stop_token_ids", "include_stop_str_in_output", "skip_special_tokens", "priority",
    "cache_salt", "n",
)  # fmt: skip
LONGEST_ID = 20  # digits
COMPLETION_TOKENS = 16  # of an answer to /v1/completions, as OpenAI has it


def params_of(
    asked: Completion | Chat, length: int, longest: int, defaults: Mapping[str, Any], tools: Tools | None = None
) -> SamplingParams:
    """Return the parameters of a request whose prompt has this length, of at most `longest` tokens with its answer.
    Null fields have the `defaults`.

    Raises ApiError for what the engine refuses.
    """
    given = dict(defaults) | {name: value for name in SAME if (value := getattr(asked, name)) is not None}
    if given.get("top_k") == -1:  # vLLM's way to say "all tokens"
        given["top_k"] = 0
    if asked.logit_bias:
        given["logit_bias"] = {_token(name): bias for name, bias in asked.logit_bias.items()}
    if asked.stop is not None:
        stop = [asked.stop] if isinstance(asked.stop, str) else asked.stop
        given["stop"] = [each for each in stop if each]
    given |= _logprobs(asked)
    if tools:
        given["skip_special_tokens"] = False  # a call may begin with one
    try:
        outputs = _outputs(asked)
        given["structured_outputs"] = tools.outputs(outputs) if tools else outputs
        return SamplingParams(max_tokens=_most(asked, length, longest), **given)
    except GrammarError as error:
        raise no_grammar(asked, error) from error
    except InputError as error:
        raise ApiError(400, str(error), param=str(error).split(" ")[0]) from error


def _most(asked: Sampled, length: int, longest: int) -> int:
    """Return the most tokens that are generated: of a chat by default all that there is room for."""
    room, limit = longest - length, f"this model's maximum context length is {longest}"
    name, most = "max_tokens", asked.max_tokens
    if isinstance(asked, Chat) and asked.max_completion_tokens:
        name, most = "max_completion_tokens", asked.max_completion_tokens
    if room < 1:
        # Clients of several libraries know what is wrong by these words alone.
        message = f"the prompt is too long: it has {length} tokens, and {limit}"
        raise ApiError(400, message, code="context_length_exceeded")
    if most and most > room:
        message = f"{name} must be at most {room} after this prompt, got {most}: {limit}"
        raise ApiError(400, message, param=name, code="context_length_exceeded")
    return most or (room if isinstance(asked, Chat) else min(COMPLETION_TOKENS, room))


def _outputs(asked: Sampled) -> StructuredOutputs | None:
    """Return what the text must be, if the request says it."""
    how, asked_for = asked.response_format, asked.structured_outputs
    if how and how.type != "text" and asked_for:
        raise ApiError(400, "response_format and structured_outputs cannot both be given", param="response_format")
    if asked_for:
        return asked_for
    if how is None or how.type == "text":
        return None
    if how.type == "json_object":
        return StructuredOutputs(json_object=True)
    if how.json_schema is None:
        raise ApiError(400, "response_format must have a json_schema", param="response_format")
    schema = how.json_schema.schema
    return StructuredOutputs(json=closed(schema) if how.json_schema.strict else schema)


def no_grammar(asked: Sampled, error: GrammarError) -> ApiError:
    """Return what a client is told of a grammar that cannot be followed."""
    names = ("structured_outputs", "response_format", "tools")
    return ApiError(400, str(error), param=next((name for name in names if getattr(asked, name, None)), None))


def _token(name: str) -> int:
    if not name.isdecimal() or len(name) > LONGEST_ID:
        raise ApiError(400, f"logit_bias must have token ids as keys, got {name[:50]!r}", param="logit_bias")
    return int(name)


def _logprobs(asked: Completion | Chat) -> dict[str, int]:
    """Return how many likeliest tokens are kept for each token, if any."""
    if isinstance(asked, Completion):
        if asked.logprobs is None:
            return {}
        return dict(logprobs=asked.logprobs) | (dict(prompt_logprobs=asked.logprobs) if asked.echo else {})
    if asked.top_logprobs and not asked.logprobs:
        raise ApiError(400, "top_logprobs needs logprobs: true", param="top_logprobs")
    return dict(logprobs=asked.top_logprobs or 0) if asked.logprobs else {}
