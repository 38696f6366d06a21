"""Configurations as Transformers has completed them, kept on disk: importing a configuration's class takes seconds."""

from __future__ import annotations

import ast
import hashlib
import json
import re
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import Any

from transformers_neuronx.support import files
from transformers_neuronx.support.user_cache import cache_directory

Attributes = dict[str, Any]


def kept(model_type: str, attributes: Mapping[str, Any], complete: Callable[[], Attributes]) -> Attributes:
    """Return what `complete` returns of these attributes with the installed version of Transformers.

    It is asked at once if the type's class is imported already, which takes less time than a disk, and where a program
    has registered classes of its own.
    """
    directory = None if _imported(model_type) or _registered() else cache_directory()
    path = directory and _path(directory, attributes)
    if path is None:
        return complete()
    found = _read(path)
    if found is None:
        found = complete()
        _write(path, found)
    return found


def _imported(model_type: str) -> bool:
    folder = re.sub(r"\W", "_", model_type)
    folders = folder, folder.removesuffix("_text")  # the text half of a model is in the whole model's
    return any(f"transformers.models.{each}.configuration_{each}" in sys.modules for each in folders)


def _registered() -> bool:
    """Whether Transformers has configurations that are not its own."""
    auto = sys.modules.get("transformers.models.auto.configuration_auto")
    mapping = getattr(auto, "CONFIG_MAPPING", None)  # none while another thread imports it
    return bool(getattr(mapping, "_extra_content", None))


def _path(directory: Path, attributes: Mapping[str, Any]) -> Path | None:
    """Return where the completed attributes are kept, or None if they are more than JSON."""
    try:
        given = json.dumps([metadata.version("transformers"), attributes], sort_keys=True)
    except (TypeError, ValueError, metadata.PackageNotFoundError):
        return None
    return directory / f"configuration-{hashlib.sha256(given.encode()).hexdigest()}.txt"


def _read(path: Path) -> Attributes | None:
    try:
        found = ast.literal_eval(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, SyntaxError, MemoryError, RecursionError):  # missing or damaged: it is made again
        return None
    return found if isinstance(found, dict) else None


def _write(path: Path, found: Attributes) -> None:
    """Keep attributes, if they are literals: infinity, NaN and objects are not. JSON would turn names into strings."""
    with suppress(ValueError, OSError):
        if ast.literal_eval(repr(found)) == found:
            files.replace(path, repr(found).encode(), mode=0o600)
