"""Helpers of tests of failing saves."""

import itertools


def snapshot(directory):
    """All files of a directory with their contents."""
    return {path: path.is_file() and path.read_bytes() for path in directory.rglob("*")}


def fails_at(call, function, error):
    """Return `function`, changed so that one of its calls raises `error`."""
    calls = itertools.count()

    def failing(*args, **kwargs):
        if next(calls) == call:
            raise error
        return function(*args, **kwargs)

    return failing
