"""The directory of what this user's processes keep for later ones, if it can be trusted."""

from __future__ import annotations

import functools
import logging
import os
import stat
from pathlib import Path

from transformers_neuronx import env
from transformers_neuronx.errors import ConfigError

_LOG = logging.getLogger(__name__)


@functools.cache
def warn_once(text: str) -> None:
    _LOG.warning(text)


def cache_directory() -> Path | None:
    """Return the directory that the environment selects, or None if it is off or cannot be trusted."""
    if (switch := env.CACHE.get()) not in ("on", "off"):
        raise ConfigError(f"{env.CACHE.name} must be on or off, got {switch!r}")
    if switch == "off" or os.name != "posix":  # other systems lack these locks and owners
        return None
    directory = os.path.expanduser(env.CACHE_DIR.get() or os.path.join(env.CACHE_HOME.get(), "transformers_neuronx"))
    if directory.startswith("~"):
        warn_once(f"no home directory to cache compiled programs in: set {env.CACHE_DIR.name}, or {env.CACHE.name}=off")
        return None
    try:
        os.makedirs(directory, mode=0o700, exist_ok=True)
        status = os.stat(directory)
    except OSError as error:
        warn_once(f"compiled programs are not cached: {error}")
        return None
    if status.st_uid != os.getuid() or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        warn_once(
            f"compiled programs are not cached in {directory}: cached code is executed, but the directory belongs to "
            f"another user, or others can write to it (mode {stat.S_IMODE(status.st_mode):o}); run chmod 700 on it, or "
            f"set {env.CACHE_DIR.name} to another directory"
        )
        return None
    return Path(directory)
