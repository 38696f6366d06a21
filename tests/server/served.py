"""`transformers-neuronx serve` in a process of its own, with a tiny random model that answers in milliseconds."""

import re
import subprocess
import sys
import time
from pathlib import Path
from urllib.request import urlopen

TINY_KJV = Path(__file__).parents[2] / "examples" / "tiny-kjv"
NAME, VOCABULARY, POSITIONS = "tiny", 1023, 256
TEMPLATE = (
    "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}answer: {% endif %}"
)
GAUGE = re.compile(r"^transformers_neuronx_(\w+){[^}]*} (\S+)$", re.M)


def checkpoint(where):
    """Write a random GPT-2 with the tokenizer of tiny-kjv. Its answers vary, as its weights are large."""
    import torch
    from transformers import AutoTokenizer, GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    sizes = dict(vocab_size=VOCABULARY, n_positions=POSITIONS, n_embd=32, n_layer=2, n_head=2, initializer_range=0.5)
    GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=1022, eos_token_id=1022)).save_pretrained(where)
    tokenizer = AutoTokenizer.from_pretrained(TINY_KJV)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(where)


class StartError(Exception):
    """A server did not start."""


class Served:
    """A server's process, from its start until it is ready. What it says is added to a file."""

    def __init__(self, model, log, port=0, *options):
        command = [sys.executable, "-m", "transformers_neuronx", "serve", str(model), "--served-model-name", NAME]
        command += ["--n-positions", str(POSITIONS), "--port", str(port), *options]
        self.log, before = Path(log), Path(log).stat().st_size if Path(log).exists() else 0
        with self.log.open("ab") as file:
            self.process = subprocess.Popen(command, stdout=file, stderr=file)
        deadline = time.monotonic() + 300
        while not (found := re.search(r"running on http://(\S+):(\d+)", self.said(before))):
            running = self.process.poll() is None and time.monotonic() < deadline
            if not running:
                self.kill()
                raise StartError(f"the server does not start:\n{self.said(before)[-4000:]}")
            time.sleep(0.02)
        self.host, self.port = found[1], int(found[2])
        self.url = f"http://{self.host}:{self.port}"

    def said(self, since=0):
        """Return what the log has, from a position on."""
        return self.log.read_bytes()[since:].decode(errors="replace")

    def tracebacks(self):
        """Return the last line of each traceback in the log, with how often there is the same."""
        last = re.findall(r"^Traceback.*?\n(?:\s.*\n|\n)*?(\S.*)$", self.said(), re.M)
        return {line: last.count(line) for line in last}

    def gauges(self):
        """Return what the server tells Prometheus of now, by name."""
        with urlopen(f"{self.url}/metrics", timeout=60) as response:
            return {name: float(value) for name, value in GAUGE.findall(response.read().decode())}

    def memory(self):
        """Return the resident memory of the process, in KiB."""
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        return int(re.search(r"VmRSS:\s+(\d+) kB", status)[1])

    def files(self):
        """Return how many files the process has open."""
        return len([*Path(f"/proc/{self.process.pid}/fd").iterdir()])

    def kill(self):
        self.process.kill()
        self.process.wait()
