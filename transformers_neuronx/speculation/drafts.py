"""Speculative decoding: a cheap proposer makes draft tokens, and the target model verifies them all in one step.

The random numbers of a draw depend only on seed, row and position. So the logits after each draft token determine the
token that the target would sample there, and a draft token is accepted if it is that token. The result is what the
target generates alone, greedy or sampled. The proposer only decides how many tokens a step yields.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from transformers_neuronx.engine.inputs import Integers
from transformers_neuronx.errors import ConfigError, InputError
from transformers_neuronx.models.generation import Generation, Streamer
from transformers_neuronx.models.sampling import ForSampling
from transformers_neuronx.serving.draft_heads import DraftHead
from transformers_neuronx.serving.guesses import PromptLookup
from transformers_neuronx.serving.head_calls import HeadCalls
from transformers_neuronx.speculation.acceptors import (
    Accepting,
    DefaultTokenAcceptor,
    DraftModelForSpeculation,
    DraftProvider,
    TokenAcceptor,
)

Array = np.ndarray[Any, Any]


class SpeculativeGenerator:
    """Speculative decoding: the same tokens as `target.sample`, in fewer steps of the target.

    - `draft`: a smaller model with the target's `batch_size` and vocabulary, and at least its `n_positions`; an
      `EagleDraft` for the target, whose cache must be in pages; or a `PromptLookup`, which finds draft tokens in the
      text itself. None, for a `PromptLookup()`, is also allowed.
    - `target`: the model whose tokens are generated.
    - `k`: number of draft tokens that the target verifies in one step, at least 1. Default 4.
    - `acceptor`: decides which draft tokens are accepted, from the logits of both models. Then, and if `draft` is a
      `DraftProvider`, `k` includes the target's own token, and the host decides in each step. Default None: a draft
      token is accepted if the target samples it.

    Compiles the program that verifies draft tokens if the target is on its devices; otherwise the target's `to_neuron`
    does, or with an `EagleDraft`, the first call. Raises ConfigError if `k` is below 1 or the models do not fit each
    other.
    """

    eos_token_id: int | None = None  # of calls that name none
    pad_token_id: int = 0

    def __init__(
        self,
        draft: ForSampling | DraftHead | PromptLookup | DraftProvider | None,
        target: ForSampling,
        k: int = 4,
        acceptor: TokenAcceptor | None = None,
    ) -> None:
        if k < 1:
            raise ConfigError(f"k must be at least 1, got {k}")
        if isinstance(draft, ForSampling):
            check_pair(draft, target)
        self.target = target
        self.k = k
        self._accepting: Accepting | None = None
        if acceptor is not None or isinstance(draft, DraftProvider):
            provider = DraftModelForSpeculation(draft) if isinstance(draft, ForSampling) else draft
            if not isinstance(provider, DraftProvider) or k < 2:
                raise ConfigError(f"an acceptor needs a draft model and k of at least 2, got {draft} and k={k}")
            self._accepting = Accepting(provider, acceptor or DefaultTokenAcceptor(), k)
            return
        self.draft = draft or PromptLookup()
        self._head_calls: HeadCalls | None = None
        if not isinstance(draft, DraftHead):
            target.compile_also(("verify", k), lambda decoder: decoder.verifying(k))
        elif target.is_on_device:
            self.to_neuron()

    def to_neuron(self, workers: int | None = None) -> None:
        """Load an `EagleDraft`, and compile the programs for it. The target must be on its devices."""
        if isinstance(self.draft, DraftHead):
            self._head_calls = HeadCalls(self.draft, self.target, self.k)

    @property
    def models(self) -> list[ForSampling]:
        """Models that it calls in addition to the target."""
        return [self.draft] if self._accepting is None and isinstance(self.draft, ForSampling) else []

    def sample(
        self,
        input_ids: Integers,
        sequence_length: int,
        start_ids: Integers | None = None,
        eos_token_id: int | None = None,
        pad_token_id: int | None = None,
        attention_mask: Integers | None = None,
        streamer: Streamer | None = None,
        output_logits: bool = False,
        **options: Any,
    ) -> Any:
        """Generate tokens as `target.sample` does, with its arguments and its result.

        `eos_token_id` is its `eos_token_override`. Of rows that `attention_mask` pads on the right, the new tokens take
        the place of the padding, and `pad_token_id` follows them, by default 0. Raises InputError also for
        `no_repeat_ngram_size`, `output_scores`, `output_logits`, and prompts that serve several rows.
        """
        if output_logits:
            raise InputError("output_logits is not supported: logits stay on the devices; use forward()")
        options |= dict(streamer=streamer)
        if self._accepting is not None:  # the acceptor samples all tokens but the first
            options.setdefault("top_k", 1)
        eos_token_id = self.eos_token_id if eos_token_id is None else eos_token_id
        if eos_token_id is not None:
            options["eos_token_override"] = eos_token_id
        if attention_mask is not None and padded_on_the_right(attention_mask):
            pad = self.pad_token_id if pad_token_id is None else pad_token_id
            return closed_up(self, input_ids, attention_mask, sequence_length, pad, **options)
        options |= dict(speculator=self, attention_mask=attention_mask)
        return self.target.sample(input_ids, sequence_length, start_ids, **options)

    def blocks(self, generation: Generation, count: int) -> Iterator[Array]:
        """Yield blocks as `Generation.on_devices` does, by verifying up to `k` draft tokens of each row at a time."""
        if self._accepting is not None:
            return self._accepting.blocks(generation, count)
        if isinstance(self.draft, DraftHead):
            if self._head_calls is None or self._head_calls.decoder is not generation.decoder:
                self.to_neuron()
            return generation.on_devices(count, 1, self._head_calls, self.k)
        return generation.on_devices(count, 1, self.draft, self.k)


def padded_on_the_right(attention_mask: Integers) -> bool:
    """Whether a mask [batch, n] ends with padding in a row."""
    return not np.asarray(attention_mask)[:, -1].all()


def closed_up(
    speculator: Any, input_ids: Integers, attention_mask: Integers, sequence_length: int, pad: int, **options: Any
) -> torch.Tensor:
    """Sample after rows that are padded on the right. Return s64[batch, sequence_length], without padding inside."""
    target, ids = speculator.target, torch.as_tensor(input_ids)
    lengths, columns = np.asarray(attention_mask).astype(bool).sum(1), ids.shape[1]
    count = min(sequence_length - int(lengths.min()), target.options.buckets.longest - int(lengths.max()))
    options |= dict(attention_mask=attention_mask)
    made = target.sample(ids, columns + count, speculator=speculator, **options)
    rows = torch.full((len(made), sequence_length), pad)
    for row, length in enumerate(lengths.tolist()):
        whole = torch.cat([ids[row, :length], made[row, columns:]])[:sequence_length]
        rows[row, : len(whole)] = whole
    return rows


def check_pair(draft: ForSampling, target: ForSampling) -> None:
    """Raise ConfigError unless the draft fits the target."""
    if not isinstance(draft, ForSampling):
        raise ConfigError(f"draft must be a model, got {draft!r:.80}")
    if draft is target:
        raise ConfigError("a draft must be another model than its target: both would write to the same caches")
    if draft.family.images:
        raise ConfigError(f"{draft.tag}: a draft reads text alone: load it with NeuronAutoModelForCausalLM")
    for name, ours, theirs in (
        ("vocab_size", draft.config.vocab_size, target.config.vocab_size),
        ("batch_size", draft.options.batch_size, target.options.batch_size),
    ):
        if ours != theirs:
            raise ConfigError(f"{name} must be the same for draft and target, got {ours} and {theirs}")
    if (ours := draft.options.buckets.longest) < (theirs := target.options.buckets.longest):
        raise ConfigError(f"n_positions of the draft must be at least the target's {theirs}, got {ours}")
