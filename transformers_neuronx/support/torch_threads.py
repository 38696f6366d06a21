"""How many threads PyTorch uses while a compiled model generates."""

from __future__ import annotations

from threading import Lock

import torch


class _OneTorchThread:
    """Limits torch to one thread inside the context, and restores the number afterwards.

    After an operation, torch's threads keep spinning for milliseconds on the cores that the programs need.
    """

    def __init__(self) -> None:
        self._lock = Lock()
        self._inside = self._before = 0

    def __enter__(self) -> None:
        with self._lock:
            if not self._inside:
                self._before = torch.get_num_threads()
                torch.set_num_threads(1)
            self._inside += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._inside -= 1
            if not self._inside:
                torch.set_num_threads(self._before)


ONE_TORCH_THREAD = _OneTorchThread()
