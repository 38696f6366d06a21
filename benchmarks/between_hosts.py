"""What a token costs when a model is divided between hosts, by the delay between them.

Run as root: two network namespaces stand for hosts, and a relay between them holds each packet for a while.

python benchmarks/between_hosts.py --out benchmarks/results/between_hosts.json
"""

from __future__ import annotations

import argparse
import ctypes
import fcntl
import json
import os
import queue
import statistics
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from transformers_neuronx.runtimes.processor import processor

ROOT = Path(__file__).parents[1]
NAMES, NETWORK = ("neuronx-a", "neuronx-b"), "10.78.0"
TUN, NO_INFO, SET = 0x0001, 0x1000, 0x400454CA  # of Linux's if_tun.h


def run(command: str) -> None:
    subprocess.run(command.split(), check=True)


def inside(name: str | None) -> None:
    """Let this thread be in a network namespace, or in that of the machine."""
    path = f"/var/run/netns/{name}" if name else f"/proc/{os.getpid()}/ns/net"
    with open(path) as place:
        if ctypes.CDLL(None, use_errno=True).setns(place.fileno(), 0):
            raise OSError(ctypes.get_errno(), "setns")


def tunnel(number: int) -> int:
    """Make the network device of a host. Returns what reads and writes its packets."""

    def make() -> None:
        inside(NAMES[number])
        device = os.open("/dev/net/tun", os.O_RDWR)
        fcntl.ioctl(device, SET, struct.pack("16sH22x", b"tun0", TUN | NO_INFO))
        found.append(device)

    found: list[int] = []
    thread = threading.Thread(target=make)  # a thread that is elsewhere must not be used for anything else
    thread.start()
    thread.join()
    for command in (f"addr add {NETWORK}.{number + 1}/24 dev tun0", "link set tun0 up", "link set lo up"):
        run(f"ip -n {NAMES[number]} {command}")
    return found[0]


def relay(source: int, target: int, delay: list[float]) -> None:
    """Carry packets one way, each as late as `delay` says at the time, in seconds."""
    waiting: queue.Queue[tuple[float, bytes]] = queue.Queue()

    def take() -> None:
        while True:
            packet = os.read(source, 2**16)
            waiting.put((time.perf_counter() + delay[0], packet))

    def give() -> None:
        while True:
            due, packet = waiting.get()
            if (rest := due - time.perf_counter()) > 0:
                time.sleep(rest)
            os.write(target, packet)

    for part in (take, give):
        threading.Thread(target=part, daemon=True).start()


@contextmanager
def hosts() -> Iterator[list[float]]:
    """Two hosts. Yields a list with the delay of one way, which may be changed."""
    try:
        for name in NAMES:
            run(f"ip netns add {name}")
        delay = [0.0]
        devices = [tunnel(number) for number in range(2)]
        relay(devices[0], devices[1], delay)
        relay(devices[1], devices[0], delay)
        yield delay
    finally:
        for name in NAMES:
            subprocess.run(["ip", "netns", "del", name], check=False)


def on(host: int, *command: str) -> list[str]:
    return ["ip", "netns", "exec", NAMES[host], *command]


ECHO = "import socket; s = socket.create_server(('', 7)); c = s.accept()[0]\nwhile d := c.recv(64): c.send(d)"
ASK = f"""
import socket, time, statistics
c = socket.create_connection(("{NETWORK}.2", 7)); c.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1); t = []
for _ in range(200):
    began = time.perf_counter(); c.send(b"x"); c.recv(1); t.append(time.perf_counter() - began)
print(statistics.median(t) * 1e3)
"""


def round_trip() -> float:
    """Milliseconds of a byte to the other host and back: the median of 200."""
    echo = subprocess.Popen(on(1, sys.executable, "-c", ECHO))
    time.sleep(0.5)
    try:
        asked = subprocess.run(on(0, sys.executable, "-c", ASK), check=True, capture_output=True, text=True)
    finally:
        echo.kill()
        echo.wait()
    return float(asked.stdout)


def bench(model: str, hosts: int, *more: str) -> float:
    """Milliseconds of a token, the median of `bench`."""
    command = [sys.executable, "-m", "transformers_neuronx", "bench", model, "--tp", "2", "-p", "16", "-n", "64"]
    command += ["--rounds", "5", "--json", *more]
    if hosts == 1:
        return float(
            json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)[0]["token_p50_ms"]
        )
    command += ["--nnodes", "2", "--master-addr", f"{NETWORK}.1"]
    other = subprocess.Popen(on(1, *command, "--node-rank", "1"), stderr=subprocess.DEVNULL)
    try:
        ran = subprocess.run(on(0, *command), check=True, capture_output=True, text=True)
    finally:
        other.kill()
        other.wait()
    return float(json.loads(ran.stdout)[0]["token_p50_ms"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=str(ROOT / "examples" / "tiny-kjv"))
    parser.add_argument("--delays", default="0,0.1,0.3,1.3", help="round trips that the relay adds, in milliseconds")
    parser.add_argument("--out", help="file for the results")
    asked = parser.parse_args()
    found = dict(machine=processor()["processor"], processors=os.cpu_count(), model=Path(asked.model).name)
    found["one_process"] = bench(asked.model, 1)
    found["two_processes"] = bench(asked.model, 1, "--processes")
    print(
        f"one process {found['one_process']:.2f} ms a token, two on one host {found['two_processes']:.2f}", flush=True
    )
    found["hosts"] = []
    with hosts() as delay:
        for added in map(float, asked.delays.split(",")):
            delay[0] = added / 2e3
            trips = [round_trip() for _ in range(3)]
            token = bench(asked.model, 2)
            found["hosts"].append(dict(added_ms=added, round_trip_ms=statistics.median(trips), token_ms=token))
            print(f"round trip {statistics.median(trips):.2f} ms: {token:.2f} ms a token", flush=True)
    if asked.out:
        Path(asked.out).write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
