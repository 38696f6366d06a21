"""Compare this project with other engines on the CPU: one run, one table.

    python benchmarks/cpu.py [--engines ours,openvino] [--shapes gpt2] [--widths bf16,s8] [--rounds 3] [--quick]

Weights are random, in the shapes of GPT-2 124M and Llama-3.2-1B; --shapes also knows those of a mixture and a hybrid.
Decoding is greedy and ignores the end of a sequence. Each engine has its own environment, created at the first run, and
files converted from the same checkpoint. Both are kept in --work. Compiling llama.cpp takes a quarter of an hour. Each
measurement is a process. Engines take turns, and the machine's own speed is measured before each of them. A failure is
reported in its row, and the other rows continue.

Torch must be its CPU build. If the package index has another one, set PIP_EXTRA_INDEX_URL to an index that has it.
"""

import argparse
import hashlib
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from itertools import product
from pathlib import Path

from peers import PEERS
from peers.checkpoint import DENSE, SHAPES
from peers.results import Results, report
from tqdm import tqdm

HERE = Path(__file__).parent
CACHE = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"), "transformers_neuronx-benchmarks")
WIDTHS = ("f32", "bf16", "f16", "s8", "s4")
POSITIONS = [256, 1024]
START, PROMPTS, TOKENS = 16, [16, 128, 1024], dict(short=128, long=896)
BATCH = 8
MAKER = "maker.txt"
ENGINES = [name for name, peer in PEERS.items() if not peer.only_serves]


class PeerError(Exception):
    """A command of a peer failed. The message is the last line of its errors."""


class Work:
    """The directory of environments, checkpoints and converted files, and the processes that use them."""

    def __init__(self, directory, staging, under, timeout):
        self.directory, self.under, self.timeout = Path(directory).expanduser().resolve(), under, timeout
        self.directory.mkdir(parents=True, exist_ok=True)
        self.staging = staging
        self.threads = len(os.sched_getaffinity(0))

    def run(self, command, **environment):
        """Return the last line that the command prints. Raises PeerError with the last line of its errors."""
        everyone = dict(
            PYTHONPATH=os.pathsep.join([str(HERE), str(HERE.parent)]), OMP_NUM_THREADS=str(self.threads),
            NEURONX_CACHE_DIR=str(self.directory / "compiled"), HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false",
            TORCHINDUCTOR_CACHE_DIR=str(self.directory / "inductor"),
        )  # fmt: skip
        options = dict(env=os.environ | everyone | environment, capture_output=True, text=True, cwd=self.directory)
        try:
            ran = subprocess.run([*self.under, *map(str, command)], timeout=self.timeout, **options)
        except subprocess.TimeoutExpired:
            raise PeerError(f"timed out after {self.timeout} s") from None
        if ran.returncode:
            lines = (ran.stderr.strip() or ran.stdout.strip() or f"exit status {ran.returncode}").splitlines()
            (self.directory / "failed.log").write_text(f"{shlex.join(ran.args)}\n{ran.stdout}\n{ran.stderr}")
            raise PeerError(lines[-1].strip().replace(f"{self.directory}/", "")[:200])
        return ran.stdout.strip().rpartition("\n")[2]

    def python(self, peer):
        """Return the Python of a peer's environment, which is created if it is missing or has other versions."""
        if not peer.requirements:
            return sys.executable
        home, wanted = self.directory / "environments" / peer.module, "\n".join(peer.requirements)
        python, stamp = home / "bin" / "python", home / "requirements.txt"
        if not stamp.exists() or stamp.read_text() != wanted:
            shutil.rmtree(home, ignore_errors=True)
            self.run([sys.executable, "-m", "venv", home])
            self.run([python, "-m", "pip", "install", "--quiet", *peer.requirements], **peer.building)
            if peer.without:
                self.run([python, "-m", "pip", "uninstall", "--quiet", "--yes", *peer.without])
            stamp.write_text(wanted)
        return python

    def checkpoint(self, name):
        directory = self.directory / "checkpoints" / name
        if not directory.exists():
            making = directory.with_name(f"{name}.part")
            self.run([sys.executable, "-P", "-m", "peers.checkpoint", name, making])
            making.rename(directory)
        return directory

    def call(self, engine, task):
        """Run a task in a process of the peer, and return its result."""
        peer = PEERS[engine]
        python = self.python(peer)
        task = task | dict(engine=engine, threads=self.threads)
        return json.loads(self.run([python, "-P", "-m", f"peers.{peer.module}", json.dumps(task)]))

    def task(self, shape, engine, format):  # noqa: A002
        directory = self.directory / "files" / shape / re.sub(r"\W+", "-", f"{PEERS[engine].module} {format}")
        buckets = {1: [POSITIONS, sorted(PROMPTS)], BATCH: [POSITIONS, sorted(TOKENS.values())]}
        return dict(
            format=format, checkpoint=str(self.directory / "checkpoints" / shape), directory=str(directory),
            positions=POSITIONS, buckets=buckets, vocab=SHAPES[shape].vocab, count=SHAPES[shape].count, start=START,
        )  # fmt: skip

    def prepare(self, shape, engine, format):  # noqa: A002
        """Convert the checkpoint, unless the same versions have done so."""
        task = self.task(shape, engine, format)
        directory, made_by = Path(task["directory"]), maker(PEERS[engine])
        if Path(directory, MAKER).exists() and Path(directory, MAKER).read_text() == made_by:
            return
        making = directory.with_name(f"{directory.name}.part")
        shutil.rmtree(making, ignore_errors=True)
        making.mkdir(parents=True)
        self.call(engine, task | dict(do="prepare", directory=str(making)))
        (making / MAKER).write_text(made_by)
        shutil.rmtree(directory, ignore_errors=True)
        making.rename(directory)

    def measure(self, shape, engine, format, task):  # noqa: A002
        self.prepare(shape, engine, format)  # again, if this project has changed since
        task = self.task(shape, engine, format) | task
        self.call(engine, dict(do="nothing"))  # brings its libraries into the system's cache
        with tempfile.TemporaryDirectory(dir=self.staging) as scratch:
            for name in ("checkpoint", "directory"):
                task[name] = shutil.copytree(task[name], Path(scratch, name)).as_posix()
            return self.call(engine, task)

    def rates(self):
        return json.loads(self.run([sys.executable, "-P", "-m", "peers.machine", self.threads]))


def maker(peer):
    """Return what identifies the maker of files: a peer's versions, or a digest of this project's code."""
    if peer.requirements:
        return "\n".join(peer.requirements)
    digest = hashlib.sha256()
    for path in sorted((HERE.parent / "transformers_neuronx").rglob("*")):
        if path.suffix in (".py", ".so"):
            digest.update(path.read_bytes())
    return digest.hexdigest()


def measurements(quick):
    """Return the tasks that are measured, each in a process: for a single sequence and for several."""
    repeats = dict(do="measure", repeats=1 if quick else 3)
    one = dict(rows=1, prompt=PROMPTS, token=TOKENS)
    several = dict(rows=BATCH, prompt=[], token=dict(short=TOKENS["short"]) if quick else TOKENS)
    return [repeats | one, repeats | several]


def chosen(arguments):
    """Return shape, engine and format of each row, in the order of the table."""
    rows = []
    for shape, engine in product(arguments.shapes, arguments.engines):
        widths = arguments.widths or SHAPES[shape].widths
        formats = [kind for kind, width in PEERS[engine].formats.items() if width in widths]
        rows += [dict(shape=shape, engine=engine, format=kind) for kind in formats]
    return rows


def prepare(work, results, rows):
    for row in (bar := tqdm(rows, desc="files", leave=False)):
        bar.set_postfix_str(" ".join(row.values()))
        try:
            work.prepare(**row)
        except PeerError as failure:
            failed(results, row, failure)


def measure(work, results, rows, rounds, quick):
    """Measure each row in every round, and the machine's speed before it. A row that failed is not measured again."""
    turns = list(product(range(rounds), rows, measurements(quick)))
    for _, row, task in (bar := tqdm(turns, desc="measurements", leave=False)):
        if results.failed(row):
            continue
        bar.set_postfix_str(" ".join([*row.values(), f"x {task['rows']}"]))
        results.add("rates", work.rates())
        try:
            results.add("runs", row | dict(rows=task["rows"]) | work.measure(**row, task=task))
        except PeerError as failure:
            failed(results, row, failure)


def failed(results, row, failure):
    results.add("runs", row | dict(error=str(failure)))
    tqdm.write(f"{' '.join(row.values())}: {failure}")


def perplexities(work, results, rows):
    """Compute the perplexity of this project's measured formats, once each."""
    for kind in dict.fromkeys(row["format"] for row in rows if row["engine"] == "ours"):
        if kind not in results.all["perplexity"]:
            results.all["perplexity"][kind] = work.call("ours", dict(do="perplexity", format=kind))
            results.write()


def listed(among):
    def names(text):
        names = text.split(",")
        if unknown := set(names) - set(among):
            raise argparse.ArgumentTypeError(f"{', '.join(unknown)} must be one of {', '.join(among)}")
        return names

    return names


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engines", type=listed(ENGINES), default=ENGINES, help=", ".join(ENGINES))
    parser.add_argument("--shapes", type=listed(SHAPES), default=list(DENSE), help=", ".join(SHAPES))
    parser.add_argument("--widths", type=listed(WIDTHS), help=", ".join(WIDTHS))
    parser.add_argument("--rounds", type=int, default=3, help="with --add, 0 prints the results in --out")
    parser.add_argument("--quick", action="store_true", help="fewer repetitions, and no long context for several rows")
    parser.add_argument("--work", default=CACHE, help="where environments and converted files are kept")
    parser.add_argument("--staging", default="/dev/shm", help="directory in memory for the files of a measurement")
    parser.add_argument("--out", help="JSON file for all measurements; the table is written next to it as Markdown")
    parser.add_argument("--add", action="store_true", help="continue with the results in --out")
    parser.add_argument("--under", type=shlex.split, default=[], help="prefix of each command: nice, taskset -c 0,1, …")
    parser.add_argument("--timeout", type=int, default=3600, help="seconds that one process may take")
    arguments = parser.parse_args()
    work = Work(arguments.work, arguments.staging, arguments.under, arguments.timeout)
    results = Results(arguments.out, arguments.add)
    rows = chosen(arguments)
    for shape in arguments.shapes:
        work.checkpoint(shape)
    prepare(work, results, rows)
    measure(work, results, rows, arguments.rounds, arguments.quick)
    if arguments.rounds:
        perplexities(work, results, rows)
    text = report(results.all)
    print(text)
    if arguments.out:
        Path(arguments.out).with_suffix(".md").write_text(text)


if __name__ == "__main__":
    main()
