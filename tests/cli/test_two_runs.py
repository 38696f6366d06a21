"""Two runs into one file of results: the second is refused while the first is there, and continues after it."""

import errno
import json
import os
import signal
import subprocess
import sys
import time

import pytest
from bundled import ROOT, TINY_KJV

from transformers_neuronx.support import files

COUNT = 40
REFUSED = "error: predictions.jsonl: another run is writing results there; wait for it, or choose another --output\n"


@pytest.fixture
def arguments(tmp_path):
    prompts = [json.dumps(dict(prompt=f"And the number of them was {number},")) for number in range(COUNT)]
    (tmp_path / "data.jsonl").write_text("\n".join(prompts))
    return ["run", str(TINY_KJV), "--data-dir", "data.jsonl", "--examples-to-generate", str(COUNT), "--json"]


def test_the_second_is_refused_and_after_a_kill_it_goes_on(command, tmp_path, arguments):
    output = tmp_path / "predictions.jsonl"
    environment = os.environ | dict(PYTHONPATH=str(ROOT), HF_HUB_OFFLINE="1")
    first = subprocess.Popen(
        [sys.executable, "-m", "transformers_neuronx", *arguments],
        cwd=tmp_path, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
    )  # fmt: skip
    try:
        while first.poll() is None and not (output.exists() and b"\n" in output.read_bytes()):
            time.sleep(0.005)
        first.send_signal(signal.SIGSTOP)
        before = output.read_bytes()
        assert first.poll() is None and 0 < before.count(b"\n") < COUNT
        for more in ([], ["--restart"], ["--top-k", 3]):
            assert command(*arguments, *more, status=1) == ("", REFUSED)
        assert output.read_bytes() == before
    finally:
        first.kill()
        first.communicate()
    command(*arguments)
    lines = output.read_bytes().splitlines()
    assert [json.loads(line)["line"] for line in lines] == list(range(1, COUNT + 1))
    assert b"".join(line + b"\n" for line in lines).startswith(before)


def test_no_lock_is_left(command, tmp_path, arguments):
    with open(tmp_path / "predictions.jsonl", "ab", buffering=0) as file:
        files.lock(file)
        assert command(*arguments, status=1) == ("", REFUSED)
    command(*arguments)
    assert {path.name for path in tmp_path.iterdir()} == {
        "data.jsonl", "predictions.jsonl", "predictions.jsonl.settings.json"
    }  # fmt: skip


@pytest.mark.parametrize("system", ["no locks", "no module"])
@pytest.mark.slow
def test_where_there_are_no_locks_that_is_said(command, tmp_path, arguments, monkeypatch, system):
    import fcntl

    (tmp_path / "data.jsonl").write_text('{"prompt": "And"}')

    def flock(*_):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setenv("NEURONX_CACHE", "off")  # it has its own locks
    if system == "no locks":
        monkeypatch.setattr(fcntl, "flock", flock)
    else:
        monkeypatch.setitem(sys.modules, "fcntl", None)
    printed, said = command(*arguments)
    reason = os.strerror(errno.ENOLCK) if system == "no locks" else "no locks on this system"
    assert said == f"predictions.jsonl cannot be locked ({reason}): do not let another run write to it\n"
    assert json.loads(printed)["results"] == 1


def test_what_is_no_file_takes_no_results(command, tmp_path, arguments):
    os.mkfifo(tmp_path / "pipe")
    _, said = command(*arguments, "--output", "pipe", status=2)
    assert said == "error: pipe: results must go to a regular file, found a special file\n"
    assert not (tmp_path / "pipe.settings.json").exists()


def test_an_output_in_which_nothing_is_yet_is_begun_anew(command, tmp_path, arguments):
    """A run that is killed before its first result leaves an empty file, with settings or without."""
    (tmp_path / "predictions.jsonl").touch()
    command(*arguments, "--examples-to-generate", 2)
    (tmp_path / "predictions.jsonl").write_bytes(b"")
    printed, _ = command(*arguments, "--examples-to-generate", 1, "--top-k", 3)
    assert json.loads(printed)["results"] == 1
