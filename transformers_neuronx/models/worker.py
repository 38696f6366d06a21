"""A worker process: it has devices, and does what another process tells it. See `runtimes.remote`."""

from __future__ import annotations

import importlib
import json
import os
import socket
import sys
import threading
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue
from typing import Any

import numpy as np

from transformers_neuronx.config import Completed
from transformers_neuronx.engine.artifacts import Artifact, holds_artifact, open_artifact
from transformers_neuronx.engine.descriptions import constructor_options
from transformers_neuronx.engine.loading import put_all
from transformers_neuronx.errors import EngineError
from transformers_neuronx.models.base import Model
from transformers_neuronx.models.weight_loading import incoming
from transformers_neuronx.pyhlo import HloModuleProto
from transformers_neuronx.pyhlo.dtypes import element_type, from_numpy
from transformers_neuronx.runtimes.base import DeviceTensor, Executable, raw
from transformers_neuronx.runtimes.wire import Bytes, Message, Wire
from transformers_neuronx.runtimes.xla import XlaRuntime, xla_runtime
from transformers_neuronx.version import __version__
from transformers_neuronx.weights.checkpoint import Checkpoint, open_weights
from transformers_neuronx.weights.origin import Marked
from transformers_neuronx.weights.reading import Sharded

Answer = tuple[Mapping[str, Any], list[Bytes]]  # what it says, and the bytes of arrays


class Worker:
    """Holds tensors and programs by number. Each method is a command; what it returns is the answer, if one is due."""

    def __init__(self, wire: Wire, platform: str, degree: int) -> None:
        self._wire, self._place = wire, (platform, degree)
        self._tensors: dict[int, DeviceTensor] = {}
        self._programs: dict[int, Executable] = {}
        self._weights: dict[int, list[DeviceTensor]] = {}  # of programs, as their last calls had them
        self._runtime: XlaRuntime
        self._pool = ThreadPoolExecutor(os.cpu_count())

    def do(self, message: Message) -> None:
        """Do what a message says."""
        for number in message.says.get("free", ()):
            for held in (self._tensors, self._programs, self._weights):
                held.pop(number, None)
        if message.says["do"] in ("compile", "load"):  # several at a time; nothing needs one before it is there
            self._pool.submit(self._answered, message)
        else:
            self._answered(message)

    def _answered(self, message: Message) -> None:
        says, answered = message.says, message.says["answered"]
        number = dict(number=says["number"])
        try:
            told, data = getattr(self, says["do"])(message)
        except Exception as error:
            if not answered:
                raise
            self._wire.send(number | dict(error=str(error), kind=type(error).__name__))
        else:
            if answered:
                self._wire.send({**number, **told}, data)

    def begin(self, _: Message) -> Answer:
        """Join the other workers."""
        self._runtime = runtime = xla_runtime(*self._place)
        facts = dict(version=__version__, description=runtime.description, fingerprint=dict(runtime.fingerprint))
        return facts | dict(panels=runtime.panels, scatters=runtime.scatters), []

    def put(self, message: Message) -> Answer:
        """Bring arrays to the devices here: one for each, or one for all, which may be zeros."""
        says, data = message
        dtype, shape = element_type(says["dtype"]).numpy, tuple(says["shape"])
        arrays = [np.frombuffer(each, dtype).reshape(shape) for each in data] or [np.zeros(shape, dtype)]
        self._tensors[says["tensor"]] = self._runtime.put(arrays, donate=says["own"])
        return {}, []

    def read(self, message: Message) -> Answer:
        """Read the pieces of a model's weights that belong here."""
        says, first = message.says, message.says["first"]

        def progress(name: str) -> None:
            self._wire.send(dict(number=says["number"], progress=name))

        weights, marked = weights_of(says["model"], self._runtime)
        held = put_all(self._runtime, weights, progress)
        tensors: dict[int, list[Any]] = {}
        for key, tensor in held.items():
            tensors.setdefault(id(tensor), [tensor, []])[1].append(key)
        told = []
        for number, (tensor, keys) in enumerate(tensors.values(), first):
            self._tensors[number] = tensor
            told.append([number, from_numpy(tensor.aval.dtype).name, tensor.shape, keys])
        return dict(tensors=told, marks=marked.marks), []

    def compile(self, message: Message) -> Answer:
        """Compile a program. The answer has its code, if that can be had."""
        program = self._runtime.compile(HloModuleProto.FromString(bytes(message.data[0])))
        self._programs[message.says["program"]] = program
        try:
            return {}, [program.serialize()]
        except EngineError:
            return {}, []

    def load(self, message: Message) -> Answer:
        """Take a program that was compiled."""
        module, data = map(bytes, message.data)
        self._programs[message.says["program"]] = self._runtime.load(data, HloModuleProto.FromString(module))
        return {}, []

    def call(self, message: Message) -> Answer:
        """Run a program, with the weights of its call before unless there are others."""
        says = message.says
        program, others = self._programs[says["program"]], [self._tensors[number] for number in says["others"]]
        if "weights" in says:
            self._weights[says["program"]] = [self._tensors[number] for number in says["weights"]]
        place = program.signature.weights.start  # type: ignore[attr-defined]
        results = program(*others[:place], *self._weights[says["program"]], *others[place:])
        self._tensors.update(enumerate(results, says["first"]))
        return {}, []

    def fetch(self, message: Message) -> Answer:
        """Return a tensor of the first device here, or of every one."""
        tensor = self._tensors[message.says["tensor"]]
        return {}, [raw(array) for array in (tensor.shards() if message.says["every"] else [tensor.numpy()])]

    def let_go(self, _: Message) -> Answer:
        self._runtime.let_go()
        return {}, []

    def memory(self, message: Message) -> Answer:
        return dict(bytes=self._programs[message.says["program"]].memory()), []

    def text(self, message: Message) -> Answer:
        return dict(text=self._programs[message.says["program"]].text()), []

    def attends_in_place(self, message: Message) -> Answer:
        return dict(answer=self._runtime.attends_in_place(message.says["cached"], message.says["head_dim"])), []

    def spent(self, _: Message) -> Answer:
        return dict(spent=self._runtime.spent()), []


def weights_of(told: Mapping[str, Any], runtime: XlaRuntime) -> tuple[Iterable[Sharded], Artifact | Marked]:
    """Return the pieces that belong here of the weights that `weight_loading.fill` has told of."""
    module, _, name = told["kind"].rpartition(".")
    cls: type[Model] = getattr(importlib.import_module(module), name)
    model = cls(Completed(told["attributes"]), **constructor_options(told["description"]["options"]))
    if model.description != told["description"]:
        raise EngineError(f"this worker makes another {name} of the same options: it has another version")
    path = told["weights"]
    source: Artifact | Checkpoint = open_artifact(path) if holds_artifact(path) else open_weights(path)
    return incoming(model.decoder_on(runtime), source)


def main() -> None:
    """Be a worker until the other process ends."""
    orders = json.loads(sys.stdin.readline())
    try:
        wire = Wire(socket.create_connection((orders["address"], orders["port"])))
        wire.send(dict(token=orders["token"], rank=orders["rank"]))
    except OSError as error:
        sys.exit(f"error: cannot reach the process that leads, at {orders['address']}:{orders['port']}: {error}")
    messages: SimpleQueue[Message] = SimpleQueue()

    def listen() -> None:
        while True:
            try:
                messages.put(wire.receive())
            except OSError:
                os._exit(0)  # whatever else this process waits for

    def wait_for_the_end() -> None:
        sys.stdin.read()
        os._exit(0)

    for target in (listen, wait_for_the_end):
        threading.Thread(target=target, name=target.__name__, daemon=True).start()
    worker = Worker(wire, orders["platform"], orders["degree"])
    try:
        while True:
            worker.do(messages.get())
    except Exception as error:
        wire.send(dict(lost=f"worker {orders['rank']}: {type(error).__name__}: {error}"))
        raise


if __name__ == "__main__":
    main()
