"""Completes attributes of Hugging Face configurations, and decides whether those that a family does not read can change
results.

For the latter, Transformers' own code is searched as text. It is not imported: that takes seconds, and artifacts do not
need it.
"""

from __future__ import annotations

import copy
import functools
import logging
import re
from collections.abc import Iterable, Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from transformers_neuronx.config.kept import kept
from transformers_neuronx.errors import ConfigError

_LOG = logging.getLogger(__name__)
_MENTIONED: set[str] = set()

# Types of checkpoints that come with code, where that is a copy of a model of Transformers; and its type there.
COPIES = dict(AXK1="axk1", kimi_k2="deepseek_v3")

# Imports of files other than the models' own, and reads of a configuration: config.name, getattr(config, "name"), and
# in its base classes self.name, kwargs.pop("name") and fields.
_IMPORT = re.compile(r"^\s*from (\.+)([\w.]+) import", re.M)
_READ = re.compile(
    r"""(?:config|self)\.(\w+)|(?:config|self),\s*["'](\w+)["']|(?:pop|get)\(\s*["'](\w+)["']|^    (\w+):""", re.M
)


def with_defaults(attributes: Mapping[str, Any]) -> dict[str, Any]:
    """Return the attributes as Transformers completes them: with defaults, and current names instead of older ones.

    Raises ConfigError for a model type that Transformers does not know, and for a configuration that it rejects.
    """
    return kept(known_type(attributes), attributes, functools.partial(_completed, attributes))


def _completed(attributes: Mapping[str, Any]) -> dict[str, Any]:
    from transformers import CONFIG_MAPPING  # seconds to import, and not needed to write graphs or to load artifacts

    model_type = known_type(attributes)
    if model_type not in CONFIG_MAPPING:
        raise ConfigError(f"the configuration has model_type={model_type!r}, which Transformers does not know")
    try:
        # a copy, since Transformers modifies its argument
        own = _with_floats({**attributes, "model_type": model_type})
        found: dict[str, Any] = CONFIG_MAPPING[model_type].from_dict(own).to_dict()
    except Exception as error:  # Transformers' checks raise all kinds of exceptions
        raise ConfigError(f"Transformers rejects the {model_type} configuration: {error}") from error
    return found


def known_type(attributes: Mapping[str, Any]) -> str:
    """Return the model type of a configuration, as Transformers names it."""
    model_type = str(attributes.get("model_type"))
    return COPIES.get(model_type, model_type)


def _with_floats(value: Any) -> Any:
    """Return a copy with numbers where Transformers writes a word, since JSON has none for them: infinity, NaN."""
    if isinstance(value, dict):
        if value.keys() == {"__float__"}:
            return float(value["__float__"])
        return {name: _with_floats(each) for name, each in value.items()}
    return [_with_floats(each) for each in value] if isinstance(value, list) else copy.deepcopy(value)


def may_be_read(model_type: str, name: str) -> bool:
    """Return whether Transformers' code for a model type might read this attribute; without the code, always true.

    In the configuration's and the model's file, any word counts. In the files that they import, only reads of a
    configuration count. One name too many refuses a model needlessly; one too few would give wrong results.
    """
    words = _read_by_transformers(re.sub(r"\W", "_", model_type))
    return words is None or name in words


@functools.cache
def _read_by_transformers(folder: str) -> frozenset[str] | None:
    found = find_spec("transformers")
    if found is None or found.origin is None:
        return None
    package = Path(found.origin).parent
    if not (package / "models" / folder).exists():  # the text half of a model is in the whole model's
        folder = folder.removesuffix("_text")
    own = [package / "models" / folder / f"{part}_{folder}.py" for part in ("configuration", "modeling")]
    try:
        helpers = {package / "configuration_utils.py"}.union(*map(_imported, own)).difference(own)
        words = [word for path in own for word in re.findall(r"\w+", path.read_text(encoding="utf-8"))]
        reads = [read for path in helpers for read in _READ.finditer(path.read_text(encoding="utf-8"))]
    except OSError:
        return None
    return frozenset([*words, *(read[read.lastindex or 0] for read in reads)])


def _imported(path: Path) -> Iterator[Path]:
    for dots, name in _IMPORT.findall(path.read_text(encoding="utf-8")):
        file = path.parents[len(dots) - 1].joinpath(*name.split(".")).with_suffix(".py")
        if file.exists():  # packages only list their contents
            yield file


def mention(model_type: str, names: Iterable[str]) -> None:
    """Log once for each attribute that it has no effect."""
    if new := [name for name in names if f"{model_type}.{name}" not in _MENTIONED]:
        _MENTIONED.update(f"{model_type}.{name}" for name in new)
        listed = ", ".join(new)
        _LOG.warning(
            "The %s configuration has attributes that Transformers does not read; they change nothing here either: %s.",
            *(model_type, listed),
        )


# Attributes that describe a format, with the name of a format that gives none. MLX writes the first two.
_QUANTIZED = dict(quantization="mlx", quantization_config="an unnamed format", compression_config="compressed-tensors")


def quantized_with(attributes: Mapping[str, Any]) -> str | None:
    """Return the format of a checkpoint's quantized weights, such as "gptq, 4 bits"; None if they are not quantized."""
    given = {name: attributes[name] for name in _QUANTIZED if attributes.get(name) is not None}
    if not given:
        return None
    first, how = next(iter(given.items()))
    if not isinstance(how, Mapping):
        return _QUANTIZED[first]
    bits = next((how[name] for name in ("bits", "w_bit") if name in how), None)
    bits = next((number for number in (4, 8) if how.get(f"load_in_{number}bit")), bits)
    name = how.get("quant_method") or ("bitsandbytes" if "load_in_4bit" in how else _QUANTIZED[first])
    details = [how[name] for name in ("format", "fmt", "quant_algo") if name in how]
    return ", ".join(map(str, [name, *details, *([] if bits is None else [f"{bits} bits"])]))
