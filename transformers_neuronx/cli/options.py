"""What several commands ask for, and how a model and its tokenizer are made of that."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from transformers_neuronx.auto import class_for
from transformers_neuronx.config import NeuronConfig, QuantizationConfig
from transformers_neuronx.encoder_decoder import EncoderDecoderForSampling
from transformers_neuronx.errors import CheckpointError, ConfigError
from transformers_neuronx.files import explain
from transformers_neuronx.module import load_config, resolve_tokenizer
from transformers_neuronx.sampling import ForSampling
from transformers_neuronx.serialization import holds_artifact

HOW, CHOICE, SOURCE = "How it is compiled", "How tokens are chosen", "Where the model is"


def option(*names: str, help: str, panel: str | None = None, default: bool = False) -> Any:  # noqa: A002
    """An option of these names, in a panel of the help, which says its default if asked to."""
    return typer.Option(*names, help=help, rich_help_panel=panel, show_default=default or panel == CHOICE)


WHAT = "A directory with a checkpoint or an artifact, or a name on the Hugging Face hub."
Model = Annotated[str, typer.Argument(metavar="MODEL", help=WHAT)]
MaybeModel = Annotated[str | None, typer.Argument(metavar="MODEL", help=WHAT, show_default=False)]
NameOrPath = Annotated[str | None, option("--model-name-or-path", help="The model, as an option.", panel=SOURCE)]
ConfigName = Annotated[
    str | None,
    option("--config-name", help="Its configuration, if the weights are elsewhere.", panel=SOURCE),
]
CheckpointName = Annotated[
    str | None,
    option("--checkpoint-name", help="A checkpoint, or a file, with the weights.", panel=SOURCE),
]
CacheDir = Annotated[str | None, option("--cache-dir", help="Where models of the hub are kept.", panel=SOURCE)]
Amp = Annotated[
    str | None,
    option("--amp", help="Activations, weights and cache: f32, bf16 or f16; by default the checkpoint's.", panel=HOW),
]
Degree = Annotated[int | None, option("--tp", help="Devices that share each layer; by default one.", panel=HOW)]
Batch = Annotated[int | None, option("--batch-size", help="Sequences at once; by default one.", panel=HOW)]
Positions = Annotated[
    int | None, option("--n-positions", help="The longest sequence; by default the model's.", panel=HOW)
]
Quant = Annotated[str | None, option("--quant", help="Weights in fewer bits: s8, s4 or f8e4m3fn.", panel=HOW)]
Rounded = Annotated[bool, option("--round-activations", help="Activations in 8 bits, too, beside --quant.", panel=HOW)]
Runtime = Annotated[str | None, option("--runtime", help="Where it runs: cpu or cuda; by default cpu.", panel=HOW)]
TopK = Annotated[int, option("--top-k", help="Draw from so many likeliest tokens; 1 is greedy, 0 all.", panel=CHOICE)]
TopP = Annotated[float, option("--top-p", help="… of those from the fewest that are so probable.", panel=CHOICE)]
Temperature = Annotated[float, option("--temperature", help="Divides the logits.", panel=CHOICE)]
Seed = Annotated[int | None, option("--seed", help="Draws the same tokens again; by default others.", panel=CHOICE)]
Json = Annotated[bool, option("--json", help="JSON on the standard output, for programs.")]

DTYPES = {"float32": "f32", "bfloat16": "bf16", "float16": "f16"}


def open_model(
    path: str,
    *,
    amp: str | None = None,
    tp: int | None = None,
    quant: str | None = None,
    rounded: bool = False,
    runtime: str | None = None,
    without_weights: bool = False,
    **options: Any,
) -> ForSampling:
    """The model in `path`, not on a device yet. Options that are None are as an artifact has them, or by default."""
    if rounded and quant is None:
        raise ConfigError("--round-activations wants --quant beside it")
    config = load_config(path, options.get("cache_dir"))
    if amp is None and not holds_artifact(path):
        amp = DTYPES.get(str(config.get("dtype") or config.get("torch_dtype")), "f32")
    switches = None
    if quant is not None or runtime is not None:
        quantization = QuantizationConfig(quant, activation_dtype="s8" if rounded else None) if quant else None
        switches = NeuronConfig(quant=quantization, runtime=runtime)
    options |= dict(amp=amp, tp_degree=tp, neuron_config=switches)
    given = {name: value for name, value in options.items() if value is not None}
    cls = class_for(path, options.get("cache_dir"))
    if without_weights:
        given.pop("cache_dir", None)
        return cls(config, **given)
    return cls.from_pretrained(path, **given)


def one_of(*names: str | None) -> str:
    """The model that one of several arguments names."""
    named = [name for name in names if name is not None]
    if not named:
        raise typer.BadParameter("wanted a MODEL, --model-name-or-path or --config-name")
    return named[0]


def fitting(path: str, prompt: int, new: int, cache_dir: str | None = None, asked: int = -1) -> dict[str, Any]:
    """Sizes to compile for, of which prompts of so many tokens and what is made of them want no larger ones.

    They are the next powers of two, so that other prompts find their programs in the compile cache, unless a number of
    positions is `asked` for.
    """
    if asked > 0:
        return dict(n_positions=asked)
    if holds_artifact(path):
        return {}
    cls = class_for(path, cache_dir)
    trained = cls.family.read_config(load_config(path, cache_dir)).n_positions
    if issubclass(cls, EncoderDecoderForSampling):
        return dict(n_positions=_power(1 + new), context_length_estimate=_power(prompt))
    return dict(n_positions=min(_power(prompt + new), trained or 2**30))


def _power(size: int) -> int:
    return max(1 << (size - 1).bit_length(), 128)


def tokenizer_if_any(path: str, cache_dir: str | None = None) -> Any:
    """The tokenizer beside a checkpoint, or None."""
    try:
        return tokenizer_of(path, cache_dir)
    except CheckpointError:
        return None


def tokenizer_of(path: str, cache_dir: str | None = None) -> Any:
    """The tokenizer beside a checkpoint or an artifact."""
    from transformers import AutoTokenizer  # takes seconds

    load_config(path, cache_dir)  # if that is not there, it is what is to be said
    directory = resolve_tokenizer(path, cache_dir)
    with explain(f"{path} has no tokenizer", "save one there: tokenizer.save_pretrained(...)"):
        return AutoTokenizer.from_pretrained(directory)
