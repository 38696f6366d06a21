"""A full disk: the error names the path, and no partly written file stays."""

import errno
import json
import os
import resource
import threading
from contextlib import contextmanager

import pytest
from bundled import TINY_KJV
from transformers import PreTrainedTokenizerFast

from transformers_neuronx.engine.artifacts import open_artifact
from transformers_neuronx.errors import StorageError
from transformers_neuronx.support import files

pytestmark = pytest.mark.compiled_ahead

COMPILE = ("compile", TINY_KJV, "to/artifact", "--n-positions", 64)
FULL = "No space left on device; make room there, or choose another place\n"
LARGE = "File too large; allow larger files (ulimit -f), or choose another place\n"


@contextmanager
def full(after):
    """Make the disk full after `count` files."""
    sync, left = os.fsync, [after]

    def fsync(descriptor):
        left[0] -= 1
        if left[0] < 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        sync(descriptor)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", fsync)
        yield


@contextmanager
def limited(name, size):
    """Limit the size of files while that function of `files` runs."""
    function, limits = getattr(files, name), resource.getrlimit(resource.RLIMIT_FSIZE)

    def within(*arguments):
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
        try:
            return function(*arguments)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(files, name, within)
        yield


def listing(directory):
    return {path: path.is_file() and path.read_bytes() for path in directory.rglob("*")}


@pytest.mark.parametrize("after", [0, 7])
def test_compile(command, tmp_path, after):
    with full(after):
        printed, said = command(*COMPILE, status=1)
    assert (printed, said) == ("", f"error: to/artifact: cannot write the artifact: {FULL}")
    assert listing(tmp_path) == {}


def test_compile_over_an_artifact(command, tmp_path):
    command(*COMPILE)
    before = listing(tmp_path)
    with full(5):
        _, said = command(*COMPILE, status=1)
    assert said == f"error: to/artifact: cannot write the artifact: {FULL}" and listing(tmp_path) == before


def test_the_tokenizer_of_an_artifact(command, tmp_path, monkeypatch):
    def save_pretrained(self, directory):
        (directory / "tokenizer.json").write_text("{")
        raise Exception("No space left on device (os error 28)")  # the message of safetensors

    monkeypatch.setattr(PreTrainedTokenizerFast, "save_pretrained", save_pretrained)
    _, said = command(*COMPILE, status=1)
    told = "No space left on device (os error 28); make room there, or choose another place\n"
    assert said == f"error: to/artifact: cannot write the tokenizer: {told}"
    listed = {"manifest.json", *open_artifact("to/artifact").manifest["files"]}
    assert {path.name for path in (tmp_path / "to/artifact").iterdir()} == listed


@pytest.mark.slow
def test_run(command, tmp_path):
    """A partly written line is removed, and the same command continues."""
    prompts = [f"And {name} said" for name in ("Moses", "Aaron", "Joshua", "David")]
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(dict(prompt=prompt)) + "\n" for prompt in prompts))
    arguments = ("run", TINY_KJV, "--data-dir", "data.jsonl", "--max-seq-length", 64, "--json", "--output")
    command(*arguments, "whole.jsonl")
    whole = (tmp_path / "whole.jsonl").read_bytes()
    lines = whole.splitlines(keepends=True)
    with limited("append", len(lines[0]) + len(lines[1]) + 20):
        _, said = command(*arguments, "part.jsonl", status=1)
    assert said == f"error: part.jsonl: cannot write results: {LARGE}"
    assert (tmp_path / "part.jsonl").read_bytes() == b"".join(lines[:2])
    command(*arguments, "part.jsonl")
    assert (tmp_path / "part.jsonl").read_bytes() == whole


def test_run_s_settings(command, tmp_path):
    (tmp_path / "data.jsonl").write_text('{"prompt": "And"}\n')
    before = listing(tmp_path)
    with limited("replace", 100):
        _, said = command("run", TINY_KJV, "--data-dir", "data.jsonl", status=1)
    assert said == f"error: predictions.jsonl.settings.json: cannot write the settings of the results: {LARGE}"
    assert listing(tmp_path) == before | {tmp_path / "predictions.jsonl": b""}  # empty, as a lock


def test_inspect(command, tmp_path):
    (tmp_path / "page.html").write_text("an earlier one")
    before = listing(tmp_path)
    with limited("replace", 1000):
        _, said = command("inspect", TINY_KJV, "--n-positions", 64, "--html", "page.html", status=1)
    assert said == f"error: page.html: cannot write the page: {LARGE}" and listing(tmp_path) == before


def test_a_page_in_a_directory_that_is_not_there_yet_and_in_a_pipe(command, tmp_path):
    arguments = ("inspect", TINY_KJV, "--n-positions", 64, "--html")
    command(*arguments, "new/directory/page.html")
    page = (tmp_path / "new/directory/page.html").read_bytes()
    os.mkfifo(tmp_path / "pipe")
    read = []
    reader = threading.Thread(target=lambda: read.append((tmp_path / "pipe").read_bytes()))
    reader.start()
    command(*arguments, "pipe")
    reader.join()
    assert read == [page] and (tmp_path / "pipe").is_fifo()


@pytest.mark.parametrize(
    ("number", "advice"),
    [
        (errno.ENOSPC, "make room there, or choose another place"),
        (errno.EDQUOT, "make room in this user's quota, or choose another place"),
        (errno.EIO, "the disk may be failing: choose another place"),
        (errno.EROFS, "choose another place"),
    ],
)
def test_the_error_has_the_system_s_number(tmp_path, number, advice):
    with pytest.raises(StorageError) as caught, files.saving(tmp_path, "results"):
        raise OSError(number, os.strerror(number))
    assert isinstance(caught.value, OSError) and caught.value.errno == number
    assert str(caught.value) == f"{tmp_path}: cannot write results: {os.strerror(number)}; {advice}"
