"""Arguments as programs for the original pass them: by position, by names of other versions, or by unknown names.

The original took every keyword argument and ignored those that it did not know. Published programs rely on it, so
unknown ones are accepted here, and a warning names them.
"""

from __future__ import annotations

import functools
import inspect
import warnings
from collections.abc import Callable, Collection, Iterable
from difflib import get_close_matches
from typing import Any, TypeVar

from transformers_neuronx.errors import ConfigError

Class = TypeVar("Class", bound=type)


def mention_unknown(taker: str, unknown: Iterable[str], known: Collection[str], hints: Collection[str] = ()) -> None:
    """Warn once about keyword arguments that have no effect, with a known name where one is similar.

    `hints` are names of fields of NeuronConfig, which some versions of the original took here.
    """
    told = []
    for name in sorted(unknown):
        similar = [] if name in hints else get_close_matches(name, known, 1)
        hint = "set it in NeuronConfig" if name in hints else f"did you mean {similar[0]}?" if similar else ""
        told.append(f"{name} ({hint})" if hint else name)
    if told:
        warnings.warn(f"{taker} has no such arguments, they have no effect: {', '.join(told)}", stacklevel=4)


_DECODER = "batch_size amp tp_degree unroll init_n_active_tokens neuron_config tag"
# The order of arguments after the configuration, for classes that had one. The others took them by name alone.
ORDERS = {
    "GPT2ForSampling": _DECODER,
    "GPTJForSampling": _DECODER,
    "GPTNeoXForSampling": _DECODER,
    "GPT2ForSamplingWithContextBroadcasting": "batch_size prompt_batch_size amp tp_degree unroll "
    "context_length_estimate context_unroll neuron_config reorder_cache",
    "OPTForSampling": "batch_size amp tp_degree n_positions unroll context_length_estimate context_unroll "
    "neuron_config",
}


def take_in_order(cls: type) -> None:
    """Let the constructor of a class in ORDERS take arguments by position."""
    if cls.__name__ not in ORDERS:
        return
    init, names = cls.__init__, ORDERS[cls.__name__].split()  # type: ignore[misc]

    @functools.wraps(init)
    def taking(self: Any, config: Any, *values: Any, **options: Any) -> None:
        if len(values) > len(names):
            raise ConfigError(f"{cls.__name__} takes {len(names)} arguments after config, got {len(values)}")
        named = dict(zip(names, values, strict=False))
        if twice := sorted(named.keys() & options.keys()):
            raise ConfigError(f"{cls.__name__} got {', '.join(twice)} twice, by position and by name")
        init(self, config, **named, **options)

    cls.__init__ = taking  # type: ignore[misc]


def path_in(path_or_name: Any, options: dict[str, Any]) -> Any:
    """Return the path of a checkpoint, also if it was passed under a name of the original, which leaves `options`."""
    names = ("pretrained_model_name_or_path", "pretrained_model_path")
    given = [options.pop(name) for name in names if name in options]
    if path_or_name is None and not given:
        raise ConfigError("from_pretrained needs the path or the name of a checkpoint, got neither")
    return given[0] if path_or_name is None else path_or_name


def forgiving(renamed: dict[str, Callable[[Any], dict[str, Any]]] | None = None) -> Callable[[Class], Class]:
    """Let a class take unknown keyword arguments with a warning; `renamed` translates values of older names."""

    def decorate(cls: Class) -> Class:
        init, known = cls.__init__, inspect.signature(cls).parameters  # type: ignore[misc]

        @functools.wraps(init)
        def taking(self: Any, *values: Any, **options: Any) -> None:
            for name in (renamed or {}).keys() & options.keys():
                options |= (renamed or {})[name](options.pop(name))
            mention_unknown(cls.__name__, options.keys() - known.keys(), known)
            init(self, *values, **{name: value for name, value in options.items() if name in known})

        cls.__init__ = taking  # type: ignore[misc]
        return cls

    return decorate
