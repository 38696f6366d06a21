"""Artifacts: a model's programs, compiled, and if wanted its weights as the devices have them, in a directory.

`manifest.json` is the last file of an artifact to be written and says what belongs to it, with checksums. Programs are
found by the identity of their modules, so that one of another graph is never run in place of what was asked for. This
file owns what is saved and how it is found again; what programs and weights mean it does not know.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import itertools
import json
import logging
import operator
import os
import re
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors.torch
import torch

from transformers_neuronx import files, panels
from transformers_neuronx.cache import ArtifactSource, warn_once
from transformers_neuronx.config import (
    CompileOptions,
    Completed,
    KVCacheQuantizationConfig,
    NeuronConfig,
    QuantizationConfig,
)
from transformers_neuronx.decoder import Decoder
from transformers_neuronx.errors import CheckpointError, ConfigError
from transformers_neuronx.loading import LOADERS
from transformers_neuronx.manifest import (
    CONFIG,
    FORMAT,
    MANIFEST,
    Tensors,
    as_json,
    facts_of,
    read_manifest,
    sealed,
    sha256_of,
)
from transformers_neuronx.module import Checkpoint, PathOrName, Readers, format_in, open_safetensors
from transformers_neuronx.origin import Marks, marks_in
from transformers_neuronx.programs import Family
from transformers_neuronx.progress import bar
from transformers_neuronx.pyhlo import HloModuleProto
from transformers_neuronx.pyhlo.dtypes import numpy_to_torch
from transformers_neuronx.version import __version__
from transformers_neuronx.weights import Key, Sharded, Weight, collapsed, expand

_LOG = logging.getLogger(__name__)

OWN_FILES = re.compile(r"program-.*\.(hlo\.pb|executable|neff)|weights-.*\.safetensors")


def save_artifact(directory: PathOrName, decoder: Decoder, attributes: Mapping[str, Any], weights: bool) -> None:
    """Save the programs built so far, `attributes` as `config.json`, and with `weights` those of the decoder.

    Other files in `directory` are kept. An earlier artifact is replaced when the new one is complete and on the disk;
    a save that fails or is interrupted leaves it as it was. A killed process may leave `.artifact.tmp-*`, to delete,
    and, killed in the exchange, no artifact and the parts of the earlier one in `.artifact.old-*`. CheckpointError when
    the directory holds a checkpoint, which has a `config.json` of its own.
    """
    path = want_place(directory)
    with files.staging(path, "artifact") as stage:
        manifest = dict(
            format=FORMAT,
            version=__version__,
            **description(decoder.family, decoder.config, decoder.options),
            runtime=dict(decoder.runtime.fingerprint),
            code=code_of(decoder),
            keys=dict(sorted(decoder.identities.items())),
            programs=_save_programs(decoder, stage),
            weights=_save_weights(decoder, stage) if weights else {},
            origin=dict(sorted(decoder.origin.items())) if weights else {},
        )
        files.write(stage / CONFIG, as_json(attributes))
        written = sorted(stage.iterdir())
        manifest["files"] = {file.name: facts_of(file) for file in written}
        files.write(stage / MANIFEST, sealed(manifest))
        old = {file.name for file in path.iterdir() if OWN_FILES.fullmatch(file.name)}
        files.exchange(stage, path, last=MANIFEST, obsolete=old.difference(file.name for file in written))


def want_place(directory: PathOrName) -> Path:
    """Where `save_artifact` would write. Raises what it would of the directory, before there is anything to save."""
    path = files.want_writable(Path(os.path.expanduser(directory)), directory=True)
    if found := format_in(path):
        raise CheckpointError(f"{path / found} is a checkpoint; save the artifact to a directory of its own")
    return path


def description(family: Family, config: Any, options: CompileOptions) -> dict[str, Any]:
    """What a model has to have in common with an artifact, in the types of JSON."""
    compiled = dataclasses.asdict(options)
    del compiled["workers"]  # how many are compiled at once
    told = dict(family=family.name, config=dataclasses.asdict(config), options=compiled)
    in_json: dict[str, Any] = json.loads(as_json(told))
    return in_json


def code_of(decoder: Decoder) -> str:
    """A digest of the code that writes its modules, and how; empty where some of that is not in this package."""
    homes = decoder.family.graph.__name__, decoder.family.weights.__name__, type(decoder.config).__module__
    if not (_own_code() and all(home.startswith(f"{__package__}.") for home in homes)):
        return ""
    return f"{_own_code()} panels={decoder.programs.panels} in_place={decoder.programs.in_place}"


@functools.cache
def _own_code() -> str:
    here = Path(__file__).parent
    sources = {str(path.relative_to(here)): sha256_of(path) for path in sorted(here.rglob("*.py"))}
    return hashlib.sha256(json.dumps(sources).encode()).hexdigest() if sources else ""


def _save_programs(decoder: Decoder, stage: Path) -> dict[str, dict[str, str]]:
    programs = {}
    for identity, (module, executable) in list(decoder.executables.items()):
        stem = f"program-{re.sub(r'[^-_A-Za-z0-9]', '_', module.name)}-{identity[:12]}"
        programs[identity] = dict(hlo=f"{stem}.hlo.pb", executable=f"{stem}.{decoder.runtime.suffix}")
        files.write(stage / f"{stem}.hlo.pb", module.SerializeToString(deterministic=True))
        files.write(stage / programs[identity]["executable"], executable.serialize())
    return programs


def _save_weights(decoder: Decoder, stage: Path) -> dict[str, Tensors]:
    """A file for each layer and one for what is of none: no more than that is in memory at once. Tied ones once."""
    groups: dict[str, Tensors] = {}
    places: dict[int, list[str]] = {}
    held = {_text(key): tensor for key, tensor in decoder.weights.items()}
    for (layer, _), (name, tensor) in zip(decoder.weights, held.items(), strict=True):
        if id(tensor) not in places:
            group = groups.setdefault(f"weights-{'shared' if layer is None else f'layer-{layer:04}'}.safetensors", {})
            places[id(tensor)] = group[name] = []
        places[id(tensor)].append(name)
    with bar("saving weights", len(held)) as saved:
        for file, tensors in groups.items():
            content = {}
            for name in tensors:
                shards = [numpy_to_torch(shard.copy()) for shard in held[name].shards()]  # the device's are read-only
                bytes_of = [shard.contiguous().flatten().view(torch.uint8) for shard in shards]
                kept = shards[:1] if all(of.equal(bytes_of[0]) for of in bytes_of) else shards
                content.update({_ranked(name, rank): shard for rank, shard in enumerate(kept)})
            files.write(stage / file, _aligned(safetensors.torch.save(content)))
            saved.update(sum(map(len, tensors.values())))
    return groups


def _aligned(data: bytes) -> bytes:
    """A safetensors file in which tensors begin where a processor's vectors do, so that they can be used in place."""
    end = 8 + int.from_bytes(data[:8], "little")
    spaces = -end % 64  # after the header, where the format allows them
    return b"".join([(end - 8 + spaces).to_bytes(8, "little"), data[8:end], b" " * spaces, data[end:]])


def _ranked(name: str, rank: int) -> str:
    return f"{name}@{rank}"


def _text(key: Key) -> str:
    layer, name = key
    return name if layer is None else f"layer.{layer}.{name}"


def _key(text: str) -> Key:
    layered = re.fullmatch(r"layer\.(\d{1,9})\.(.+)", text)
    return (int(layered[1]), layered[2]) if layered else (None, text)


def holds_artifact(path_or_name: PathOrName) -> bool:
    """Whether it is the directory of an artifact, and not a checkpoint's with a manifest of something else."""
    path = Path(os.path.expanduser(path_or_name))
    return os.path.lexists(path / MANIFEST) and not format_in(path)


@dataclass(frozen=True)
class Artifact:
    """What a directory holds, as its manifest says. Checksums are compared when a file is read."""

    directory: Path
    manifest: dict[str, Any]

    @property
    def has_weights(self) -> bool:
        return bool(self.manifest["weights"])

    def attributes(self, family: Family) -> Completed:
        """The configuration of the model that was saved, as Transformers had completed it."""
        path = self.directory / CONFIG
        attributes = Completed(files.read_json(path, files.unique))
        with files.explain(f"{path}: not the configuration of such a model"):
            family.read_config(attributes)
        return attributes

    def options(self) -> dict[str, Any]:
        """The options of a model's constructor that it was saved with, as far as they say what is in an artifact."""
        saved = self.manifest["options"]
        names = ("batch_size", "prompt_batch_size", "tp_degree", "unroll", "context_unroll")
        with files.explain(f"{self.directory / MANIFEST}: not the options of a model"):
            sizes, numbers = saved["buckets"], {name: saved[name] for name in names}
            names_of_sizes = ("positions", "context", "sources")
            positions, context, sources = (list(map(operator.index, sizes[name])) for name in names_of_sizes)
            if not all(value is None or type(value) is int for value in numbers.values()):
                raise ValueError(f"wanted whole numbers, got {numbers}")
            switches = NeuronConfig(
                tokens_per_dispatch=saved["chunk"],
                quant=saved["quant"] and QuantizationConfig(**saved["quant"]),
                kv_cache_quant=saved["kv_cache_quant"] and KVCacheQuantizationConfig(**saved["kv_cache_quant"]),
            )
            sizes = dict(n_positions=positions, context_length_estimate=sources or context, amp=str(saved["amp"]))
        return dict(**sizes, **numbers, neuron_config=switches)

    def check(self, family: Family, config: Any, options: CompileOptions) -> None:
        """ConfigError with all that is different in the model that was saved, where something is."""
        wanted = description(family, config, options)
        saved = {name: self.manifest[name] for name in wanted}
        if found := differences(saved, wanted):
            raise ConfigError(
                f"the artifact {self.directory} was saved of another model or with other options: {'; '.join(found)}"
            )

    @property
    def marks(self) -> Marks:
        """Of the checkpoint whose weights these are; none in an artifact of the versions that did not note them."""
        marks: Marks = self.manifest.get("origin", {})
        return marks

    def check_weights(self, own: Checkpoint | Artifact | None, prefix: str) -> None:
        """ConfigError where these weights are not those that a model has of its `own`, as far as marks tell."""
        if not self.has_weights:
            return
        if own is None or (isinstance(own, Artifact) and not own.has_weights):
            _LOG.info("the model has no weights of its own, and takes those in %s", self.directory)
            return
        theirs = own.marks if isinstance(own, Artifact) else marks_in(own, self.marks, prefix)
        common = sorted(self.marks.keys() & theirs.keys())
        if not common:
            warn_once(
                f"the weights in {self.directory} are used; whether they are those of {own.directory} cannot be told, "
                "since the artifact has no marks of these tensors: save it again, and it will have them"
            )
        if different := [name for name in common if self.marks[name] != theirs[name]]:
            raise ConfigError(
                f"load: the weights in {self.directory} must be those of {own.directory}, but {len(different)} of "
                f"{len(common)} tensors are others: {collapsed(different)}; save the artifact again from a model of "
                f"that checkpoint, or take the artifact's own weights with from_pretrained({str(self.directory)!r})"
            )

    def programs(self, decoder: Decoder) -> ArtifactSource:
        """What the decoder can use: modules if this code would write the same, executables if they are for here."""
        if changed := differences(self.manifest["runtime"], dict(decoder.runtime.fingerprint)):
            _LOG.warning(
                "the executables in %s are not for here, and its programs are compiled anew: %s",
                self.directory,
                "; ".join(changed),
            )
        written_here = self.manifest["code"] == code_of(decoder) != ""
        return ArtifactSource(self.module if written_here else _nothing, _nothing if changed else self.executable)

    def module(self, key: str) -> HloModuleProto | None:
        """The module of the program with this `artifact_key`, or None."""
        program = self.manifest["programs"].get(self.manifest["keys"].get(key))
        if program is None:
            return None
        path = self.verified(program["hlo"])
        with files.explain(f"{path}: not a module"):
            return HloModuleProto.FromString(path.read_bytes())

    def executable(self, identity: str) -> bytes | None:
        """The executable of the module with that identity."""
        program = self.manifest["programs"].get(identity)
        return None if program is None else self.verified(program["executable"]).read_bytes()

    def verified(self, name: str) -> Path:
        """The file, which has the checksum that the manifest says."""
        path = files.want_file(self.directory / name, f"which {MANIFEST} lists")
        with files.explain(f"{path}: cannot be read"):
            found = facts_of(path)
        if found != self.manifest["files"][name]:
            raise CheckpointError(f"{path}: damaged, it is not what was saved; {files.AGAIN}")
        return path

    def weights(self, decoder: Decoder) -> Iterator[Sharded]:
        """The saved weights for the decoder's devices, as soon as their checksums are compared.

        They lie as those devices had them that they were saved from, and are laid out anew where these want otherwise.
        """
        table = dict(expand(decoder.programs.table, decoder.config.n_layer))
        missing = {_text(key) for key in table}
        listed = {name for tensors in self.manifest["weights"].values() for names in tensors.values() for name in names}
        if missing != listed:
            wrong = f"lists other weights than the model has: {collapsed(sorted(missing ^ listed))}"
            raise CheckpointError(f"{self.directory / MANIFEST}: {wrong}; {files.AGAIN}")
        rows = {_text(key): row for key, row in table.items()}
        for names, pieces in self.tensors():
            row = rows[names[0]]
            laid_out = functools.partial(_laid_out, row, decoder.programs.degree, pieces)
            yield Sharded([*map(_key, names)], row.dtype or decoder.options.amp, laid_out)

    def tensors(self) -> Iterator[tuple[list[str], Callable[[], list[torch.Tensor]]]]:
        """Each tensor that was saved: the weights that it is, and what reads its pieces, one per device or one for all.

        Checks the files first.
        """
        weights: dict[str, Tensors] = self.manifest["weights"]
        with ThreadPoolExecutor(LOADERS) as pool:
            paths = list(pool.map(self.verified, weights))
        for path, tensors in zip(paths, weights.values(), strict=True):
            readers = open_safetensors(path, to_keep=True)
            for name, names in tensors.items():
                if _ranked(name, 0) not in readers:
                    raise CheckpointError(f"{path}: not the weights that {MANIFEST} lists, {name!r} is missing")
                yield names, functools.partial(_pieces, path, readers, name)


def _nothing(_: str) -> None:
    return None


def _laid_out(row: Weight, degree: int, pieces: Callable[[], list[torch.Tensor]]) -> list[torch.Tensor]:
    """The pieces of a weight, in panels or as matrices, as its row has it."""
    if row.word:
        return [panels.laid_out(piece, row.word) if piece.ndim == 2 else piece for piece in pieces()]
    return [panels.as_matrix(piece, row.share(degree)) if piece.ndim == 4 else piece for piece in pieces()]


def _pieces(path: Path, readers: Readers, name: str) -> list[torch.Tensor]:
    ranks = itertools.takewhile(readers.__contains__, (_ranked(name, rank) for rank in itertools.count()))
    with files.explain(f"{path}: cannot read {name!r}"):
        return [readers[ranked](ranked) for ranked in ranks]


def differences(saved: Mapping[str, Any], wanted: Mapping[str, Any], inside: str = "") -> list[str]:
    """Each value that differs, as "amp: saved bf16, wanted f32"."""
    found = []
    for name in sorted(saved.keys() | wanted.keys()):
        one, other = (values.get(name, "nothing") for values in (saved, wanted))
        where = inside + name
        if isinstance(one, dict) and isinstance(other, dict):
            found += differences(one, other, "" if where == "options" else f"{where}.")
        elif one != other:
            line = f"{where}: saved {str(one)[:80]}, wanted {str(other)[:80]}"
            found.append(line.encode("ascii", "backslashreplace").decode())
    return found


def open_artifact(directory: PathOrName) -> Artifact:
    """The artifact in `directory`. Reads its manifest and `config.json`, of the other files nothing but their sizes.

    CheckpointError names the file that is missing, of another size, or is not what a manifest is.
    """
    path = Path(os.path.expanduser(directory))
    artifact = Artifact(path, read_manifest(path))
    artifact.verified(CONFIG)
    return artifact
