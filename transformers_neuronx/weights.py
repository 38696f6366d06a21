"""The weight table: the name of each weight, its layout, and its split over devices.

A family is a list of `Weight` rows. The rows determine what is read from a checkpoint, what is missing or left over
in it, the parameters of every program, and each device's shard. This file depends on no family and no program.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch

from transformers_neuronx import panels
from transformers_neuronx.errors import CheckpointError
from transformers_neuronx.hlo import Parameters
from transformers_neuronx.module import Checkpoint
from transformers_neuronx.pyhlo import Tensor, dtype_named
from transformers_neuronx.pyhlo.dtypes import to_torch

Layout = Callable[[torch.Tensor], torch.Tensor]
SCALE = "_scale"  # suffix of a quantized weight's name in the row of its scales
Key = tuple[int | None, str]  # the layer, or None for a weight outside the layers, and the weight's name


def as_is(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def transposed(tensor: torch.Tensor) -> torch.Tensor:
    """Transpose a `Conv1D`'s [in, out] to a `Linear`'s [out, in]; a bias is unchanged."""
    return tensor.movedim(-1, 0)


def plus_one(tensor: torch.Tensor) -> torch.Tensor:
    """Add one to the weight of a norm that multiplies by one plus its weight."""
    return tensor.float() + 1


@functools.cache
def part(index: int, parts: int, layout: Layout = as_is) -> Layout:
    """Layout: piece `index` of `parts` equal ones along the outputs of a fused layer, after `layout`."""
    return lambda tensor: layout(tensor).chunk(parts)[index]


@functools.cache
def part_per_head(index: int, parts: int, head_dim: int) -> Layout:
    """Layout: piece `index` of `parts` equal ones of a fused layer whose outputs are [heads, parts, d]."""
    return lambda tensor: torch.unflatten(tensor, 0, (-1, parts, head_dim))[:, index].flatten(0, 1)


@functools.cache
def pairs_as_halves(head_dim: int, rotary_dim: int) -> Layout:
    """Layout: reorder features that rotate in pairs (0 with 1), to rotate 0 with rotary_dim / 2 and so on in each head.

    The product of a query and a key does not change if the features of both are reordered alike.
    """
    order = [*range(0, rotary_dim, 2), *range(1, rotary_dim, 2), *range(rotary_dim, head_dim)]
    return lambda tensor: torch.unflatten(tensor, 0, (-1, head_dim))[:, order].flatten(0, 1)


@functools.cache
def section(index: int, sizes: tuple[int, ...], layout: Layout = as_is) -> Layout:
    """Layout: piece `index` of pieces of `sizes` along the outputs of a fused layer, after `layout`."""
    return lambda tensor: layout(tensor).split_with_sizes(sizes)[index]


@functools.cache
def expert(number: int, index: int = 0, parts: int = 1) -> Layout:
    """Layout: one expert's weight, unchanged, or piece `index` of `parts` of its matrix if the experts are stacked."""
    return lambda tensor: tensor if tensor.ndim == 2 else tensor[number].chunk(parts)[index]


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

    def cut(self, tensor: torch.Tensor, degree: int) -> list[torch.Tensor]:
        """Cut a tensor into one piece per device."""
        axis, size = self.axis, tensor.shape[self.axis]
        if (copies := self.copies(degree)) > 1:
            units = torch.unflatten(tensor, axis, (-1, self.unit))
            tensor = units.repeat_interleave(copies, axis).flatten(axis, axis + 1)
        missing = self.padded(size, degree) - tensor.shape[axis]
        if missing:
            tensor = torch.nn.functional.pad(tensor, [0, 0] * (tensor.ndim - 1 - axis) + [0, missing])
        return list(tensor.chunk(degree, axis))


@dataclass(frozen=True)
class Heads:
    """The heads of an attention layer: `heads` query heads, in equal groups that share one of `kv_heads` key heads.

    Every device gets whole groups: query heads with the keys that they attend to. If there are fewer groups than
    devices, keys are copied and their groups divided. If the numbers do not divide, heads of zeros are added.
    """

    heads: int
    kv_heads: int
    head_dim: int

    @property
    def group(self) -> int:
        """Number of query heads that share a key head."""
        return self.heads // self.kv_heads

    def copies(self, degree: int) -> int:
        """Copies of each key head: the smallest divisor of the group that is enough for all devices."""
        divisors = [n for n in range(1, self.group + 1) if self.group % n == 0]
        return next((n for n in divisors if self.kv_heads * n >= degree), self.group)

    def split(self, axis: int, *, keys: bool = False, unit: int | None = None) -> Split:
        """Return the split of an axis of heads with `unit` elements each, by default `head_dim`."""
        return HeadSplit(axis, unit or self.head_dim, self, keys)

    def kv_share(self, degree: int) -> int:
        """Number of key heads on one of `degree` devices."""
        return self.split(0, keys=True, unit=1).share((self.kv_heads,), degree)[0]


@dataclass(frozen=True)
class HeadSplit(Split):
    heads: Heads = Heads(1, 1, 1)
    keys: bool = False

    def block(self, degree: int) -> int:
        return self.unit if self.keys else self.unit * (self.heads.group // self.heads.copies(degree))

    def copies(self, degree: int) -> int:
        return self.heads.copies(degree) if self.keys else 1


@dataclass(frozen=True)
class Weight:
    """A row of the table.

    `name` is the graph's, "attn.q.weight". `source` is the checkpoint's, with `{}` for the layer's number and `|`
    between alternative names. `layout` makes the checkpoint's tensor into `shape`, the whole weight in the graph. If
    the weight is stored in another form, `layout` makes the shape `matrix`, and `store` makes that into `shape`.
    `dtype` is a fixed element type; without one the weight has that of the activations. A row with a `value` is
    computed, not read; its `source` only says whether every layer has it. With a `word`, devices hold their shards in
    panels of words of that many elements. With `rounded`, activations are rounded to 8 bits before the product, with
    one scale per `rounded` inputs. `layers` is the number of layers that have it, if not each of the decoder's does.
    """

    name: str
    source: str
    shape: tuple[int, ...]
    layout: Layout = as_is
    split: Split | None = None
    dtype: str | None = None
    value: Callable[[], torch.Tensor] | None = None
    store: Layout | None = None
    matrix: tuple[int, ...] | None = None
    word: int | None = None
    rounded: int | None = None
    layers: int | None = None

    @property
    def layered(self) -> bool:
        return "{}" in self.source or self.layers is not None

    @property
    def multiplies(self) -> bool:
        """Whether it is the matrix of a linear layer that is split; only small, sensitive layers are not."""
        return self.name.endswith(".weight") and len(self.shape) == 2 and self.split is not None

    @property
    def reduces(self) -> bool:
        """Whether it is split by inputs, so that the devices' products with it must be summed."""
        return self.split is not None and self.split.axis == 1

    def at(self, layer: int) -> Weight:
        return replace(self, source=self.source.replace("{}", str(layer)))

    def share(self, degree: int) -> tuple[int, ...]:
        """Shape of the shard of one of `degree` devices, as a matrix."""
        return self.split.share(self.shape, degree) if self.split else self.shape

    def held(self, degree: int) -> tuple[int, ...]:
        """Shape of that shard in memory."""
        share = self.share(degree)
        return panels.sizes(share, self.word) if self.word else share


# Split a linear layer's [out, in] by outputs, so that each device computes some of them, or by inputs, so that the
# devices' results are summed.
COLUMNS, ROWS = Split(axis=0), Split(axis=1)


def attention(
    name: str, heads: Heads, hidden: int, sources: Sequence[tuple[str, Layout]], *, bias: bool, out_bias: bool
) -> list[Weight]:
    """The rows of an attention layer; `sources` are names and layouts of queries, keys, values and output."""
    table = []
    for part_name, (source, layout) in zip("qkv", sources[:3], strict=True):
        count = heads.heads if part_name == "q" else heads.kv_heads
        split = heads.split(0, keys=part_name != "q")
        table += linear(f"{name}.{part_name}", source, count * heads.head_dim, hidden, split, layout=layout, bias=bias)
    source, layout = sources[3]
    inner = heads.heads * heads.head_dim
    return table + linear(f"{name}.out", source, hidden, inner, heads.split(1), layout=layout, bias=out_bias)


def gated_mlp(
    name: str, sources: Sequence[tuple[str, Layout]], inner: int, hidden: int, *, bias: bool = False
) -> list[Weight]:
    """The rows of a gated feed-forward block; `sources` are names and layouts of gate, up and down."""
    gate, up, down = sources
    return [
        *linear(f"{name}.gate", gate[0], inner, hidden, COLUMNS, layout=gate[1], bias=bias),
        *linear(f"{name}.up", up[0], inner, hidden, COLUMNS, layout=up[1], bias=bias),
        *linear(f"{name}.down", down[0], hidden, inner, ROWS, layout=down[1], bias=bias),
    ]


def linear(
    name: str,
    source: str,
    out_features: int,
    in_features: int,
    split: Split,
    *,
    layout: Layout = as_is,
    bias: bool = True,
) -> list[Weight]:
    """The rows of a linear layer: weight [out, in], bias [out]. A bias is split as the outputs are."""
    table = [Weight(f"{name}.weight", f"{source}.weight", (out_features, in_features), layout, split)]
    if bias:
        table.append(
            Weight(f"{name}.bias", f"{source}.bias", (out_features,), layout, split if split.axis == 0 else None)
        )
    return table


def norm(name: str, source: str, features: int, *, bias: bool = True, layout: Layout = as_is) -> list[Weight]:
    """The rows of a normalization, in f32 for all types of activations."""
    return [
        Weight(f"{name}.{part}", f"{source}.{part}", (features,), layout, dtype="f32")
        for part in ("weight", "bias")[: 1 + bias]
    ]


# What programs see.


@dataclass(frozen=True)
class Parameter:
    """A weight inside a graph: one device's shard, and the row that it is a shard of.

    `dtype` is the element type of the activations; with a `scale`, the tensor must be multiplied by it.
    """

    tensor: Tensor
    row: Weight
    degree: int
    dtype: str
    scale: Tensor | None = None

    @property
    def sizes(self) -> tuple[int, ...]:
        """Sizes of the shard, as a matrix."""
        return self.row.share(self.degree)

    @property
    def storage(self) -> tuple[Any, ...]:
        """A key that is equal for weights that one operation can multiply."""
        return self.row.word, self.row.rounded, self.tensor.dtype.name, self.scale is None


def declare(table: Sequence[Weight], parameters: Parameters, dtype: str, degree: int, scope: str = "") -> Any:
    """Declare the table's rows as parameters of the open graph: `w.attn.q.weight` of the result is a `Parameter`."""
    root = SimpleNamespace()
    add = parameters.add
    shares = {r.name: add(dtype_named(r.dtype or dtype)[r.held(degree)], scope + r.name, weight=True) for r in table}
    for row in table:
        if row.name.endswith(SCALE):
            continue
        *path, leaf = row.name.split(".")
        node = root
        for part in path:
            node = node.__dict__.setdefault(part, SimpleNamespace())
        setattr(node, leaf, Parameter(shares[row.name], row, degree, dtype, shares.get(row.name + SCALE)))
    return root


# What a checkpoint holds.


def expand(table: Sequence[Weight], layers: int) -> Iterator[tuple[Key, Weight]]:
    """Iterate over all weights of the model."""
    for row in table:
        for layer in range(row.layers or layers) if row.layered else [None]:
            yield (layer, row.name), row if layer is None else row.at(layer)


def resolve(
    table: Sequence[Weight], layers: int, checkpoint: Checkpoint, prefix: str, ignored: Sequence[str]
) -> dict[Key, Weight]:
    """Return the table's rows with `source` set to the names in `checkpoint`. Reads headers only.

    A checkpoint of the bare model lacks `prefix`. `ignored` are patterns of names to skip. Raises CheckpointError with
    all weights that are missing, have the wrong shape, or are left over.
    """
    found: dict[Key, Weight] = {}
    missing, misshapen = [], []
    for key, row in expand(table, layers):
        if row.value is not None:
            found[key] = row
            continue
        names = [name for full in row.source.split("|") for name in (full, full.removeprefix(prefix))]
        source = next((name for name in names if name in checkpoint), None)
        if source is None:
            missing.append(row.source)
            continue
        found[key] = replace(row, source=source)
        shape = checkpoint.shape(source)
        try:
            laid_out = tuple(row.layout(torch.empty(shape, device="meta")).shape)
        except (RuntimeError, IndexError):
            laid_out = None
        if laid_out != (wanted := row.matrix or row.shape):
            misshapen.append(f"{source} {list(shape)} (for {row.name} {list(wanted)})")
    used = {row.source for row in found.values() if row.value is None}
    extra = [n for n in checkpoint if n not in used and not any(re.fullmatch(pattern, n) for pattern in ignored)]
    complaints = [
        f"{what} {collapsed(names)}"
        for what, names in (("lacks", missing), ("has the wrong shape for", misshapen), ("has unexpected", extra))
        if names
    ]
    if complaints:
        raise CheckpointError(f"the checkpoint {checkpoint.directory} does not fit the model: {'; '.join(complaints)}")
    return found


def collapsed(names: Sequence[str], limit: int = 6) -> str:
    """Format a readable list: names that differ only in the layer's number are merged, and the rest is counted."""
    layers: dict[str, list[str]] = {}
    for name in names:
        pattern = re.sub(r"(?<=\.)\d+(?=\.)", "*", name, count=1)
        layers.setdefault(pattern, []).append(name)
    shown = [ns[0] if len(ns) == 1 else f"{pattern} ({len(ns)} layers)" for pattern, ns in layers.items()]
    return ", ".join(shown[:limit]) + (f" and {len(shown) - limit} more" if len(shown) > limit else "")


class Sharded(NamedTuple):
    """The weights that share a tensor, its type, and what makes its pieces: one per device, or one for all."""

    keys: list[Key]
    element: str
    pieces: Callable[[], list[torch.Tensor]]


def shards(resolved: Mapping[Key, Weight], checkpoint: Checkpoint, dtype: str, degree: int) -> Iterator[Sharded]:
    """Iterate over the checkpoint's tensors for `degree` devices. Tensors are read on demand.

    Weights that are one tensor of the checkpoint, laid out and split alike, come once, so tied weights share memory.
    Pieces are views of the checkpoint's file if possible.
    """
    groups: dict[tuple[Any, ...], list[Key]] = {}
    for key, row in resolved.items():
        identity = (row.value or row.source, row.layout, row.store, row.split, row.word, row.dtype or dtype)
        groups.setdefault(identity, []).append(key)

    def pieces(
        source: Any, layout: Layout, store: Layout | None, split: Split | None, word: int | None, element: str
    ) -> list[torch.Tensor]:
        whole = layout(source() if callable(source) else checkpoint.read(source))
        whole = store(whole) if store else whole
        shares = split.cut(whole, degree) if split else [whole]
        return [panels.laid_out(share, word, to_torch(element)) for share in shares] if word else shares

    for how, keys in groups.items():
        yield Sharded(keys, how[-1], functools.partial(pieces, *how))
