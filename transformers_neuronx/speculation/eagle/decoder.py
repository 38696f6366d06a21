"""The original's name for speculative decoding with an EAGLE head."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from transformers_neuronx.config.token_trees import Tree, draft_tokens
from transformers_neuronx.errors import ConfigError
from transformers_neuronx.models.sampling import ForSampling
from transformers_neuronx.speculation.drafts import SpeculativeGenerator
from transformers_neuronx.speculation.eagle.draft import EagleDraft
from transformers_neuronx.support.arguments import mention_unknown


class EagleSpeculativeDecoder(SpeculativeGenerator):
    """Speculative decoding with an EAGLE head: the same tokens as `target.sample`, in fewer steps of the target.

    - `draft`: a head, opened by `EagleDraft.from_pretrained`.
    - `target`: the model whose tokens are generated.
    - `k`: number of draft tokens that the target verifies in one step, at least 1. Default 2.
    - `pad_token_id`: what follows the tokens of a row that was padded on the right. Default 0.
    - `eos_token_id`: the token that ends a row. Default: the configuration's.
    - `token_tree`: as for a `TreeSpeculativeGenerator`; it sets `k`.
    - `buckets`: accepted and ignored: the sizes of programs are the target's.

    Raises ConfigError if the head does not fit the target, and for a `token_tree` that is none.
    """

    def __init__(
        self,
        draft: EagleDraft,
        target: ForSampling,
        k: int = 2,
        pad_token_id: int = 0,
        eos_token_id: int | None = None,
        buckets: Sequence[int] | None = None,
        token_tree: Tree | None = None,
        **unknown: Any,
    ) -> None:
        mention_unknown(type(self).__name__, unknown, ("pad_token_id", "eos_token_id", "buckets", "token_tree"))
        if not isinstance(draft, EagleDraft):
            raise ConfigError(f"draft must be an EAGLE head, EagleDraft.from_pretrained(...), got {draft!r:.80}")
        super().__init__(draft, target, k if token_tree is None else draft_tokens(token_tree))
        self.pad_token_id, self.eos_token_id, self.token_tree = pad_token_id, eos_token_id, token_tree
