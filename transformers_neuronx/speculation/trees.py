"""The original's name for speculation with token trees."""

from __future__ import annotations

from typing import Any

from transformers_neuronx.config.token_trees import Tree, draft_tokens
from transformers_neuronx.engine.inputs import Integers
from transformers_neuronx.errors import NotSupportedError
from transformers_neuronx.models.generation import Streamer
from transformers_neuronx.models.sampling import ForSampling
from transformers_neuronx.speculation.drafts import SpeculativeGenerator


class TreeSpeculativeGenerator(SpeculativeGenerator):
    """Speculative decoding along one path of a tree: the same tokens as `target.sample`, in fewer steps of the target.

    - `draft`, `target`: as for a SpeculativeGenerator.
    - `token_tree`: the children of each node, 0 being the root. One draft token is made for each level, not one for
      each node.

    Raises ConfigError for a `token_tree` that is none, and NotSupportedError for an `acceptor`.
    """

    def __init__(
        self, draft: ForSampling, target: ForSampling, token_tree: Tree | None = None, acceptor: object = None
    ) -> None:
        if acceptor is not None:
            raise NotSupportedError("an acceptor of token trees is not supported: what the target samples stays")
        self.token_tree = token_tree or {}
        super().__init__(draft, target, draft_tokens(self.token_tree))
        self.depth = self.k + 1  # with the root

    def sample(  # type: ignore[override]  # as in the original, which has no padding here
        self,
        input_ids: Integers,
        sequence_length: int,
        start_ids: Integers | None = None,
        eos_token_id: int | None = None,
        streamer: Streamer | None = None,
        **options: Any,
    ) -> Any:
        """Generate tokens as a SpeculativeGenerator does, by default greedily."""
        options = dict(top_k=1) | options
        return super().sample(input_ids, sequence_length, start_ids, eos_token_id, streamer=streamer, **options)
