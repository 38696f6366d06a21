"""Declares options: which values each may have, and one of three kinds.

An option works, is accepted without effect, or is refused unless it has its default.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from numbers import Integral, Real
from typing import Any

from transformers_neuronx.errors import ConfigError
from transformers_neuronx.support.arguments import mention_unknown


@dataclass(frozen=True)
class Wanted:
    """A requirement of a value, in words and as a check."""

    text: str
    holds: Callable[[Any], Any]


def one_of(*values: Any) -> Wanted:
    return Wanted(f"one of {', '.join(map(str, values))}", lambda value: value in values)


def or_none(wanted: Wanted) -> Wanted:
    return Wanted(f"{wanted.text}, or None", lambda value: value is None or wanted.holds(value))


def each(wanted: Wanted) -> Wanted:
    return Wanted(
        f"{wanted.text}, or a list of them",
        lambda value: all(map(wanted.holds, value if isinstance(value, list | tuple) else [value])),
    )


def whole(least: int) -> Wanted:
    return Wanted(
        f"a whole number of at least {least}", lambda value: isinstance(value, Integral) and int(value) >= least
    )


def real(text: str, holds: Callable[[float], bool]) -> Wanted:
    return Wanted(f"a number {text}", lambda value: isinstance(value, Real) and holds(float(value)))


def made_of(kind: type, text: str) -> Wanted:
    return Wanted(f"{text} or None", lambda value: value is None or isinstance(value, kind))


TRUTH = one_of(False, True)


def works(default: Any, wanted: Wanted) -> Any:
    return field(default=default, metadata=dict(wanted=wanted))


def idle(default: Any, wanted: Wanted = TRUTH) -> Any:
    """Declare a switch without effect here, such as those that trade memory for time in AWS's compiler."""
    return field(default=default, metadata=dict(wanted=wanted, idle=True))


def refused(default: Any, why: str) -> Any:
    """Declare a switch that would change inputs or results, and is not supported."""
    return field(default=default, metadata=dict(wanted=Wanted(f"{default}: {why}", lambda value: value == default)))


class Switches:
    """Base of configurations: every value is checked when it is assigned, at first or later.

    An assignment that is refused changes nothing. `settle` checks what concerns several fields.
    """

    def __setattr__(self, name: str, value: Any) -> None:
        declared: Any = type(self).__dict__["__dataclass_fields__"].get(name)
        if declared is None:
            mention_unknown(type(self).__name__, [name], type(self).__dict__["__dataclass_fields__"])
        elif not (wanted := declared.metadata["wanted"]).holds(value):
            raise ConfigError(f"{name} must be {wanted.text}, got {value!r}")
        before = self.__dict__.copy()
        self.__dict__[name] = value
        if "_made" in before:
            try:
                self.settle(name)
            except BaseException:
                self.__dict__.clear()
                self.__dict__.update(before)
                raise

    def __post_init__(self) -> None:
        self.settle()
        self.__dict__["_made"] = True

    def settle(self, changed: str = "") -> None:
        """Check fields against each other, and complete them, after all are set or the field `changed` was."""
