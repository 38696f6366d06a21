"""Processes that run models together: how they find each other, and what they say when they do not."""

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import closing

import pytest
from ports import free_port

from transformers_neuronx.errors import ConfigError, EngineError
from transformers_neuronx.runtimes import meeting
from transformers_neuronx.runtimes.meeting import Meeting
from transformers_neuronx.runtimes.world import World, world

TORCHRUN = dict(RANK="1", WORLD_SIZE="4", MASTER_ADDR="10.0.0.1", MASTER_PORT="29500", LOCAL_RANK="1")
SLURM = dict(SLURM_JOB_ID="5", SLURM_PROCID="1", SLURM_STEP_NUM_TASKS="2", SLURM_STEP_NODELIST="gpu[02-04,7],x1")
URI = "1531576320.0;tcp://10.96.0.1,10.148.0.1:34911"
OPEN_MPI = dict(OMPI_COMM_WORLD_SIZE="2", OMPI_COMM_WORLD_RANK="0", OMPI_MCA_orte_hnp_uri=URI)
ORIGINAL = dict(NEURON_RANK_ID="1", NEURON_LOCAL_TP="2", NEURON_RT_ROOT_COMM_ID="10.0.0.2:63423")


@pytest.fixture
def given(monkeypatch):
    """`given(**variables)`: set these, and no others that a launcher sets."""

    def given(**variables):
        for each in (*TORCHRUN, *SLURM, *OPEN_MPI, *ORIGINAL, "NEURONX_WORLD"):
            monkeypatch.delenv(each, raising=False)
        for name, value in variables.items():
            monkeypatch.setenv(name, value)

    given()
    return given


@pytest.mark.parametrize(
    ("variables", "found"),
    [
        ({}, None),
        (dict(NEURONX_WORLD="1/2@host:81"), World(1, 2, "host", 81)),
        (dict(NEURONX_WORLD="0/2@fe80::1:81"), World(0, 2, "fe80::1", 81)),
        (dict(NEURONX_WORLD="0/1@host:81"), None),
        (dict(NEURONX_WORLD="off") | TORCHRUN, None),
        (dict(NEURONX_WORLD="1/2@host:81") | TORCHRUN, World(1, 2, "host", 81)),
        (TORCHRUN, World(1, 4, "10.0.0.1", 29501)),
        (TORCHRUN | dict(WORLD_SIZE="1", RANK="0"), None),
        (SLURM, World(1, 2, "gpu02", 61445)),
        (SLURM | dict(SLURM_STEP_NODELIST="a-[3,5]-b,c"), World(1, 2, "a-3-b", 61445)),
        (SLURM | dict(SLURM_STEP_NODELIST="one,two"), World(1, 2, "one", 61445)),
        (OPEN_MPI, World(0, 2, "10.96.0.1", 61440 + 1531576320 // 4096 % 4096)),
        (ORIGINAL, World(1, 2, "10.0.0.2", 63423)),
    ],
)
def test_what_launchers_say(given, variables, found):
    given(**variables)
    assert world(4) == found
    assert world(1) is None, "a model on one device has no need of others"


@pytest.mark.parametrize(
    ("variables", "said"),
    [
        (dict(NEURONX_WORLD="1of2"), "NEURONX_WORLD must be RANK/SIZE@HOST:PORT, or off, got '1of2'"),
        (dict(NEURONX_WORLD="2/2@host:81"), "of 2 processes the rank must be from 0 to 1, got 2"),
        (TORCHRUN | dict(RANK="one"), "RANK must be a whole number, got 'one'"),
        (OPEN_MPI | dict(OMPI_MCA_orte_hnp_uri="1;usock"), "names no host"),
        (ORIGINAL | dict(NEURON_LOCAL_TP="3"), "tp_degree=4 must be a multiple of NEURON_LOCAL_TP=3"),
        (ORIGINAL | dict(NEURON_RT_ROOT_COMM_ID="host"), "NEURON_RT_ROOT_COMM_ID must be HOST:PORT, got 'host'"),
        (SLURM | dict(SLURM_STEP_NODELIST=""), "SLURM_STEP_NODELIST must name hosts, got ''"),
    ],
)
def test_what_makes_no_sense(given, variables, said):
    given(**variables)
    with pytest.raises(ConfigError, match=said):
        world(4)


def test_each_process_has_as_many_devices():
    assert World(0, 2, "host", 1).devices(4) == 2
    with pytest.raises(
        ConfigError, match=r"a multiple of the 3 processes that run the model, got 4; set NEURONX_WORLD"
    ):
        World(0, 3, "host", 1).devices(4)


@pytest.fixture
def meet(monkeypatch):
    """`meet({rank: facts}, size)`: what each rank is told, or the error that it gets; ranks are threads."""
    monkeypatch.setattr(meeting, "PATIENCE", 1.0)
    monkeypatch.setattr(meeting, "HELLO", 0.2)
    monkeypatch.setattr(Meeting, "_watch", lambda self: None)
    all_found = []

    def meet(ranks, size, port=None):
        found, port = {}, port or free_port()
        all_found.append(found)

        def come(rank, facts):
            try:
                found[rank] = Meeting(World(rank, size, "127.0.0.1", port), facts, lambda address: dict(at=address))
            except EngineError as error:
                found[rank] = str(error)

        threads = [threading.Thread(target=come, args=each) for each in ranks.items()]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return found

    yield meet
    for each in (each for found in all_found for each in found.values() if isinstance(each, Meeting)):
        each._close()


def test_they_meet(meet):
    found = meet({rank: dict(version="1") for rank in (2, 0, 1)}, 3)
    assert [found[rank].told for rank in range(3)] == [dict(at="127.0.0.1")] * 3


def test_another_version_is_an_error_in_all(meet):
    found = meet({0: dict(version="1"), 1: dict(version="2")}, 2)
    assert found == dict.fromkeys((0, 1), "rank 1 has another version '2', not '1', as rank 0 has")


def test_one_who_does_not_come_is_an_error_in_all(meet):
    found = meet({0: {}, 1: {}}, 4)
    assert found[0] == found[1]
    assert found[0].startswith("rank 2, 3 did not come to 127.0.0.1:")


def test_without_rank_0_nobody_meets(meet):
    assert meet({1: {}}, 2)[1].startswith("rank 0 did not come to 127.0.0.1:")


def test_nobody_meets_itself(meet, monkeypatch):
    """A connection from a port to itself succeeds, although nobody listens there."""
    port, connect, sockets = free_port(), socket.create_connection, []

    def to_itself(address, timeout):
        monkeypatch.setattr(socket, "create_connection", connect)
        sockets.append(connect(address, timeout, source_address=address))
        return sockets[0]

    monkeypatch.setattr(socket, "create_connection", to_itself)
    assert meet({1: {}}, 2, port)[1].startswith("rank 0 did not come to 127.0.0.1:")
    assert sockets[0].fileno() == -1, "it must be closed, so that rank 0 can listen"


def test_two_of_one_rank(meet, monkeypatch):
    port, found = free_port(), {}
    first = threading.Thread(target=lambda: found.update(meet({0: {}, 1: {}}, 3, port)))
    first.start()
    time.sleep(0.3)
    other = meet({1: {}}, 3, port)
    first.join()
    assert found[0] == other[1] == "there are two processes with rank 1, or it is too large"


def test_a_port_that_is_taken(meet):
    with closing(socket.create_server(("", 0))) as taken:
        port = taken.getsockname()[1]
        assert (
            meet({0: {}}, 2, port)[0]
            == f"rank 0 cannot listen at port {port}, where ranks meet: Address already in use"
        )


def test_who_is_not_one_of_them_is_sent_away(meet):
    port, said = free_port(), []

    def stranger():
        time.sleep(0.2)
        for line in (b"GET / HTTP/1.1\r\n\r\n", b"", b'{"rank": "x"}\n'):
            with closing(socket.create_connection(("127.0.0.1", port))) as connection:
                connection.sendall(line)
                said.append(connection.recv(10))

    knocking = threading.Thread(target=stranger)
    knocking.start()
    ranks = threading.Timer(0.3, lambda: None)
    ranks.start()
    found = {}
    leader = threading.Thread(target=lambda: found.update(meet({0: {}}, 2, port)))
    leader.start()
    knocking.join()
    meet({1: {}}, 2, port)
    leader.join()
    assert said == [b"", b"", b""] and found[0].told == dict(at="127.0.0.1")


SCRIPT = """
import atexit, sys, time
from transformers_neuronx.runtimes import meeting
from transformers_neuronx.runtimes.world import world
meeting.BEAT, meeting.SILENCE = 0.1, 1.0
with_others = meeting.Meeting(world(2), {}, lambda address: {})
atexit.register(with_others.leave)
print("met", flush=True)
sys.stdin.readline()  # a rank that is faster may end those that have not yet said that they have met
exec(sys.argv[1])
"""
WAIT = "time.sleep(60)"


@pytest.fixture
def processes():
    """`processes(*what)`: a process for each rank, which does this when all have met."""
    started, pipes = [], dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)

    def processes(*what):
        port = free_port()
        for rank, each in enumerate(what):
            variables = os.environ | dict(NEURONX_WORLD=f"{rank}/{len(what)}@127.0.0.1:{port}")
            command = [sys.executable, "-c", SCRIPT, each]
            started.append(subprocess.Popen(command, **pipes, text=True, env=variables))
        for process in started:
            line = process.stdout.readline()
            assert line == "met\n", process.communicate()
        for process in started:
            process.stdin.write("\n")
            process.stdin.flush()
        return list(started)

    yield processes
    for process in started:
        with process:
            process.kill()


def ended(process):
    _, said = process.communicate(timeout=30)
    return process.returncode, said.strip()


def test_they_wait_for_each_other_at_the_end(processes):
    first, second = processes("", "time.sleep(0.5); print('later')")
    assert ended(first) == ended(second) == (0, "")


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(("how", "said"), [("KILL", "is gone"), ("STOP", "has not answered for 1 seconds")])
def test_when_one_is_lost_all_end_with_a_sentence(processes, rank, how, said):
    started = processes(WAIT, WAIT, WAIT)
    victim = started.pop(rank)
    victim.send_signal(signal.Signals[f"SIG{how}"])
    others = [ended(process) for process in started]
    victim.kill()
    victim.communicate()
    assert [status for status, _ in others] == [1, 1]
    assert all(f"error: rank {rank} {said}; rank" in line and line.count("\n") == 0 for _, line in others)


def test_who_ends_with_an_error_tells_the_others(processes):
    first, second = processes(WAIT, "raise ValueError('no such weight')")
    assert ended(first) == (1, "error: rank 1 ended with ValueError: no such weight; rank 0 cannot go on without it")
    status, said = ended(second)
    assert status == 1 and said.endswith("ValueError: no such weight")


def test_ranks_that_do_not_do_the_same(processes):
    same = "with_others.note(b'a'); with_others.note({}); time.sleep(10)"
    for status, said in map(ended, processes(same.format("b'b'"), same.format("b'c'"))):
        assert status == 1 and "run different programs, or the same with other operands, at command 2" in said
