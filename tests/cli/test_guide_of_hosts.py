"""The guide to several processes, step by step as written there; network namespaces are its hosts."""

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from bundled import ROOT, TINY_KJV

GUIDE = (ROOT / "docs/guides/several-processes.md").read_text()
PROMPT = "And God said unto Moses,"
[SENTENCE] = set(re.findall(rf"^{PROMPT}.*$", GUIDE, re.M))
ADDRESSES = {"host-a": "10.79.0.1", "host-b": "10.79.0.2"}
ASK = f"""
import json, urllib.request
def asked(path, **body):
    data = json.dumps(body).encode() if body else None
    return json.load(urllib.request.urlopen(urllib.request.Request("http://127.0.0.1:8000/v1/" + path, data)))
name = asked("models")["data"][0]["id"]
print(asked("completions", model=name, prompt={PROMPT!r}, max_tokens=18, temperature=0)["choices"][0]["text"])
"""


def steps():
    """Return the guide's commands on hosts, by block: pairs of a host and a command."""
    for block in re.findall(r"^```text\n(.*?)^```$", GUIDE, re.M | re.S):
        commands = [(host or "host-a", command) for host, command in re.findall(r"^(host-[ab])?\$ (.*)$", block, re.M)]
        if commands and "--ray" not in commands[0][1]:  # which tests/server/test_ray.py tries
            yield commands


STEPS = list(steps())
SERVED = [step for step in STEPS if "serve" in step[0][1]]
SCRIPTS = [step for step in STEPS if "script.py" in step[0][1]]


@pytest.fixture(scope="module")
def hosts():
    if os.geteuid() or not shutil.which("ip"):
        pytest.skip("network namespaces need root and ip, of iproute2")
    names = "127.0.0.1 localhost\n" + "".join(f"{address} {name}\n" for name, address in ADDRESSES.items())
    with ExitStack() as ends:
        for name in ADDRESSES:
            folder = Path("/etc/netns", name)
            folder.mkdir(parents=True)
            ends.callback(shutil.rmtree, folder)
            (folder / "hosts").write_text(names)
            ip(f"netns add {name}")
            ends.callback(ip, f"netns del {name}")
        ip("link add eth0 netns host-a type veth peer name eth0 netns host-b")
        for name, address in ADDRESSES.items():
            for command in (f"addr add {address}/24 dev eth0", "link set eth0 up", "link set lo up"):
                ip(f"-n {name} {command}")
        yield


def ip(arguments):
    subprocess.run(["ip", *arguments.split()], check=True)


@pytest.fixture
def folder(tmp_path):
    """A user's folder: MODEL is the bundled checkpoint, and script.py the example."""
    (tmp_path / "MODEL").symlink_to(TINY_KJV)
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    shutil.copy(ROOT / "examples" / "several_processes.py", tmp_path / "script.py")
    return tmp_path


@contextmanager
def started(step, folder):
    """Start the commands of a step, each on its host. None is left at the end."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    processes = []
    try:
        for host, command in step:
            words = shlex.split(command)
            own = dict(word.split("=", 1) for word in words if re.match(r"[A-Z_]+=", word))
            words = words[len(own) :]
            processes.append(
                subprocess.Popen(
                    ["ip", "netns", "exec", host, *words], cwd=folder, text=True, stdout=subprocess.PIPE,
                    env=os.environ | dict(PATH=path, PYTHONPATH=str(ROOT)) | own, stderr=subprocess.STDOUT,
                )
            )  # fmt: skip
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.communicate()


def answer(leader):
    """Return what the server of host-a answers, once it is there."""
    while leader.poll() is None:  # the time limit of tests is the only one
        asked = subprocess.run(
            ["ip", "netns", "exec", "host-a", sys.executable, "-c", ASK], capture_output=True, text=True
        )
        if asked.returncode == 0:
            return asked.stdout
        time.sleep(0.5)
    return pytest.fail(f"the server ended: {leader.communicate()[0]}")


def test_the_guide_has_these_steps():
    assert [len(step) for step in STEPS] == [1, 1, 2, 2]
    assert [*SERVED, *SCRIPTS] == STEPS and [host for host, _ in STEPS[2]] == list(ADDRESSES)


@pytest.mark.slow
@pytest.mark.parametrize("step", SERVED, ids=lambda step: step[0][1])
def test_a_model_is_served(step, hosts, folder):
    with started(step, folder) as processes:
        assert (PROMPT + answer(processes[0])).startswith(SENTENCE)
        processes[0].send_signal(signal.SIGTERM)
        said = [process.communicate(timeout=120)[0] for process in processes]
        assert [process.returncode for process in processes] == [0] * len(step), said


@pytest.mark.slow
@pytest.mark.parametrize("step", SCRIPTS, ids=lambda step: step[0][1])
def test_a_script_runs_on_both_hosts(step, hosts, folder):
    with started(step, folder) as processes:
        said = [process.communicate(timeout=120)[0] for process in processes]
        assert [process.returncode for process in processes] == [0] * len(step), said
        assert all(SENTENCE in each for each in said)
