"""Calls of a compiled model: logits, scores and samples."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
import torch

from transformers_neuronx.config import GenerationConfig, token_ids
from transformers_neuronx.engine.inputs import Integers, Rows, integers, read_rows, read_slots
from transformers_neuronx.engine.outputs import want_head
from transformers_neuronx.engine.profiling import Profile, profile
from transformers_neuronx.engine.rules import Number, Rules
from transformers_neuronx.errors import ConfigError, InputError
from transformers_neuronx.models.block_calls import Limits, read_call
from transformers_neuronx.models.generation import (
    Criteria,
    Generation,
    Speculator,
    Streamer,
    Transcript,
    check_sound,
    spread,
    streaming,
)
from transformers_neuronx.models.methods import NeuronModelBase
from transformers_neuronx.serving.blocks import BlockDecoder, no_slots
from transformers_neuronx.support.turns import take_all

Array = np.ndarray[Any, Any]

STREAMED = 8  # tokens per dispatch with a streamer


class ForSampling(NeuronModelBase):
    """A language model compiled for fixed shapes, with calls for logits, scores and samples.

    The constructor takes the arguments of `Model`. All calls need `to_neuron` first.

    Arguments that several calls have:

    - `input_ids`: integers [batch, n] from 0 to vocab_size - 1, as a tensor, an array or lists. The batch is at most
      `batch_size` rows. A row's tokens may have padding on either side.
    - `start_ids`: integers [batch], the number of padding columns on the left of each row. Default: none.
    - `cache_ids`: integers [n] or [batch, n], the columns of `input_ids`, counted from the start of the padded prompt.
      Default: 0, 1, …, which starts new sequences.
    - `attention_mask`: [batch, columns so far], zero for padding on either side. It replaces both of the above.

    With `padding_side="right"` in the NeuronConfig, as continuous batching has it, rows are padded on the right:
    `cache_ids` [batch, n] are positions, with padding of 0 or -1, and `start_ids` [batch] are the cache slots of the
    rows, in any order.

    If the cache is in blocks, as `init_cache_engine` of the ContinuousBatchingConfig makes it, `input_metadata` of
    `forward` says which sequence has which. Its attributes are integers:

    - `block_tables` [sequences, n]: the blocks of each sequence, in the order of its positions.
    - `context_lens` [sequences], `seq_lens_tensor` [sequences]: for `enable_chunked_prefill`, tokens in the cache, and
      tokens after the call. `input_ids` [1, n] has the new ones of all sequences side by side.
    - `is_prompt`, `prompt_lens_tensor` [prompts]: without it, whether `input_ids` [1, n] are whole prompts side by
      side, and their lengths; if they are not, `input_ids` [sequences, 1] has one token of each sequence.

    `cache_ids` are then positions, and `start_ids` slots: block * block_size + place in the block.

    Arguments of `sample`:

    - `sequence_length`: most columns of the result, including the prompt and its padding.
    - `top_k`, `top_p`, `temperature`, `seed`: see `Rules`. Default None: top_k=50, top_p=1.0, temperature=1.0, no seed.
      With `on_device_generation` in the NeuronConfig, its values hold, and these three have no effect.
    - `rules`: a `Rules` in place of these and the next two.
    - `min_p`, `repetition_penalty`: see `Rules`. Default 0.0 and 1.0, which change nothing.
    - `eos_token_override`: one or several tokens that end a row, instead of the configuration's; -1 for none.
    - `streamer`: gets `put` with each column of new tokens, s64[batch, 1], then `end()`; for example a `TextStreamer`.
      It first gets the prompt, if its attribute `skip_prompt` is true or a `speculator` is given. If its attribute
      `response_with_prefix` is true, it gets all columns so far each time.
    - `stopping_criteria_list`: a function of the ids so far, s64[batch, columns], and the scores. It returns whether
      to stop, as one value for all rows or one for each.
    - `no_repeat_ngram_size`: no n-gram of that many tokens occurs twice in a row. Default: no limit.
    - `output_scores`: also return the logits that tokens were sampled from. Default False.
    - `speculator`: a `SpeculativeGenerator` or `FusedSpeculativeDecoder`, whose own `sample` passes it.

    With the same `seed`, samples are the same on every runtime and at every tp_degree. With a list of seeds, one per
    row, they also do not depend on the other rows of the batch.

    Threads may share a model: their calls queue. A call from inside another call, by a streamer or a criterion, raises
    InputError. A new prompt replaces the sequence in its slot, so no other thread may use the slots of sequences that
    a caller continues with `cache_ids`.

    Raises ConfigError before `to_neuron`, InputError for arguments that the model cannot serve, and EngineError if a
    program fails or logits are NaN. The model stays usable.
    """

    _whole: ClassVar[str] = ""  # the call that `sample` is a part of, if any

    def reorder_cache(self, reorder_ids: Integers) -> None:
        """Give row `i` the sequence of row `reorder_ids[i]`, as beam search does.

        `reorder_ids` are integers [at most batch_size]; the other rows keep their sequences. Raises InputError unless
        each is at least 0 and below `batch_size`.
        """
        with self.turns.take("reorder_cache()"):
            self.reorder(reorder_ids)

    def reorder(self, rows: Integers) -> None:
        """Do the same as `reorder_cache`, for a caller that has the turn."""
        count, chosen = self.options.batch_size, integers("reorder_cache", rows, 1)
        if len(chosen) > count or chosen.min() < 0 or chosen.max() >= count:
            raise InputError(f"reorder_cache needs rows below batch_size={count}, got {chosen.tolist()}")
        self.decoder.reorder(np.concatenate([chosen, np.arange(len(chosen), count)]))

    def forward(
        self,
        input_ids: Integers,
        cache_ids: Integers | None = None,
        start_ids: Integers | None = None,
        attention_mask: Integers | None = None,
        output_all_logits: bool | None = None,
        input_metadata: Any = None,
    ) -> Any:
        """Return the logits after the last token of each row, f32[batch, vocab].

        Tokens start new sequences. With `cache_ids` that do not begin at 0, or an `attention_mask` with more columns
        than `input_ids`, they continue those of earlier calls. The class describes these arguments.

        `output_all_logits` returns the logits after every token, f32[batch, n, vocab], with zeros for padding. Its
        default is that of the NeuronConfig, which has two more options:

        - `log_softmax_scores` returns a pair: the logits and their log-softmax.
        - `on_device_generation` returns the tokens sampled from the logits, s64[batch, 1], unless the caller passes
          `output_all_logits`.

        If `prompt_batch_size` is below `batch_size`, each prompt of a full batch of prompts goes to batch_size /
        prompt_batch_size slots, which repeat the prompts in order. Logits have one row for each prompt; sampled tokens
        one for each slot.

        If the cache is in blocks, `input_metadata` has those of each sequence. Row i of the logits is for the last
        token of sequence i; with `enable_chunked_prefill` there are `max_num_seqs` rows, and those of no sequence are
        0. With all logits, they are f32[*, vocab] for `input_ids` [*]. Raises InputError for blocks that cannot be
        right.
        """
        where = dict(cache_ids=cache_ids, start_ids=start_ids, attention_mask=attention_mask)
        if self.takes_blocks(input_metadata):
            with self.turns.take("forward()"):
                return self.run_blocks(input_ids, output_all_logits, input_metadata, **where)
        with self.turns.take("forward()"):
            return self.run(input_ids, output_all_logits, **where)

    def run(self, input_ids: Integers, output_all_logits: bool | None = None, **where: Integers | None) -> Any:
        """Do the same as `forward`, for a caller that has the turn."""
        want_head(self.options, self.tag, "make logits")
        rows, switches = self._read(input_ids, **where), self.switches
        repeats = self._repeats(rows)
        every = switches.output_all_logits if output_all_logits is None else output_all_logits
        with self.meter.call(sum(map(len, rows.tokens))) as call:
            if switches.on_device_generation and output_all_logits is None:
                tokens = self._sampled(rows, repeats)
                call.mark()
                return tokens
            logits = self.decoder.feed(rows, every)
            self.decoder.repeat(len(rows.tokens), repeats)
            call.mark()
        return self._as_scores(spread(logits, rows) if every else logits[:, 0])

    def takes_blocks(self, metadata: Any) -> bool:
        """Whether calls give the blocks of sequences. Raises InputError for `metadata` where no cache was divided."""
        batching = self.switches.continuous_batching
        if metadata is not None and (batching is None or batching.block_size is None):
            wanted = "call init_cache_engine(block_size, num_blocks) of its ContinuousBatchingConfig before to_neuron()"
            raise InputError(f"input_metadata is for a model whose cache is in blocks: {wanted}")
        return self.options.blocks is not None

    def run_blocks(
        self, input_ids: Integers, output_all_logits: bool | None, metadata: Any, attention_mask: Any = None,
        **where: Integers | None,
    ) -> Any:  # fmt: skip
        """Do the same as `forward` over blocks, for a caller that has the turn."""
        blocks, vocab_size = self.options.blocks, self.model_config.vocab_size
        assert blocks is not None and isinstance(self.decoder, BlockDecoder)
        if attention_mask is not None:
            raise InputError(
                "attention_mask cannot say where tokens are in a cache of blocks: pass input_metadata only"
            )
        every = self.switches.output_all_logits if output_all_logits is None else output_all_logits
        limits = Limits(blocks, self.options.batch_size, self.options.buckets.longest, vocab_size)
        read = read_call(input_ids, where["cache_ids"], where["start_ids"], metadata, limits, every)
        logits = np.zeros((read.count, vocab_size), np.float32)
        with self.meter.call(len(read.call.tokens)) as call:
            logits[read.rows] = self.decoder.logits(read.call)
            call.mark()
        return self._as_scores(logits.reshape(*np.shape(input_ids), vocab_size) if every else logits)

    def _as_scores(self, logits: Array) -> Any:
        """Return logits in the type that the NeuronConfig wants, and their log-softmax if it does."""
        scores = torch.from_numpy(logits).to(getattr(torch, self.switches.cast_logits_dtype))
        return (scores, scores.log_softmax(-1)) if self.switches.log_softmax_scores else scores

    def score(
        self, input_ids: Integers, start_ids: Integers | None = None, attention_mask: Integers | None = None
    ) -> torch.Tensor:
        """Return the natural log-probability of each token given those before it in its row, f32[batch, n].

        It is zero for padding and for each row's first token. The class describes the arguments.
        """
        want_head(self.options, self.tag, "score tokens")
        rows = self._read(input_ids, start_ids=start_ids, attention_mask=attention_mask)
        scores = torch.zeros(rows.real.shape)
        with self.turns.take("score()"), self.meter.call(sum(map(len, rows.tokens))):
            logits = torch.from_numpy(self.decoder.feed(rows, all_positions=True))
        for row, (tokens, real) in enumerate(zip(rows.tokens, torch.from_numpy(rows.real), strict=True)):
            after = torch.from_numpy(tokens[1:])[:, None]
            before = logits[row, : len(after)].log_softmax(-1)
            scores[row, real] = torch.cat([torch.zeros(1), before.gather(1, after)[:, 0]])
        return scores

    def update_generation_config(self, generation_config: GenerationConfig) -> None:
        """Replace the NeuronConfig's `on_device_generation`: later calls sample by other rules. Compiles nothing.

        Raises ConfigError if the model has no `on_device_generation` or a value is not supported, and InputError if a
        list does not have one value for each of `batch_size` slots.
        """
        if self.switches.on_device_generation is None:
            raise ConfigError("update_generation_config needs a model with on_device_generation in its NeuronConfig")
        copied = replace(deepcopy(generation_config))  # checked again: its lists may have been changed
        Rules(**copied.rules()).packed(self.options.batch_size)
        self.neuron_config = replace(self.neuron_config, on_device_generation=copied)
        self.switches = replace(self.switches, on_device_generation=copied)

    def sample(
        self,
        input_ids: Integers,
        sequence_length: int,
        start_ids: Integers | None = None,
        top_k: int | Sequence[int] | None = None,
        top_p: Number | None = None,
        eos_token_override: int | Sequence[int] | None = None,
        temperature: Number | None = None,
        streamer: Streamer | None = None,
        stopping_criteria_list: Criteria | None = None,
        no_repeat_ngram_size: int | None = None,
        cache_ids: Integers | None = None,
        output_scores: bool = False,
        attention_mask: Integers | None = None,
        min_p: Number = 0.0,
        repetition_penalty: Number = 1.0,
        seed: int | Sequence[int] | None = None,
        speculator: Speculator | None = None,
        rules: Rules | None = None,
    ) -> Any:
        """Generate tokens after prompts. Return both, s64[batch, at most sequence_length].

        The class describes the arguments. Generation stops when all rows have ended, or at `sequence_length` columns.
        A row ends at its end-of-sequence token, or where `stopping_criteria_list` says so; after that it repeats the
        end-of-sequence token. With `output_scores`, the result is a pair: the ids, and a list with the logits
        f32[batch, vocab] of each new column. Raises InputError if the prompt has `sequence_length` columns or more, or
        the result would be longer than `n_positions`.
        """
        input_ids, sequence_length = self.after_prefix(input_ids, sequence_length)
        rules = rules or self._rules_of_call(top_k, top_p, temperature, min_p, repetition_penalty, seed)
        eos = self._ends(eos_token_override)
        rows = self._read(input_ids, cache_ids=cache_ids, start_ids=start_ids, attention_mask=attention_mask)
        ids = torch.from_numpy(integers("input_ids", input_ids, 2))
        columns = ids.shape[1] if cache_ids is None else int(np.max(np.asarray(cache_ids))) + 1
        count = self._room(rows, sequence_length, columns)
        first, last = ids.repeat(self._repeats(rows), 1), [*eos, *self.eos_token_ids, 0][0]
        seen = Transcript([first], last, stopping_criteria_list, no_repeat_ngram_size, output_scores)
        self._continue(rows, rules, eos, count, seen, streamer, speculator)
        return (seen.ids, seen.scores) if output_scores else seen.ids

    def profile(self, prompt_tokens: int = 128, new_tokens: int = 64) -> Profile:
        """Measure where the time of `sample` goes, with `prompt_batch_size` prompts.

        `prompt_tokens` and `new_tokens` are the tokens of each prompt and those generated after it; their sum is at
        most `n_positions`. Runs once before it measures. Returns a `Profile`, a table when printed.
        """
        ids, end = np.arange(prompt_tokens) % self.model_config.vocab_size, prompt_tokens + new_tokens
        rows = ids[None].repeat(self.options.prompt_batch_size, 0)
        return profile(self.decoder, lambda: self.sample(rows, end, eos_token_override=-1))

    def _rules_of_call(self, *values: Any) -> Rules:
        """Make `Rules` of arguments of `sample`. As in the original, on_device_generation outweighs the first three."""
        return self._rules(*((None,) * 3 if self.switches.on_device_generation else values[:3]), *values[3:])

    def _ends(self, override: int | Sequence[int] | None) -> list[int]:
        default = self.switches.on_device_generation
        if override is None and default is None:
            return self.eos_token_ids
        return token_ids(default.eos_token_id if default and override is None else override)

    def _sampled(self, rows: Rows, repeats: int) -> torch.Tensor:
        """Sample the token after each row, by the rules of its slot. -> s64[batch, 1]"""
        slots = rows.slots if repeats == 1 else np.arange(self.options.batch_size)
        tokens = self.decoder.sample_after(rows, self._rules().packed(self.options.batch_size, slots), repeats)
        check_sound(tokens, np.arange(len(tokens)))
        return torch.from_numpy(tokens[:, None])

    def _continue(
        self,
        rows: Rows,
        rules: Rules,
        eos: list[int],
        count: int,
        seen: Transcript,
        streamer: Streamer | None,
        speculator: Speculator | None,
    ) -> None:
        want_head(self.options, self.tag, "generate")
        if self.options.blocks is not None:
            raise no_slots()
        repeats = self._repeats(rows)
        if speculator is not None and (repeats > 1 or seen.process is not None):
            wanted = "one sequence per prompt, and neither no_repeat_ngram_size nor output_scores"
            raise InputError(f"speculation needs {wanted}")
        models = [self] if speculator is None else [self, *speculator.models]
        turns = take_all((model.turns for model in models), "sample()", self._whole)
        measured = self.meter.call(sum(map(len, rows.tokens)))
        generation = Generation(self.decoder, rows, repeats, rules, eos, self._feed_with_hooks)
        steps = self.options.chunk if self.decoder.loops else 1
        steps = steps if streamer is None else min(STREAMED, steps)
        shown = speculator is not None or getattr(streamer, "skip_prompt", False)
        whole = getattr(streamer, "response_with_prefix", False)
        with turns, streaming(streamer, seen.ids[: len(rows.tokens)] if shown else None) as put, measured as call:
            process = seen.process or (_unchanged if self.hooked else None)
            if speculator is not None:
                blocks = speculator.blocks(generation, count)
            elif process is not None:
                blocks = generation.by_host(count, process)
            else:
                blocks = generation.on_devices(count, steps)
            for tokens in seen.read(call.timed(self.with_context_hooks(blocks)), generation):
                put(seen.ids if whole else tokens[:, None])
            call.new_tokens = seen.made

    def _feed_with_hooks(self, rows: Rows) -> Array:
        """Feed a token or prompt of `sample`. Hooks get what a call of the model would: ids, columns and pads."""
        if not self.hooked:
            return self.decoder.feed(rows)
        n = max(map(len, rows.tokens))
        ids = torch.tensor([[0] * (n - len(row)) + row.tolist() for row in rows.tokens])
        columns, pads = torch.arange(n) + int(rows.end.max()) - n, torch.from_numpy(int(rows.end.max()) - rows.end)
        logits = self.with_hooks(lambda *_: torch.from_numpy(self.decoder.feed(rows)[:, 0]), ids, columns, pads)
        changed: Array = logits[:, None].numpy()
        return changed

    def _room(self, rows: Rows, sequence_length: int, columns: int) -> int:
        """Return the number of tokens to generate after `columns`. Raises InputError if there is no room for them."""
        count, end = sequence_length - columns, int(rows.end.max())
        if (rows.slots != np.arange(len(rows.slots))).any():
            raise InputError(f"start_ids must be the slots 0, 1, … in order for sample(), got {rows.slots.tolist()}")
        if count < 1:
            wanted = f"more than the {columns} columns of the prompt"
            raise InputError(f"sequence_length must be {wanted}, got {sequence_length}")
        if end + count > self.options.buckets.longest:
            raise InputError(
                f"n_positions={self.options.buckets.longest} is the longest sequence this model takes; "
                f"sequence_length={sequence_length} needs {end + count}"
            )
        return count

    def _read(self, input_ids: Integers, **where: Integers | None) -> Rows:
        vocab_size, slots = self.model_config.vocab_size, self.options.batch_size
        longest = self.options.buckets.longest - self.prefixed
        named = {name for name, value in where.items() if value is not None}
        if self.switches.padding_side == "right" and named and "attention_mask" not in named:
            ids = where["cache_ids"], where["start_ids"]
            return read_slots(input_ids, *ids, vocab_size=vocab_size, longest=longest, slots=slots)
        rows = read_rows(input_ids, vocab_size=vocab_size, longest=longest, **where)
        if len(rows.tokens) > slots:
            raise InputError(f"batch_size={slots} is the most rows this model takes, got {len(rows.tokens)}")
        return replace(rows, start=rows.start + self.prefixed)

    def _repeats(self, rows: Rows) -> int:
        """Number of sequences that each prompt serves."""
        fits = len(rows.tokens) == self.options.prompt_batch_size and not rows.start.any()
        return self.options.repeats if fits and self._broadcasts else 1


def _unchanged(logits: Array) -> Array:
    return logits
