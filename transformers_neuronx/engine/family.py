"""What a family of decoders is to the engine: its configuration, its weight table and its graph."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from transformers_neuronx.layers.memory import Memory
from transformers_neuronx.layers.state import State
from transformers_neuronx.layers.step import Cache, Step
from transformers_neuronx.pyhlo import Tensor
from transformers_neuronx.weights.rows import Weight
from transformers_neuronx.weights.splits import Heads

# Names of rows of a weight table begin so: the encoder outside its layers, its layers, and what each layer of the
# decoder makes its memory with. Only the programs of the encoder have these. A tower for images has the first two.
WHOLE_ENCODER, ENCODER_LAYER, TO_MEMORY = "source.", "encoder.", ("cross.k.", "cross.v.")
ENCODER_ONLY = (WHOLE_ENCODER, ENCODER_LAYER, *TO_MEMORY)


class DecoderConfig(Protocol):
    """Attributes of a family's configuration that the engine itself reads."""

    @property
    def vocab_size(self) -> int: ...
    @property
    def n_positions(self) -> int | None: ...
    @property
    def hidden_size(self) -> int: ...
    @property
    def n_layer(self) -> int: ...
    @property
    def attention_heads(self) -> Heads: ...
    def heads_of(self, kind: str) -> Heads | None: ...
    def window_of(self, kind: str) -> int | None: ...
    def states_of(self, kind: str) -> Sequence[State]: ...
    def source_of(self, layer: int) -> int: ...
    @property
    def undivided(self) -> bool: ...
    @property
    def eos_token_id(self) -> int | list[int] | None: ...


class EncoderDecoderConfig(DecoderConfig, Protocol):
    """Attributes that the engine also reads if the family has an encoder.

    Sources are token ids unless there are `source_sizes`: then each is numbers, f32[*source_sizes], that the encoder
    makes `source_positions` positions of.
    """

    @property
    def encoder_layers(self) -> int: ...
    @property
    def source_sizes(self) -> tuple[int, ...]: ...
    @property
    def source_positions(self) -> int | None: ...
    @property
    def decoder_start_token_id(self) -> int: ...


class TowerSizes(Protocol):
    """Sizes of a tower for images, in patches: how many there are on each side of its table of positions, and of those
    that become one row; the numbers of a patch.
    """

    @property
    def side(self) -> int: ...
    @property
    def merged(self) -> int: ...
    @property
    def numbers(self) -> int: ...


class VisionConfig(DecoderConfig, Protocol):
    """Attributes that the engine also reads if the family has a tower for images.

    In place of each `image_token_id` there is a row of an image, [row_parts, hidden_size]: see `layers.Placed`.
    """

    @property
    def encoder_layers(self) -> int: ...
    @property
    def tower(self) -> TowerSizes: ...
    @property
    def row_parts(self) -> int: ...
    @property
    def image_token_id(self) -> int: ...
    @property
    def video_token_id(self) -> int: ...


class Table(Protocol):
    """A module with a family's weight table. PREFIX begins the names in checkpoints that have a head."""

    __name__: str
    PREFIX: str

    def table(self, config: Any, /) -> list[Weight]:
        """Return the rows of the table."""
        ...

    def ignored(self, config: Any, /) -> list[str]:
        """Return patterns of names in checkpoints that no row has and that mean nothing."""
        ...


class Graph(Protocol):
    """A module with the forward pass of a family's decoder. `w` are the weights of a part, by name."""

    __name__: str

    def embed(self, config: Any, w: Any, step: Step, /) -> Tensor:
        """Return the hidden states of a step. [b, n, h]"""
        ...

    @property
    def layer(self) -> Callable[..., tuple[Tensor, Cache]]:
        """`layer(config, w, x, cache, step)` returns the hidden states [b, n, h] after a layer, of the last one only
        those that are needed (`Step.needed_rows`), and its new cache.

        Further arguments are what `Family.prepare` returned, and the kind of the layer, if the family has them.
        """
        ...

    def norm(self, config: Any, w: Any, x: Tensor, /) -> Tensor:
        """Return the last hidden states [b, n, ·], which the head is applied to, after those of the last layer."""
        ...

    def head(self, config: Any, w: Any, x: Tensor, /) -> Tensor:
        """Return the logits f32[b, n, vocab] after hidden states [b, n, h]."""
        ...


class EncoderGraph(Protocol):
    """A module with the forward pass of a family's encoder."""

    def embed_source(self, config: Any, w: Any, source: Tensor, /) -> tuple[Tensor, Any]:
        """Return the hidden states [b, m, h] of sources, and what all layers of the encoder share.

        They are ids s32[b, m], or numbers [b, *source_sizes] in the type of activations.
        """
        ...

    def encoder_layer(self, config: Any, w: Any, x: Tensor, lengths: Tensor, shared: Any, /) -> Tensor:
        """Return the hidden states [b, m, h] after a layer, for sources of these lengths, s32[b]."""
        ...

    def encoded(self, config: Any, w: Any, x: Tensor, /) -> Tensor:
        """Return what the encoder returns, [b, m, h], given the hidden states after its last layer."""
        ...

    def memory(self, config: Any, w: Any, x: Tensor, lengths: Tensor, /) -> Memory:
        """Return what a layer of the decoder attends to, given what the encoder returns."""
        ...


class Patches(NamedTuple):
    """An image in patches, in the order of the rows that they become, padded to a number of patches.

    numbers [n, ·] in the type of activations; corners s32[n, 4], the four of a table of positions that a patch is
    between, and shares f32[n, 4], how much of each it has; places f32[n, 2], its row and column; length s32[1], how
    many are not padding.
    """

    numbers: Tensor
    corners: Tensor
    shares: Tensor
    places: Tensor
    length: Tensor


class TowerGraph(Protocol):
    """A module with the forward pass of a family's tower for images."""

    def tower(self, config: Any, w: Any, layers: Sequence[Any], image: Patches, /) -> Tensor:
        """Return the rows of an image, [rows, row_parts, h], given weights outside the tower's layers and of each."""
        ...


@dataclass(frozen=True)
class Family:
    """A kind of decoder: how to read its configuration, and the modules with its weight table and its graph.

    `prepare` computes what layers share, if that depends on the positions alone. If layers differ, the configuration
    has `layer_kinds`, and rows of the table may name the kinds that have them. With an `encoder`, each sequence attends
    to a source: layers of the decoder get `w.memory`, the `Memory` of all slots, and the configuration is an
    `EncoderDecoderConfig`. With a `tower`, images stand in place of some tokens, and the configuration is a
    `VisionConfig`. `folder` is the family's, if its graph is in another. Without `pages`, its attention reads
    caches in slots only.
    """

    read_config: Callable[[Any], DecoderConfig]
    weights: Table
    graph: Graph
    folder: str | None = None
    pages: bool = True
    prepare: Callable[[Any, Step], Any] | None = None
    encoder: EncoderGraph | None = None
    tower: TowerGraph | None = None

    @property
    def images(self) -> bool:
        """Whether it reads images, and is both halves of a multimodal model."""
        return self.tower is not None

    @property
    def name(self) -> str:
        """Name of the folder, by default the one that holds the graph; for a family in one file, that file's name."""
        return self.folder or self.graph.__name__.split(".")[-2:][0]
