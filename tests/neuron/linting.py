"""Helpers that write modules for the linter and read its findings."""

import inspect

from transformers_neuronx.compiler import check, compile_py_func
from transformers_neuronx.pyhlo import dtype_named


def parameter(*sizes, dtype="f32", number=0):
    return dtype_named(dtype)[sizes].Parameter(parameter_number=number)


def write(function):
    """Return the module of `function()`."""
    return compile_py_func(lambda _: function())


def named(function, target="trn1"):
    """Return the rules that a function's module breaks, with the compiler's codes."""
    return sorted((finding.rule, finding.code) for finding in check(write(function), target))


def entry_of(module):
    return next(each for each in module.computations if each.id == module.entry_computation_id)


def line_of(function, text):
    """Return file:line of the line of a function that contains `text`."""
    lines, first = inspect.getsourcelines(function)
    [place] = [number for number, line in enumerate(lines) if text in line]
    return f"{inspect.getsourcefile(function)}:{first + place}"
