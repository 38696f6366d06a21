"""Models as users hold them: made from a checkpoint, brought to the devices, called, sampled from.

This file owns the loop over tokens. It knows no family: a subclass names one.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar, Protocol, Self

import numpy as np
import torch
from tqdm import tqdm

from transformers_neuronx.config import Buckets, CompileOptions, NeuronConfig
from transformers_neuronx.decoder import Decoder, Family
from transformers_neuronx.errors import ConfigError, InputError
from transformers_neuronx.inputs import Integers, Rows, integers, read_rows
from transformers_neuronx.module import Checkpoint, load_config, open_checkpoint
from transformers_neuronx.runtimes import get_runtime


class Streamer(Protocol):
    """What takes tokens as they come: Hugging Face's `TextStreamer` is one."""

    def put(self, value: torch.Tensor) -> None: ...
    def end(self) -> None: ...


class ForSampling:
    """A decoder of one family, compiled for fixed shapes.

    `config` is a Hugging Face configuration, or its attributes as a dictionary. `n_positions` is the longest
    sequence, or the sizes that token programs are compiled for; by default what the model was trained for, or 2048.
    `batch_size` sequences are generated at once, from prompts of which `prompt_batch_size` are encoded at once; when
    it is the smaller, each prompt serves several sequences. `amp` is the type of activations, weights and cache:
    f32, bf16 or f16. `tp_degree` devices share each layer. `context_length_estimate` is the number of prompt tokens
    that one program encodes, or several; 0 is one by one; `init_n_active_tokens` is an older name of it. `unroll` and
    `context_unroll` are the layers per program. With `reorder_cache`, beams have their program compiled beforehand,
    not when first needed. `tag` names the model in what is shown of it.
    """

    family: ClassVar[Family]

    def __init__(
        self,
        config: Any,
        *,
        n_positions: int | Sequence[int] | None = None,
        batch_size: int = 1,
        prompt_batch_size: int | None = None,
        amp: str = "f32",
        tp_degree: int = 1,
        unroll: int | None = None,
        context_length_estimate: int | Sequence[int] | str | None = None,
        context_unroll: int | None = None,
        init_n_active_tokens: int | None = None,
        neuron_config: NeuronConfig | None = None,
        reorder_cache: bool = False,
        tag: str | None = None,
    ) -> None:
        attributes = dict(config) if isinstance(config, Mapping) else config.to_dict()
        self.config = self.family.read_config(attributes)
        self.eos_token_ids = _token_ids(attributes.get("eos_token_id"))
        self.neuron_config = neuron_config or NeuronConfig()
        self.tag = tag or type(self).__name__
        self.reorders = reorder_cache
        trained = self.config.n_positions
        context = init_n_active_tokens if context_length_estimate is None else context_length_estimate
        buckets = Buckets.of(trained or 2048 if n_positions is None else n_positions, context)
        if trained is not None and buckets.longest > trained:
            raise ConfigError(f"n_positions={buckets.longest} is more than the {trained} the model was made with")
        self.options = CompileOptions(
            buckets=buckets,
            batch_size=batch_size,
            prompt_batch_size=batch_size if prompt_batch_size is None else prompt_batch_size,
            amp=amp,
            tp_degree=tp_degree,
            unroll=unroll,
            context_unroll=context_unroll,
        )
        self._checkpoint: Checkpoint | None = None
        self._decoder: Decoder | None = None

    @classmethod
    def from_pretrained(cls, path_or_name: str | os.PathLike[str], **options: Any) -> Self:
        """A model for the checkpoint in a directory, or of that name on the Hugging Face hub.

        The directory is one of Transformers' (safetensors or `pytorch_model.bin`, sharded or not) or one that
        `save_pretrained_split` made. `options` are those of the constructor. Weights are read by `to_neuron`.
        """
        model = cls(load_config(path_or_name), **options)
        model._checkpoint = open_checkpoint(path_or_name)
        return model

    @property
    def decoder(self) -> Decoder:
        """The engine below. Raises ConfigError before `to_neuron`."""
        if self._decoder is None:
            raise ConfigError(f"{self.tag} is not on a device yet: call to_neuron() first")
        return self._decoder

    def to_neuron(self) -> None:
        """Load the weights and compile the programs, showing progress on a terminal."""
        if self._checkpoint is None:
            raise ConfigError(f"{self.tag} has no weights: make it with from_pretrained")
        runtime = get_runtime(self.neuron_config.runtime, self.options.tp_degree)
        decoder = Decoder(self.family, self.config, runtime, self.options)
        count = len(decoder.shared_table) + len(decoder.layer_table) * self.config.n_layer
        with tqdm(total=count, desc=f"{self.tag}: loading weights", disable=None, leave=False) as bar:
            decoder.load(self._checkpoint, lambda name: bar.update())
        shapes = decoder.planned()
        with tqdm(total=len(shapes), desc=f"{self.tag}: compiling programs", disable=None, leave=False) as bar:
            decoder.compile(shapes, lambda shape: bar.update())
        if self.reorders or self.options.repeats > 1:
            decoder.compile_reorder()
        self._decoder = decoder

    def reset(self) -> None:
        """Forget all sequences. Calls do not need it: a prompt starts a sequence anew."""
        self.decoder.reset()

    def reorder_cache(self, rows: Integers) -> None:
        """Row `i` goes on with the sequence of row `rows[i]`, as beams do. rows [up to batch_size]"""
        source = np.arange(self.options.batch_size)
        chosen = integers("reorder_cache", rows, 1)
        if len(chosen) > self.options.batch_size or chosen.min() < 0 or chosen.max() >= self.options.batch_size:
            raise InputError(
                f"reorder_cache wants rows below batch_size={self.options.batch_size}, got {chosen.tolist()}"
            )
        source[: len(chosen)] = chosen
        self.decoder.reorder(source)

    def forward(
        self,
        input_ids: Integers,
        cache_ids: Integers | None = None,
        start_ids: Integers | None = None,
        attention_mask: Integers | None = None,
        output_all_logits: bool | None = None,
    ) -> torch.Tensor:
        """Logits after the last token of each row, f32[batch, vocab].

        input_ids [batch, n] start new sequences, or go on with those of the last call: then cache_ids, [n] or
        [batch, n], are the columns of the tokens, counted from the start of the padded prompt, and start_ids [batch]
        how many of them are padding on the left. In place of both, attention_mask [batch, columns so far] has zeros
        for padding, on whatever side it is.

        With output_all_logits, which the NeuronConfig may have as its default, logits after every token, f32[batch, n,
        vocab], where those of padding are zeros.
        """
        rows = self._read(input_ids, cache_ids=cache_ids, start_ids=start_ids, attention_mask=attention_mask)
        every = self.neuron_config.output_all_logits if output_all_logits is None else output_all_logits
        logits = self._encode(rows, broadcast=not rows.start.any(), every=every)
        if not every:
            return torch.from_numpy(logits[:, 0])
        columns = np.zeros((len(logits), *rows.real.shape[1:], self.config.vocab_size), np.float32)
        for row, real in enumerate(np.tile(rows.real, (len(logits) // len(rows.real), 1))):
            columns[row, real] = logits[row, : real.sum()]
        return torch.from_numpy(columns)

    __call__ = forward

    def sample(
        self,
        input_ids: Integers,
        sequence_length: int,
        start_ids: Integers | None = None,
        top_k: int = 50,
        top_p: float = 1.0,
        temperature: float = 1.0,
        eos_token_override: int | None = None,
        streamer: Streamer | None = None,
        attention_mask: Integers | None = None,
        seed: int | None = None,
    ) -> torch.Tensor:
        """The prompts and what the model makes of them, s64[batch, up to sequence_length].

        Each token is drawn from the `top_k` likeliest, and of those from the fewest whose probabilities reach
        `top_p`; `top_k=1` is greedy. A row that has come to its end-of-sequence token repeats it; generation stops
        when all have, or at `sequence_length` columns, prompt and padding included. `eos_token_override` is another
        end-of-sequence token, -1 for none. `streamer` gets the prompt and then each step's tokens. The same `seed`
        draws the same tokens.
        """
        choose = Chooser(top_k, top_p, temperature, seed)
        eos = self.eos_token_ids if eos_token_override is None else _token_ids(eos_token_override)
        rows = self._read(input_ids, start_ids=start_ids, attention_mask=attention_mask)
        ids = torch.from_numpy(integers("input_ids", input_ids, 2))
        count = sequence_length - ids.shape[1]
        self._check_room(sequence_length, count, int(rows.end.max()))
        with _ended(streamer):
            if streamer is not None:
                streamer.put(ids)
            output = [ids.repeat(self._repeats(rows), 1)]
            for tokens in self._generate(rows, count, choose, eos):
                output.append(tokens[:, None])
                if streamer is not None:
                    streamer.put(tokens)
        return torch.cat(output, 1)

    def _check_room(self, sequence_length: int, count: int, end: int) -> None:
        if count < 1:
            wanted = f"more than the {sequence_length - count} columns of the prompt"
            raise InputError(f"sequence_length wants to be {wanted}, got {sequence_length}")
        if end + count > self.options.buckets.longest:
            raise InputError(
                f"n_positions={self.options.buckets.longest} is the longest sequence this model takes; "
                f"sequence_length={sequence_length} needs {end + count}"
            )

    def _generate(self, rows: Rows, count: int, choose: Chooser, eos: list[int]) -> Iterator[torch.Tensor]:
        """Up to `count` times the next token of every row, s64[batch]; a row past its end repeats it."""
        logits = torch.from_numpy(self._encode(rows, broadcast=True)[:, 0])
        position = np.tile(rows.end, self._repeats(rows))
        done = torch.zeros(len(logits), dtype=torch.bool)
        for left in reversed(range(count)):
            tokens = choose(logits)
            if eos:
                tokens = torch.where(done, eos[0], tokens)
                done |= torch.isin(tokens, torch.tensor(eos))
            yield tokens
            if done.all() or not left:
                return
            column = tokens.numpy()[:, None]
            logits = torch.from_numpy(self._feed(Rows(list(column), position, np.ones_like(column, bool)))[:, 0])
            position = position + 1

    def _read(self, input_ids: Integers, **where: Integers | None) -> Rows:
        rows = read_rows(input_ids, vocab_size=self.config.vocab_size, longest=self.options.buckets.longest, **where)
        if len(rows.tokens) > self.options.batch_size:
            raise InputError(
                f"batch_size={self.options.batch_size} is what this model takes, got {len(rows.tokens)} rows"
            )
        return rows

    def _repeats(self, rows: Rows) -> int:
        """How many sequences each prompt serves."""
        return self.options.repeats if len(rows.tokens) == self.options.prompt_batch_size else 1

    def _encode(self, rows: Rows, broadcast: bool, every: bool = False) -> np.ndarray[Any, Any]:
        """Logits as `_feed` has them; a prompt that serves several sequences is copied to their slots."""
        repeats = self._repeats(rows)
        if not broadcast or repeats == 1:
            return self._feed(rows, every=every)
        logits = self._feed(rows, self.options.prompt_batch_size, every)
        self.decoder.reorder(np.tile(np.arange(self.options.prompt_batch_size), repeats))
        return np.tile(logits, (repeats, 1, 1))

    def _feed(self, rows: Rows, slots: int | None = None, every: bool = False) -> np.ndarray[Any, Any]:
        """Logits after the last token of each row, or after `every` one; long rows go in several windows.

        -> f32[batch, 1 or the longest row, vocab]
        """
        slots = slots or self.options.batch_size
        lengths = np.zeros(slots, np.int64)
        lengths[: len(rows.tokens)] = [len(row) for row in rows.tokens]
        start = np.zeros(slots, np.int64)
        start[: len(rows.tokens)] = rows.start
        logits = np.zeros((slots, lengths.max() if every else 1, self.config.vocab_size), np.float32)
        fed = np.zeros(slots, np.int64)
        while (fed < lengths).any():
            left = lengths - fed
            active = 1 if left.max() == 1 else self.options.buckets.active(int(left.max()))
            now = np.minimum(left, active)
            ids = np.zeros((slots, active), np.int64)
            for row, tokens in enumerate(rows.tokens):
                ids[row, : now[row]] = tokens[fed[row] : fed[row] + now[row]]
            out = self.decoder.run(ids, start + fed, now, start + lengths, every)
            for row in range(len(rows.tokens)):
                if every:
                    logits[row, fed[row] : fed[row] + now[row]] = out[row, : now[row]]
                elif now[row] and fed[row] + now[row] == lengths[row]:
                    logits[row] = out[row]
            fed += now
        return logits[: len(rows.tokens)]


class Chooser:
    """Draws one token per row from logits, reproducibly."""

    def __init__(self, top_k: int, top_p: float, temperature: float, seed: int | None) -> None:
        if top_k < 1:
            raise InputError(f"top_k wants at least 1, got {top_k}")
        if not 0 < top_p <= 1:
            raise InputError(f"top_p wants to be above 0 and at most 1, got {top_p}")
        if not temperature > 0:
            raise InputError(f"temperature wants to be above 0, got {temperature}; greedy choice is top_k=1")
        self.top_k = top_k
        self.top_p = top_p
        self.temperature = temperature
        self.generator = torch.Generator()
        self.generator.seed() if seed is None else self.generator.manual_seed(seed)

    def __call__(self, logits: torch.Tensor) -> torch.Tensor:
        """Logits f32[batch, vocab] -> s64[batch]"""
        if self.top_k == 1:
            return logits.argmax(-1)
        values, ids = logits.topk(min(self.top_k, logits.shape[-1]), -1)
        probabilities = torch.softmax(values / self.temperature, -1)
        before = probabilities.cumsum(-1) - probabilities
        probabilities = probabilities.masked_fill(before >= self.top_p, 0)
        drawn = torch.multinomial(probabilities, 1, generator=self.generator)
        return ids.gather(-1, drawn)[:, 0]


def _token_ids(value: int | Sequence[int] | None) -> list[int]:
    """Token ids as configurations have them: none, one or several; -1 is none."""
    return [i for i in ([] if value is None else [value] if isinstance(value, int) else value) if i >= 0]


@contextmanager
def _ended(streamer: Streamer | None) -> Iterator[None]:
    """A streamer is told of the end however generation ends."""
    try:
        yield
    finally:
        if streamer is not None:
            streamer.end()
