"""What clients of a server do: ask for what is known, for what is new, for what cannot be; read slowly, and go away.

Each kind is a function of what is known, a connection, and random numbers. It raises WrongError for what a server
should not do.
"""

import asyncio
import json
from collections import defaultdict
from contextlib import aclosing
from random import Random

from served import NAME, POSITIONS, VOCABULARY
from wire import request

COMPLETIONS, CHATS, EMBEDDINGS = "/v1/completions", "/v1/chat/completions", "/v1/embeddings"
STREAM = dict(stream=True, stream_options=dict(include_usage=True))
EVENT, DONE = b"data: ", b"data: [DONE]\n\n"
LARGE = 2**24 + 1  # bytes of a body that is too large


class WrongError(Exception):
    """What a server did and should not."""


def check(right, what):
    if not right:
        raise WrongError(what)


def check_status(status, wanted, *what):
    check(status == wanted, f"status {status} instead of {wanted}: {str(what)[:500]}")


def encoded(body):
    return json.dumps(body).encode()


def path_of(body):
    return CHATS if "messages" in body else EMBEDDINGS if "input" in body else COMPLETIONS


def ids(random, least, most):
    return [random.randrange(VOCABULARY - 1) for _ in range(random.randint(least, most))]


def bodies(random):
    """Return requests whose answers are the same each time, by their kind. Many prompts begin alike."""
    beginnings = [ids(random, count, count) for count in (0, 40, 64, 100, 128, 190)]
    words = "And the LORD said unto Moses, go up in the beginning was light".split()

    def asked(**fields):
        prompt = random.choice(beginnings) + ids(random, 1, 30)
        return dict(prompt=prompt, max_tokens=random.randint(1, 30), temperature=0) | fields

    def chat(**fields):
        text = " ".join(random.choices(words, k=random.randint(1, 20)))
        return dict(messages=[dict(role="user", content=text)], max_tokens=random.randint(1, 20)) | fields

    def schema(number):
        values = dict(type="array", items=dict(enum=[f"w{number}", "x", 5, True]), maxItems=3)
        fields = dict(type="object", properties=dict(a=values, b=dict(type="boolean")), required=["a", "b"])
        return dict(type="json_schema", json_schema=dict(schema=fields | dict(additionalProperties=False)))

    return {
        "greedy": [asked() for _ in range(100)],
        "chat": [chat(temperature=0) for _ in range(20)],
        "sampled": [asked(temperature=1, seed=seed, n=random.randint(1, 4), top_p=0.9) for seed in range(20)],
        "sampled chat": [chat(seed=seed, n=2) for seed in range(10)],
        "penalties": [asked(frequency_penalty=1, repetition_penalty=1.2, min_tokens=5) for _ in range(10)],
        "logprobs": [asked(logprobs=count % 4, echo=True) for count in range(20)],
        "schema": [asked(response_format=schema(number), max_tokens=36) for number in range(10)],
        "stop": [asked(stop=random.choices("e a th he ren s".split(), k=2), max_tokens=30) for _ in range(20)],
        "vectors": [dict(input=[asked()["prompt"] for _ in range(random.randint(1, 3))]) for _ in range(10)],
        "long": [asked(prompt=ids(random, 1, 9), ignore_eos=True, max_tokens=200) for _ in range(8)],
    }


def answer_of(parts):
    """Return what matters of a response, or of the events of a stream: texts, reasons, usage, and so on."""
    if "data" in parts[0]:
        return parts[0]["data"]
    found = defaultdict(lambda: ["", [], None])
    for part in parts:
        for choice in part["choices"]:
            each, said = found[choice["index"]], choice.get("message") or choice.get("delta") or choice
            each[0] += said.get("text") or said.get("content") or ""
            each[1] += (choice["logprobs"] or {}).get("token_logprobs", [])
            each[2] = each[2] or choice["finish_reason"]
    used = parts[-1]["usage"]
    return dict(sorted(found.items())), used["prompt_tokens"], used["completion_tokens"]


def events_of(text):
    """Return the events of a whole stream."""
    check(text.endswith(DONE), f"a stream ends with {text[-300:]}")
    lines = [line for line in text.removesuffix(DONE).split(b"\n\n") if line.startswith(EVENT)]
    events = [json.loads(line.removeprefix(EVENT)) for line in lines]
    check(all("error" not in event for event in events), f"a stream has the error {lines[-1]}")
    return events


async def begun(wire):
    """Return the headers of a response that must be an answer, whose body is still to be read."""
    status, headers = await wire.head()
    check_status(status, 200)
    return headers


class Known:
    """Requests with the answers that they get alone, by their kind."""

    async def learn(self, wire, seed):
        self.answers = {}
        for kind, asked in bodies(Random(seed)).items():
            self.answers[kind] = []
            for body in asked:
                response = await wire.ask("POST", path_of(body), encoded(body))
                check_status(response.status, 200, response.body, body)
                self.answers[kind].append((body, answer_of([response.json()])))
        wire.close()
        texts = {answer[0][0][0] for _, answer in self.answers["greedy"]}
        check(len(texts) > len(self.answers["greedy"]) / 2, "different prompts have different answers")

    def one(self, random, stream=False):
        """Return a request with its answer, which may be a stream."""
        kinds = [kind for kind in self.answers if kind != "long" and not (stream and kind == "vectors")]
        return random.choice(self.answers[random.choice(["greedy", *kinds])])

    @staticmethod
    def compare(body, parts, answer):
        found = answer_of(parts)
        check(found == answer, f"{json.dumps(body)} is answered with {found} instead of {answer}")


async def whole(known, wire, random):
    """Ask for what is known."""
    body, answer = known.one(random)
    response = await wire.ask("POST", path_of(body), encoded(body))
    check_status(response.status, 200, response.body, body)
    known.compare(body, [response.json()], answer)


async def streamed(known, wire, random):
    """Ask for it as a stream."""
    body, answer = known.one(random, stream=True)
    response = await wire.ask("POST", path_of(body), encoded(body | STREAM))
    check_status(response.status, 200, response.body, body)
    known.compare(body, events_of(response.body), answer)


async def fresh(known, wire, random):
    """Ask for what nobody has asked for, so that the cache must forget."""
    prompt, most = ids(random, 1, POSITIONS - 10), random.randint(1, 9)
    body = dict(prompt=prompt, max_tokens=most, ignore_eos=True, priority=random.randint(-1, 1))
    response = await wire.ask("POST", COMPLETIONS, encoded(body))
    check_status(response.status, 200, response.body)
    used = response.json()["usage"]
    check((used["prompt_tokens"], used["completion_tokens"]) == (len(prompt), most), f"usage {used} of {body}")


async def grammar(known, wire, random):
    """Ask for JSON by a schema that nobody has had."""
    wanted = random.randrange(10**9)
    body = dict(messages=[dict(role="user", content="a")], structured_outputs=dict(json=dict(const=wanted)))
    response = await wire.ask("POST", CHATS, encoded(body))
    check_status(response.status, 200, response.body)
    said = response.json()["choices"][0]["message"]["content"]
    check(json.loads(said) == wanted, f"{said} by the schema of {wanted}")


async def gone(known, wire, random):
    """Ask for much, and go away: while the request is sent, at once, a bit later, or in the middle of the answer."""
    stream, way = random.random() < 0.6, random.choice(["sending", "at once", "later", "reading"])
    body = dict(prompt=ids(random, 1, 60), max_tokens=random.randint(20, 190), n=random.choice([1, 1, 1, 4]))
    data = request("POST", COMPLETIONS, encoded(body | dict(ignore_eos=True, stream=stream)))
    await wire.send(data[: random.randrange(1, len(data))] if way == "sending" else data)
    if way == "later":
        await asyncio.sleep(random.expovariate(50))
    elif way == "reading" and stream:
        left, headers = random.randint(1, 40), await begun(wire)
        async with aclosing(wire.parts(headers)) as parts:
            async for _ in parts:
                left -= 1
                if not left:
                    break
    wire.close(reset=random.random() < 0.5)


async def slow(known, wire, random):
    """Read a long answer so slowly that the server must wait, or go away while it does."""
    often, gives_up = random.uniform(0, 0.3), random.random() < 0.3
    body = dict(prompt=ids(random, 1, 60), max_tokens=150, logprobs=20, n=2, ignore_eos=True, stream=True)
    await wire.send(request("POST", COMPLETIONS, encoded(body)), buffer=2**12)
    headers, found = await begun(wire), b""

    async def pause():
        if random.random() < often:
            await asyncio.sleep(random.expovariate(100))

    async with aclosing(wire.parts(headers, pause)) as parts:
        async for part in parts:
            found += part
            if gives_up and len(found) > 2**17:
                return wire.close()
    scored = [choice["logprobs"] or {} for event in events_of(found) for choice in event["choices"]]
    made = sum(len(each.get("tokens", [])) for each in scored)
    check(made == 300, f"a slow reader got {made} of 300 tokens")
    return wire.close()


def wrong_requests():
    """Return requests that are wrong: method, path, body, and the status of their answer."""
    deep = b"[" * 10_000
    broken = [b"", b"{", b"[]", b"null", b"\xff\xfe", b'{"prompt": NaN}', b'{"prompt": "\\ud800"}', deep]
    fields = [
        dict(max_tokens=0), dict(max_tokens="5"), dict(max_tokens=POSITIONS), dict(temperature=-1), dict(n=10**6),
        dict(prompt=[]), dict(prompt=""), dict(prompt=[VOCABULARY]), dict(prompt=[-1]), dict(prompt=["a", 5]),
        dict(top_k=-2), dict(top_p=0), dict(seed=-1), dict(logprobs=21), dict(logit_bias=dict(x=1)), dict(suffix="b"),
        dict(stop=[5]), dict(stop_token_ids=["a"]), dict(response_format=dict(type="json_schema")), dict(stream="yes"),
        dict(structured_outputs=dict(regex="(")), dict(structured_outputs=dict(json=dict(type="nothing"))),
    ]  # fmt: skip
    user = dict(role="user", content="a")
    chats = [
        dict(messages=[]), dict(messages=[dict(content="a")]), dict(messages="a"),
        dict(messages=[user], tool_choice="required"), dict(messages=[user], top_logprobs=2),
        dict(messages=[dict(role="user", content=[dict(type="image_url")])]),
    ]  # fmt: skip
    nowhere = [("GET", "/nothing"), ("GET", "/v1/models/other"), ("POST", "/v2/completions"), ("GET", "/%ff%00/..")]
    never = [("GET", COMPLETIONS), ("DELETE", "/health"), ("PUT", CHATS), ("PATCH", "/v1/models"), ("GET", "/tokenize")]
    return [
        *(("POST", COMPLETIONS, body, 400) for body in broken),
        *(("POST", COMPLETIONS, encoded(dict(prompt="a") | body), 400) for body in fields),
        *(("POST", CHATS, encoded(body), 400) for body in chats),
        ("POST", COMPLETIONS, encoded(dict(prompt="a", model="other")), 404),
        ("POST", "/tokenize", b"{}", 400),
        ("POST", "/detokenize", encoded(dict(tokens=[-1])), 400),
        *((*each, None, 404) for each in nowhere),
        *((*each, None, 405) for each in never),
    ]


WRONG = wrong_requests()


async def wrong(known, wire, random):
    """Ask for what cannot be answered."""
    method, path, body, status = random.choice(WRONG)
    response = await wire.ask(method, path, body)
    check_status(response.status, status, response.body, method, path, (body or b"")[:200])
    error = response.json()["error"]
    check(error.keys() == {"message", "type", "param", "code"} and error["message"], f"an error has the form {error}")


async def large(known, wire, random):
    """Send too much: a prompt without room for an answer, or a body that is too large, or says that it is."""
    way = random.choice(["ids", "text", "length"]) if random.random() < 0.98 else "parts"
    if way in ("ids", "text"):
        prompt = ids(random, POSITIONS, 5000) if way == "ids" else "word " * random.randint(1000, 9000)
        response = await wire.ask("POST", COMPLETIONS, encoded(dict(prompt=prompt)))
        return check_status(response.status, 400, response.body)
    if way == "length":
        await wire.send(request("POST", COMPLETIONS, **{"Content-Length": LARGE}))
    else:
        await wire.send(request("POST", COMPLETIONS, **{"Transfer-Encoding": "chunked"}))
        for _ in range(LARGE // 2**18 + 1):
            await wire.send(b"40000\r\n" + b" " * 2**18 + b"\r\n")
    response = await wire.response()
    check_status(response.status, 413, response.body)
    return wire.close(reset=random.random() < 0.5)


async def other(known, wire, random):
    """Ask for what needs no engine."""
    path = random.choice(["/health", "/ready", "/metrics", "/v1/models", f"/v1/models/{NAME}", "/tokenizer_info", ""])
    if path:
        response = await wire.ask("GET", path)
        return check_status(response.status, 200, response.body)
    text = " ".join(random.choices(["Moses", "é☃", "light", "\n", "🎉"], k=random.randint(1, 50)))
    response = await wire.ask("POST", "/tokenize", encoded(dict(prompt=text)))
    check_status(response.status, 200, response.body)
    response = await wire.ask("POST", "/detokenize", encoded(dict(tokens=response.json()["tokens"])))
    return check(response.json() == dict(prompt=text), f"{text!r} becomes {response.body}")


SHARES = {whole: 33, streamed: 22, fresh: 14, grammar: 4, gone: 14, slow: 0.3, wrong: 7, large: 1.7, other: 4}
