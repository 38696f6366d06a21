"""A headless Chromium that does what a person does, through the Chrome DevTools protocol over a socket."""

import base64
import json
import os
import socket
import time

from browser import SWITCHES, chromium

KEYS = {"Enter": (13, "\r"), "Escape": (27, ""), "Tab": (9, ""), "Backspace": (8, ""), " ": (32, " ")}  # code, text
SHIFT = 8


class Browser:
    """One process, which reads messages as its file 3 and writes them as its file 4."""

    def __init__(self, profile):
        program = chromium()
        self._socket, theirs = socket.socketpair()
        self._socket.settimeout(60)
        command = [program, *SWITCHES, "--remote-debugging-pipe", f"--user-data-dir={profile}", "about:blank"]
        null = (os.POSIX_SPAWN_OPEN, 2, os.devnull, os.O_WRONLY, 0)
        files = [null, *((os.POSIX_SPAWN_DUP2, theirs.fileno(), number) for number in (3, 4))]
        self._process = os.posix_spawn(program, command, os.environ, file_actions=files)
        theirs.close()
        self._rest, self._number, self.events = b"", 0, []

    def call(self, method, session=None, **params):
        """Return what a method returns. Events that come before are kept in `events`."""
        self._number += 1
        message = dict(id=self._number, method=method, params=params) | (dict(sessionId=session) if session else {})
        self._socket.sendall(json.dumps(message).encode() + b"\0")
        while (told := self._received()).get("id") != self._number:
            self.events.append(told)
        assert "error" not in told, f"{method}: {told['error']}"
        return told["result"]

    def wait_for(self, event, session, since):
        """Wait until there is such an event, after the first `since` events."""
        while not any(told["method"] == event and told.get("sessionId") == session for told in self.events[since:]):
            self.events.append(self._received())

    def _received(self):
        while b"\0" not in self._rest:
            part = self._socket.recv(2**16)
            assert part, "the browser runs"
            self._rest += part
        message, _, self._rest = self._rest.partition(b"\0")
        return json.loads(message)

    def close(self):
        self.call("Browser.close")
        os.waitpid(self._process, 0)
        self._socket.close()


class Tab:
    """A page in a tab, which has a session storage of its own."""

    def __init__(self, browser, url, width=1280, height=800, scheme="light"):
        self.browser = browser
        self.target = browser.call("Target.createTarget", url="about:blank")["targetId"]
        self.session = browser.call("Target.attachToTarget", targetId=self.target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        features = [
            dict(name="prefers-color-scheme", value=scheme),
            dict(name="prefers-reduced-motion", value="reduce"),
        ]
        self.call("Emulation.setEmulatedMedia", features=features)
        self.load("Page.navigate", url=url)

    def call(self, method, **params):
        return self.browser.call(method, self.session, **params)

    def load(self, method, **params):
        """Open a page, and wait until its script has run."""
        since = len(self.browser.events)
        self.call(method, **params)
        self.browser.wait_for("Page.loadEventFired", self.session, since)

    def run(self, script):
        """Return the value of an expression, or of its promise."""
        told = self.call("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in told, f"{script}: {told['exceptionDetails']}"
        return told["result"].get("value")

    def wait(self, script):
        """Wait until an expression is true, and return its value."""
        deadline = time.monotonic() + 20
        while not (value := self.run(script)):
            assert time.monotonic() < deadline, (
                f"{script} becomes true; the page: {self.run('document.body.innerText')}"
            )
            time.sleep(0.02)
        return value

    def press(self, key, shift=False):
        """Press a key, and release it."""
        code, text = KEYS.get(key, (0, key))
        about = dict(key=key, code=key, windowsVirtualKeyCode=code, modifiers=SHIFT if shift else 0)
        self.call("Input.dispatchKeyEvent", type="keyDown" if text else "rawKeyDown", text=text, **about)
        self.call("Input.dispatchKeyEvent", type="keyUp", **about)

    def type(self, text):
        for character in text:
            self.call("Input.dispatchKeyEvent", type="char", text=character)

    def console(self):
        """Return what the console has, exceptions included."""
        kinds = ("Log.entryAdded", "Runtime.exceptionThrown", "Runtime.consoleAPICalled")
        told = [event for event in self.browser.events if event.get("sessionId") == self.session]
        return [json.dumps(event["params"]) for event in told if event["method"] in kinds]

    def screenshot(self, path):
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"]))

    def close(self):
        self.browser.call("Target.closeTarget", targetId=self.target)
