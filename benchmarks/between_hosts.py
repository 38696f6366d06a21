"""What a token and a prompt cost when a model is divided between hosts, by the delay and the bandwidth between them.

Run as root: network namespaces stand for hosts, and a relay between them holds each packet for a while.

python benchmarks/between_hosts.py --out benchmarks/results/between_hosts.json
"""

from __future__ import annotations

import argparse
import ctypes
import fcntl
import json
import math
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
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import Any

from transformers_neuronx import NeuronAutoModelForCausalLM
from transformers_neuronx.analysis.planning import Planner
from transformers_neuronx.runtimes.processor import processor

ROOT = Path(__file__).parents[1]
NETWORK = "10.78.0"
TUN, NO_INFO, SET = 0x0001, 0x1000, 0x400454CA  # of Linux's if_tun.h
TO = 19  # the place of the last byte of the address in an IP packet to which it goes
PROMPT = 128


def name(host: int) -> str:
    return f"neuronx-{host}"


def address(host: int) -> str:
    return f"{NETWORK}.{host + 1}"


def run(command: str) -> None:
    subprocess.run(command.split(), check=True)


def tunnel(host: int) -> int:
    """Make the network device of a host. Returns what reads and writes its packets."""

    def make() -> None:
        with open(f"/var/run/netns/{name(host)}") as place:
            if ctypes.CDLL(None, use_errno=True).setns(place.fileno(), 0):
                raise OSError(ctypes.get_errno(), "setns")
        device = os.open("/dev/net/tun", os.O_RDWR)
        fcntl.ioctl(device, SET, struct.pack("16sH22x", b"tun0", TUN | NO_INFO))
        found.append(device)

    found: list[int] = []
    thread = threading.Thread(target=make)  # a thread that is elsewhere must not be used for anything else
    thread.start()
    thread.join()
    for command in (f"addr add {address(host)}/24 dev tun0", "link set tun0 up", "link set lo up"):
        run(f"ip -n {name(host)} {command}")
    return found[0]


@dataclass
class Wire:
    """Each packet is `delay` seconds under way, and each host gets at most `bandwidth` bytes a second."""

    delay: float = 0.0
    bandwidth: float = math.inf


class Relay:
    """Carries packets between the devices of hosts."""

    def __init__(self, devices: list[int], wire: Wire) -> None:
        self.devices, self.wire = devices, wire
        self.waiting: list[queue.Queue[bytes | tuple[float, bytes]]] = [queue.Queue() for _ in devices]
        self.free = [0.0] * len(devices)  # when a host has all that was sent to it
        self.lock = threading.Lock()
        for host in range(len(devices)):
            for part in (self.take, self.give):
                threading.Thread(target=part, args=[host], daemon=True).start()

    def take(self, host: int) -> None:
        while packet := os.read(self.devices[host], 2**16):
            to = packet[TO] - 1
            if packet[0] >> 4 != 4 or not 0 <= to < len(self.devices):
                continue
            with self.lock:
                self.free[to] = max(self.free[to], time.perf_counter()) + len(packet) / self.wire.bandwidth
                self.waiting[to].put((self.free[to] + self.wire.delay, packet))

    def give(self, host: int) -> None:
        while True:
            due, packet = self.waiting[host].get()
            if (rest := due - time.perf_counter()) > 0:
                time.sleep(rest)
            os.write(self.devices[host], packet)


@contextmanager
def hosts(count: int) -> Iterator[Wire]:
    """So many hosts. Yields what is between them, which may be changed."""
    try:
        for host in range(count):
            run(f"ip netns add {name(host)}")
        wire = Wire()
        Relay([tunnel(host) for host in range(count)], wire)
        yield wire
    finally:
        for host in range(count):
            subprocess.run(["ip", "netns", "del", name(host)], check=False)


def on(host: int, *command: str) -> list[str]:
    return ["ip", "netns", "exec", name(host), *command]


ECHO = "import socket; s = socket.create_server(('', 7)); c = s.accept()[0]\nwhile d := c.recv(64): c.send(d)"
ASK = f"""
import socket, time, statistics
c = socket.create_connection(("{address(1)}", 7)); c.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1); t = []
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


def bench(model: str, devices: int, hosts: int, *more: str) -> dict[str, float]:
    """Milliseconds of a token and of a prompt, the medians of `bench`."""
    command = [sys.executable, "-m", "transformers_neuronx", "bench", model, "--tp", str(devices), "-p", str(PROMPT)]
    command += ["-n", "32", "--rounds", "5", "--json", *more]
    if hosts > 1:
        command += ["--nnodes", str(hosts), "--master-addr", address(0)]
    others = [
        subprocess.Popen(on(host, *command, "--node-rank", str(host)), stderr=subprocess.DEVNULL)
        for host in range(1, hosts)
    ]
    try:
        first = on(0, *command) if hosts > 1 else command
        ran = subprocess.run(first, check=True, stdout=subprocess.PIPE, text=True)
    finally:
        for other in others:
            other.kill()
            other.wait()
    found = json.loads(ran.stdout)[0]
    return dict(token_ms=found["token_p50_ms"], prompt_ms=found["first_ms"])


def facts(model: str, devices: int) -> dict[str, Any]:
    """The sums of a token and of a prompt: how many, and the bytes that each device gets in them."""
    sizes = dict(n_positions=[256], context_length_estimate=[PROMPT])
    needs = Planner(NeuronAutoModelForCausalLM.from_pretrained(model, **sizes)).needs(devices, on_cpu=True)
    return dict(token=needs.token, prompt=needs.prompt)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=str(ROOT / "examples" / "tiny-kjv"))
    parser.add_argument("--hosts", default="2,3,4")
    parser.add_argument("--delays", default="0,0.3,1.3", help="round trips that the relay adds, in milliseconds")
    parser.add_argument("--bandwidths", default="inf,0.1", help="gigabits a second into each host")
    parser.add_argument("--out", help="file for the results")
    asked = parser.parse_args()
    counts, delays, rates = (
        [kind(each) for each in text.split(",")]
        for kind, text in ((int, asked.hosts), (float, asked.delays), (float, asked.bandwidths))
    )
    found: dict[str, Any] = dict(
        machine=processor()["processor"], processors=os.cpu_count(), model=Path(asked.model).name, prompt=PROMPT
    )
    found["alone"] = [dict(devices=each, processes=1) | bench(asked.model, each, 1) for each in [1, *counts]]
    found["alone"].append(dict(devices=2, processes=2) | bench(asked.model, 2, 1, "--processes"))
    found["work"] = {each: {name: asdict(work) for name, work in facts(asked.model, each).items()} for each in counts}
    print(*found["alone"], sep="\n", flush=True)
    found["hosts"] = []
    for count in counts:
        with hosts(count) as wire:
            for added, rate in product(delays, rates):
                wire.delay, wire.bandwidth = added / 2e3, rate * 1e9 / 8
                trip = statistics.median(round_trip() for _ in range(3))
                row = dict(hosts=count, added_ms=added, round_trip_ms=trip, gigabits=None if math.isinf(rate) else rate)
                found["hosts"].append(row | bench(asked.model, count, count))
                print(found["hosts"][-1], flush=True)
    if asked.out:
        Path(asked.out).write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
