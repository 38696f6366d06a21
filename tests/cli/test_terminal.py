"""Commands in a terminal of 80 columns with progress bars and Ctrl-C, and with closed outputs."""

import fcntl
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time

import pytest
from bundled import ROOT, TINY_KJV

PROMPT = "And God said unto Moses,"


@pytest.fixture
def terminal(tmp_path):
    """`terminal("run", …, typed={text: bytes})`: the output in a terminal of 80 columns, and the exit status.

    When a text of `typed` appears, its bytes are typed.
    """

    def ran(*arguments, typed=None, **variables):
        process, descriptor = pty.fork()
        if not process:
            os.chdir(tmp_path)
            signal.signal(signal.SIGINT, signal.SIG_DFL)  # commands that a shell starts in the background ignore it
            environment = os.environ | dict(PYTHONPATH=str(ROOT), TERM="xterm", NO_COLOR="1") | variables
            environment.pop("COLUMNS", None)
            os.execve(sys.executable, [sys.executable, "-m", "transformers_neuronx", *map(str, arguments)], environment)
        fcntl.ioctl(descriptor, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
        shown, waiting, until = b"", dict(typed or {}), time.monotonic() + 300
        while time.monotonic() < until:
            if not select.select([descriptor], [], [], 1)[0]:
                continue
            try:
                shown += os.read(descriptor, 65536)
            except OSError:  # it is closed
                break
            for text in [text for text in waiting if text.encode() in shown]:
                os.write(descriptor, waiting.pop(text))
        os.close(descriptor)
        return shown.decode(), os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])

    return ran


def left(shown):
    """Return the lines that remain on the screen, without text that was overwritten."""
    lines, row, column = [""], 0, 0
    for piece in re.findall(r"\x1b\[A|\x1b\[[0-9;]*[mK]|[\r\n]|[^\r\n\x1b]+", shown):
        if piece == "\x1b[A":
            row -= 1
        elif piece == "\r":
            column = 0
        elif piece == "\n":
            row += 1
            lines += [""] * (row == len(lines))
        elif piece[0] != "\x1b":
            lines[row] = lines[row][:column].ljust(column) + piece + lines[row][column + len(piece) :]
            column += len(piece)
    return [line.rstrip() for line in lines]


@pytest.mark.slow
def test_bars_are_shown_and_vanish(terminal, process, tmp_path):
    shown, status = terminal("compile", TINY_KJV, "artifact", "--n-positions", 64)
    assert status == 0
    for what, count in (("weights ", 101), ("programs", 5)):
        assert re.search(rf"GPT2ForSampling: {what} +\d+%\|.*\| \d+/{count} \[00:\d\d\]", shown), what
    assert "saving weights" in shown
    assert max(map(len, re.split(r"[\r\n]+", shown.replace("\x1b[A", "")))) <= 80
    lines = left(shown)
    assert lines[0] == "5 programs:" and lines[-2].endswith("saved to artifact") and lines[-1] == ""
    (tmp_path / "data.jsonl").write_text(f'{{"prompt": "{PROMPT}"}}\n')
    shown, _ = terminal("run", "artifact", "--data-dir", "data.jsonl")
    assert "prompts   0%" in shown
    printed, said = process("run", "artifact", "--data-dir", "data.jsonl", "--output", "again.jsonl")
    assert printed == "\n".join(left(shown)) and said == ""


IMPORTS = dict(PYTHONPROFILEIMPORTTIME="1")  # Python prints each module that it imports


@pytest.mark.parametrize(
    ("seen", "variables"),
    [
        ("numpy", IMPORTS),
        pytest.param("jaxlib._hlo", IMPORTS, marks=pytest.mark.slow),
        pytest.param("programs", dict(NEURONX_CACHE="off"), marks=pytest.mark.slow),
        (PROMPT, {}),
    ],
    ids=["Python imports", "jaxlib imports", "compiling", "writing"],
)
def test_ctrl_c_is_heeded_at_any_moment(terminal, seen, variables):
    arguments = "generate", TINY_KJV, PROMPT, "-n", 480, "--seed", 0
    shown, status = terminal(*arguments, typed={seen: b"\x03"}, **variables)
    assert status == 130 and shown.endswith("stopped\r\n") and "Traceback" not in shown


@pytest.mark.slow
def test_outputs_that_take_nothing(tmp_path):
    """A closed pipe, as with `| head -1`, ends a command silently; a full disk is an error."""
    command = [sys.executable, "-m", "transformers_neuronx", "generate", TINY_KJV, PROMPT, "-n", "40"]
    environment = os.environ | dict(PYTHONPATH=str(ROOT))
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "wb") as pipe, open("/dev/full", "wb") as full:
        outputs = [(pipe, ""), (full, "error: [Errno 28] No space left on device\n")]
        for output, said in outputs:
            ended = subprocess.run(command, stdout=output, stderr=subprocess.PIPE, env=environment, text=True)
            assert (ended.returncode, ended.stderr) == (1, said)
