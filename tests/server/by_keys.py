"""The server's page, operated by keys alone."""

import json

MESSAGE, OPTIONS = "#message", "summary"
DONE = "document.querySelector('#send').textContent === 'Send'"


def ask(tab, text):
    """Send a message, by keys alone, and return the answer."""
    focus(tab, MESSAGE)
    tab.type(text)
    tab.press("Enter")
    tab.wait(DONE)
    return last(tab, ".answer")


def last(tab, part):
    return tab.run(f"document.querySelector('article:last-child {part}').textContent")


def focus(tab, selector):
    """Press Tab until an element has the focus."""
    for _ in range(40):
        if tab.run(f"document.activeElement.matches({json.dumps(selector)})"):
            return
        tab.press("Tab")
    raise AssertionError(f"Tab reaches {selector}")


def set_option(tab, name, value):
    if not tab.run("document.querySelector('details').open"):
        focus(tab, OPTIONS)
        tab.press("Enter")
    focus(tab, f"[name={name}]")
    tab.type(value)
