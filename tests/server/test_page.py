"""The page that the server shows to people, in a browser."""

import base64
import io
import json
import re
import time
from collections import Counter
from types import SimpleNamespace
from urllib.request import urlopen

import numpy as np
import pytest
from by_keys import DONE, MESSAGE, OPTIONS, ask, focus, last, set_option
from in_threads import servers
from PIL import Image
from starlette.applications import Starlette
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route
from transformers import AutoTokenizer

from transformers_neuronx.server.app import Server
from transformers_neuronx.server.models import ServedModel
from transformers_neuronx.server.page import headers, page
from transformers_neuronx.server.prompts import Prompts
from transformers_neuronx.server.settings import Settings

PROMPT = "And Moses"
HTML = "<img src=x onerror=\"document.title = 'broken'\"><script>document.title = 'broken'</script>"


@pytest.fixture(scope="module")
def serve():
    """`serve(app)`: the address of an application that runs."""
    with servers() as start:
        yield lambda app: start(SimpleNamespace(app=app, draining=False)).address()


def shown(_):
    return Response(page(), headers=headers(), media_type="text/html")


class Scripted:
    """A server that answers as it is told: `replies` to chats, in order, and the text of `metrics`."""

    def __init__(self, names=("model",)):
        self.seeing = []  # the names of models that read images
        self.names, self.replies, self.bodies, self.metrics, self.keys = names, [], [], "", []
        self.app = Starlette(
            routes=[
                Route("/", shown),
                Route("/health", lambda _: Response()),
                Route("/metrics", lambda _: Response(self.metrics)),
                Route("/v1/models", self.models),
                Route("/v1/chat/completions", self.chat, methods=["POST"]),
            ]
        )

    def models(self, _):
        models = [dict(id=name, capabilities=["multimodal"] * (name in self.seeing)) for name in self.names]
        return Response(json.dumps(dict(data=models)))

    async def chat(self, request):
        self.bodies.append(json.loads(await request.body()))
        self.keys.append(request.headers.get("authorization"))
        return self.replies.pop(0)


@pytest.fixture
def scripted(serve):
    server = Scripted()
    return server, serve(server.app)


def event(text="", reason=None, **more):
    choice = dict(index=0, delta=dict(content=text), finish_reason=reason)
    return f"data: {json.dumps(dict(choices=[choice]) | more, ensure_ascii=False)}\n\n"


def stream(*parts, done=True):
    """A response of these parts."""
    sent = [part if isinstance(part, bytes) else part.encode() for part in parts]
    return StreamingResponse(iter([*sent, b"data: [DONE]\n\n"] if done else sent), media_type="text/event-stream")


def refused(status, message):
    return Response(json.dumps(dict(error=dict(message=message))), status)


def test_a_chat_by_keys_alone(tab, url, client):
    opened = tab(url)
    set_option(opened, "temperature", "0")
    set_option(opened, "max_tokens", "12")
    assert opened.run("document.querySelector('#chosen').textContent") == "temperature 0, max tokens 12"
    messages = []
    for text in (PROMPT, "In the beginning"):
        messages.append(dict(role="user", content=text))
        answer = client.chat.completions.create(model="tiny-kjv", messages=messages, max_tokens=12, temperature=0)
        assert ask(opened, text) == answer.choices[0].message.content.rstrip()
        told = last(opened, ".told")
        assert re.fullmatch("12 tokens · (.* tokens/s · )?first token after .* · token limit reached", told)
        messages.append(dict(role="assistant", content=answer.choices[0].message.content))
    opened.type("one")
    opened.press("Enter", shift=True)
    opened.type("two")
    assert opened.run("document.querySelector('#message').value") == "one\ntwo"
    assert opened.run("document.querySelectorAll('article').length") == 2, "Shift and Enter send nothing"


def test_what_the_prompt_had_in_the_cache_is_told(tab, url):
    opened = tab(url)
    set_option(opened, "max_tokens", "1")
    for _ in range(2):
        opened.run("document.querySelector('#new').click()")
        opened.call("Input.insertText", text="And he said unto them, " * 20)
        ask(opened, "")
    assert "prompt tokens cached" in last(opened, ".told")


def test_numbers_of_an_answer(tab, scripted):
    numbers = dict(began=0, first=1250, last=3250, reason="length")
    numbers["usage"] = dict(prompt_tokens=90, completion_tokens=201, prompt_tokens_details=dict(cached_tokens=64))
    told = ["201 tokens", "100 tokens/s", "first token after 1.25 s", "64 of 90 prompt tokens cached"]
    assert tab(scripted[1]).run(f"toldOf({json.dumps(numbers)})") == " · ".join([*told, "token limit reached"])


@pytest.fixture
def slow(engine, monkeypatch):
    """An engine that takes its time, so that an answer can be stopped."""
    start = engine._loop.start

    def slowly():
        time.sleep(0.02)
        start()

    monkeypatch.setattr(engine._loop, "start", slowly)


@pytest.mark.usefixtures("slow")
def test_an_answer_is_stopped(tab, url, engine):
    opened = tab(url)
    set_option(opened, "temperature", "0")
    for way in (lambda: opened.press("Escape"), lambda: opened.run("document.querySelector('#send').click()")):
        focus(opened, MESSAGE)
        opened.type(PROMPT)
        opened.press("Enter")
        opened.wait("document.querySelector('article:last-child .answer').textContent.length > 5")
        assert opened.run("document.querySelector('#send').textContent") == "Stop" and len(engine.scheduler)
        way()
        opened.wait(DONE)
        deadline = time.monotonic() + 30
        while len(engine.scheduler):
            assert time.monotonic() < deadline, "the engine ends the request"
            time.sleep(0.01)
        assert last(opened, ".told").endswith("stopped") and len(last(opened, ".answer")) > 5
    assert opened.run("turns.length") == 2 and opened.run("bodyOf(turns[1]).messages.length") == 3


def test_a_reload_keeps_what_was_there(tab, scripted):
    server, url = scripted
    server.names = ["first", "second"]
    server.replies = [stream(event("one")), stream(event("two"))]
    opened = tab(url)
    set_option(opened, "seed", "7")
    set_option(opened, "system", "Be brief.")
    focus(opened, "#model")
    opened.press("s")
    ask(opened, "hello")
    opened.type("a draft")
    opened.load("Page.reload")
    opened.wait("document.querySelector('#model').value === 'second'")
    assert (last(opened, ".asked span + span"), last(opened, ".answer")) == ("hello", "one")
    assert opened.run("document.querySelector('#message').value") == "a draft"
    ask(opened, "")
    told = [dict(role="system", content="Be brief."), dict(role="user", content="hello")]
    assert server.bodies[0]["messages"] == told and server.bodies[0]["seed"] == server.bodies[1]["seed"] == 7
    told += [dict(role="assistant", content="one"), dict(role="user", content="a draft")]
    assert server.bodies[1]["messages"] == told and server.bodies[1]["model"] == "second"
    opened.run("document.querySelector('#new').click()")
    assert opened.run("document.querySelectorAll('article').length") == 0


@pytest.mark.parametrize(
    "kept", ["{broken", "null", "5", '{"turns": 5}', '{"turns": [null]}', '{"turns": [{"asked": 1}], "values": "x"}']
)
def test_broken_data_is_forgotten(tab, scripted, kept):
    server, url = scripted
    server.replies = [stream(event("fine"))]
    opened = tab(url)
    opened.run(f"addEventListener('pagehide', () => sessionStorage.setItem(KEPT, {json.dumps(kept)}))")
    opened.load("Page.reload")
    assert ask(opened, "hello") == "fine"
    assert opened.run("document.querySelectorAll('article').length") == 1


def test_all_options_are_sent_and_no_other(tab, scripted):
    server, url = scripted
    server.replies = [stream(event("one")), stream(event("two"))]
    opened = tab(url)
    ask(opened, "hello")
    usage = dict(include_usage=True, continuous_usage_stats=True)
    always = dict(model="model", stream=True, stream_options=usage)
    assert server.bodies[0] == always | dict(messages=[dict(role="user", content="hello")])
    given = dict(temperature=0.5, top_p=0.9, top_k=4, max_tokens=20, seed=-3)
    for name, value in given.items():
        set_option(opened, name, str(value))
    set_option(opened, "key", "secret")
    focus(opened, "[name=stop]")
    opened.type("end")
    opened.press("Enter")
    opened.type("\\n")
    ask(opened, "again")
    sent = server.bodies[1]
    assert len(sent.pop("messages")) == 3 and sent == always | given | dict(stop=["end", "\n"])
    assert server.keys == [None, "Bearer secret"]


CONTROLS = "[...document.querySelectorAll('button, input, select, textarea, summary, [tabindex]')]"
CONTROLS += ".filter((each) => each.checkVisibility())"
OUTSIDE = f"""{CONTROLS}.filter((each) => {{
  const {{ left, right }} = each.getBoundingClientRect();
  return left < 0 || right > innerWidth;
}}).length"""


def attach(tab, *paths):
    """Choose files, as in the browser's dialog, which no test can operate."""
    root = tab.call("DOM.getDocument")["root"]["nodeId"]
    node = tab.call("DOM.querySelector", nodeId=root, selector="#files")["nodeId"]
    tab.call("DOM.setFileInputFiles", nodeId=node, files=[str(path) for path in paths])


PICTURES = "document.querySelectorAll('#images button').length"


@pytest.fixture
def pictures(tmp_path):
    """Paths of images: small, larger than models read, with transparency, of a kind that no browser reads."""
    draw = np.random.default_rng(0)
    Image.fromarray(draw.integers(0, 255, (20, 30, 3), np.uint8)).save(tmp_path / "small.png")
    Image.fromarray(draw.integers(0, 255, (30, 4000, 3), np.uint8)).save(tmp_path / "wide.jpg")
    Image.new("RGBA", (3000, 10)).save(tmp_path / "clear.png")
    (tmp_path / "text.png").write_text("no image")
    return [tmp_path / name for name in ("small.png", "wide.jpg", "clear.png", "text.png")]


def opened_image(part):
    kind, _, data = part["image_url"]["url"].partition(";base64,")
    return kind, Image.open(io.BytesIO(base64.b64decode(data)))


def test_images_of_a_message(tab, scripted, pictures):
    server, url = scripted
    server.names, server.seeing = ["seeing", "blind"], ["seeing"]
    server.replies = [stream(event(text)) for text in ("one", "two", "three")]
    opened = tab(url, width=390, height=700)
    opened.wait("document.querySelector('#attach').checkVisibility()")
    attach(opened, *pictures)
    opened.wait(f"{PICTURES} === 3")
    assert "This browser reads no image in text.png." in opened.run("document.body.innerText")
    assert opened.run("document.documentElement.scrollWidth") <= 390 and opened.run(OUTSIDE) == 0
    ask(opened, "What is this?")
    [message] = server.bodies[0]["messages"]
    *parts, text = message["content"]
    assert text == dict(type="text", text="What is this?")
    kinds, images = zip(*map(opened_image, parts), strict=True)
    assert kinds == ("data:image/png", "data:image/jpeg", "data:image/jpeg")
    assert [image.size for image in images] == [(30, 20), (2048, 15), (2048, 7)]
    assert np.array_equal(images[0], Image.open(pictures[0])), "a small file is sent as it is"
    assert np.asarray(images[2]).min() > 250, "behind what is transparent it is white"
    assert opened.run("document.querySelectorAll('article img').length") == 3 and opened.run(PICTURES) == 0

    attach(opened, pictures[0])
    opened.wait(f"{PICTURES} === 1")
    opened.load("Page.reload")
    opened.wait(f"{PICTURES} === 1")
    attach(opened, pictures[0])
    opened.wait(f"{PICTURES} === 2")
    focus(opened, "#images button")
    opened.press("Enter")
    assert opened.run(PICTURES) == 1
    ask(opened, "")
    first, answer, again = server.bodies[1]["messages"]
    assert (
        first == message and answer["content"] == "one" and [each["type"] for each in again["content"]] == ["image_url"]
    )

    attach(opened, pictures[0])
    opened.wait(f"{PICTURES} === 1")
    focus(opened, "#model")
    opened.press("b")
    opened.wait("!document.querySelector('#attach').checkVisibility()")
    focus(opened, MESSAGE)
    opened.press("Enter")
    assert opened.run("turns.length") == 2, "an image that the model does not read is no message"
    ask(opened, "And now?")
    assert [each["content"] for each in server.bodies[2]["messages"]] == ["What is this?", "one", "", "two", "And now?"]
    focus(opened, "#model")
    opened.press("s")
    opened.wait(f"{PICTURES} === 1")


def test_images_are_pasted_at_once(tab, scripted, pictures):
    server, url = scripted
    server.seeing, server.replies = ["model"], [stream(event("one"))]
    opened = tab(url)
    opened.wait("document.querySelector('#attach').checkVisibility()")
    data = base64.b64encode(pictures[0].read_bytes()).decode()
    opened.run(f"""(() => {{
      const bytes = Uint8Array.from(atob('{data}'), (each) => each.charCodeAt(0));
      const clipboardData = new DataTransfer();
      clipboardData.items.add(new File([bytes], 'pasted.png', {{ type: 'image/png' }}));
      for (let i = 0; i < 3; i++)
        document.activeElement.dispatchEvent(new ClipboardEvent('paste', {{ clipboardData, bubbles: true }}));
    }})()""")
    opened.wait(f"{PICTURES} === 3")
    ask(opened, "")
    for part in server.bodies[0]["messages"][0]["content"]:
        assert np.array_equal(opened_image(part)[1], Image.open(pictures[0]))


def test_a_conversation_too_large_to_keep_keeps_its_texts(tab, scripted):
    server, url = scripted
    server.seeing, server.replies = ["model"], [stream(event("one"))]
    opened = tab(url)
    opened.wait("document.querySelector('#attach').checkVisibility()")
    opened.run("images = ['data:image/png;base64,' + 'A'.repeat(2 ** 23)]")
    ask(opened, "hello")
    opened.load("Page.reload")
    assert (last(opened, ".asked span + span"), last(opened, ".answer")) == ("hello", "one")


def test_a_narrow_screen(tab, scripted):
    server, url = scripted
    server.names, server.metrics = ["a-name-that-is-much-too-long-for-this-screen" * 2], metrics(1)
    server.replies = [stream(event("word" * 200 + "\n```\n" + "code " * 100 + "\n```\n"))]
    opened = tab(url, width=390, height=700)
    ask(opened, "long" * 100)
    set_option(opened, "temperature", "1")
    for view in ("chat", "server"):
        focus(opened, f"nav [data-view={view}]")
        opened.press("Enter")
        assert opened.run("document.documentElement.scrollWidth") <= 390 and opened.run(OUTSIDE) == 0
        assert opened.run("document.querySelector('#chat').checkVisibility()") == (view == "chat")
        assert opened.run("document.querySelector('#server').checkVisibility()") == (view == "server")
    opened.wait("document.querySelector('#tiles section').checkVisibility()")
    focus(opened, "nav [data-view=chat]")
    opened.press("Enter")
    assert opened.run("document.querySelector('#send').getBoundingClientRect().bottom") <= 700


def test_tab_reaches_everything_in_order(tab, scripted):
    server, url = scripted
    server.names = ["first", "second"]
    server.replies = [stream(event("one")), refused(503, "full")]
    opened = tab(url, "status of 503", width=800)
    ask(opened, "hello")
    ask(opened, "again")
    focus(opened, OPTIONS)
    opened.press(" ")
    opened.run("document.querySelector('#model').focus()")
    name = "(each) => each.id || each.name || each.dataset.view || each.className || each.tagName"
    order = []
    while opened.run("document.activeElement !== document.body"):
        order.append(opened.run(f"({name})(document.activeElement)"))
        ring = "(each) => getComputedStyle(each).outlineStyle !== 'none' || getComputedStyle(each).boxShadow !== 'none'"
        own = "document.activeElement.id === 'message' ? document.activeElement.parentElement : document.activeElement"
        assert opened.run(f"({ring})({own})"), f"{order[-1]} shows that it has the focus"
        opened.press("Tab")
    assert order == opened.run(f"{CONTROLS}.map({name})")
    named = "(each) => each.labels?.length || each.textContent.trim() || each.getAttribute('aria-label')"
    assert opened.run(f"{CONTROLS}.every({named})"), "each has a name"


def test_a_model_without_a_chat_template_goes_on(tab, serve, engine, client):
    model = ServedModel(engine, "tiny-kjv")
    model.prompts = Prompts(AutoTokenizer.from_pretrained(engine.tokenizer.name_or_path))
    opened = tab(serve(Server({"tiny-kjv": model}, Settings()).app), "status of 400")
    set_option(opened, "temperature", "0")
    text = ""
    for each in (PROMPT, "And Aaron", ""):
        text += f"\n{each}" if text and each else each
        wanted = client.completions.create(model="tiny-kjv", prompt=text, temperature=0).choices[0].text
        assert ask(opened, each) == wanted.rstrip()
        text += wanted
    assert "This model continues text; it has no chat template." in opened.run("document.body.innerText")
    refusals = [line for line in opened.console() if "status of 400" in line]
    assert len(refusals) == 1, "chats are tried once"


def test_errors_are_said_and_may_be_retried(tab, scripted):
    server, url = scripted

    def breaking():
        yield event("half").encode()
        raise ConnectionError

    failures = [
        (refused(401, "a key"), "The server needs an API key, under Options."),
        (refused(429, "slower"), "Too many requests at once: slower"),
        (refused(503, "it is full"), "The server cannot answer now: it is full"),
        (Response("<h1>Bad Gateway</h1>", 502), "The server answered with error 502: Bad Gateway"),
        (stream(event("half"), 'data: {"error": {"message": "no memory"}}\n\n'), "The answer broke off: no memory"),
        (stream(event("half"), done=False), "The answer broke off: the connection was closed"),
        (StreamingResponse(breaking()), "The connection to the server failed"),
    ]
    server.replies = [reply for reply, _ in failures] + [stream(event("fine"))]
    opened = tab(url, "Failed to load resource")
    ask(opened, "hello")
    for _, wanted in failures:
        opened.wait(f"document.querySelector('.error').textContent.startsWith({json.dumps(wanted)})")
        assert opened.run("document.querySelector('#spoken').textContent").startswith(wanted)
        focus(opened, ".retry")
        opened.press("Enter")
        opened.wait(DONE)
    assert last(opened, ".answer") == "fine" and last(opened, ".error") == ""
    assert opened.run("document.querySelectorAll('article').length") == 1


def test_a_stream_may_come_in_any_pieces(tab, scripted):
    server, url = scripted
    text = "Ein Fluß, 日本 und 🙂\n"
    sent = f": nothing new\n\nevent: told\r\n{event(text)}".replace("}\n\n", "}\r\n\r\n").encode()
    server.replies = [stream(*(sent[place : place + 1] for place in range(len(sent))), event("end"))]
    assert ask(tab(url), "hello") == f"{text}end"


def test_html_is_text(tab, scripted):
    server, url = scripted
    server.names = [HTML]
    label = HTML.replace("\\", "\\\\").replace('"', '\\"')
    server.metrics = f'transformers_neuronx_finished_requests_total{{reason="{label}"}} 3\n'
    server.replies = [stream(event(f"{HTML}\n```html\n{HTML}\n```\n{HTML}"))] + [refused(503, HTML)] * 2
    opened = tab(url, "status of 503")
    ask(opened, HTML)
    assert last(opened, ".asked span + span") == HTML
    blocks = opened.run("[...document.querySelectorAll('.answer > *')].map((each) => [each.tagName, each.textContent])")
    assert blocks == [["DIV", HTML], ["PRE", HTML], ["DIV", HTML]]
    ask(opened, "hello")
    assert HTML in last(opened, ".error")
    opened.wait("document.querySelector('#tiles').innerText.includes('<img')")
    opened.load("Page.reload")
    opened.wait("document.querySelector('#name').textContent")
    assert opened.run("document.querySelectorAll('img, body script ~ script, article script').length") == 0
    assert opened.run("document.title").startswith("<img")


def test_an_answer_is_copied(tab, scripted, browser):
    server, url = scripted
    server.replies = [stream(event("one\n```\ntwo\n```\n"))]
    opened = tab(url)
    browser.call("Browser.grantPermissions", permissions=["clipboardReadWrite", "clipboardSanitizedWrite"], origin=url)
    ask(opened, "hello")

    def copied():
        focus(opened, ".copy")
        opened.press("Enter")
        opened.wait("document.querySelector('.copy').textContent === 'Copied'")
        return opened.run("navigator.clipboard.readText()")

    assert copied() == "one\n```\ntwo\n```\n"
    opened.run("navigator.clipboard.writeText('').then(() => { navigator.clipboard.writeText = null; })")
    opened.run("document.querySelector('.copy').textContent = ''")
    assert copied() == "one\n```\ntwo\n```\n", "also where the clipboard may not be written"


def metrics(number):
    """A metrics text. Counters grow with the number."""
    lines = ["# HELP transformers_neuronx_rows Rows.", "# TYPE transformers_neuronx_rows gauge", "other_total 9"]

    def add(name, value, **labels):
        told = ",".join(f'{label}="{text}"' for label, text in dict(model="kjv", **labels).items())
        lines.append(f"transformers_neuronx_{name}{{{told}}} {float(value)}")

    for name, value in dict(requests_running=3, requests_waiting=5, rows=4, cache_positions_used=250).items():
        add(name, value)
    add("cache_positions", 600)
    add("cache_positions", 400, shard="second")
    add("prompt_tokens_total", 1000 * number)
    add("cached_prompt_tokens_total", 500 * number)
    add("generated_tokens_total", 100 * number)
    for reason, count in dict(stop=1200, length=30, abort=0).items():
        add("finished_requests_total", count, reason=reason)
    for bound, count in {"0.001": 0, "0.01": 50, "0.1": 95, "1.0": 100, "+Inf": 100}.items():
        add("time_to_first_token_seconds_bucket", count, le=bound)
    add("time_to_first_token_seconds_sum", 2)
    add("time_to_first_token_seconds_count", 100)
    return "\n".join(lines) + "\n"


TILES = """Object.fromEntries([...document.querySelectorAll('#tiles section')]
  .filter((each) => each.checkVisibility())
  .map((each) => each.innerText.split(/\\n+/).map((line) => line.trim()))
  .map(([title, ...lines]) => [title, lines.join(' ')]))"""


def test_numbers_of_the_server(tab, serve):
    server, calls = Scripted(), Counter()

    def text(_):
        calls["all"] += 1
        return Response(metrics(calls["all"]))

    server.app.router.routes.insert(0, Route("/metrics", text))
    opened = tab(serve(server.app), "status of 500")
    opened.wait("!!document.querySelector('.curve [d*=L]')")
    shown = opened.run(TILES)
    speeds = [shown.pop(name) for name in ("Generated", "Prompts")]
    assert all(" tokens/s " in each and float(each.split()[0].replace(",", "")) > 0 for each in speeds)
    told = shown.pop("Prefix hits")
    assert told.startswith("50 % ") and told.endswith(",000 prompt tokens")
    assert shown == {
        "Running": "3 of 4 rows",
        "Waiting": "5",
        "Cache": "25 % 250 of 1,000 positions",
        "Finished": "1,230 1,200 stop, 30 length",
        "Time to first token": "20 ms on average 1 ms 1 s half within 10 ms, 95 % within 100 ms",
    }
    assert opened.run("document.querySelector('.bars').viewBox.baseVal.width") == 3


def test_metrics_that_fail_are_said_in_a_sentence(tab, scripted):
    server, url = scripted
    server.app.router.routes.insert(0, Route("/metrics", lambda _: refused(500, "a bug")))
    opened = tab(url, "status of 500")
    wanted = "There are no numbers of the server now. The server answered with error 500: a bug"
    opened.wait(f"document.querySelector('#trouble').textContent === {json.dumps(wanted)}")
    assert opened.run(TILES) == {}


def test_numbers_of_the_real_server(tab, url):
    opened = tab(url)
    ask(opened, PROMPT)
    opened.wait("!!document.querySelector('.bars')")
    wanted = {"Running", "Waiting", "Generated", "Prompts", "Cache", "Prefix hits", "Finished", "Preemptions"}
    wanted |= {"Time to first token", "Time between tokens", "Time in the queue", "Whole request"}
    assert opened.run(TILES).keys() == wanted


def test_a_server_that_is_not_healthy(tab, serve):
    server = Scripted()
    server.app.router.routes.insert(0, Route("/health", lambda _: refused(503, "no progress")))
    opened = tab(serve(server.app), "status of 503")
    assert opened.run("document.querySelector('#health').textContent") == "not healthy"


def test_nothing_but_the_page_may_run(url):
    with urlopen(url) as response:
        assert response.read() == page()
        assert headers() == {name: response.headers[name] for name in headers()}
    assert not re.search(rb"<[^>]* on\w+=", page().partition(b"<script>")[0])
    policy = headers()["Content-Security-Policy"]
    assert "unsafe" not in policy and "connect-src 'self'" in policy and "frame-ancestors 'none'" in policy


def test_a_server_with_a_key(tab, started):
    address = started(keys=["secret"]).address()
    opened = tab(address.replace("//", "//me:secret@"))  # as if the browser had asked for it
    set_option(opened, "max_tokens", "1")
    ask(opened, PROMPT)
    assert last(opened, ".told").startswith("1 token · ")
    opened.wait("!!document.querySelector('.bars')")
