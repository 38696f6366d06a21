"""What LiteLLM has of servers at two addresses: `litellm_client.py URL BUSY PROMPT OTHER_PROMPT`, printed as JSON.

The busy one answers only requests that are sent again. The other one is asked what is wrong.
"""

import asyncio
import json
import sys

import litellm
from litellm import acompletion, completion, text_completion

litellm.suppress_debug_info = True  # or it prints advice about errors


def chats(chat):
    """Answers of a chat: whole and as streams, each also in an event loop."""

    async def later():
        answer = await acompletion(**chat)
        return text(answer), [text(part) async for part in await acompletion(stream=True, **chat)]

    answer = completion(**chat)
    *parts, last = completion(stream=True, stream_options=dict(include_usage=True), **chat)
    later_answer, later_parts = asyncio.run(later())
    return dict(
        answer=text(answer),
        reason=answer.choices[0].finish_reason,
        tokens=[answer.usage.prompt_tokens, answer.usage.completion_tokens],
        stream="".join(text(part) or "" for part in parts),
        stream_tokens=[last.usage.prompt_tokens, last.usage.completion_tokens],
        async_answer=later_answer,
        async_stream="".join(part or "" for part in later_parts),
    )


def text(answer):
    """Return the text of an answer, or of a part of a stream."""
    [choice] = answer.choices
    return choice.delta.content if "delta" in choice else choice.message.content


def texts(asked, prompts):
    """Completions of a prompt, of two at once, and as a stream."""
    return dict(
        one=text_completion(prompt=prompts[0], **asked).choices[0].text,
        both=[choice.text for choice in text_completion(prompt=prompts, **asked).choices],
        stream="".join(part.choices[0].text or "" for part in text_completion(prompt=prompts[0], stream=True, **asked)),
    )


def errors(chat):
    """The classes of the errors of requests that are wrong."""
    wrong = dict(
        model=dict(model=chat["model"] + "s"),
        prompt=dict(messages=[dict(role="user", content="And it came to pass " * 200)]),
        tokens=dict(max_tokens=1000),
    )
    found = {}
    for name, fields in wrong.items():
        try:
            completion(**chat | fields)
        except (litellm.NotFoundError, litellm.BadRequestError) as error:
            found[name] = type(error).__name__
    return found


url, busy, *prompts = sys.argv[1:]
told = {}
for provider in ("openai", "hosted_vllm"):
    model = dict(model=f"{provider}/tiny-kjv", api_key="none", temperature=0, max_tokens=12)
    again = model | dict(api_base=f"{busy}/v1", num_retries=2)
    messages = [dict(role="user", content=prompts[0])]
    told[provider] = dict(
        chats=chats(again | dict(messages=messages)),
        texts=texts(again, prompts),
        errors=errors(model | dict(api_base=f"{url}/v1", messages=messages)),
    )
print(json.dumps(told))
