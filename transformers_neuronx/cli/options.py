"""Options shared by several commands, and how a model and its tokenizer are opened from them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, cast

import typer

from transformers_neuronx.config import NeuronConfig, QuantizationConfig, Workers
from transformers_neuronx.config.multimodal import text_half
from transformers_neuronx.engine.artifacts import holds_artifact, open_artifact
from transformers_neuronx.engine.family import EncoderDecoderConfig
from transformers_neuronx.errors import CheckpointError, ConfigError
from transformers_neuronx.huggingface.auto import class_of, reads_images
from transformers_neuronx.huggingface.tokenizers import tokenizer_in, tokenizer_of_gguf
from transformers_neuronx.models.sampling import ForSampling
from transformers_neuronx.runtimes import RUNTIMES
from transformers_neuronx.support.files import explain, read_json
from transformers_neuronx.weights.directories import (
    PROCESSOR_FILES,
    gguf_at,
    load_config,
    load_generation_config,
    load_pooling,
    resolve_tokenizer,
)

NO = 4  # exit status of `plan`, `lint` and `check` if they find a problem
HOW, CHOICE, WHERE, SERVER, LORA = "Compilation", "Sampling", "Model location", "Server", "Adapters"
MOST = 2**31 - 1  # limit of every count
LORAS, RANK = 4, 16  # adapters of running requests at once, and their highest rank, by default


def option(
    *names: str,
    help: str,  # noqa: A002
    panel: str | None = None,
    default: bool | str = False,
    least: float | None = None,
    also: int | None = None,
    metavar: str | None = None,
) -> Any:
    """Return an option with these names in a panel of the help. `default` shows its default, or a text in its place.

    Its number, or each number of a list, must be at least `least`, or equal to `also`.
    """
    callback = None if least is None else _counted(least, also)
    return typer.Option(
        *names, help=help, rich_help_panel=panel, show_default=default, callback=callback, metavar=metavar
    )


def _counted(least: float, also: int | None) -> Callable[[Any], Any]:
    def check(value: Any) -> Any:
        for number in value if isinstance(value, list) else [value]:
            if number is not None and number != also and not least <= number <= MOST:
                wanted = f"{least} or more" if not number >= least else f"{MOST} or less"
                raise typer.BadParameter(f"must be {wanted}{'' if also is None else f', or {also}'}; got {number}")
        return value

    return check


WHAT = "Directory of a checkpoint or an artifact, a GGUF file, or a name on the Hugging Face hub."
Model = Annotated[str, typer.Argument(metavar="MODEL", help=WHAT)]
MaybeModel = Annotated[str | None, typer.Argument(metavar="MODEL", help=WHAT, show_default=False)]
NameOrPath = Annotated[str | None, option("--model-name-or-path", help="Same as MODEL.", panel=WHERE)]
ConfigName = Annotated[
    str | None,
    option("--config-name", help="Same as MODEL, if --checkpoint-name has the weights.", panel=WHERE),
]
CheckpointName = Annotated[
    str | None,
    option("--checkpoint-name", help="Checkpoint directory or file to load the weights from.", panel=WHERE),
]
Adapter = Annotated[
    str | None, option("--adapter", help="Directory of a LoRA adapter to merge into the weights.", panel=WHERE)
]
CacheDir = Annotated[str | None, option("--cache-dir", help="Cache directory for models of the hub.", panel=WHERE)]
Amp = Annotated[
    str | None,
    option(
        "--amp",
        help="Type of weights, activations and cache: f32, bf16 or f16; by default the checkpoint's.",
        panel=HOW,
    ),
]
Degree = Annotated[int | None, option("--tp", help="Devices that share each layer; 1 by default.", panel=HOW, least=1)]
Experts = Annotated[
    bool,
    option(
        "--expert-parallel",
        "--enable-expert-parallel",
        help="Each device has some experts of a mixture, not a part of each; needs --tp.",
        panel=HOW,
    ),
]
Batch = Annotated[int | None, option("--batch-size", help="Sequences per batch; 1 by default.", panel=HOW, least=1)]
Positions = Annotated[
    int | None,
    option(
        "--n-positions",
        "--max-seq-length",
        help="Longest sequence in tokens; by default the model's.",
        panel=HOW,
        least=1,
    ),
]
Context = Annotated[
    list[int] | None,
    option(
        "--context",
        help="Prompt length to compile for; may be repeated.",
        panel=HOW,
        least=1,
    ),
]
Quant = Annotated[str | None, option("--quant", help="Quantize the weights: s8, s4 or f8e4m3fn.", panel=HOW)]
Rounded = Annotated[
    bool, option("--round-activations", help="Also round activations to 8 bits; needs --quant.", panel=HOW)
]
Runtime = Annotated[str | None, option("--runtime", help="Where to run: cpu, cuda or neuron.", panel=HOW)]
Seed = Annotated[
    int | None, option("--seed", help="Random seed; the same seed gives the same tokens.", panel=CHOICE, default=True)
]
Json = Annotated[bool, option("--json", help="Print JSON instead of text.")]

DTYPES = {"float32": "f32", "bfloat16": "bf16", "float16": "f16"}


@dataclass(frozen=True)
class How:
    """How the user asked for a model to be compiled. None is the default, or what an artifact was compiled with."""

    amp: str | None
    tp: int | None
    quant: str | None
    rounded: bool
    runtime: str | None
    workers: Workers | None = None
    expert_parallel: bool = False

    def options(self) -> dict[str, Any]:
        """Return the given options as keywords of a model's constructor."""
        if self.rounded and self.quant is None:
            raise ConfigError("--round-activations needs --quant")
        if self.runtime not in (None, *RUNTIMES):
            raise ConfigError(f"--runtime must be one of {', '.join(RUNTIMES)}, got {self.runtime!r}")
        switches = None
        if self.expert_parallel or any(given is not None for given in (self.quant, self.runtime, self.workers)):
            activations = "s8" if self.rounded else None
            quant = QuantizationConfig(self.quant, activation_dtype=activations) if self.quant else None
            spread = dict(workers=self.workers, expert_parallel=self.expert_parallel)
            switches = NeuronConfig(quant=quant, runtime=self.runtime, **spread)  # type: ignore[arg-type]
        return said(amp=self.amp, tp_degree=self.tp, neuron_config=switches)


def said(**options: Any) -> dict[str, Any]:
    """Return the options that are not None."""
    return {name: value for name, value in options.items() if value is not None}


class Source:
    """A model by its path or name, maybe with an adapter. Its configuration is read once, and decides the family.

    A configuration file alone is enough where no weights are needed. Of a multimodal model it is the text half; or with
    `images` the whole, if its family reads them. Raises CheckpointError if no family supports it.
    """

    def __init__(
        self, path: str, cache_dir: str | None = None, adapter: str | None = None, images: bool = False
    ) -> None:  # fmt: skip
        self.path, self.cache_dir, self.adapter = path, cache_dir, adapter
        self.is_artifact = holds_artifact(path)
        alone = Path(path).expanduser()
        self._alone = alone.suffix == ".json" and alone.is_file()
        with _checkpoint_s():
            both = reads_images if images else False
            self.attributes = text_half(read_json(alone)) if self._alone else load_config(path, cache_dir, both)
            self.cls = class_of(self.attributes, path)
            family = self.cls.family
            completed = open_artifact(path).attributes(family) if self.is_artifact else self.attributes
            self.config = family.read_config(completed)

    @cached_property
    def generation(self) -> dict[str, Any]:
        """Contents of its generation_config.json; empty if it has none."""
        return {} if self._alone else load_generation_config(self.path, self.cache_dir)

    @cached_property
    def pooling(self) -> str:
        """How its hidden states become embeddings."""
        return "last" if self._alone else load_pooling(self.path, self.cache_dir)

    def open(
        self, how: How, *, without_weights: bool = False, needs_weights: bool = True, **options: Any
    ) -> ForSampling:
        """Return the model, not on a device yet. `without_weights` reads only the configuration and the options.

        A ConfigError is about the options. What is wrong with the model itself is a CheckpointError.
        """
        dtype = str(self.attributes.get("dtype") or self.attributes.get("torch_dtype"))
        default = {} if self.is_artifact else dict(amp=DTYPES.get(dtype, "f32"))
        given = default | how.options() | said(**options)
        if without_weights:
            saved = open_artifact(self.path).options() if self.is_artifact else {}
            return self.cls(self.attributes, **saved | given)
        if needs_weights and self.is_artifact and "weights" not in given and not open_artifact(self.path).has_weights:
            raise CheckpointError(f"{self.path} is an artifact without weights: compile one with --weights")
        return self.cls.from_pretrained(self.path, cache_dir=self.cache_dir, **said(adapter=self.adapter), **given)

    def fitting(self, prompt: int, new: int, asked: int = -1) -> dict[str, Any]:
        """Return sizes to compile for, large enough for prompts of `prompt` tokens and `new` tokens after them.

        They are powers of two, so that other prompts find their programs in the compile cache. A number of positions
        that is `asked` for overrides them.
        """
        self.want_text()
        if asked > 0:
            return dict(n_positions=asked)
        if self.is_artifact:
            return {}
        if self.cls.family.encoder:
            return dict(n_positions=_power(1 + new), context_length_estimate=_power(prompt))
        trained = self.config.n_positions
        return dict(n_positions=min(_power(prompt + new), trained or 2**30))

    def want_text(self) -> None:
        """Raise CheckpointError if the model reads numbers, as Whisper does, and no text."""
        encodes = self.cls.family.encoder is not None
        if encodes and (sizes := cast(EncoderDecoderConfig, self.config).source_sizes):
            raise CheckpointError(
                f"{self.path} reads numbers, {list(sizes)} for each source, and commands give text; use "
                f"{self.cls.__name__} in a program: docs/guides/speech.md"
            )

    def tokenizer(self) -> Any:
        """Return the model's tokenizer."""
        return tokenizer_of(self.path, self.cache_dir)

    def image_processor(self) -> Any:
        """Return what divides images into patches for the model. Raises CheckpointError if it has none."""
        from transformers import AutoImageProcessor  # takes seconds

        directory = resolve_tokenizer(self.path, self.cache_dir)
        if not any((directory / name).exists() for name in PROCESSOR_FILES):
            advice = f"add {PROCESSOR_FILES[0]} of the checkpoint, or leave out images with --text-only"
            raise CheckpointError(f"{self.path} does not say how images are read; {advice}")
        with explain(f"{self.path}: its image processor cannot be read", "leave out images with --text-only"):
            return AutoImageProcessor.from_pretrained(directory)  # type: ignore[no-untyped-call]


def tokenizer_of(path: str, cache_dir: str | None) -> Any:
    """Return the tokenizer of a model, of any family. Raises CheckpointError if it has none."""
    file, advice = gguf_at(path), "save one there: tokenizer.save_pretrained(…)"
    if file and find_spec("gguf") is None:
        raise CheckpointError('the tokenizer of a GGUF file needs gguf: pip install "transformers-neuronx[gguf]"')
    directory = file.parent if file else resolve_tokenizer(path, cache_dir)
    with explain(f"{path}: its tokenizer cannot be read", "take another file" if file else advice):
        tokenizer = tokenizer_of_gguf(file) if file else tokenizer_in(directory)
    if not tokenizer("a").input_ids:  # Transformers returns an empty one if there are no files
        raise CheckpointError(f"{path} has no tokenizer; {advice}")
    return tokenizer


@contextmanager
def _checkpoint_s() -> Iterator[None]:
    """Raise CheckpointError for an unsupported configuration: the checkpoint is at fault, not the command."""
    try:
        yield
    except ConfigError as error:
        raise CheckpointError(" ".join(str(error).split())) from error


def _power(size: int) -> int:
    return max(1 << (size - 1).bit_length(), 128)


def one_of(*names: str | None) -> str:
    """Return the model that the first given argument names."""
    named = [name for name in names if name is not None]
    if not named:
        raise typer.BadParameter("expected a MODEL, --model-name-or-path or --config-name")
    return named[0]
