"""Makes every module and name of the original library importable.

`surface.txt` lists them. A name that lives elsewhere in this package is found there. One that is refused is a stand-in,
whose use raises a NotSupportedError that says why and what to do. An import hook adds both: to the modules that exist
here when they are imported, and as modules of their own where there is none.
"""

from __future__ import annotations

import functools
import importlib
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import Any

from transformers_neuronx.errors import NotSupportedError

PACKAGE = "transformers_neuronx"
TABLE = Path(__file__).with_name("surface.txt")
WORKS, IDLE, DIFFERS, REFUSED = VERDICTS = ("works", "no effect", "differs", "refused")


@dataclass(frozen=True)
class Name:
    """A line of the table: a name of the original, its arguments if it is called, and what it does here.

    `home` is the module and the name under which it is found, if not in its own.
    """

    module: str
    name: str
    arguments: str | None
    verdict: str
    note: str
    home: tuple[str, str] | None

    @property
    def path(self) -> str:
        return f"{self.module}.{self.name}"


@dataclass
class Module:
    """A module of the original: what is said of its refused names, and its names."""

    path: str
    note: str
    names: dict[str, Name] = field(default_factory=dict)


_LINE = re.compile(
    r"(?P<name>[\w.]+)(?P<arguments>\(.*\))? \| (?P<verdict>works|no effect|differs|refused)"
    r"(?: in (?P<home>[\w.]+)(?::(?P<attribute>\w+))?)?(?: \| (?P<note>.*))?"
)


@functools.cache
def modules() -> dict[str, Module]:
    """Read the table: modules by their import paths."""
    found: dict[str, Module] = {}
    for line in TABLE.read_text(encoding="utf-8").splitlines():
        if line.startswith("["):
            path, _, note = line[1:].partition("]")
            module = Module(f"{PACKAGE}.{path}" if path != PACKAGE else path, note.strip())
            found[module.path] = module
        elif line.strip() and not line.startswith("#"):
            match = _LINE.fullmatch(line)
            assert match, line
            facts = match.groupdict()
            note = facts["note"] or (module.note if facts["verdict"] == REFUSED else "")
            home = (f"{PACKAGE}.{facts['home']}", facts["attribute"] or facts["name"]) if facts["home"] else None
            made = Name(module.path, facts["name"], facts["arguments"], facts["verdict"], note, home)
            module.names[made.name] = made
    return found


@functools.cache
def _packages() -> frozenset[str]:
    return frozenset(path.rsplit(".", depth)[0] for path in modules() for depth in range(1, path.count(".")))


@functools.cache
def _homes() -> frozenset[str]:
    """Modules of this package that have names of other modules of the original."""
    return frozenset(name.home[0] for module in modules().values() for name in module.names.values() if name.home)


class Refusing(type):
    """The type of stand-ins: using one in any way but `import` and `isinstance` raises NotSupportedError."""

    path: str
    why: str

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        raise NotSupportedError(f"{cls.path}: {cls.why}")

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return stand_in(f"{cls.path}.{name}", cls.why)


def stand_in(path: str, why: str) -> Refusing:
    """Return a class for a name that is refused."""
    return Refusing(path.rsplit(".", 1)[-1], (), {"path": path, "why": why, "__doc__": why})


def find(module: str, name: str) -> Any:
    """Return what a name of the original stands for. Raises AttributeError for other names."""
    entry = modules()[module].names.get(name) if module in modules() else None
    if entry is not None and entry.verdict == REFUSED:
        return stand_in(entry.path, entry.note)
    if entry is None or entry.home is None:
        raise AttributeError(f"module {module!r} has no attribute {name!r}")
    home, attribute = entry.home
    return getattr(importlib.import_module(home), attribute)


def _refused_member(entry: Name) -> Callable[..., Any]:
    def member(*args: Any, **kwargs: Any) -> Any:
        raise NotSupportedError(f"{entry.path}: {entry.note}")

    member.__doc__ = f"Raise NotSupportedError: {entry.note}."
    return member


@functools.cache
def _refused_members() -> dict[str, list[tuple[str, str, Name]]]:
    """By module: classes there, and members of the original's class that are refused."""
    found: dict[str, list[tuple[str, str, Name]]] = {}
    for known in modules().values():
        for entry in known.names.values():
            owner, _, member = entry.name.partition(".")
            if member and entry.verdict == REFUSED:
                home, attribute = known.names[owner].home or (entry.module, owner)
                found.setdefault(home, []).append((attribute, member, entry))
    return found


def _completed(module: ModuleType) -> None:
    """Let a module find the original's other names, and give its classes the members that are refused."""
    for attribute, member, entry in _refused_members().get(module.__name__, []):
        if not hasattr(cls := vars(module)[attribute], member):
            setattr(cls, member, _refused_member(entry))
    vars(module)["__getattr__"] = functools.partial(find, module.__name__)


class _Completing(SourceFileLoader):
    """Loads a module of this package that has the path of one of the original's."""

    def exec_module(self, module: ModuleType) -> None:
        super().exec_module(module)
        _completed(module)


class _Absent(Loader):
    """Makes a module that the original had and this package does not."""

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        known = modules().get(module.__name__)
        module.__doc__ = known.note if known else None
        _completed(module)


class _Finder(MetaPathFinder):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if not fullname.startswith(f"{PACKAGE}."):
            return None
        if not (fullname in modules() or fullname in _packages() or fullname in _homes()):
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is None:
            return ModuleSpec(fullname, _Absent(), is_package=fullname in _packages())
        if isinstance(spec.loader, SourceFileLoader):
            spec.loader = _Completing(spec.loader.name, spec.loader.path)
        return spec


def install() -> None:
    """Make the names importable, once."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())
