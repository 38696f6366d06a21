"""What a family of decoders is to the engine: its configuration, its weight table and its graph."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Protocol

from transformers_neuronx.layers.state import State
from transformers_neuronx.weights.splits import Heads


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
    @property
    def eos_token_id(self) -> int | list[int] | None: ...


@dataclass(frozen=True)
class Family:
    """A kind of decoder: how to read its configuration, and the modules with its weight table and its graph.

    `weights` has `table(config)`, `ignored(config)` and PREFIX. `graph` has `embed`, `layer` and `head`, and also
    `prepare` if layers share something that depends on the positions alone. If layers differ, the configuration has
    `layer_kinds`, rows of the table may name the kinds that have them, and `layer` gets the kind as its last argument.
    `folder` is the family's, if its graph is in another. Without `pages`, its attention reads caches in slots only.
    """

    read_config: Callable[[Any], DecoderConfig]
    weights: ModuleType
    graph: ModuleType
    folder: str | None = None
    pages: bool = True

    @property
    def name(self) -> str:
        """Name of the folder, by default the one that holds the graph; for a family in one file, that file's name."""
        return self.folder or self.graph.__name__.split(".")[-2:][0]
