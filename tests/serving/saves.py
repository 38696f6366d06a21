"""What tests of saves that fail have in common."""

import itertools


def snapshot(directory):
    """What is in a directory, whole."""
    return {path: path.is_file() and path.read_bytes() for path in directory.rglob("*")}


def fails_at(call, function, error):
    """`function`, but for one of its calls, which raises `error`."""
    calls = itertools.count()

    def failing(*args, **kwargs):
        if next(calls) == call:
            raise error
        return function(*args, **kwargs)

    return failing
