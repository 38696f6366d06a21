"""`serve --ray` on this machine: replicas that are killed, and more of them under load. It needs the extra `ray`."""

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from http.client import HTTPConnection, HTTPException, IncompleteRead
from importlib.util import find_spec
from pathlib import Path

import pytest
from ports import free_port
from served import TINY_KJV, checkpoint

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("ray") is None, reason="the extra ray is not installed"),
]
BODY = dict(prompt="In the beginning", temperature=0, stream=True, ignore_eos=True)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    place = tmp_path_factory.mktemp("model")
    checkpoint(place)
    return place


@pytest.fixture
def cluster():
    """A cluster of Ray with more processors than this machine may have."""
    ray = str(Path(sys.executable).with_name("ray"))
    command = [ray, "start", "--head", "--num-cpus", "8", "--include-dashboard", "false", "--disable-usage-stats"]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    yield
    subprocess.run([ray, "stop", "--force"], check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


@contextmanager
def serving(model, *options):
    """Run replicas of a model. Yields the port of the proxy."""
    port = free_port()
    command = [sys.executable, "-m", "transformers_neuronx", "serve", f"x={model}", "--ray", "--port", str(port)]
    command += ["--n-positions", "256", "--batch-size", "8", *map(str, options)]
    environment = os.environ | dict(RAY_USAGE_STATS_ENABLED="0")
    process = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)
    said = []
    try:
        while not any(line.startswith("running on") for line in said):
            said.append(process.stderr.readline())
            assert said[-1], "".join(said)
        reader = threading.Thread(target=lambda: said.extend(process.stderr))
        reader.start()
        yield port
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0, "".join(said)
    finally:
        process.kill()
        process.wait()
        process.stderr.close()
    assert not replicas(), "all end with the command"


def replicas():
    """The processes of replicas."""
    found = []
    for each in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if each.read_bytes().startswith(b"ray::ServeReplica:transformers-neuronx"):
                found.append(int(each.parent.name))
        except OSError:
            continue  # it has ended
    return found


def streamed(port, tokens=100):
    """How a streamed request ends: with its text, with an error event, or cut off."""
    connection = HTTPConnection("127.0.0.1", port, timeout=60)
    try:
        headers = {"content-type": "application/json"}
        connection.request("POST", "/v1/completions", json.dumps(BODY | dict(max_tokens=tokens)), headers)
        response = connection.getresponse()
        if response.status != 200:
            return f"status {response.status}"
        try:
            text = response.read().decode()
        except IncompleteRead:
            return "cut"
        if text.endswith("data: [DONE]\n\n"):
            parts = re.findall(r"^data: (\{.*\})$", text, re.M)
            return "".join(json.loads(part)["choices"][0]["text"] for part in parts)
        return "error event" if '"error"' in text else "cut"
    except (HTTPException, OSError) as error:
        return type(error).__name__
    finally:
        connection.close()


def wait_for(number, seconds=90):
    """Wait until there are so many replicas."""
    deadline = time.monotonic() + seconds
    while len(found := replicas()) != number:
        assert time.monotonic() < deadline, f"there are {len(found)} replicas, not {number}"
        time.sleep(0.1)
    return found


def test_a_thousand_requests_while_replicas_are_killed(model):
    with serving(model, "--replicas", 2) as port:
        wanted = streamed(port)
        assert wanted.startswith((" ", "\n")) or wanted
        over, killed = threading.Event(), []

        def kill():
            while not over.wait(3):
                if len(found := replicas()) == 2:
                    os.kill(found[len(killed) % 2], signal.SIGKILL)
                    killed.append(found)

        killer = threading.Thread(target=kill)
        killer.start()
        with ThreadPoolExecutor(8) as pool:
            ends = Counter(pool.map(lambda _: streamed(port), range(1000)))
        over.set()
        killer.join()
        print({("answered" if end == wanted else end): count for end, count in ends.items()}, len(killed), "kills")
        lost = ends.total() - ends[wanted]
        # Ray's proxy answers with 500 itself if a replica is killed before the first byte of its answer.
        assert killed and set(ends) <= {wanted, "cut", "error event", "status 500"}
        assert lost <= 8 * len(killed), "only requests under way at a kill"
        wait_for(2)
        assert streamed(port) == wanted


@pytest.mark.usefixtures("cluster")
def test_replicas_of_two_worker_processes_each():
    with serving(TINY_KJV, "--replicas", 2, "--tp", 2, "--processes") as port:
        [text] = {streamed(port, 8) for _ in range(8)}
        assert text.startswith(" of the beginning")


@pytest.mark.filterwarnings("ignore")  # Ray's own
def test_the_application_of_a_configuration_file(model):
    from transformers_neuronx.cli.service import application
    from transformers_neuronx.errors import ConfigError

    made = application(dict(model=str(model), tp=2, processes=True, max_replicas=3))
    config = made._bound_deployment._deployment_config.autoscaling_config
    assert (config.min_replicas, config.max_replicas) == (1, 3)
    for wrong in ({}, dict(model="x", size=2)):
        with pytest.raises(ConfigError, match="arguments must be model"):
            application(wrong)


def test_more_replicas_under_load(model):
    with serving(model, "--replicas", 1, "--max-replicas", 2) as port:
        assert len(wait_for(1)) == 1
        over = threading.Event()

        def ask():
            while not over.is_set():
                streamed(port, 200)

        with ThreadPoolExecutor(24) as pool:
            for _ in range(24):
                pool.submit(ask)
            try:
                wait_for(2, 120)
            finally:
                over.set()
