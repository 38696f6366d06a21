"""Calls of a model whose cache is in blocks: the original's arguments become a `BlockCall`, or an error.

As in the original, `cache_ids` are positions, and `start_ids` are slots, one for each position of all blocks: block *
block_size + place in the block. `input_metadata` has tensors as attributes:

- With `enable_chunked_prefill`, tokens of all sequences stand side by side, [1, n]; `block_tables` [sequences, ·],
  `context_lens` [sequences], the tokens that are in the cache, and `seq_lens_tensor` [sequences], with the new ones.
- Without it, a call has prompts side by side, [1, n], with `prompt_lens_tensor` [prompts] and `is_prompt`; or one token
  of each sequence, [sequences, 1], with `block_tables`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from transformers_neuronx.config import Blocks, CompileOptions
from transformers_neuronx.engine.family import DecoderConfig, Family
from transformers_neuronx.engine.inputs import Integers, integers
from transformers_neuronx.errors import ConfigError, InputError
from transformers_neuronx.runtimes.base import Runtime
from transformers_neuronx.serving.blocks import BlockCall

Array = np.ndarray[Any, Any]
INSTEAD = "make the model without init_cache_engine(), or use an Engine"


def check_blocks(tag: str, family: Family, config: DecoderConfig, options: CompileOptions, samples: bool) -> None:
    """Raise ConfigError, naming what is in the way, for a model that cannot have a cache of blocks.

    `samples` says whether calls sample on the devices.
    """
    kinds = dict.fromkeys(getattr(config, "layer_kinds", [""]))
    if family.encoder is not None:
        raise ConfigError(f"{tag} has an encoder, and what it reads is not in blocks: {INSTEAD}")
    if stateful := [kind for kind in kinds if config.states_of(kind) or config.heads_of(kind) is None]:
        raise ConfigError(f"{tag} has layers with states, which are not in blocks ({', '.join(stateful)}): {INSTEAD}")
    if samples:
        raise ConfigError("on_device_generation cannot sample from a cache of blocks: sample from the logits")
    if options.sparse is not None and options.sparse.window is None:
        raise ConfigError(f"sparse_attn without a window cannot read a cache of blocks: {INSTEAD}")


def check_runtime(runtime: Runtime) -> None:
    """Raise ConfigError where attention cannot read blocks."""
    if not runtime.pages:
        raise ConfigError(f"{runtime.description} has no attention over blocks yet: {INSTEAD}")


@dataclass(frozen=True)
class Limits:
    """What calls may have: the blocks, most sequences, longest sequence, and the number of token ids."""

    blocks: Blocks
    sequences: int
    longest: int
    vocab_size: int


@dataclass(frozen=True)
class Read:
    """A call, and where its logits go: the row of each in a result of `count` rows."""

    call: BlockCall
    rows: Array
    count: int


def read_call(
    input_ids: Integers, cache_ids: Integers | None, start_ids: Integers | None, metadata: Any, limits: Limits,
    every: bool,
) -> Read:  # fmt: skip
    """Read a call with the original's arguments, see above.

    Row i of the result is for the last token of sequence i; with chunked prefill there are as many rows as
    `max_num_seqs`. With `every`, there is one for each token of `input_ids`. Raises InputError for what is missing,
    does not fit, or contradicts something else.
    """
    if metadata is None:
        raise InputError("the cache is in blocks, so forward() needs input_metadata with block_tables, got None")
    ids, size = integers("input_ids", input_ids, 2), limits.blocks.size
    slots, positions = (_of_tokens(*each, ids.size) for each in (("start_ids", start_ids), ("cache_ids", cache_ids)))
    if limits.blocks.chunked:
        call, tokens = _chunks(ids, metadata)
    elif _is_prompt(ids, metadata):
        call, tokens = _prompts(ids, slots, metadata, size)
    else:
        call, tokens = _single(ids, positions, slots, metadata)
    _check(call, limits)
    _check_places(call, tokens, positions, slots, size)
    if every:
        return Read(replace(call, wanted=np.arange(len(tokens))), tokens, ids.size)
    rows = np.flatnonzero(call.count)
    count = limits.sequences if limits.blocks.chunked else len(call.count)
    return Read(replace(call, wanted=np.cumsum(call.count)[rows] - 1), rows, count)


def _of_tokens(name: str, value: Integers | None, count: int) -> Array | None:
    """Return an argument that has a number for each token, [count], if it is given."""
    if value is None:
        return None
    flat = integers(name, value, np.ndim(value)).reshape(-1)
    if len(flat) != count:
        raise InputError(f"{name} must have a number for each of the {count} tokens of input_ids, got {len(flat)}")
    return flat


def _field(metadata: Any, name: str, ndim: int) -> Array:
    value = getattr(metadata, name, None)
    if value is None:
        raise InputError(f"input_metadata needs {name}, got none")
    return integers(f"input_metadata.{name}", value, ndim)


def _call(tokens: Array, start: Array, count: Array, tables: Array) -> BlockCall:
    return BlockCall(tokens, start, count, tables, np.zeros(0, np.int64))


def _side_by_side(ids: Array, count: Array, name: str) -> Array:
    """Return the tokens of sequences that stand side by side in one row; others after them are padding."""
    if (count < 0).any() or len(ids) != 1 or not 0 < count.sum() <= ids.size:
        raise InputError(
            f"input_ids must be [1, n], with the tokens of all sequences side by side, got {list(ids.shape)} where "
            f"{name} gives {count.tolist()} tokens"
        )
    return ids[0, : count.sum()]


def _chunks(ids: Array, metadata: Any) -> tuple[BlockCall, Array]:
    """Read chunks of prompts and running rows. Also return which of `ids` they are."""
    tables = _field(metadata, "block_tables", 2)
    start, end = (_field(metadata, name, 1) for name in ("context_lens", "seq_lens_tensor"))
    if not len(tables) == len(start) == len(end):
        counts = f"{len(tables)}, {len(start)} and {len(end)}"
        raise InputError(f"block_tables, context_lens and seq_lens_tensor must be of the same sequences, got {counts}")
    tokens = _side_by_side(ids, end - start, "seq_lens_tensor - context_lens")
    return _call(tokens, start, end - start, tables), np.arange(len(tokens))


def _is_prompt(ids: Array, metadata: Any) -> bool:
    told = getattr(metadata, "is_prompt", None)
    return ids.shape[1] > 1 if told is None else bool(told)


def _prompts(ids: Array, slots: Array | None, metadata: Any, size: int) -> tuple[BlockCall, Array]:
    """Read whole prompts, whose blocks follow from their slots."""
    count = _field(metadata, "prompt_lens_tensor", 1)
    tokens = _side_by_side(ids, count, "prompt_lens_tensor")
    if slots is None:
        raise InputError("start_ids must be the slots of a prompt's tokens, got None")
    tables = np.zeros((len(count), max(-(-int(count.max()) // size), 1)), np.int64)
    for row, first, number in zip(tables, np.cumsum(count) - count, count, strict=True):
        own = slots[first : first + number : size] // size
        row[: len(own)] = own
    return _call(tokens, np.zeros_like(count), count, tables), np.arange(len(tokens))


def _single(ids: Array, positions: Array | None, slots: Array | None, metadata: Any) -> tuple[BlockCall, Array]:
    """Read one token of each sequence. Rows with a negative slot are padding."""
    tables = _field(metadata, "block_tables", 2)
    if ids.shape[1] != 1 or len(ids) != len(tables):
        raise InputError(
            f"input_ids must be one token of each of the {len(tables)} sequences of block_tables, got {list(ids.shape)}"
        )
    if positions is None:
        raise InputError("cache_ids must be the positions of the tokens, got None")
    real = np.ones(len(ids), bool) if slots is None else slots >= 0
    return _call(ids[real, 0], positions, real.astype(np.int64), tables), np.flatnonzero(real)


def _check(call: BlockCall, limits: Limits) -> None:
    end, width = call.start + call.count, call.tables.shape[1] * limits.blocks.size
    if len(call.count) > limits.sequences:
        raise InputError(f"max_num_seqs={limits.sequences} is the most sequences of a call, got {len(call.count)}")
    if not call.count.any() or (call.start[call.count > 0] < 0).any():
        raise InputError(f"a call needs tokens at positions of at least 0, got {call.count} from {call.start} on")
    if (wrong := (call.tokens < 0) | (call.tokens >= limits.vocab_size)).any():
        raise InputError(f"input_ids must be ids from 0 to {limits.vocab_size - 1}, got {call.tokens[wrong.argmax()]}")
    longest = int(end[call.count > 0].max())
    if longest > limits.longest:
        raise InputError(f"n_positions={limits.longest} is the longest sequence this model takes, got {longest} tokens")
    if longest > width:
        raise InputError(
            f"block_tables must have blocks for {longest} positions, got {call.tables.shape[1]} for {width}"
        )


def _check_places(call: BlockCall, tokens: Array, positions: Array | None, slots: Array | None, size: int) -> None:
    """Compare positions and slots, if they are given, with those that follow from the rest."""
    sequence = np.repeat(np.arange(len(call.count)), call.count)
    first = np.cumsum(call.count) - call.count
    place = call.start[sequence] + np.arange(len(tokens)) - first[sequence]
    wanted = call.tables[sequence, place // size] * size + place % size
    for name, given, right in (("cache_ids", positions, place), ("start_ids", slots, wanted)):
        if given is not None and (wrong := given[tokens] != right).any():
            at = int(wrong.argmax())
            raise InputError(
                f"{name} must agree with input_metadata: token {at} is at position {place[at]} of sequence "
                f"{sequence[at]}, so slot {wanted[at]} with blocks of {size}; got {given[tokens][at]}"
            )
