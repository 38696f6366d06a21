"""Load of all kinds on a server in a process of its own. No answer may be wrong, and nothing may stay behind.

python tests/server/soak.py --requests 100000

Then the server is told to stop, and killed, in the middle of its work. The program prints figures, and ends with status
1 if something was wrong.
"""

import argparse
import asyncio
import math
import signal
import sys
import tempfile
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from random import Random
from subprocess import TimeoutExpired

from kinds import COMPLETIONS, SHARES, STREAM, Known, WrongError, begun, check, check_status, encoded, events_of
from served import Served, StartError, checkpoint
from wire import Wire, request

LIMIT = 120  # seconds without an answer, after which a request hangs
ROUNDS = 10  # after each of them, nothing may be left
# Of memory in the last half, if there are so many requests before it. Until then the allocator's heaps grow, by what is
# free in them and not by what is used.
GROWTH, WARM = 1.02, 20_000
MOST_WRONG = 30  # then the program gives up
IDLE = ("requests_running", "requests_waiting", "cache_positions_used")
REPEATED = 200  # requests to a server that was started again
COMING = 8  # clients that go on to ask while the server stops
FAILURES = (WrongError, StartError, OSError, TimeoutExpired, ValueError, LookupError)


class Soak:
    """Load on a server, what was wrong, and figures."""

    def __init__(self, served, seed):
        self.served, self.seed, self.known = served, seed, Known()
        self.wrong, self.statuses, self.asked = [], Counter(), Counter()
        self.longest = Counter()  # seconds of a request, by its kind
        self.rounds = []  # requests so far, seconds, KiB of memory, open files
        self.status = None  # of the process that was told to stop
        self.dead = False  # whether the server was killed, so that connections may break

    def wire(self):
        return Wire(self.served.host, self.served.port, self.statuses)

    async def load(self, numbers, connections, until=math.inf):
        """Send requests over so many connections, and return how many were sent."""
        sent, numbers = 0, iter(numbers)

        async def client():
            nonlocal sent
            wire = self.wire()
            for number in numbers:
                sent += 1
                await self.one(number, wire)
                if self.dead or time.monotonic() > until or len(self.wrong) >= MOST_WRONG:
                    break
            wire.close()

        await asyncio.gather(*(client() for _ in range(connections)))
        return sent

    async def one(self, number, wire):
        """Do what a request's number says, and note what was wrong."""
        random, began = Random(f"{self.seed} {number}"), time.monotonic()
        [kind] = random.choices([*SHARES], [*SHARES.values()])
        try:
            async with asyncio.timeout(LIMIT):
                await kind(self.known, wire, random)
        except TimeoutError:
            self.fails(f"no answer in {LIMIT} seconds", number, kind.__name__)
            wire.close()
        except FAILURES as error:
            if not (self.dead and isinstance(error, OSError)):
                self.fails(f"{type(error).__name__}: {error}", number, kind.__name__)
            wire.close()
        self.asked[kind.__name__] += 1
        self.longest[kind.__name__] = max(self.longest[kind.__name__], time.monotonic() - began)

    def fails(self, what, *where):
        self.wrong.append(f"{', '.join(map(str, where))}: {what}" if where else what)
        print(f"WRONG {self.wrong[-1][:2000]}", file=sys.stderr, flush=True)

    async def settle(self, sent, seconds):
        """Wait until the server has nothing to do, and note what it holds then."""
        deadline = time.monotonic() + 30
        while True:
            gauges, files = self.served.gauges(), self.served.files()
            held = {name: gauges[name] for name in IDLE if gauges[name]}
            if not held and (not self.rounds or files <= self.rounds[0][3]):
                break
            if time.monotonic() > deadline:
                self.fails(f"30 seconds after {sent} requests the server has {held}, and {files} files are open")
                break
            await asyncio.sleep(0.1)
        self.rounds.append((sent, seconds, self.served.memory(), files))
        print(f"{sent} requests in {seconds:.0f} seconds", file=sys.stderr, flush=True)

    async def soak(self, requests, seconds, connections):
        """Send so many requests, or as many as there is time for, in rounds."""
        began, sent = time.monotonic(), 0
        for number in range(ROUNDS):
            until = began + (seconds or math.inf) * (number + 1) / ROUNDS
            sent += await self.load(range(sent, requests * (number + 1) // ROUNDS), connections, until)
            await self.settle(sent, time.monotonic() - began)
            if len(self.wrong) >= MOST_WRONG:
                return
        half, *_, last = self.rounds[ROUNDS // 2 - 1 :]
        if half[0] >= WARM and last[2] > half[2] * GROWTH:
            self.fails(f"memory has grown from {half[2]} to {last[2]} KiB since the first {half[0]} requests")

    async def drained(self):
        """Tell the server to stop while it answers: what has begun must end well, and others are refused."""
        asked = self.known.answers["long"]
        events = [asyncio.Event() for _ in asked]
        running = [self._begins(*each, event) for each, event in zip(asked, events, strict=True)]
        running = asyncio.gather(*running, *(self._comes() for _ in range(COMING)))
        async with asyncio.timeout(LIMIT):
            await asyncio.gather(*(event.wait() for event in events))
            self.served.process.send_signal(signal.SIGTERM)
            await running
        self.status = self.served.process.wait(LIMIT)
        check(self.status == 0, f"status {self.status} after SIGTERM")

    async def _begins(self, body, answer, event):
        """Read a stream, whose beginning comes before the server is told to stop."""
        wire = self.wire()
        await wire.send(request("POST", COMPLETIONS, encoded(body | STREAM)))
        headers, found = await begun(wire), b""
        async for part in wire.parts(headers):
            event.set()
            found += part
        self.known.compare(body, events_of(found), answer)
        wire.close()

    async def _comes(self):
        """Ask again and again, until the server refuses it, or is not there any more."""
        wire, random = self.wire(), Random(0)
        with suppress(OSError):
            while True:
                body, answer = random.choice(self.known.answers["greedy"])
                response = await wire.ask("POST", COMPLETIONS, encoded(body))
                if response.status == 503:
                    break
                check_status(response.status, 200, response.body)
                self.known.compare(body, [response.json()], answer)
        wire.close()

    async def killed(self, connections):
        """Kill the server in the middle of its work: connections end, and no client waits for an answer."""
        load = asyncio.create_task(self.load(range(10**6), connections))
        await asyncio.sleep(1)
        self.dead = True
        self.served.kill()
        await load

    def report(self):
        """Print figures."""
        print(f"{'requests':>9} {'seconds':>8} {'memory KiB':>11} {'files':>6}")
        for sent, seconds, memory, files in self.rounds:
            print(f"{sent:9} {seconds:8.1f} {memory:11} {files:6}")
        print(f"\n{'kind':9} {'requests':>9} {'longest s':>10}")
        for kind, count in sorted(self.asked.items()):
            print(f"{kind:9} {count:9} {self.longest[kind]:10.2f}")
        print("\nresponses:", ", ".join(f"{count} with {status}" for status, count in sorted(self.statuses.items())))
        print("status of the process after SIGTERM:", self.status)


async def soaked(directory, requests, seconds, seed, connections):
    """Start a server, soak it, stop it, start and kill it, and start it again. Return what was wrong."""
    log, model = directory / "server.log", directory / "model"
    checkpoint(model)
    soak = Soak(Served(model, log), seed)
    try:
        await soak.known.learn(soak.wire(), seed)
        await soak.soak(requests, seconds, connections)
        await soak.drained()
        for _ in range(2):  # after each end, the next server has the same address, and answers at once
            soak.served, soak.dead = Served(model, log, soak.served.port), False
            await soak.load(range(REPEATED), connections)
            await soak.killed(connections)
    except FAILURES as error:
        soak.fails(f"{type(error).__name__}: {error}")
    finally:
        soak.served.kill()
    soak.wrong += [f"{count} times in the log: {line}" for line, count in soak.served.tracebacks().items()]
    soak.report()
    return soak.wrong


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=100_000, help="how many are sent (default: %(default)s)")
    parser.add_argument("--seconds", type=float, help="for how long they are sent, at most")
    parser.add_argument("--seed", type=int, default=0, help="what they are drawn from (default: %(default)s)")
    parser.add_argument("--connections", type=int, default=48, help="how many at once (default: %(default)s)")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="soak_") as directory:
        found = asyncio.run(soaked(Path(directory), **vars(asked)))
    print("\n".join(["", "wrong:", *(each[:1000] for each in found)]) if found else "\nnothing was wrong")
    sys.exit(bool(found))


if __name__ == "__main__":
    main()
