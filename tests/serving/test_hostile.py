"""Files changed at random or on purpose: each is read correctly, or refused by an error that names it.

Run as a program, this file reads its inputs and prints the outcomes, so that a crash is a failing test.
"""

import collections
import json
import os
import random
import re
import struct
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch
from lora_files import HIDDEN, write_adapter
from safetensors.torch import save_file
from transformers import GPT2Config, GPT2LMHeadModel

from transformers_neuronx.engine.artifacts import open_artifact
from transformers_neuronx.engine.manifest import sealed
from transformers_neuronx.errors import ConfigError, TransformersNeuronxError
from transformers_neuronx.gpt2.model import GPT2ForSampling
from transformers_neuronx.weights.adapters import open_adapter
from transformers_neuronx.weights.checkpoint import open_checkpoint
from transformers_neuronx.weights.directories import load_config

pytestmark = pytest.mark.compiled_ahead

OUTSIDE = 666.0  # the values of files outside that must never be read
STATE = {"a": torch.arange(6.0).reshape(2, 3), "b": torch.ones(4, dtype=torch.bfloat16), "c": torch.tensor(3)}
NAMES = ["../outside", "../outside.bin", "/etc/passwd", "..", ".", "", "a/b", "~", "\0", "x" * 300, "\ud800", "%s"]
VALUES = [None, True, -1, 0, 1, 2**31, 2**63, 2**64, 10**400, 1e308, "", [], {}, [[]], "F32", "F4", "BF16", *NAMES]
DEEP = ["[" * 100_000, '{"a":' * 50_000, "1" * 5000, '{"weight_map":{"a":1e999}}', "{}", ""]
TRAPS = [  # in pickle's opcodes
    b"cos\nsystem\n(S'touch ../trap'\ntR",
    b'cbuiltins\neval\n(S\'open("../trap", "w")\'\ntR',
    b"\x80\x04\x8c\x02os\x8c\x06system\x93\x8c\x0dtouch ../trap\x85R",
    b"ctorch\nload\n(S'../outside.bin'\ntR",
    b"ctorch\nUntypedStorage\n(I1000000000000\ntR",
    b"(I1\n" * 50,
    b"\x8a\xff" + b"\xff" * 255,
    b"0" * 9,
]


# The files to change, and how to read them. Each reader returns what it has read, to compare with the original.


def read_checkpoint(directory):
    with open_checkpoint(directory) as checkpoint:
        held = {name: checkpoint.read(name).clone() for name in checkpoint}
    assert not any((tensor == OUTSIDE).any() for tensor in held.values()), "a file outside of the directory was read"


def read_config(directory):
    load_config(directory)


def read_adapter(directory):
    adapter = open_adapter(directory)
    for change in adapter.changes.values():
        changed = change.applied(torch.zeros(change.shape))
        assert changed.shape == change.shape and changed.dtype == torch.float32
    for part in adapter.whole.values():
        adapter.readers[part](part)


def read_artifact(directory):
    artifact = open_artifact(directory)
    model = GPT2ForSampling.from_pretrained(directory)
    weights = {name: pieces() for names, pieces in artifact.tensors() for name in names}
    return (
        model.model_config,
        {identity: artifact.executable(identity) for identity in artifact.manifest["programs"]},
        {key: artifact.module(key) for key in artifact.manifest["keys"]},
        {name: [piece.clone() for piece in pieces] for name, pieces in weights.items()},
    )


def write_safetensors(directory):
    save_file(STATE, directory / "model.safetensors")


def write_index(directory):
    weight_map = dict.fromkeys(STATE, "model-1.safetensors")
    save_file(STATE, directory / "model-1.safetensors")
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def write_split(directory):
    split = directory / "pytorch_model.bin"
    split.mkdir()
    for name, tensor in STATE.items():
        torch.save(tensor, split / f"p0.{name}")
    (split / "key_to_filename.json").write_text(json.dumps({name: f"p0.{name}" for name in STATE}))


def write_bin(directory):
    torch.save(STATE, directory / "pytorch_model.bin")


def write_lora(directory):
    directory.rmdir()
    more = {"base_model.model.lm_head.weight": torch.ones(3, 4)}
    more |= {"base_model.model.transformer.h.0.attn.c_proj.lora_magnitude_vector": torch.ones(HIDDEN)}
    write_adapter(directory, seed=0, rank=2, more=more, alpha_pattern={"c_attn": 3}, use_rslora=True)


def write_artifact(directory):
    torch.manual_seed(0)
    sizes = {"n_layer": 1, "n_embd": 16, "n_head": 2, "n_positions": 8, "vocab_size": 40}
    checkpoint = directory.parent / "checkpoint"
    GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0)).save_pretrained(checkpoint)
    model = GPT2ForSampling.from_pretrained(checkpoint)
    model.to_neuron()
    model.save(directory, sharded_weights=True)


def changed_bytes(chance, content, within=None):
    """Flip, cut out, double or insert a few bytes."""
    content = bytearray(content)
    for _ in range(chance.choice([1, 1, 1, 2, 5, 20])):
        at = chance.randrange(min(within or len(content), len(content)) + 1)
        piece = chance.randrange(1, 20)
        kind = chance.randrange(5)
        if kind == 0 and at < len(content):
            content[at] ^= 1 << chance.randrange(8)
        elif kind == 1:
            del content[at : at + piece]
        elif kind == 2:
            content[at:at] = content[at : at + piece]
        elif kind == 3:
            content[at:at] = chance.randbytes(piece)
        elif kind == 4 and chance.random() < 0.2:
            del content[at:]
    return bytes(content)


def changed_json(chance, text):
    """Exchange a value, a name or a whole part of a JSON file for another."""
    content = json.loads(text)
    places = []

    def walk(node):
        for key in node if isinstance(node, dict) else range(len(node)):
            places.append((node, key))
            if isinstance(node[key], dict | list):
                walk(node[key])

    walk(content)
    node, key = chance.choice(places)
    kind = chance.randrange(4)
    if kind == 0:
        other, there = chance.choice(places)
        node[key] = json.loads(json.dumps(other[there]))
    elif kind == 1 and isinstance(node, dict):
        node[chance.choice(NAMES)] = node.pop(key)
    elif kind == 2:
        del node[key]
    else:
        node[key] = chance.choice(VALUES)
    return content


def change_header(chance, path):
    whole = path.read_bytes()
    (size,) = struct.unpack("<Q", whole[:8])
    if chance.random() < 0.5:
        path.write_bytes(changed_bytes(chance, whole, within=8 + size))
    else:
        header = json.dumps(changed_json(chance, whole[8 : 8 + size])).encode()
        path.write_bytes(struct.pack("<Q", len(header)) + header + whole[8 + size :])


def change_json(chance, path):
    if chance.random() < 0.5:
        path.write_bytes(changed_bytes(chance, path.read_bytes()))
    elif chance.random() < 0.02:
        path.write_text(chance.choice(DEEP))
    else:
        path.write_text(json.dumps(changed_json(chance, path.read_text())))


def change_manifest(chance, path):
    if chance.random() < 0.5:
        change_json(chance, path)
        return
    content = changed_json(chance, path.read_text())
    if isinstance(content, dict):
        path.write_bytes(sealed(content))  # on purpose
    else:
        path.write_text(json.dumps(content))


def change_pickle(chance, path):
    if chance.random() < 0.3:
        path.write_bytes(changed_bytes(chance, path.read_bytes()))
        return
    with zipfile.ZipFile(path) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    name = next(name for name in members if name.endswith("data.pkl"))
    pickled = members[name]
    if chance.random() < 0.5:
        at = chance.randrange(len(pickled))
        trap = chance.choice(TRAPS)
        members[name] = pickled[:at] + trap + pickled[at:] if chance.random() < 0.8 else trap + b"."
    else:
        members[name] = changed_bytes(chance, pickled)
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in members.items():
            archive.writestr(name, content)


# The file to change, how to change it, and how its directory is made and read.
KINDS = {
    "safetensors": ("model.safetensors", change_header, write_safetensors, read_checkpoint),
    "index": ("model.safetensors.index.json", change_json, write_index, read_checkpoint),
    "listing": ("pytorch_model.bin/key_to_filename.json", change_json, write_split, read_checkpoint),
    "pickle": ("pytorch_model.bin", change_pickle, write_bin, read_checkpoint),
    "manifest": ("manifest.json", change_manifest, write_artifact, read_artifact),
    "weights": ("weights-shared.safetensors", change_header, write_artifact, read_artifact),
    "config": ("config.json", change_json, write_artifact, read_artifact),
    "adapter": ("adapter_model.safetensors", change_header, write_lora, read_adapter),
    "adapter's configuration": ("adapter_config.json", change_json, write_lora, read_adapter),
}


class Watch:
    """Records the files that Python opens and the processes that it starts."""

    def __init__(self):
        self.on = False
        self.seen = []
        sys.addaudithook(self.note)

    def note(self, event, arguments):
        if not self.on:
            return
        if event in ("os.system", "subprocess.Popen", "os.exec", "os.posix_spawn", "os.fork", "socket.connect"):
            self.seen.append(event)
        if event == "open" and isinstance(arguments[0], str | bytes | os.PathLike):
            path = os.path.abspath(os.fsdecode(arguments[0]))
            if not path.startswith(os.getcwd() + "/") and not is_code(path):
                self.seen.append(path)


def main(folder, count):
    """Change, read and restore `count` times for each kind, and print the outcomes."""
    watch = Watch()
    for kind, (name, change, _, read) in KINDS.items():
        directory = Path(folder) / kind / "directory"
        os.chdir(directory)
        path = directory / name
        whole, wanted = path.read_bytes(), read(directory)
        outcomes = collections.Counter()
        for number in range(count):
            change(random.Random(number), path)
            outcomes[attempt(f"{kind} {number}", read, directory, wanted, watch)] += 1
            path.write_bytes(whole)
        print(json.dumps(outcomes))


def attempt(where, read, directory, wanted, watch):
    """Read the changed file, check the outcome, and return it."""
    outcome = "read"
    watch.on = True
    try:
        got = read(directory)
    except TransformersNeuronxError as error:
        # A ConfigError must name the value of the configuration or the option.
        named, outcome = isinstance(error, ConfigError) or str(directory) in str(error), type(error).__name__
        text = str(error)
    watch.on = False
    if outcome == "read":
        assert where.startswith("manifest") or same(got, wanted), f"{where}: it was read wrong"
    else:
        assert named, f"{where}: {text!r} names no file"
        text.encode()
    assert not watch.seen, f"{where}: {watch.seen}"
    assert not (directory.parent / "trap").exists(), f"{where}: code was run"
    return outcome


def is_code(path):
    """Whether it is one of Python's own files, which late imports and tracebacks open."""
    return re.search(r"\.pyc?$|/proc/|/lib/python", path)


def same(one, other):
    if isinstance(one, dict):
        return one.keys() <= other.keys() and all(same(one[name], other[name]) for name in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return one.equal(other) if isinstance(one, torch.Tensor) else one == other


@pytest.mark.parametrize("count", [200, pytest.param(3000, marks=pytest.mark.slow)])
def test_changed_files_are_refused_or_read_right(count, tmp_path):
    for kind, (_, _, write, _) in KINDS.items():
        directory = tmp_path / kind / "directory"
        directory.mkdir(parents=True)
        write(directory)
        outside = {name: torch.full((2,), OUTSIDE) for name in STATE}
        save_file(outside, directory.parent / "outside")
        torch.save(outside, directory.parent / "outside.bin")
    command = [sys.executable, __file__, str(tmp_path), str(count)]
    environment = os.environ | dict(PYTHONPATH=str(Path(__file__).parents[1]))
    ran = subprocess.run(command, capture_output=True, text=True, timeout=590, env=environment)
    assert ran.returncode == 0, ran.stderr[-3000:]
    for kind, line in zip(KINDS, ran.stdout.splitlines(), strict=True):
        outcomes = json.loads(line)
        print(kind, outcomes)
        assert sum(outcomes.values()) == count
        assert outcomes["CheckpointError"] > count / 4


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
