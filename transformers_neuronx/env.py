"""Every environment variable the package reads or sets: name, default, meaning. No other file touches `os.environ`."""

from __future__ import annotations

import os
from typing import NamedTuple


class Variable(NamedTuple):
    name: str
    default: str
    meaning: str

    def get(self) -> str:
        return os.environ.get(self.name, self.default)

    def set_default(self) -> None:
        """Set the variable for the libraries below, unless the user has."""
        os.environ.setdefault(self.name, self.default)


RUNTIME = Variable("NEURONX_RUNTIME", "cpu", "Where programs run when NeuronConfig does not say: cpu or cuda.")
LOG_LEVEL = Variable("TF_CPP_MIN_LOG_LEVEL", "1", "XLA's own log: 0 everything, 1 warnings, 2 errors. Set, not read.")
