"""llama.cpp's own server, compiled from the source archive of llama-cpp-python. Clients speak HTTP to it.

It has a slot for each client and keeps prompts, as by its defaults.
"""

import http.client
import json
import subprocess
import sys
import tarfile
import time
from contextlib import closing
from pathlib import Path

from peers.common import free_port, run, serve
from peers.gguf_files import write
from peers.results import machine

SOURCE = "llama-cpp-python==0.3.36"
TOOLS = Path(sys.executable).parent
SERVER = TOOLS / "llama-server"
SWITCHES = dict(
    CMAKE_BUILD_TYPE="Release", GGML_NATIVE="ON", BUILD_SHARED_LIBS="OFF", LLAMA_BUILD_TESTS="OFF",
    LLAMA_BUILD_EXAMPLES="OFF", LLAMA_BUILD_APP="OFF", LLAMA_USE_PREBUILT_UI="OFF", LLAMA_OPENSSL="OFF",
    CMAKE_MAKE_PROGRAM=TOOLS / "ninja",
)  # fmt: skip
WITHOUT_AMX = "-mno-amx-int8 -mno-amx-tile"  # its code for AMX ends with an illegal instruction in 0.3.36


def prepare(task):
    if not SERVER.exists():
        build(TOOLS.parent / "build")
    write(task.checkpoint, Path(task.directory, "model.gguf"), task.format, words=True)


def build(directory):
    """Compile the server. It takes a quarter of an hour on two cores."""
    call(sys.executable, "-m", "pip", "download", "--no-deps", "--no-binary=:all:", "-d", directory, SOURCE)
    [archive] = directory.glob("*.tar.gz")
    with tarfile.open(archive) as files:
        files.extractall(directory, filter="data")
    [source] = directory.glob("*/vendor/llama.cpp")
    flags = dict(CMAKE_CXX_FLAGS=WITHOUT_AMX) if "amx_tile" in machine()["instructions"] else {}
    switches = [f"-D{name}={value}" for name, value in (SWITCHES | flags).items()]
    call(TOOLS / "cmake", "-G", "Ninja", "-S", source, "-B", directory / "objects", *switches)
    call(TOOLS / "cmake", "--build", directory / "objects", "--target", "llama-server")
    (directory / "objects" / "bin" / "llama-server").rename(SERVER)


def call(*command):
    subprocess.run([str(part) for part in command], stdout=sys.stderr, check=True)


class Server:
    def __init__(self, task):
        self.port = free_port()
        each = task.prompt + task.count + 8
        sizes = {"--threads": task.threads, "--parallel": task.clients, "--ctx-size": task.clients * each}
        switches = [str(part) for pair in sizes.items() for part in pair]
        model = Path(task.directory, "model.gguf")
        command = [SERVER, "--model", model, "--host", "127.0.0.1", "--port", str(self.port), "--no-ui", *switches]
        self.process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        while self.status() != 200:
            if self.process.poll() is not None:
                sys.exit(f"llama-server ended with {self.process.returncode}")
            time.sleep(0.2)

    def status(self):
        """Return the status of its health; 0 if it does not listen yet."""
        try:
            connection = http.client.HTTPConnection("127.0.0.1", self.port)
            connection.request("GET", "/health")
            return connection.getresponse().status
        except ConnectionError:
            return 0

    def answer(self, ids, count):
        greedy = dict(temperature=0, ignore_eos=True, cache_prompt=True, stream=True, return_tokens=True)
        connection = http.client.HTTPConnection("127.0.0.1", self.port)
        connection.request("POST", "/completion", json.dumps(dict(prompt=ids, n_predict=count) | greedy))
        for line in connection.getresponse():
            if line.startswith(b"data: {"):
                yield from json.loads(line[6:])["tokens"]

    def close(self):
        self.process.kill()
        self.process.wait()


def measure(task):
    with closing(Server(task)) as server:
        return serve(task, server)


run(prepare, None, serve=measure)
