"""Calls of a model whose draft tokens come from a head."""

from __future__ import annotations

from typing import Any

from transformers_neuronx.errors import ConfigError
from transformers_neuronx.serving.calls import call_loop
from transformers_neuronx.serving.draft_heads import DraftHead, HeadGuesser
from transformers_neuronx.serving.limits import Limits
from transformers_neuronx.serving.loop import Loop
from transformers_neuronx.serving.paged_slots import PagedDecoder
from transformers_neuronx.serving.parts import compile_parts


class HeadCalls:
    """A head for calls of a model that is on its devices. Its cache has pages of the same numbers as the model's slots.

    What the head did not see, as other calls fed it, is missing from its cache: its draft tokens are then worse.
    """

    def __init__(self, head: DraftHead, model: Any, guesses: int) -> None:
        decoder, depths = model.decoder, head.depths_in(model)
        if not isinstance(decoder, PagedDecoder):
            raise ConfigError(f"a draft head needs a decoder whose slots are over pages, got {model.tag}")
        decoder.verifying(guesses)
        self.decoder, self._guesses, self._steps = decoder, guesses, decoder.steps_with(depths)
        tokens, rows, longest = decoder.steps.most_tokens, decoder.slots, decoder.options.buckets.longest
        limits = Limits(tokens, tokens, rows, longest, guesses=guesses)
        self._guesser = HeadGuesser(head.decoder_for(model), decoder.cache, limits, self._steps.keys)
        compile_parts(model.tag, self._steps, self._guesser)

    def loop(self) -> Loop:
        """Return a loop for one call, as `call_loop` does."""
        return call_loop(self.decoder, 1, self._guesser, self._guesses, self._steps)
