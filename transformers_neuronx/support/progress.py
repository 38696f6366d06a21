"""Show the progress of long operations: a bar that vanishes at the end on a terminal, and nothing elsewhere."""

from __future__ import annotations

from typing import Any

from tqdm import tqdm

FORMAT = "{desc} {percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt} [{elapsed}]"


def bar(what: str, total: int, done: int = 0) -> tqdm[Any]:
    """Return a bar on standard error: a context manager whose `update()` counts one more of `total`."""
    return tqdm(desc=what, total=total, initial=done, disable=None, leave=False, bar_format=FORMAT, dynamic_ncols=True)
