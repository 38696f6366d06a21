"""The project's own server over HTTP, in a process of its own, with the engine of `ours`."""

import http.client
import json
import subprocess
import sys
import threading
import time
from contextlib import closing

from peers.common import run, serve

NAME = "model"


class Server:
    def __init__(self, task):
        command = [sys.executable, "-P", "-m", "peers.ours_server", json.dumps(vars(task) | dict(do="listen"))]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.host = self.process.stdout.readline().strip()
        if not self.host:
            sys.exit(f"the server ended with {self.process.wait()}")

    def answer(self, ids, count):
        wanted = dict(model=NAME, prompt=ids, max_tokens=count, temperature=0, ignore_eos=True, stream=True)
        wanted |= dict(return_token_ids=True)
        connection = http.client.HTTPConnection(self.host)
        connection.request("POST", "/v1/completions", json.dumps(wanted), {"Content-Type": "application/json"})
        for line in connection.getresponse():
            if line.startswith(b"data: {"):
                for choice in json.loads(line[6:])["choices"]:
                    yield from choice.get("token_ids", [])

    def close(self):
        self.process.stdin.close()  # which ends it
        self.process.wait()


def measure(task):
    with closing(Server(task)) as server:
        return serve(task, server)


def listen(task):
    """Serve until standard input ends. Print the address first."""
    from transformers import AutoTokenizer

    from peers import ours
    from transformers_neuronx.server.app import Server as Application
    from transformers_neuronx.server.models import ServedModel
    from transformers_neuronx.server.running import Running
    from transformers_neuronx.server.settings import Settings

    engine = ours.Server(task, AutoTokenizer.from_pretrained(task.checkpoint)).engine
    running = Running(Application({NAME: ServedModel(engine, NAME)}, Settings()), "127.0.0.1", 0)

    def until_told():
        while not running.started:
            time.sleep(0.01)
        print(running.address().removeprefix("http://"), flush=True)
        sys.stdin.read()
        running.should_exit = True

    threading.Thread(target=until_told, daemon=True).start()
    running.run()


if __name__ == "__main__":
    run(None, None, serve=measure, listen=listen)
