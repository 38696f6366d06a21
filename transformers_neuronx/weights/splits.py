"""How devices divide a tensor: in equal pieces, or in whole heads of attention."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Split:
    """Cut `axis` into one piece per device, in whole blocks of `unit` elements; zeros pad the last pieces."""

    axis: int
    unit: int = 1

    def block(self, degree: int) -> int:
        """Number of elements that stay together."""
        return self.unit

    def copies(self, degree: int) -> int:
        """Number of copies of each unit."""
        return 1

    def padded(self, size: int, degree: int) -> int:
        """Size along `axis`, padded to divide by `degree`."""
        step = self.block(degree) * degree
        return -(-size * self.copies(degree) // step) * step

    def share(self, shape: tuple[int, ...], degree: int) -> tuple[int, ...]:
        """Shape of one device's piece."""
        sizes = list(shape)
        sizes[self.axis] = self.padded(sizes[self.axis], degree) // degree
        return tuple(sizes)

    def cut(self, tensor: torch.Tensor, degree: int, ranks: Iterable[int] | None = None) -> list[torch.Tensor]:
        """Cut a tensor into one piece per device, and return those of `ranks`, by default all."""
        return [self._piece(tensor, degree, rank) for rank in (range(degree) if ranks is None else ranks)]

    def _piece(self, tensor: torch.Tensor, degree: int, rank: int) -> torch.Tensor:
        axis, copies, size = self.axis, self.copies(degree), tensor.shape[self.axis] * self.copies(degree)
        each = self.padded(tensor.shape[axis], degree) // degree
        first, last = (min(end, size) for end in (rank * each, (rank + 1) * each))
        if copies > 1:
            units = torch.unflatten(tensor, axis, (-1, self.unit))
            chosen = torch.arange(first // self.unit, last // self.unit, device=tensor.device) // copies
            piece = units.index_select(axis, chosen).flatten(axis, axis + 1)
        else:
            piece = tensor.narrow(axis, first, last - first)
        missing = each - (last - first)
        return torch.nn.functional.pad(piece, [0, 0] * (tensor.ndim - 1 - axis) + [0, missing]) if missing else piece


@dataclass(frozen=True)
class Heads:
    """The heads of an attention layer: `heads` query heads, in equal groups that share one of `kv_heads` key heads.

    Every device gets whole groups: query heads with the keys that they attend to. If there are fewer groups than
    devices, keys are copied and their groups divided. If the numbers do not divide, heads of zeros are added.

    `latent` heads share one key, which is their value, too. Every device has it, and any number of the heads.
    """

    heads: int
    kv_heads: int
    head_dim: int
    latent: bool = False

    @property
    def group(self) -> int:
        """Number of query heads that share a key head."""
        return self.heads // self.kv_heads

    def copies(self, degree: int) -> int:
        """Copies of each key head: the smallest divisor of the group that is enough for all devices."""
        if self.latent:
            return degree
        divisors = [n for n in range(1, self.group + 1) if self.group % n == 0]
        return next((n for n in divisors if self.kv_heads * n >= degree), self.group)

    def split(self, axis: int, *, keys: bool = False, unit: int | None = None) -> Split:
        """Return the split of an axis of heads with `unit` elements each, by default `head_dim`."""
        return HeadSplit(axis, unit or self.head_dim, self, keys)

    def together(self, degree: int) -> int:
        """Number of query heads that stay together: those that attend to one copy of a key head."""
        return 1 if self.latent else self.group // self.copies(degree)

    def kv_share(self, degree: int) -> int:
        """Number of key heads on one of `degree` devices."""
        return self.split(0, keys=True, unit=1).share((self.kv_heads,), degree)[0]


@dataclass(frozen=True)
class HeadSplit(Split):
    heads: Heads = Heads(1, 1, 1)
    keys: bool = False

    def block(self, degree: int) -> int:
        return self.unit if self.keys else self.unit * self.heads.together(degree)

    def copies(self, degree: int) -> int:
        return self.heads.copies(degree) if self.keys else 1
