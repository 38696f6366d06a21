"""The cache object of Hugging Face's `generate()`. It identifies sequences that are cached on the devices."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from transformers.cache_utils import Cache
from transformers.modeling_outputs import CausalLMOutputWithPast

from transformers_neuronx.engine.images import Image
from transformers_neuronx.errors import InputError
from transformers_neuronx.models.sampling import ForSampling

GENERATE = "generate()"
# What Transformers calls a cache among arguments and results. Version 5.24 gave it the shorter name.
CACHE = "cache" if "cache" in CausalLMOutputWithPast.__dataclass_fields__ else "past_key_values"


class DeviceCache(Cache):
    """Sequences that are cached on the devices: their columns, ids [rows, columns], and which of these are padding.

    The model has one set of caches, so any other call of it replaces these sequences.
    """

    is_compileable = False
    is_linear = [False]  # noqa: RUF012  # or Transformers, which asks layers, would feed all columns again

    def __init__(self, model: ForSampling) -> None:
        super().__init__(layers=[])
        self.model = model
        self.ids = torch.zeros(0, 0, dtype=torch.long)
        self.mask: torch.Tensor | None = None  # [rows, columns], once there is padding
        self.rows = self.columns = 0
        self.drafts = False
        self.images: Sequence[Image] = ()  # those of the first columns
        self._left = -1  # the version of the sequences on the devices after the last call for these

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.columns

    def feed(self, ids: torch.Tensor, mask: torch.Tensor | None, all_positions: bool) -> torch.Tensor:
        """Feed columns. Return logits after the last one, or after all with `all_positions`: f32[batch, 1 or n, vocab].

        ids [batch, n] are the next columns. mask [batch, all columns], or [batch, n], has zeros for padding; None means
        that the new columns have none.
        """
        self._check(len(ids))
        first, (rows, n) = self.columns, ids.shape
        mask = self._whole_mask(mask, rows, n)
        end = first + n if mask is None else int(mask.sum(1).max())
        cut = n - max(0, end - self.model.options.buckets.longest) if self.drafts else n
        where: dict[str, Any] = dict(cache_ids=np.arange(first, first + cut))
        if mask is not None:
            where = dict(attention_mask=mask[:, : first + cut])
        if self.images and not first:
            where |= dict(images=self.images)
        logits: torch.Tensor = self.model.run(ids[:, :cut], output_all_logits=all_positions, **where)[:rows]
        self.rows, self.columns, self._left = rows, first + n, self._held()
        self.ids, self.mask = torch.cat([self.ids[:rows, :first].reshape(rows, first), ids], 1), mask
        if not all_positions:
            return logits[:, None]
        column = torch.arange(n).clamp(max=cut - 1).expand(rows, n)
        if mask is not None:  # padding repeats the logits of the token before it
            column = torch.where(mask[:, first:] != 0, column, 0).cummax(1).values
        return torch.take_along_dim(logits, column[..., None], 1)

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last `-tokens_to_remove` columns; the next ones overwrite them.

        Earlier versions of Transformers 5 pass a positive number, the columns to keep, or a tensor of it.
        """
        tokens_to_remove = int(tokens_to_remove)
        left = tokens_to_remove if tokens_to_remove > 0 else self.columns + tokens_to_remove
        self.columns = max(0, min(self.columns, left))
        self.mask = None if self.mask is None else self.mask[:, : self.columns]

    def activate_past_recording(self) -> None:
        """From now on columns are draft tokens. Those past the longest sequence will be cropped and need not run."""
        self.drafts = True

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Give row `i` the sequence of row `beam_idx[i]`."""
        self._check(self.rows)
        with self.model.turns.take("reorder_cache()", within=GENERATE):
            self.model.reorder(beam_idx)
        self.rows, self._left = len(beam_idx), self._held()
        self.ids, self.mask = self.ids[beam_idx], None if self.mask is None else self.mask[beam_idx]

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        self.reorder_cache(indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        self.reorder_cache(torch.arange(self.rows).repeat_interleave(repeats))

    def reset(self) -> None:
        self.columns, self.mask = 0, None

    def goes_on(self, ids: torch.Tensor, mask: torch.Tensor | None) -> bool:
        """Whether ids [batch, n] continue these sequences: one column, the columns that a mask over all adds, or all
        columns so far and more. With all of them, sequences that another call has replaced can begin anew.
        """
        rows, n = ids.shape
        if not self.columns or rows != self.rows:
            return False
        follows = n == 1 or (mask is not None and mask.shape[1] == self.columns + n)
        held = self._left == self._held()
        return follows or (held and torch.equal(ids[:, : self.columns], self.ids[:, : self.columns]))

    def _whole_mask(self, mask: torch.Tensor | None, rows: int, n: int) -> torch.Tensor | None:
        """Return a mask [rows, all columns] from one over all columns or over the `n` new ones alone."""
        if mask is None and self.mask is None:
            return None
        new = torch.ones(rows, n, dtype=torch.long) if mask is None else mask
        if new.shape[1] > n or not self.columns:
            return new[:, : self.columns + n]
        before = torch.ones(rows, self.columns, dtype=new.dtype) if self.mask is None else self.mask
        return torch.cat([before.to(new.dtype), new], 1)

    def check_positions(self, positions: torch.Tensor, ids: torch.Tensor, mask: torch.Tensor | None) -> None:
        """Raise InputError unless the positions of tokens follow from the mask."""
        window = slice(self.columns, self.columns + ids.shape[1])
        mask = torch.ones(len(ids), window.stop) if mask is None else mask
        real = mask[:, window] != 0
        if not torch.equal(positions.expand(ids.shape)[real], (mask.cumsum(1) - 1)[:, window][real].long()):
            raise InputError(f"position_ids must count the tokens of attention_mask, got {positions.tolist()}")

    def _held(self) -> int:
        return self.model.decoder.version

    def _check(self, rows: int) -> None:
        if not self.columns:
            return
        if self._left != self._held():
            raise InputError(
                f"{CACHE} is no longer on the devices: another call has replaced its sequences; "
                "call reset_generation() and pass all tokens so far"
            )
        if rows != self.rows:
            raise InputError(f"{CACHE} has {self.rows} rows, got {rows}")


def cache_of(model: ForSampling, *given: Any) -> Any:
    """Return the cache that a caller gave under one of its names, or a new one. A cache may count as false."""
    named = [cache for cache in given if cache is not None]
    return named[0] if named else DeviceCache(model)
