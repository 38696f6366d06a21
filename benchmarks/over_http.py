"""What HTTP costs: tokens a second of the engine alone, and through its server, for several clients at once.

    python benchmarks/over_http.py [--shape gpt2|llama-1b] [--types bf16,s8] [--clients 1,8,16] [--rounds 5]

Both answer the same requests in the same process, in turns; the clients of the server are threads of another process.
Weights are random, all requests greedy. The tokenizer is that of benchmarks/masks.py.
"""

from __future__ import annotations

import argparse
import http.client
import json
import statistics
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path

PROMPT, TOKENS = 64, 65
NAME = "model"


def client():
    """Ask a server for answers at once, as often as a line of standard input says how; print the seconds."""
    for line in sys.stdin:
        host, bodies = json.loads(line)
        with ThreadPoolExecutor(len(bodies)) as threads:
            began = time.perf_counter()
            events = list(threads.map(asked, [host] * len(bodies), bodies))
            print(json.dumps([time.perf_counter() - began, events]), flush=True)


def asked(host, body):
    """Return how many events an answer has."""
    connection = http.client.HTTPConnection(host)
    connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
    response = connection.getresponse()
    assert response.status == 200, response.read()
    found = sum(line.startswith(b"data: {") for line in response)
    connection.close()
    return found


def bare(engine, prompts):
    """Return the seconds that an engine takes for all; a thread reads each answer, token by token."""
    began = time.perf_counter()
    handles = [engine.submit(prompt, request(TOKENS)) for prompt in prompts]
    with ThreadPoolExecutor(len(handles)) as threads:
        assert all(len(tokens) == TOKENS for tokens in threads.map(list, handles))
    return time.perf_counter() - began


def through(process, host, prompts):
    """Return the seconds that clients of the server wait for the same."""
    how = dict(model=NAME, max_tokens=TOKENS, temperature=0, ignore_eos=True, stream=True)
    print(json.dumps([host, [how | dict(prompt=prompt) for prompt in prompts]]), file=process.stdin, flush=True)
    seconds, events = json.loads(process.stdout.readline())
    assert min(events) > 2, events
    return seconds


@contextmanager
def served(engine):
    """The address of a server of an engine, in a thread of this process."""
    running = Running(Server({NAME: ServedModel(engine, NAME)}, Settings()), "127.0.0.1", 0)
    thread = threading.Thread(target=running.run)
    thread.start()
    while not running.started:
        time.sleep(0.01)
    yield running.address().removeprefix("http://")
    running.should_exit = True
    thread.join()


def measured(engine, process, counts, rounds):
    """Yield for each number of clients tokens a second of both, and the median of their ratios."""
    with served(engine) as host:
        for count in counts:
            alone, over = [], []
            for number in range(rounds + 1):  # the first one warms up
                prompts = [prompt(PROMPT, 2 * (1000 * number + row), engine.vocab_size) for row in range(count)]
                others = [prompt(PROMPT, 2 * (1000 * number + row) + 1, engine.vocab_size) for row in range(count)]
                ways = [(alone, partial(bare, engine, prompts)), (over, partial(through, process, host, others))]
                for found, way in ways if number % 2 else ways[::-1]:
                    found.append(way())
            ratios = [bare_ / http_ for bare_, http_ in zip(alone[1:], over[1:], strict=True)]
            rates = [round(count * TOKENS / statistics.median(found[1:]), 1) for found in (alone, over)]
            yield dict(clients=count, engine=rates[0], server=rates[1], ratio=round(statistics.median(ratios), 4))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="gpt2")
    parser.add_argument("--types", default="bf16,s8")
    parser.add_argument("--clients", default="1,8,16")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    counts, config = [int(each) for each in options.clients.split(",")], SHAPES[options.shape]
    command = [sys.executable, "-P", str(Path(__file__)), "client"]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    for name, model in models(config, options.types.split(",")):
        with Engine(model, rows=max(counts), tokenizer=tokenizer(config.vocab_size)) as engine:
            for found in measured(engine, process, counts, options.rounds):
                print(json.dumps(dict(shape=options.shape, type=name) | found), flush=True)
    process.stdin.close()


if __name__ == "__main__":
    if sys.argv[1:] == ["client"]:  # without what only the engine needs
        client()
    else:
        from engine import SHAPES, models, prompt, request
        from masks import tokenizer

        from transformers_neuronx import Engine
        from transformers_neuronx.server.app import Server
        from transformers_neuronx.server.models import ServedModel
        from transformers_neuronx.server.running import Running
        from transformers_neuronx.server.settings import Settings

        main()
