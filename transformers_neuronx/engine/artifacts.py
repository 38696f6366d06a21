"""Artifacts: directories with a model's compiled programs and, optionally, its weights, as they are opened and used.

`manifest.json` lists the files of the artifact, with checksums. Programs are found by the identity of their modules, so
a program of a different graph is never run by mistake. This file does not know what programs and weights mean.
"""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from transformers_neuronx.config import CompileOptions, Completed
from transformers_neuronx.engine.artifact_weights import Pieces, for_devices, read_tensors, want_weights
from transformers_neuronx.engine.compile_cache import ArtifactSource, SavedModule
from transformers_neuronx.engine.decoder import Decoder
from transformers_neuronx.engine.descriptions import code_of, constructor_options, description, differences
from transformers_neuronx.engine.family import Family
from transformers_neuronx.engine.loading import LOADERS
from transformers_neuronx.engine.manifest import CONFIG, MANIFEST, Tensors, facts_of, read_manifest
from transformers_neuronx.errors import CheckpointError, ConfigError
from transformers_neuronx.pyhlo import HloModuleProto
from transformers_neuronx.support import files
from transformers_neuronx.support.user_cache import warn_once
from transformers_neuronx.weights.checkpoint import Checkpoint
from transformers_neuronx.weights.directories import PathOrName
from transformers_neuronx.weights.formats import Readers, format_in, open_safetensors
from transformers_neuronx.weights.origin import Marks, marks_in
from transformers_neuronx.weights.reading import Sharded, collapsed

_LOG = logging.getLogger(__name__)


def holds_artifact(path_or_name: PathOrName) -> bool:
    """Whether the directory holds an artifact, and not a checkpoint with a manifest of something else."""
    path = Path(os.path.expanduser(path_or_name))
    return os.path.lexists(path / MANIFEST) and not format_in(path)


@dataclass(frozen=True)
class Artifact:
    """A saved artifact, as its manifest describes it. Checksums are compared when a file is read."""

    directory: Path
    manifest: dict[str, Any]

    on_disk: ClassVar[bool] = True

    @property
    def has_weights(self) -> bool:
        return bool(self.manifest["weights"])

    def attributes(self, family: Family) -> Completed:
        """Return the configuration of the saved model, as Transformers completed it."""
        path = self.directory / CONFIG
        attributes = Completed(files.read_json(path, files.unique))
        with files.explain(f"{path}: not a configuration of this model family"):
            family.read_config(attributes)
        return attributes

    def options(self) -> dict[str, Any]:
        """Return the constructor options of the saved model, as far as they determine what is in an artifact."""
        with files.explain(f"{self.directory / MANIFEST}: not valid options of a model"):
            return constructor_options(self.manifest["options"])

    def check(self, family: Family, config: Any, options: CompileOptions) -> None:
        """Raise ConfigError with all differences if the saved model is a different one."""
        wanted = description(family, config, options)
        saved = {name: self.manifest[name] for name in wanted}
        if found := differences(saved, wanted):
            raise ConfigError(
                f"the artifact {self.directory} was saved from another model or with other options: {'; '.join(found)}"
            )

    @property
    def marks(self) -> Marks:
        """Marks of the checkpoint that the weights come from. Artifacts of older versions have none."""
        marks: Marks = self.manifest.get("origin", {})
        return marks

    def check_weights(self, own: Checkpoint | Artifact | None, prefix: str) -> None:
        """Raise ConfigError if these weights are not the ones in a model's `own` checkpoint, as far as marks show."""
        if not self.has_weights:
            return
        if own is None or (isinstance(own, Artifact) and not own.has_weights):
            _LOG.info("the model has no weights of its own, using those in %s", self.directory)
            return
        theirs = own.marks if isinstance(own, Artifact) else marks_in(own, self.marks, prefix)
        common = sorted(self.marks.keys() & theirs.keys())
        if not common:
            warn_once(
                f"using the weights in {self.directory} without checking that they are those of {own.directory}, "
                "because the artifact has no marks of these tensors: save it again to add them"
            )
        if different := [name for name in common if self.marks[name] != theirs[name]]:
            raise ConfigError(
                f"load: the weights in {self.directory} must be those of {own.directory}, but {len(different)} of "
                f"{len(common)} tensors differ: {collapsed(different)}; save the artifact again from a model of "
                f"that checkpoint, or load the artifact's own weights with from_pretrained({str(self.directory)!r})"
            )

    def programs(self, decoder: Decoder) -> ArtifactSource:
        """Return what the decoder can use: modules if this code writes the same, executables if they run here."""
        if changed := differences(self.manifest["runtime"], dict(decoder.runtime.fingerprint)):
            _LOG.warning(
                "the executables in %s are for another environment, compiling the programs again: %s",
                self.directory,
                "; ".join(changed),
            )
        written_here = self.manifest["code"] == code_of(decoder) != ""
        return ArtifactSource(self.module if written_here else _nothing, _nothing if changed else self.executable)

    def module(self, key: str) -> SavedModule | None:
        """Return the module of the program with this `artifact_key`, or None."""
        identity = self.manifest["keys"].get(key)
        program = self.manifest["programs"].get(identity)
        if program is None:
            return None
        path = self.verified(program["hlo"])
        with files.explain(f"{path}: not a module"):
            data = path.read_bytes()
            return SavedModule(HloModuleProto.FromString(data).name, identity, data)

    def executable(self, identity: str) -> bytes | None:
        """Return the executable of the module with this identity, or None."""
        program = self.manifest["programs"].get(identity)
        return None if program is None else self.verified(program["executable"]).read_bytes()

    def verified(self, name: str) -> Path:
        """Return the path of a file, after comparing its checksum with the manifest's."""
        path = files.want_file(self.directory / name, f"listed in {MANIFEST}")
        with files.explain(f"{path}: cannot be read"):
            found = facts_of(path)
        if found != self.manifest["files"][name]:
            raise CheckpointError(f"{path}: damaged, its size or checksum differs; {files.AGAIN}")
        return path

    def weights(self, decoder: Decoder) -> Iterator[Sharded]:
        """Yield the saved weights for the decoder's devices, after comparing all checksums.

        They have the layout of the devices that they were saved from, and are converted if these devices need another.
        """
        want_weights(self.manifest["weights"], decoder.programs, self.directory / MANIFEST)
        yield from for_devices(self.tensors(), decoder.programs, decoder.options.amp, decoder.runtime.here)

    @functools.cached_property
    def readers(self) -> Readers:
        """For each saved piece of a weight, the function that reads it. Nothing is compared with checksums."""
        files_of = (open_safetensors(self.directory / file) for file in self.manifest["weights"])
        return {name: reader for file in files_of for name, reader in file.items()}

    def tensors(self) -> Iterator[tuple[list[str], Pieces]]:
        """Yield each saved tensor: the weights that share it, and a function that reads its pieces.

        There is one piece per device, or one for all. Checks the files first.
        """
        weights: dict[str, Tensors] = self.manifest["weights"]
        with ThreadPoolExecutor(LOADERS) as pool:
            paths = list(pool.map(self.verified, weights))
        for path, tensors in zip(paths, weights.values(), strict=True):
            yield from read_tensors(path, tensors)


def _nothing(_: str) -> None:
    return None


def open_artifact(directory: PathOrName) -> Artifact:
    """Open the artifact in `directory`. Reads its manifest and `config.json`, and only the sizes of other files.

    Raises CheckpointError, naming the file, if one is missing, has another size, or is not a valid manifest.
    """
    path = Path(os.path.expanduser(directory))
    artifact = Artifact(path, read_manifest(path))
    artifact.verified(CONFIG)
    return artifact
