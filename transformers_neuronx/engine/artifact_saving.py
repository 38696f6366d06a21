"""Saves artifacts: a model's compiled programs and, optionally, its weights as the devices store them.

This file decides what is saved. Files are written next to the artifact, and exchanged with its own at the end: the
manifest last, since a directory without one is no artifact.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers_neuronx.engine.artifact_weights import save_weights
from transformers_neuronx.engine.decoder import Decoder
from transformers_neuronx.engine.descriptions import code_of, description
from transformers_neuronx.engine.manifest import CONFIG, FORMAT, MANIFEST, as_json, facts_of, sealed
from transformers_neuronx.errors import CheckpointError
from transformers_neuronx.runtimes.base import want_all_here
from transformers_neuronx.support import files
from transformers_neuronx.version import __version__
from transformers_neuronx.weights.directories import PathOrName
from transformers_neuronx.weights.formats import format_in

OWN_FILES = re.compile(r"program-.*\.(hlo\.pb|executable|neff)|weights-.*\.safetensors")


def save_artifact(directory: PathOrName, decoder: Decoder, attributes: Mapping[str, Any], weights: bool) -> None:
    """Save the programs built so far, `attributes` as `config.json`, and with `weights` the decoder's weights.

    Other files in `directory` are kept. An earlier artifact is replaced when the new one is complete and on the disk. A
    save that fails or is interrupted leaves it unchanged. A killed process may leave `.artifact.tmp-*`, which can be
    deleted. If it is killed during the exchange, there is no artifact, and the parts of the earlier one are in
    `.artifact.old-*`. Raises CheckpointError if the directory holds a checkpoint, which has its own `config.json`, and
    ConfigError if other processes have some of the devices.
    """
    want_all_here(decoder.runtime, "an artifact")
    path = want_place(directory)
    with files.staging(path, "artifact") as stage:
        manifest = dict(
            format=FORMAT,
            version=__version__,
            **description(decoder.family, decoder.config, decoder.options),
            runtime=dict(decoder.runtime.fingerprint),
            code=code_of(decoder),
            keys=dict(sorted(decoder.store.identities.items())),
            programs=_save_programs(decoder, stage),
            weights=save_weights(decoder, stage) if weights else {},
            origin=dict(sorted(decoder.origin.items())) if weights else {},
        )
        files.write(stage / CONFIG, as_json(attributes))
        written = sorted(stage.iterdir())
        manifest["files"] = {file.name: facts_of(file) for file in written}
        files.write(stage / MANIFEST, sealed(manifest))
        old = {file.name for file in path.iterdir() if OWN_FILES.fullmatch(file.name)}
        files.exchange(stage, path, last=MANIFEST, obsolete=old.difference(file.name for file in written))


def want_place(directory: PathOrName) -> Path:
    """Return the path that `save_artifact` writes to. Raises its errors about the directory before the work starts."""
    path = files.want_writable(Path(os.path.expanduser(directory)), directory=True)
    if found := format_in(path):
        raise CheckpointError(f"{path / found} is a checkpoint; save the artifact to a separate directory")
    return path


def _save_programs(decoder: Decoder, stage: Path) -> dict[str, dict[str, str]]:
    programs = {}
    for identity, program in list(decoder.store.stored.items()):
        stem = f"program-{re.sub(r'[^-_A-Za-z0-9]', '_', program.name)}-{identity[:12]}"
        programs[identity] = dict(hlo=f"{stem}.hlo.pb", executable=f"{stem}.{decoder.runtime.suffix}")
        files.write(stage / f"{stem}.hlo.pb", program.saved.data)
        files.write(stage / programs[identity]["executable"], program.executable.serialize())
    return programs
