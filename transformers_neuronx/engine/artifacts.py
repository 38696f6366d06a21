"""Artifacts: directories with a model's compiled programs and, optionally, its weights as the devices store them.

`manifest.json` is written last. It lists the files of the artifact, with checksums. Programs are found by the identity
of their modules, so a program of a different graph is never run by mistake. This file decides what is saved and how it
is found again. It does not know what programs and weights mean.
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

from transformers_neuronx.config import (
    Blocks,
    CompileOptions,
    Completed,
    ContinuousBatchingConfig,
    KVCacheQuantizationConfig,
    NeuronConfig,
    QuantizationConfig,
)
from transformers_neuronx.config.sparse_attention import Pattern
from transformers_neuronx.engine.compile_cache import ArtifactSource, warn_once
from transformers_neuronx.engine.decoder import Decoder
from transformers_neuronx.engine.family import Family
from transformers_neuronx.engine.loading import LOADERS
from transformers_neuronx.engine.manifest import (
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
from transformers_neuronx.errors import CheckpointError, ConfigError
from transformers_neuronx.pyhlo import HloModuleProto
from transformers_neuronx.pyhlo.dtypes import numpy_to_torch
from transformers_neuronx.support import files
from transformers_neuronx.support.progress import bar
from transformers_neuronx.version import __version__
from transformers_neuronx.weights import panels
from transformers_neuronx.weights.checkpoint import Checkpoint, PathOrName, Readers, format_in, open_safetensors
from transformers_neuronx.weights.origin import Marks, marks_in
from transformers_neuronx.weights.reading import Key, Sharded, collapsed, expand
from transformers_neuronx.weights.rows import Weight

_LOG = logging.getLogger(__name__)
PACKAGE = Path(__file__).parents[1]  # the root of this package

OWN_FILES = re.compile(r"program-.*\.(hlo\.pb|executable|neff)|weights-.*\.safetensors")


def save_artifact(directory: PathOrName, decoder: Decoder, attributes: Mapping[str, Any], weights: bool) -> None:
    """Save the programs built so far, `attributes` as `config.json`, and with `weights` the decoder's weights.

    Other files in `directory` are kept. An earlier artifact is replaced when the new one is complete and on the disk. A
    save that fails or is interrupted leaves it unchanged. A killed process may leave `.artifact.tmp-*`, which can be
    deleted. If it is killed during the exchange, there is no artifact, and the parts of the earlier one are in
    `.artifact.old-*`. Raises CheckpointError if the directory holds a checkpoint, which has its own `config.json`.
    """
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
    """Return the path that `save_artifact` writes to. Raises its errors about the directory before the work starts."""
    path = files.want_writable(Path(os.path.expanduser(directory)), directory=True)
    if found := format_in(path):
        raise CheckpointError(f"{path / found} is a checkpoint; save the artifact to a separate directory")
    return path


def description(family: Family, config: Any, options: CompileOptions) -> dict[str, Any]:
    """Return what a model and an artifact must have in common, in the types of JSON."""
    compiled = dataclasses.asdict(options)
    del compiled["workers"]  # the number of parallel compilations changes no program
    if options.blocks is None:
        del compiled["blocks"]  # as in artifacts of earlier versions
    told = dict(family=family.name, config=dataclasses.asdict(config), options=compiled)
    in_json: dict[str, Any] = json.loads(as_json(told))
    return in_json


def code_of(decoder: Decoder) -> str:
    """Return a digest of the code and settings that write the modules, or "" if some code is outside this package."""
    homes = decoder.family.graph.__name__, decoder.family.weights.__name__, type(decoder.config).__module__
    if not (_own_code() and all(home.startswith(f"{PACKAGE.name}.") for home in homes)):
        return ""
    return f"{_own_code()} panels={decoder.programs.panels} in_place={decoder.programs.in_place}"


@functools.cache
def _own_code() -> str:
    sources = {str(path.relative_to(PACKAGE)): sha256_of(path) for path in sorted(PACKAGE.rglob("*.py"))}
    return hashlib.sha256(json.dumps(sources).encode()).hexdigest() if sources else ""


def _save_programs(decoder: Decoder, stage: Path) -> dict[str, dict[str, str]]:
    programs = {}
    for identity, (module, executable) in list(decoder.store.executables.items()):
        stem = f"program-{re.sub(r'[^-_A-Za-z0-9]', '_', module.name)}-{identity[:12]}"
        programs[identity] = dict(hlo=f"{stem}.hlo.pb", executable=f"{stem}.{decoder.runtime.suffix}")
        files.write(stage / f"{stem}.hlo.pb", module.SerializeToString(deterministic=True))
        files.write(stage / programs[identity]["executable"], executable.serialize())
    return programs


def _save_weights(decoder: Decoder, stage: Path) -> dict[str, Tensors]:
    """Write a file per layer and one for all other weights, with one file in memory at a time. Ties are saved once."""
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
    """Return a safetensors file whose tensors are aligned for a processor's vectors, so that they work in place."""
    end = 8 + int.from_bytes(data[:8], "little")
    spaces = -end % 64  # after the header, which the format allows
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
    """Whether the directory holds an artifact, and not a checkpoint with a manifest of something else."""
    path = Path(os.path.expanduser(path_or_name))
    return os.path.lexists(path / MANIFEST) and not format_in(path)


@dataclass(frozen=True)
class Artifact:
    """A saved artifact, as its manifest describes it. Checksums are compared when a file is read."""

    directory: Path
    manifest: dict[str, Any]

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
        saved = self.manifest["options"]
        names = ("batch_size", "prompt_batch_size", "tp_degree", "unroll", "context_unroll")
        with files.explain(f"{self.directory / MANIFEST}: not valid options of a model"):
            sizes, numbers = saved["buckets"], {name: saved[name] for name in names}
            names_of_sizes = ("positions", "context", "sources")
            positions, context, sources = (list(map(operator.index, sizes[name])) for name in names_of_sizes)
            if not all(value is None or type(value) is int for value in numbers.values()):
                raise ValueError(f"expected whole numbers, got {numbers}")
            switches = NeuronConfig(
                tokens_per_dispatch=saved["chunk"],
                quant=saved["quant"] and QuantizationConfig(**saved["quant"]),
                kv_cache_quant=saved["kv_cache_quant"] and KVCacheQuantizationConfig(**saved["kv_cache_quant"]),
                sparse_attn=saved["sparse"] and Pattern(**saved["sparse"]).config(),
                shard_over_sequence=saved["shard_over_sequence"],
                continuous_batching=_batching(saved),
                output_all_logits=bool((saved.get("blocks") or {}).get("all_logits")),
            )
            sizes = dict(n_positions=positions, context_length_estimate=sources or context, amp=str(saved["amp"]))
        return dict(**sizes, **numbers, neuron_config=switches)

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

    def module(self, key: str) -> HloModuleProto | None:
        """Return the module of the program with this `artifact_key`, or None."""
        program = self.manifest["programs"].get(self.manifest["keys"].get(key))
        if program is None:
            return None
        path = self.verified(program["hlo"])
        with files.explain(f"{path}: not a module"):
            return HloModuleProto.FromString(path.read_bytes())

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
        table = dict(expand(decoder.programs.table, decoder.programs.layers))
        missing = {_text(key) for key in table}
        listed = {name for tensors in self.manifest["weights"].values() for names in tensors.values() for name in names}
        if missing != listed:
            wrong = f"lists weights that differ from the model's: {collapsed(sorted(missing ^ listed))}"
            raise CheckpointError(f"{self.directory / MANIFEST}: {wrong}; {files.AGAIN}")
        rows = {_text(key): row for key, row in table.items()}
        for names, pieces in self.tensors():
            row = rows[names[0]]
            laid_out = functools.partial(_laid_out, row, decoder.programs.degree, pieces)
            yield Sharded([*map(_key, names)], row.dtype or decoder.options.amp, laid_out)

    @functools.cached_property
    def readers(self) -> Readers:
        """For each saved piece of a weight, the function that reads it. Nothing is compared with checksums."""
        files_of = (open_safetensors(self.directory / file) for file in self.manifest["weights"])
        return {name: reader for file in files_of for name, reader in file.items()}

    def tensors(self) -> Iterator[tuple[list[str], Callable[[], list[torch.Tensor]]]]:
        """Yield each saved tensor: the weights that share it, and a function that reads its pieces.

        There is one piece per device, or one for all. Checks the files first.
        """
        weights: dict[str, Tensors] = self.manifest["weights"]
        with ThreadPoolExecutor(LOADERS) as pool:
            paths = list(pool.map(self.verified, weights))
        for path, tensors in zip(paths, weights.values(), strict=True):
            readers = open_safetensors(path, to_keep=True)
            for name, names in tensors.items():
                if _ranked(name, 0) not in readers:
                    raise CheckpointError(f"{path}: {name!r} is missing, but {MANIFEST} lists it")
                yield names, functools.partial(_pieces, path, readers, name)


def _batching(saved: Mapping[str, Any]) -> ContinuousBatchingConfig | None:
    """Return what divides the cache into the saved blocks, if there are any."""
    if not saved.get("blocks"):
        return None
    blocks, longest = Blocks(**saved["blocks"]), max(saved["buckets"]["positions"])
    batching = ContinuousBatchingConfig(
        saved["batch_size"],
        max_model_len=longest,
        optimized_paged_attention=True,
        enable_chunked_prefill=blocks.chunked,
    )
    batching.init_cache_engine(blocks.size, blocks.count)
    return batching


def _nothing(_: str) -> None:
    return None


def _laid_out(row: Weight, degree: int, pieces: Callable[[], list[torch.Tensor]]) -> list[torch.Tensor]:
    """Return the pieces of a weight, in panels or as matrices, as its row requires."""
    if row.word:
        return [panels.laid_out(piece, row.word) if piece.ndim == 2 else piece for piece in pieces()]
    return [panels.as_matrix(piece, row.share(degree)) if piece.ndim == 4 else piece for piece in pieces()]


def _pieces(path: Path, readers: Readers, name: str) -> list[torch.Tensor]:
    ranks = itertools.takewhile(readers.__contains__, (_ranked(name, rank) for rank in itertools.count()))
    with files.explain(f"{path}: cannot read {name!r}"):
        return [readers[ranked](ranked) for ranked in ranks]


def differences(saved: Mapping[str, Any], wanted: Mapping[str, Any], inside: str = "") -> list[str]:
    """Return each difference, such as "amp: saved bf16, expected f32"."""
    found = []
    for name in sorted(saved.keys() | wanted.keys()):
        one, other = (values.get(name, "nothing") for values in (saved, wanted))
        where = inside + name
        if isinstance(one, dict) and isinstance(other, dict):
            found += differences(one, other, "" if where == "options" else f"{where}.")
        elif one != other:
            line = f"{where}: saved {str(one)[:80]}, expected {str(other)[:80]}"
            found.append(line.encode("ascii", "backslashreplace").decode())
    return found


def open_artifact(directory: PathOrName) -> Artifact:
    """Open the artifact in `directory`. Reads its manifest and `config.json`, and only the sizes of other files.

    Raises CheckpointError, naming the file, if one is missing, has another size, or is not a valid manifest.
    """
    path = Path(os.path.expanduser(directory))
    artifact = Artifact(path, read_manifest(path))
    artifact.verified(CONFIG)
    return artifact
