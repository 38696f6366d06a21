"""What several commands ask for, and how a model and its tokenizer are made of that."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any

import typer

from transformers_neuronx.auto import class_of
from transformers_neuronx.config import NeuronConfig, QuantizationConfig
from transformers_neuronx.encoder_decoder import EncoderDecoderForSampling
from transformers_neuronx.errors import CheckpointError, ConfigError
from transformers_neuronx.files import explain, read_json
from transformers_neuronx.module import load_config, load_generation_config, resolve_tokenizer
from transformers_neuronx.runtimes import RUNTIMES
from transformers_neuronx.sampling import ForSampling
from transformers_neuronx.serialization import holds_artifact, open_artifact

NO = 4  # the exit status where nothing went wrong, and the answer is no
HOW, CHOICE, WHERE = "How it is compiled", "How tokens are chosen", "Where the model is"
MOST = 2**31 - 1  # of any number that is counted


def option(
    *names: str,
    help: str,  # noqa: A002
    panel: str | None = None,
    default: bool | str = False,
    least: float | None = None,
    also: int | None = None,
) -> Any:
    """An option of these names, in a panel of the help, which says its default if asked to, or in those words.

    Its number, or each of several, must be at `least` that, or `also` this one.
    """
    callback = None if least is None else _counted(least, also)
    return typer.Option(*names, help=help, rich_help_panel=panel, show_default=default, callback=callback)


def _counted(least: float, also: int | None) -> Callable[[Any], Any]:
    def check(value: Any) -> Any:
        for number in value if isinstance(value, list) else [value]:
            if number is not None and number != also and not least <= number <= MOST:
                wanted = f"{least} or more" if not number >= least else f"{MOST} or less"
                raise typer.BadParameter(f"must be {wanted}{'' if also is None else f', or {also}'}; got {number}")
        return value

    return check


WHAT = "A directory with a checkpoint or an artifact, or a name on the Hugging Face hub."
Model = Annotated[str, typer.Argument(metavar="MODEL", help=WHAT)]
MaybeModel = Annotated[str | None, typer.Argument(metavar="MODEL", help=WHAT, show_default=False)]
NameOrPath = Annotated[str | None, option("--model-name-or-path", help="The model, as an option.", panel=WHERE)]
ConfigName = Annotated[
    str | None,
    option("--config-name", help="Its configuration, if the weights are elsewhere.", panel=WHERE),
]
CheckpointName = Annotated[
    str | None,
    option("--checkpoint-name", help="A checkpoint, or a file, with the weights.", panel=WHERE),
]
CacheDir = Annotated[str | None, option("--cache-dir", help="Where models of the hub are kept.", panel=WHERE)]
Amp = Annotated[
    str | None,
    option("--amp", help="Activations, weights and cache: f32, bf16 or f16; by default the checkpoint's.", panel=HOW),
]
Degree = Annotated[
    int | None, option("--tp", help="Devices that share each layer; by default one.", panel=HOW, least=1)
]
Batch = Annotated[int | None, option("--batch-size", help="Sequences at once; by default one.", panel=HOW, least=1)]
Positions = Annotated[
    int | None,
    option(
        "--n-positions", "--max-seq-length", help="The longest sequence; by default the model's.", panel=HOW, least=1
    ),
]
Context = Annotated[
    list[int] | None,
    option(
        "--context",
        help="Tokens of a prompt that a program takes; may be given several times.",
        panel=HOW,
        least=1,
    ),
]
Quant = Annotated[str | None, option("--quant", help="Weights in fewer bits: s8, s4 or f8e4m3fn.", panel=HOW)]
Rounded = Annotated[bool, option("--round-activations", help="Activations in 8 bits, too, beside --quant.", panel=HOW)]
Runtime = Annotated[str | None, option("--runtime", help="Where it runs: cpu, cuda or neuron.", panel=HOW)]
Seed = Annotated[
    int | None, option("--seed", help="Draws the same tokens again; by default others.", panel=CHOICE, default=True)
]
Json = Annotated[bool, option("--json", help="JSON on the standard output, for programs.")]

DTYPES = {"float32": "f32", "bfloat16": "bf16", "float16": "f16"}


@dataclass(frozen=True)
class How:
    """What the user says of how a model is compiled; None is as an artifact has it, or by default."""

    amp: str | None
    tp: int | None
    quant: str | None
    rounded: bool
    runtime: str | None

    def options(self) -> dict[str, Any]:
        """As a model's constructor has them, those that are said."""
        if self.rounded and self.quant is None:
            raise ConfigError("--round-activations wants --quant beside it")
        if self.runtime not in (None, *RUNTIMES):
            raise ConfigError(f"--runtime must be one of {', '.join(RUNTIMES)}, got {self.runtime!r}")
        switches = None
        if self.quant is not None or self.runtime is not None:
            activations = "s8" if self.rounded else None
            quant = QuantizationConfig(self.quant, activation_dtype=activations) if self.quant else None
            switches = NeuronConfig(quant=quant, runtime=self.runtime)
        return said(amp=self.amp, tp_degree=self.tp, neuron_config=switches)


def said(**options: Any) -> dict[str, Any]:
    """The options that are not None."""
    return {name: value for name, value in options.items() if value is not None}


class Source:
    """A model by its path or name. Its configuration, by which it is decided what it is, is read once.

    A configuration that is a file alone will do for what wants no weights. CheckpointError where no family takes it.
    """

    def __init__(self, path: str, cache_dir: str | None = None) -> None:
        self.path = path
        self.cache_dir = cache_dir
        self.is_artifact = holds_artifact(path)
        alone = Path(path).expanduser()
        self._alone = alone.suffix == ".json" and alone.is_file()
        self.attributes = read_json(alone) if self._alone else load_config(path, cache_dir)
        with _checkpoint_s():
            self.cls = class_of(self.attributes, path)
            family = self.cls.family
            completed = open_artifact(path).attributes(family) if self.is_artifact else self.attributes
            self.config = family.read_config(completed)

    @cached_property
    def generation(self) -> dict[str, Any]:
        """What its generation_config.json says, nothing where there is none."""
        return {} if self._alone else load_generation_config(self.path, self.cache_dir)

    def open(
        self, how: How, *, without_weights: bool = False, needs_weights: bool = True, **options: Any
    ) -> ForSampling:
        """The model, not on a device yet; `without_weights` no more is read than the configuration and the options.

        A ConfigError is about the options: what is wrong with the model itself is a CheckpointError.
        """
        dtype = str(self.attributes.get("dtype") or self.attributes.get("torch_dtype"))
        default = {} if self.is_artifact else dict(amp=DTYPES.get(dtype, "f32"))
        given = default | how.options() | said(**options)
        if without_weights:
            saved = open_artifact(self.path).options() if self.is_artifact else {}
            return self.cls(self.attributes, **saved | given)
        if needs_weights and self.is_artifact and "weights" not in given and not open_artifact(self.path).has_weights:
            raise CheckpointError(f"{self.path} is an artifact that has no weights: compile one with them")
        return self.cls.from_pretrained(self.path, cache_dir=self.cache_dir, **given)

    def fitting(self, prompt: int, new: int, asked: int = -1) -> dict[str, Any]:
        """Sizes to compile for, of which prompts of so many tokens and what is made of them want no larger ones.

        They are the next powers of two, so that other prompts find their programs in the compile cache, unless a
        number of positions is `asked` for.
        """
        if asked > 0:
            return dict(n_positions=asked)
        if self.is_artifact:
            return {}
        if issubclass(self.cls, EncoderDecoderForSampling):
            return dict(n_positions=_power(1 + new), context_length_estimate=_power(prompt))
        trained = self.config.n_positions
        return dict(n_positions=min(_power(prompt + new), trained or 2**30))

    def tokenizer(self) -> Any:
        """The tokenizer beside it."""
        from transformers import AutoTokenizer  # takes seconds

        directory, advice = resolve_tokenizer(self.path, self.cache_dir), "save one there: tokenizer.save_pretrained(…)"
        with explain(f"{self.path}: its tokenizer cannot be read", advice):
            tokenizer = AutoTokenizer.from_pretrained(directory)
        if not tokenizer("a").input_ids:  # Transformers makes an empty one where there are no files
            raise CheckpointError(f"{self.path} has no tokenizer; {advice}")
        return tokenizer


@contextmanager
def _checkpoint_s() -> Iterator[None]:
    """A configuration that is not supported is a fault of the checkpoint, not of the command."""
    try:
        yield
    except ConfigError as error:
        raise CheckpointError(" ".join(str(error).split())) from error


def _power(size: int) -> int:
    return max(1 << (size - 1).bit_length(), 128)


def one_of(*names: str | None) -> str:
    """The model that one of several arguments names."""
    named = [name for name in names if name is not None]
    if not named:
        raise typer.BadParameter("wanted a MODEL, --model-name-or-path or --config-name")
    return named[0]
