"""Damaged files of safetensors with weights in few bits: each is read as something, or refused with a typed error."""

import json
import random
import struct

from safetensors.torch import load_file, save_file

from transformers_neuronx.errors import CheckpointError
from transformers_neuronx.weights.checkpoint import open_checkpoint


def mutations_of(directory, matrix, sound=lambda packed: True, count=3000):
    """Read mutations of a checkpoint's tensors whose names have `matrix`. Return how many were read, and refused."""
    path = directory / "model.safetensors"
    save_file({name: part for name, part in load_file(path).items() if matrix in name}, path)
    content = path.read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    header, begin = json.loads(content[8 : 8 + length]), 8 + length
    offsets = [part["data_offsets"] for name, part in header.items() if name != "__metadata__"]
    parts = [(begin + first, begin + last) for first, last in offsets] + [(0, begin)]
    chance, read, refused = random.Random(0), 0, []
    for _ in range(count):
        path.write_bytes(mutated(chance, content, parts))
        try:
            with open_checkpoint(directory) as checkpoint:
                for name in checkpoint:
                    packed = checkpoint.packed(name)
                    if packed is None:
                        checkpoint.read(name)
                    else:
                        assert packed.numbers.shape == packed.shape and sound(packed)
            read += 1
        except CheckpointError as error:
            refused.append(str(error))
    assert all(said.startswith(str(directory)) and len(said) < 600 for said in refused)
    return read, len(refused)


def mutated(chance, content, parts):
    """Change a few bytes of a file: of its header, or of a part of a matrix; or cut it."""
    content = bytearray(content)
    for _ in range(chance.choice([1, 1, 1, 2, 4])):
        at = chance.randrange(*chance.choice(parts))
        content[at] = chance.choice([content[at] ^ 1 << chance.randrange(8), 0, 255, 127, chance.randrange(256)])
    return bytes(content if chance.random() < 0.95 else content[: chance.randrange(len(content))])
