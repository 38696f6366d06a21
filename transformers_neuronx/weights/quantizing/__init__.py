"""Writes a checkpoint in fewer bits, in the format compressed-tensors, which other programs read, too."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch

from transformers_neuronx.config.published import QUANTIZATION, Form
from transformers_neuronx.errors import CheckpointError, ConfigError
from transformers_neuronx.support import files
from transformers_neuronx.support.progress import bar
from transformers_neuronx.weights.checkpoint import Checkpoint, open_checkpoint
from transformers_neuronx.weights.directories import PathOrName, gguf_at, load_config, resolve_tokenizer
from transformers_neuronx.weights.quantizing.inputs import Skeleton, is_transposed
from transformers_neuronx.weights.quantizing.matrices import Quantized, compensated, rounded
from transformers_neuronx.weights.quantizing.schemes import SCHEMES as SCHEMES, Scheme, scheme_named as scheme_named
from transformers_neuronx.weights.quantizing.shards import CONFIG, LIMIT, Shards, copy_beside, want_place as want_place

EXPERT = re.compile(r"(.*\.experts\.\d+\..*)\.weight")  # a matrix that Transformers' models may hold in a stack


@dataclass(frozen=True)
class Written:
    """What was written: how many matrices are in fewer bits, and the bytes of all tensors before and after."""

    matrices: int
    bytes_before: int
    bytes: int


def quantize(
    checkpoint: PathOrName,
    output: PathOrName,
    scheme: Scheme | str,
    *,
    windows: Sequence[Sequence[int]] = (),
    ignore: Iterable[str] = (),
    cache_dir: PathOrName | None = None,
    shard_bytes: int = LIMIT,
) -> Written:
    """Write a checkpoint of Transformers in fewer bits to a new directory, with its tokenizer.

    The linear layers of its decoder layers are stored as `scheme` says. The head, embeddings and everything else stay
    as they are, and so do modules that `ignore` names, or matches with a pattern after "re:". Matrices are rounded to
    nearest, with scales of the least error. With `windows` of token ids, of equal length, errors are compensated for
    such inputs instead (GPTQ). Then a layer is in memory at a time, in f32, with the hidden states of all windows.

    The directory is complete or absent: nothing of it stays after an error or an interrupt. Raises CheckpointError if
    the checkpoint cannot be read or is in few bits already, and ConfigError if the scheme does not fit it, or there is
    something at `output`.
    """
    scheme = scheme_named(scheme) if isinstance(scheme, str) else scheme
    place = want_place(output)
    if len({len(window) for window in windows}) > 1 or not all(windows):
        raise ConfigError("windows must be of equal length, with at least one token each")
    with _opened(checkpoint, cache_dir) as source, files.staging(place, "checkpoint") as stage:
        job = _Job(Skeleton(source), scheme, tuple(ignore), _scale_type(load_config(source.directory)))
        shards = Shards(stage, shard_bytes)
        before = job.write(shards, windows)
        copy_beside(source.directory, resolve_tokenizer(checkpoint, cache_dir), stage, scheme.attributes(job.ignored))
        files.exchange(stage, place, last=CONFIG)
    return Written(len(job.modules), before, shards.bytes)


class _Job:
    """A checkpoint's matrices on their way to a scheme. `modules` are their names: True for those stored [in, out]."""

    def __init__(self, skeleton: Skeleton, scheme: Scheme, ignore: Sequence[str], dtype: torch.dtype | None) -> None:
        self.skeleton, self.scheme, self.dtype = skeleton, scheme, dtype
        source = skeleton.checkpoint
        wanted = {
            name: is_transposed(each)
            for n in range(len(skeleton.layers))
            for name, each in skeleton.matrices(n).items()
        }
        modules = {skeleton.stored(f"{name}.weight").removesuffix(".weight"): told for name, told in wanted.items()}
        modules |= {match[1]: False for name in source if (match := EXPERT.fullmatch(name))}
        form = Form("", (None, None), tuple(ignore))
        self.modules = {name: told for name, told in modules.items() if not form.ignores(name)}
        if not self.modules:
            raise ConfigError(f"{source.directory}: no matrix is left to quantize: ignore fewer")
        others = {name.removesuffix(".weight") for name in source if name.endswith(".weight")} - self.modules.keys()
        plain = {name for name in others if len(source.shape(f"{name}.weight")) == 2}
        stacks = {name for name in source if not name.endswith(".weight") and len(source.shape(name)) == 3}
        self.ignored = sorted({skeleton.head} | plain | stacks)
        for name, told in self.modules.items():
            inputs = source.shape(f"{name}.weight")[0 if told else 1]
            if inputs % (scheme.group or 1):
                raise ConfigError(
                    f"{name} has {inputs} inputs, which are no whole groups of {scheme.group}; choose a group size "
                    "that divides them, or ignore this module"
                )

    def write(self, shards: Shards, windows: Sequence[Sequence[int]]) -> int:
        """Write matrices in few bits, then all other tensors. Return the bytes that they had."""
        source = self.skeleton.checkpoint
        with bar("quantizing", len(self.modules)) as progress:
            for module, matrix in self.compensated(windows) if windows else self.rounded():
                shards.add(matrix.tensors(module, self.modules[module]))
                progress.update()
        for name in sorted(source.names - {f"{module}.weight" for module in self.modules}):
            shards.add({name: source.read(name)})
        shards.end()
        return sum(source.read(name).nbytes for name in source)

    def rounded(self) -> Iterator[tuple[str, Quantized]]:
        for name, told in self.modules.items():
            tensor = self.skeleton.checkpoint.read(f"{name}.weight")
            matrix = (tensor.T if told else tensor).float()
            yield name, rounded(self.scheme, matrix, self.dtype or tensor.dtype)

    def compensated(self, windows: Sequence[Sequence[int]]) -> Iterator[tuple[str, Quantized]]:
        """Quantize layer by layer. The inputs of a layer are what the quantized ones before it make of the text."""
        skeleton = self.skeleton
        hidden = skeleton.begin(windows)
        for number in range(len(skeleton.layers)):
            with skeleton.layer(number) as modules:
                hessians = skeleton.hessians(number, hidden)
                for name, module in modules.items():
                    stored = skeleton.stored(f"{name}.weight").removesuffix(".weight")
                    if stored in self.modules:
                        yield stored, self._compensated(stored, module, hessians.get(name))
                for place, x in enumerate(hidden):
                    hidden[place] = skeleton.apply(number, x)

    def _compensated(self, name: str, module: torch.nn.Module, hessian: torch.Tensor | None) -> Quantized:
        """Quantize a module, and let it compute with its new numbers."""
        told, dtype = self.modules[name], self.dtype or self.skeleton.checkpoint.dtype(f"{name}.weight")
        weight = module.get_parameter("weight")
        matrix = weight.T.contiguous() if told else weight
        if hessian is None:
            found = rounded(self.scheme, matrix, dtype)
        else:
            found = compensated(self.scheme, matrix, hessian, dtype, f"{self.skeleton.checkpoint.directory}: {name}")
        weight.data = found.numbers.T.contiguous() if told else found.numbers
        return found


def _opened(path: PathOrName, cache_dir: PathOrName | None) -> Checkpoint:
    if file := gguf_at(path):
        raise CheckpointError(
            f"{file}: expected a checkpoint of Transformers, found a GGUF file; take what it was made of"
        )
    how = load_config(path, cache_dir).get(QUANTIZATION)
    if how:
        said = how.get("quant_method") if isinstance(how, dict) else how
        raise CheckpointError(f"{path}: is quantized already ({said}); take the checkpoint that it was made of")
    return open_checkpoint(path, cache_dir)


def _scale_type(config: dict[str, object]) -> torch.dtype | None:
    """Return the type that a configuration says, in which others load scales; None if it does not say."""
    found = getattr(torch, str(config.get("dtype") or config.get("torch_dtype")), None)
    return found if isinstance(found, torch.dtype) and found.is_floating_point else None
