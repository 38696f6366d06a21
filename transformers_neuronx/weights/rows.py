"""Rows of the weight table: the name of each weight, its layout, and its split over devices.

A family is a list of `Weight` rows. The rows determine what is read from a checkpoint, what is missing or left over
in it, the parameters of every program, and each device's shard. This file depends on no family and no program.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from transformers_neuronx.errors import ConfigError
from transformers_neuronx.weights import panels
from transformers_neuronx.weights.layouts import Layout, as_is, part_if_fused, section, section_per_head
from transformers_neuronx.weights.packed import Store
from transformers_neuronx.weights.splits import Heads, Split

# Suffixes of a quantized weight's name in the rows of its scales, minima and the order of its inputs, and after scales
# and minima, of their units.
SCALE, MINIMUM, ORDER, UNIT = "_scale", "_minimum", "_order", "_unit"
EXPERT = "#"  # in the name of a tensor in the checkpoint: the number of an expert, or of a part


@dataclass(frozen=True)
class Weight:
    """A row of the table.

    `name` is the graph's, "attn.q.weight". `source` is the checkpoint's, with `{}` for the layer's number, `#` for that
    of an expert or a part if each has a tensor, and `|` between alternative names. `layout` makes the checkpoint's
    tensor into `shape`, the whole weight in the graph. If the weight is stored in another form, `layout` makes the
    shape `matrix`, and `store` makes that into `shape`. `dtype` is a fixed element type; without one the weight has
    that of the activations. A row with a `value` is computed, not read; its `source` only says whether every layer has
    it. One with `absent` is read if the checkpoint has it, and computed otherwise. With a `word`, devices hold their
    shards in panels of words of that many elements. With `rounded`, activations are rounded to 8 bits before the
    product, with one scale per `rounded` inputs. With `codes`, elements are two codes of that name each. With
    `experts`, it is a stack of so many tensors, and the rest is about one of them; with `whole_experts`, each device
    has some of them, not a piece of each. With `parts`, so many tensors are stacked before `layout`. `layers` is the
    number of layers that have it, if they are not the decoder's. `kinds` are the kinds of layers that have it, if not
    all do, and `only` their numbers.
    """

    name: str
    source: str
    shape: tuple[int, ...]
    layout: Layout = as_is
    split: Split | None = None
    dtype: str | None = None
    value: Callable[[], torch.Tensor] | None = None
    absent: Callable[[], torch.Tensor] | None = None
    store: Store | None = None
    matrix: tuple[int, ...] | None = None
    word: int | None = None
    rounded: int | None = None
    codes: str = ""
    experts: int | None = None
    whole_experts: bool = False
    parts: int | None = None
    layers: int | None = None
    kinds: frozenset[str] | None = None
    only: frozenset[int] | None = None

    def has(self, kind: str) -> bool:
        """Whether a layer of this kind has it."""
        return self.kinds is None or kind in self.kinds

    def numbers(self, kinds: Sequence[str]) -> list[int]:
        """The numbers of the layers that have it, given the kind of each layer of the decoder."""
        if self.layers:
            return [*range(self.layers)]
        return [n for n, kind in enumerate(kinds) if self.has(kind) and (self.only is None or n in self.only)]

    @property
    def sources(self) -> list[str]:
        """The names of its tensors in the checkpoint, if `source` is not of alternatives: of each expert or part."""
        count = (self.experts or self.parts or 1) if self.by_expert else 1
        return [self.source.replace(EXPERT, str(n)) for n in range(count)]

    @property
    def by_expert(self) -> bool:
        """Whether the checkpoint has a tensor for each expert or part."""
        return EXPERT in self.source

    @property
    def layered(self) -> bool:
        return "{}" in self.source or self.layers is not None

    @property
    def multiplies(self) -> bool:
        """Whether it is the matrix of a linear layer that is split; only small, sensitive layers are not."""
        divided = self.split is not None or self.whole_experts
        return self.name.endswith(".weight") and len(self.shape) == 2 and divided

    @property
    def reduces(self) -> bool:
        """Whether it is split by inputs, so that the devices' products with it must be summed to be used."""
        return self.split is not None and self.split.axis == 1

    def at(self, layer: int) -> Weight:
        return replace(self, source=self.source.replace("{}", str(layer)))

    def share(self, degree: int) -> tuple[int, ...]:
        """Shape of the shard of one of `degree` devices, as a matrix; of one expert."""
        return self.split.share(self.shape, degree) if self.split else self.shape

    def held(self, degree: int) -> tuple[int, ...]:
        """Shape of that shard in memory."""
        share = self.share(degree)
        held = panels.sizes(share, self.word) if self.word else share
        return held if self.experts is None else (self.experts_held(degree), *held)

    def experts_held(self, degree: int) -> int:
        """The number of experts in the shard of one of `degree` devices; zeros follow the last ones."""
        experts = self.experts or 0
        return -(-experts // degree) if self.whole_experts else experts


def matrix_of(name: str) -> str:
    """Return the name of the weight that a row belongs to: its own, or that of the weight whose scales it has."""
    return name.removesuffix(UNIT).removesuffix(SCALE).removesuffix(MINIMUM).removesuffix(ORDER)


def of_kinds(kinds: Collection[str], rows: Sequence[Weight]) -> list[Weight]:
    """Return rows that only layers of these kinds have; none if there is no kind."""
    return [replace(row, kinds=frozenset(kinds)) for row in rows] if kinds else []


def parts_of(block: str, names: Sequence[str], outputs: Sequence[int], heads: int = 1) -> list[tuple[str, Layout]]:
    """Return names in the checkpoint, which begin with `block`, with layouts, for layers with so many outputs.

    A layer whose name is repeated has several parts, which follow each other; with several `heads`, in each head.
    """
    parts = []
    for number, name in enumerate(names):
        sizes = tuple(size // heads for size, other in zip(outputs, names, strict=False) if other == name)
        piece = section if heads == 1 else section_per_head
        parts.append((block + name, piece(names[:number].count(name), sizes) if len(sizes) > 1 else as_is))
    return parts


def with_whole_experts(rows: Sequence[Weight]) -> list[Weight]:
    """Return rows by which each device has some experts as a whole (Lepikhin et al., arXiv:2006.16668).

    Raises ConfigError if there are no experts.
    """
    if all(row.experts is None for row in rows):
        raise ConfigError("expert_parallel=True needs a model with experts, and this has none")
    return [replace(row, split=None, whole_experts=True) if row.experts else row for row in rows]


def renamed(rows: Sequence[Weight], names: Mapping[str, str]) -> list[Weight]:
    """Return rows with other names in the checkpoint: the first of `names` that a source begins with is replaced."""
    found = ((row, next((name for name in names if row.source.startswith(name)), "")) for row in rows)
    return [replace(row, source=names.get(name, "") + row.source.removeprefix(name)) for row, name in found]


def also_named(rows: Sequence[Weight], names: Mapping[str, str]) -> list[Weight]:
    """Return rows that may have other names in the checkpoint, in which each of `names` is replaced."""
    sources = ([row.source, *(row.source.replace(*both) for both in names.items())] for row in rows)
    return [replace(row, source="|".join(dict.fromkeys(each))) for row, each in zip(rows, sources, strict=True)]


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


def mlp(
    name: str, sources: Sequence[tuple[str, Layout]], inner: int, hidden: int, *, bias: bool = False
) -> list[Weight]:
    """The rows of a feed-forward block; `sources` are names and layouts of gate, up and down, or of up and down."""
    table = []
    for part_name, (source, layout) in zip(("gate", "up")[-len(sources) + 1 :], sources[:-1], strict=True):
        table += linear(f"{name}.{part_name}", source, inner, hidden, COLUMNS, layout=layout, bias=bias)
    source, layout = sources[-1]
    return table + linear(f"{name}.down", source, hidden, inner, ROWS, layout=layout, bias=bias)


def experts(
    name: str,
    block: str,
    count: int,
    router: str,
    of_each: Sequence[str],
    of_all: Sequence[str],
    inner: int,
    hidden: int,
) -> list[Weight]:
    """The rows of a mixture of `count` experts: its router, and feed-forward blocks, stacked.

    Names in the checkpoint begin with `block`. `of_each` are those of gate, up and down, or of up and down, with the
    expert's number as `#`. `of_all` are those of tensors with all experts, of gate and up together and of down, as
    Transformers has them in memory. These, and `router`, may be alternatives; `of_each` may be empty if there are
    gates. Scores are in f32 for all types of activations.
    """
    first, last = ("|".join(block + source for source in sources.split("|")) for sources in of_all)
    parts = ("gate", "up")[-len(of_each or range(3)) + 1 :]
    each = [f"{block}{source}.weight|" for source in of_each] or [""] * 3
    rows = [
        Weight(
            f"{name}.{part}.weight", one + first, (inner, hidden),
            part_if_fused(place, inner) if len(parts) > 1 else as_is, COLUMNS,
        )
        for place, (part, one) in enumerate(zip(parts, each[:-1], strict=True))
    ] + [Weight(f"{name}.down.weight", each[-1] + last, (hidden, inner), split=ROWS)]  # fmt: skip
    routers = "|".join(f"{block}{source}.weight" for source in router.split("|"))
    scores = Weight(f"{name}.router.weight", routers, (count, hidden), dtype="f32")
    return [scores, *(replace(row, experts=count) for row in rows)]


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


def bias_of(row: Weight, source: str) -> Weight:
    """The row of the bias that a linear layer has besides the weight of this row. It is split as outputs are."""
    split = row.split if row.split and row.split.axis == 0 else None
    name = row.name.removesuffix("weight") + "bias"
    return replace(row, name=name, source=source, shape=row.shape[:1], split=split)


def norm(
    name: str,
    source: str,
    *features: int,
    bias: bool = True,
    zero_bias: bool = False,
    layout: Layout = as_is,
    split: Split | None = None,
    parts: int | None = None,
) -> list[Weight]:
    """The rows of a normalization, in f32 for all types of activations. `layout` is that of its weight.

    A layer norm has a bias. If the checkpoint has none, it is a `zero_bias`. If `source` has a `#`, the weight is one
    of `parts` tensors.
    """
    parts = parts if EXPERT in source else None
    table = [Weight(f"{name}.weight", f"{source}.weight", features, layout, split, dtype="f32", parts=parts)]
    if bias:
        table.append(Weight(f"{name}.bias", f"{source}.bias", features, split=split, dtype="f32"))
    elif zero_bias:
        zeros = functools.partial(torch.zeros, features)
        table.append(Weight(f"{name}.bias", f"{source}.bias", features, split=split, dtype="f32", value=zeros))
    return table
