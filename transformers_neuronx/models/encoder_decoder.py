"""Models with an encoder as users call them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from transformers_neuronx.config import Buckets
from transformers_neuronx.engine.family import EncoderDecoderConfig
from transformers_neuronx.engine.inputs import Integers, read_numbers, read_rows
from transformers_neuronx.engine.profiling import Profile, profile
from transformers_neuronx.errors import ConfigError, InputError
from transformers_neuronx.models.sampling import ForSampling

LONGEST = 512  # tokens of a source and of the generated sequence, by default, unless the model knows fewer
BEGUN = 64  # decoder tokens that one prefill program takes; mostly there is only one


class EncoderDecoderForSampling(ForSampling):
    """A model with an encoder and a decoder, compiled for fixed shapes. Two options differ from those of `Model`:

    - `context_length_estimate`: the longest source in tokens, or a list of the sizes that the encoder is compiled for.
      Default 512.
    - `n_positions`: the longest sequence of the decoder, as in `Model`. Default 512, or what the model was trained for
      if that is less.

    If sources are numbers, such as the features of sounds, all have the same sizes, and the first option is not needed.

    `sample` takes the sources. `forward` and `score` take the decoder's tokens, after a call of `encode` with the
    sources. Other arguments, and what calls raise, are described at `ForSampling`.
    """

    _whole = "sample() of a source"
    model_config: EncoderDecoderConfig

    def _buckets(self, n_positions: int | Sequence[int] | None, context: int | Sequence[int] | str | None) -> Buckets:
        limit = min(LONGEST, self.model_config.n_positions or LONGEST)
        longest = limit if n_positions is None and not self.switches.continuous_batching else n_positions
        if isinstance(context, str) or context == 0:
            raise ConfigError(f"context_length_estimate must be the longest source, or several sizes, got {context!r}")
        only = self.model_config.source_positions
        if only and context not in (None, only, [only], (only,)):
            raise ConfigError(f"context_length_estimate must be {only}, as all sources have, or None, got {context!r}")
        sources = (only,) if only else Buckets.of(LONGEST if context is None else context, 0).positions
        buckets = super()._buckets(longest, None)
        return replace(buckets, context=(min(BEGUN, buckets.context[-1]),), sources=sources)

    def encode(
        self,
        input_ids: Any,
        start_ids: Integers | None = None,
        attention_mask: Integers | None = None,
        slots: Sequence[int] | None = None,
    ) -> None:
        """Encode sources. From now on their slots attend to them.

        - `input_ids`: integers [batch, n], the tokens of the sources; or the sources if they are numbers, such as
          [batch, mel bins, frames] of sounds. These have no padding, and take neither of the next two arguments.
        - `start_ids`: integers [batch], the number of padding columns on the left. Default: none.
        - `attention_mask`: [batch, n], zero for padding on either side. It replaces `start_ids`.
        - `slots`: the slot of each source. Default: 0, 1, ….

        Raises InputError for a source longer than `context_length_estimate` or of other sizes, padding between its
        tokens, and slots that occur twice or are not below `batch_size`.
        """
        with self.turns.take("encode()"):
            self.read_sources(input_ids, start_ids, attention_mask, slots)

    def read_sources(
        self,
        input_ids: Any,
        start_ids: Integers | None = None,
        attention_mask: Integers | None = None,
        slots: Sequence[int] | None = None,
    ) -> None:
        """Do the same as `encode`, for a caller that has the turn."""
        count = self.options.batch_size
        sources = self._sources(input_ids, start_ids, attention_mask)
        named = np.arange(len(sources)) if slots is None else np.asarray(slots)
        if named.shape != (len(sources),) or len(set(named.tolist())) != len(named):
            raise InputError(f"slots must be unique, one for each of {len(sources)} sources, got {named.tolist()}")
        if named.min() < 0 or named.max() >= count:
            raise InputError(f"slots must be at least 0 and below batch_size={count}, got {named.tolist()}")
        positions = self.model_config.source_positions
        with self.meter.call(sum(positions or len(source) for source in sources)):
            self.decoder.encode(sources, named)

    def _sources(
        self, input_ids: Any, start_ids: Integers | None, attention_mask: Integers | None
    ) -> Sequence[np.ndarray[Any, Any]]:
        """Return each source of a call as the encoder reads it."""
        padding = dict(start_ids=start_ids, attention_mask=attention_mask)
        if sizes := self.model_config.source_sizes:
            if given := [name for name, value in padding.items() if value is not None]:
                raise InputError(
                    f"{given[0]} is for sources of tokens: those of {self.tag} are numbers without padding"
                )
            return [*read_numbers(input_ids, sizes)]
        longest = self.options.buckets.sources[-1]
        rows = read_rows(input_ids, vocab_size=self.model_config.vocab_size, longest=None, **padding)
        if (tokens := max(map(len, rows.tokens))) > longest:
            raise InputError(
                f"context_length_estimate={longest} is the longest source this model takes, got {tokens} tokens"
            )
        if rows.real.shape[1] > 1 and (np.abs(np.diff(rows.real.astype(np.int8))).sum(1) > 1 + ~rows.real[:, 0]).any():
            raise InputError("attention_mask must have a source's tokens side by side, got padding between them")
        return rows.tokens

    def sample(
        self,
        input_ids: Any,
        sequence_length: int,
        start_ids: Integers | None = None,
        *rules: Any,
        attention_mask: Integers | None = None,
        decoder_input_ids: Integers | None = None,
        **options: Any,
    ) -> Any:
        """Generate from sources. Return the decoder's tokens, s64[batch, at most sequence_length].

        - `input_ids`, `start_ids`, `attention_mask`: the sources, as in `encode`.
        - `sequence_length`: most columns of the result.
        - `decoder_input_ids`: integers [batch, n], the first tokens of the result. Default: the model's start token.
        - `rules`, `options`: the other arguments of `ForSampling.sample`, in its order.
        """
        with self.turns.take(self._whole), self.meter.call():
            self.read_sources(input_ids, start_ids, attention_mask)
            first = np.full((len(input_ids), 1), self.model_config.decoder_start_token_id)
            begun = first if decoder_input_ids is None else decoder_input_ids
            return super().sample(begun, sequence_length, None, *rules, **options)

    def profile(self, prompt_tokens: int = 128, new_tokens: int = 64) -> Profile:
        """Measure where the time of `sample` goes, with `prompt_batch_size` sources of `prompt_tokens` tokens each.

        Sources of numbers have their own sizes. `new_tokens` are generated for each. Runs once before it measures.
        Returns a `Profile`, a table when printed.
        """
        ids = np.arange(prompt_tokens) % self.model_config.vocab_size
        source = np.zeros(sizes, np.float32) if (sizes := self.model_config.source_sizes) else ids
        sources = source[None].repeat(self.options.prompt_batch_size, 0)
        return profile(self.decoder, lambda: self.sample(sources, 1 + new_tokens, eos_token_override=-1))
