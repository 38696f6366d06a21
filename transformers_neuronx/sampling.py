"""Models as users call them: logits, scores, samples."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
import torch

from transformers_neuronx.config import GenerationConfig, token_ids
from transformers_neuronx.errors import ConfigError, InputError
from transformers_neuronx.feeding import feed, repeat, sample_after
from transformers_neuronx.generation import (
    Criteria,
    Generation,
    Speculator,
    Streamer,
    Transcript,
    check_sound,
    generate,
    spread,
    streaming,
)
from transformers_neuronx.inputs import Integers, Rows, integers, read_rows, read_slots
from transformers_neuronx.models import Model
from transformers_neuronx.profiling import Profile, profile
from transformers_neuronx.rules import Number, Rules
from transformers_neuronx.sampling_functions import (
    sample_greedy as sample_greedy,
    sample_llama as sample_llama,
    sample_tokens as sample_tokens,
    select_tokens as select_tokens,
    simple_sample as simple_sample,
    top_k_top_p_filtering as top_k_top_p_filtering,
    validate_top_k_top_p_min_tokens_to_keep as validate_top_k_top_p_min_tokens_to_keep,
)
from transformers_neuronx.turns import take_all

STREAMED = 8  # tokens at once for a streamer


class ForSampling(Model):
    """What a compiled model can be asked for. Its options are those of `Model`.

    Threads may share it: their calls queue. A call from inside another one, by a streamer or a criterion, raises
    InputError. What goes on with the sequences of an earlier call, as `forward` with `cache_ids` does, must be alone
    with them: a new prompt in the same slots takes their place.
    """

    _whole: ClassVar[str] = ""  # the call that `sample` and others are part of, where they are

    def reset(self) -> None:
        """Forget all sequences. Calls do not need it: a prompt starts a sequence anew."""
        with self.turns.take("reset()"):
            self.decoder.reset()

    def reorder_cache(self, rows: Integers) -> None:
        """Row `i` goes on with the sequence of row `rows[i]`, as beams do. rows [up to batch_size]"""
        with self.turns.take("reorder_cache()"):
            self.reorder(rows)

    def reorder(self, rows: Integers) -> None:
        """As `reorder_cache`, for who has the turn."""
        count, chosen = self.options.batch_size, integers("reorder_cache", rows, 1)
        if len(chosen) > count or chosen.min() < 0 or chosen.max() >= count:
            raise InputError(f"reorder_cache wants rows below batch_size={count}, got {chosen.tolist()}")
        self.decoder.reorder(np.concatenate([chosen, np.arange(len(chosen), count)]))

    def forward(
        self,
        input_ids: Integers,
        cache_ids: Integers | None = None,
        start_ids: Integers | None = None,
        attention_mask: Integers | None = None,
        output_all_logits: bool | None = None,
    ) -> Any:
        """Logits after the last token of each row, f32[batch, vocab].

        input_ids [batch, n] start new sequences, or go on with those of the last call: then cache_ids, [n] or
        [batch, n], are the columns of the tokens, counted from the start of the padded prompt, and start_ids [batch]
        how many of them are padding on the left. In place of both, attention_mask [batch, columns so far] has zeros
        for padding, on whatever side it is.

        With padding_side="right" in the NeuronConfig, cache_ids [batch, n] are positions, padded with zeros, and
        start_ids [batch] the slots of the sequences: any, in any order, while others wait.

        With output_all_logits, which the NeuronConfig may have as its default, logits after every token, f32[batch, n,
        vocab], where those of padding are zeros. With log_softmax_scores there, a pair of logits and their
        log-softmax. With on_device_generation there, and unless the caller says output_all_logits, the tokens chosen
        from them, s64[batch, 1].
        """
        where = dict(cache_ids=cache_ids, start_ids=start_ids, attention_mask=attention_mask)
        with self.turns.take("forward()"):
            return self.run(input_ids, output_all_logits, **where)

    def run(self, input_ids: Integers, output_all_logits: bool | None = None, **where: Integers | None) -> Any:
        """As `forward`, for who has the turn."""
        rows, switches = self._read(input_ids, **where), self.neuron_config
        repeats = self._repeats(rows)
        every = switches.output_all_logits if output_all_logits is None else output_all_logits
        with self.meter.call(sum(map(len, rows.tokens))) as call:
            if switches.on_device_generation and output_all_logits is None:
                tokens = self._sampled(rows, repeats)
                call.mark()
                return tokens
            logits = np.tile(feed(self.decoder, rows, every), (repeats, 1, 1))
            repeat(self.decoder, len(rows.tokens), repeats)
            call.mark()
        scores = torch.from_numpy(spread(logits, rows, repeats) if every else logits[:, 0])
        return (scores, scores.log_softmax(-1)) if switches.log_softmax_scores else scores

    __call__ = forward

    def score(
        self, input_ids: Integers, start_ids: Integers | None = None, attention_mask: Integers | None = None
    ) -> torch.Tensor:
        """The log-probability of every token after those before it in its row, f32[batch, n].

        Zero for padding, and for each row's first token. Operands as in `forward`.
        """
        rows = self._read(input_ids, start_ids=start_ids, attention_mask=attention_mask)
        scores = torch.zeros(rows.real.shape)
        with self.turns.take("score()"), self.meter.call(sum(map(len, rows.tokens))):
            logits = torch.from_numpy(feed(self.decoder, rows, all_positions=True))
        for row, (tokens, real) in enumerate(zip(rows.tokens, torch.from_numpy(rows.real), strict=True)):
            after = torch.from_numpy(tokens[1:])[:, None]
            before = logits[row, : len(after)].log_softmax(-1)
            scores[row, real] = torch.cat([torch.zeros(1), before.gather(1, after)[:, 0]])
        return scores

    def update_generation_config(self, generation_config: GenerationConfig) -> None:
        """From now on choose tokens by other rules than the NeuronConfig's; no program is compiled for it."""
        if self.neuron_config.on_device_generation is None:
            raise ConfigError("update_generation_config wants a model with on_device_generation in its NeuronConfig")
        copied = replace(deepcopy(generation_config))  # checked anew: its lists may have been changed
        Rules(**copied.rules()).packed(self.options.batch_size)
        self.neuron_config = replace(self.neuron_config, on_device_generation=copied)

    def sample(
        self,
        input_ids: Integers,
        sequence_length: int,
        start_ids: Integers | None = None,
        top_k: int | Sequence[int] | None = None,
        top_p: Number | None = None,
        temperature: Number | None = None,
        eos_token_override: int | Sequence[int] | None = None,
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
    ) -> Any:
        """The prompts and what the model makes of them, s64[batch, up to sequence_length].

        Tokens are chosen as `rules.Rules` says, None meaning as on_device_generation has it; the same `seed` draws the
        same on every runtime and at every tp_degree, and with a list, one for each row, whatever else is in the batch.
        A row that has come to its end-of-sequence token (`eos_token_override`: another, several, or -1 for none)
        repeats it. It ends when all rows have, when `stopping_criteria_list` says so of all, or at `sequence_length`
        columns, padding included. `streamer` gets the prompt, then each column. No n-gram of `no_repeat_ngram_size`
        tokens comes twice. With `output_scores`, also a list of the logits f32[batch, vocab] that each token was chosen
        by. For `speculator` see `speculation`; what is not named here is as in `forward`.
        """
        rules = self._rules(top_k, top_p, temperature, min_p, repetition_penalty, seed)
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
        """Where the time of `sample` goes, for as many rows as there may be: a table when printed."""
        ids, end = np.arange(prompt_tokens) % self.config.vocab_size, prompt_tokens + new_tokens
        rows = ids[None].repeat(self.options.prompt_batch_size, 0)
        return profile(self.decoder, lambda: self.sample(rows, end, eos_token_override=-1))

    def _ends(self, override: int | Sequence[int] | None) -> list[int]:
        default = self.neuron_config.on_device_generation
        if override is None and default is None:
            return self.eos_token_ids
        return token_ids(default.eos_token_id if default and override is None else override)

    def _sampled(self, rows: Rows, repeats: int) -> torch.Tensor:
        """The token after each row, by the rules of the slot it has. -> s64[batch, 1]"""
        slots = rows.slots if repeats == 1 else np.arange(self.options.batch_size)
        tokens = sample_after(self.decoder, rows, self._rules().packed(self.options.batch_size, slots), repeats)
        repeat(self.decoder, len(rows.tokens), repeats)
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
        repeats = self._repeats(rows)
        if speculator is not None and (repeats > 1 or seen.process is not None):
            wanted = "a sequence for each prompt, and neither no_repeat_ngram_size nor output_scores"
            raise InputError(f"speculation wants {wanted}")
        models = [self] if speculator is None else [self, *speculator.models]
        turns = take_all((model.turns for model in models), "sample()", self._whole)
        measured = self.meter.call(sum(map(len, rows.tokens)))
        generation = Generation(self.decoder, rows, repeats, rules, eos)
        steps = self.options.chunk if self.decoder.loops else 1
        steps = steps if streamer is None else min(STREAMED, steps)
        with turns, streaming(streamer, seen.ids[: len(rows.tokens)]) as put, measured as call:
            if speculator is None:
                blocks = generate(generation, count, steps, seen.process)
            else:
                blocks = speculator.blocks(generation, count)
            for tokens in seen.read(call.timed(blocks), generation):
                put(tokens)
            call.new_tokens = seen.made

    def _room(self, rows: Rows, sequence_length: int, columns: int) -> int:
        """How many tokens are to be made after so many columns. InputError where there is no room for them."""
        count, end = sequence_length - columns, int(rows.end.max())
        if (rows.slots != np.arange(len(rows.slots))).any():
            raise InputError(f"start_ids wants the slots 0, 1, … in order for sample(), got {rows.slots.tolist()}")
        if count < 1:
            wanted = f"more than the {columns} columns of the prompt"
            raise InputError(f"sequence_length wants to be {wanted}, got {sequence_length}")
        if end + count > self.options.buckets.longest:
            raise InputError(
                f"n_positions={self.options.buckets.longest} is the longest sequence this model takes; "
                f"sequence_length={sequence_length} needs {end + count}"
            )
        return count

    def _read(self, input_ids: Integers, **where: Integers | None) -> Rows:
        vocab_size, longest, slots = self.config.vocab_size, self.options.buckets.longest, self.options.batch_size
        named = {name for name, value in where.items() if value is not None}
        if self.neuron_config.padding_side == "right" and named and "attention_mask" not in named:
            ids = where["cache_ids"], where["start_ids"]
            return read_slots(input_ids, *ids, vocab_size=vocab_size, longest=longest, slots=slots)
        rows = read_rows(input_ids, vocab_size=vocab_size, longest=longest, **where)
        if len(rows.tokens) > slots:
            raise InputError(f"batch_size={slots} is what this model takes, got {len(rows.tokens)} rows")
        return rows

    def _repeats(self, rows: Rows) -> int:
        """How many sequences each prompt serves."""
        fits = len(rows.tokens) == self.options.prompt_batch_size and not rows.start.any()
        return self.options.repeats if fits and self._broadcasts else 1
