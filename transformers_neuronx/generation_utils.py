"""Hugging Face's `generate()` for a model on the devices.

Generation is Transformers' own; this file gives it a model to call and a cache to ask, whose keys and values stay
where they are.
"""

from __future__ import annotations

from contextlib import suppress
from threading import Lock
from typing import Any

import numpy as np
import torch
from transformers import GenerationConfig, PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import Cache
from transformers.generation.utils import GenerationMixin
from transformers.modeling_outputs import BaseModelOutput, CausalLMOutputWithPast, Seq2SeqLMOutput
from transformers.utils.generic import ModelOutput, TransformersKwargs

from transformers_neuronx.encoder_decoder import EncoderDecoderForSampling
from transformers_neuronx.errors import ConfigError, InputError
from transformers_neuronx.sampling import ForSampling

# What Transformers' models may take, and ignoring it would give something other than was asked for.
EMBEDDED = {"inputs_embeds", "decoder_inputs_embeds", "labels"}
REFUSED = (TransformersKwargs.__optional_keys__ | EMBEDDED) - {"position_ids"}


class _OneTorchThread:
    """While anything runs inside, torch has one thread; then it has again what it had before.

    Between two operations torch's threads go on spinning for milliseconds, on the cores that the programs need.
    """

    def __init__(self) -> None:
        self._lock = Lock()
        self._inside = self._before = 0

    def __enter__(self) -> None:
        with self._lock:
            if not self._inside:
                self._before = torch.get_num_threads()
                torch.set_num_threads(1)
            self._inside += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._inside -= 1
            if not self._inside:
                torch.set_num_threads(self._before)


_ONE_TORCH_THREAD = _OneTorchThread()


class DeviceCache(Cache):
    """Stands for sequences cached on the devices: how many there are, and of how many columns.

    There is one cache on the devices, so whoever calls the model otherwise takes the place of these sequences.
    """

    is_compileable = False

    def __init__(self, model: ForSampling) -> None:
        super().__init__(layers=[])
        self.model = model
        self.rows = self.columns = 0
        self.drafts = False
        self._left: object = None  # what the devices held after the last call for these sequences

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.columns

    def feed(self, ids: torch.Tensor, mask: torch.Tensor | None, every: bool) -> torch.Tensor:
        """Logits after the last token of each row, or after `every` one: f32[batch, 1 or n, vocab].

        ids [batch, n] are the next columns; mask [batch, all columns] has zeros for padding, None is no padding.
        """
        self._check(len(ids))
        first, (rows, n) = self.columns, ids.shape
        mask = None if mask is None else mask[:, : first + n]
        end = first + n if mask is None else int(mask.sum(1).max())
        cut = n - max(0, end - self.model.options.buckets.longest) if self.drafts else n
        where: dict[str, Any] = dict(cache_ids=np.arange(first, first + cut))
        if mask is not None:
            where = dict(attention_mask=mask[:, : first + cut])
        logits: torch.Tensor = self.model.forward(ids[:, :cut], output_all_logits=every, **where)[:rows]
        self.rows, self.columns, self._left = rows, first + n, self._held()
        if not every:
            return logits[:, None]
        column = torch.arange(n).clamp(max=cut - 1).expand(rows, n)
        if mask is not None:  # after padding what comes after the token before it
            column = torch.where(mask[:, first:] != 0, column, 0).cummax(1).values
        return torch.take_along_dim(logits, column[..., None], 1)

    def crop(self, tokens_to_remove: int) -> None:
        """Take back the last `-tokens_to_remove` columns; what follows is written over them.

        Earlier versions of Transformers 5 say in a positive number how many are to stay.
        """
        left = tokens_to_remove if tokens_to_remove > 0 else self.columns + tokens_to_remove
        self.columns = max(0, min(self.columns, left))

    def activate_past_recording(self) -> None:
        """What is fed from now on are drafts. Those past the longest sequence will be cropped, and need not be run."""
        self.drafts = True

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Row `i` goes on with the sequence of row `beam_idx[i]`."""
        self._check(self.rows)
        self.model.reorder_cache(beam_idx)
        self.rows, self._left = len(beam_idx), self._held()

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        self.reorder_cache(indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        self.reorder_cache(torch.arange(self.rows).repeat_interleave(repeats))

    def reset(self) -> None:
        self.columns = 0

    def check_positions(self, positions: torch.Tensor, ids: torch.Tensor, mask: torch.Tensor | None) -> None:
        """Tokens stand where the mask says, and nowhere else."""
        window = slice(self.columns, self.columns + ids.shape[1])
        mask = torch.ones(len(ids), window.stop) if mask is None else mask
        real = mask[:, window] != 0
        if not torch.equal(positions.expand(ids.shape)[real], (mask.cumsum(1) - 1)[:, window][real].long()):
            raise InputError(f"position_ids want to count the tokens of attention_mask, got {positions.tolist()}")

    def _held(self) -> object:
        return self.model.decoder.caches[-1]  # every program that writes makes it another

    def _check(self, rows: int) -> None:
        if not self.columns:
            return
        if self._left is not self._held():
            raise InputError("past_key_values are no longer on the devices: the model has been called for others since")
        if rows != self.rows:
            raise InputError(f"past_key_values are of {self.rows} rows, got {rows}")


class HuggingFaceGenerationModelAdapter(PreTrainedModel, GenerationMixin):  # type: ignore[no-untyped-call]
    """A Transformers model whose work a compiled one does: `generate()` with all of its options.

    `config` is the Hugging Face configuration of the checkpoint that `model` was made from. The batch that
    `generate()` works on, prompts times beams or returned sequences, is at most the one compiled. Of a model with an
    encoder it is an `EncoderDecoderAdapter`.
    """

    main_input_name = "input_ids"
    _mask_name = "attention_mask"  # of the sequences that go on
    # Whatever attention or experts the configuration names: none of Transformers' runs here.
    _supports_sdpa = _supports_flash_attn = _supports_flex_attn = True

    @classmethod
    def _can_set_experts_implementation(cls) -> bool:
        return True

    def __new__(cls, config: PreTrainedConfig, model: ForSampling) -> HuggingFaceGenerationModelAdapter:
        return super().__new__(EncoderDecoderAdapter if isinstance(model, EncoderDecoderForSampling) else cls)

    def __init__(self, config: PreTrainedConfig, model: ForSampling) -> None:
        if model.neuron_config.log_softmax_scores:
            raise ConfigError("log_softmax_scores has forward() return a pair, and generate() wants logits alone")
        super().__init__(config)
        self.model = model
        self._columns: int | None = None  # that what is generated began with
        if config.name_or_path:
            with suppress(OSError):  # there is none
                self.generation_config = GenerationConfig.from_pretrained(config.name_or_path, local_files_only=True)

    @property
    def device(self) -> torch.device:
        """Where ids and logits are: the host."""
        return torch.device("cpu")

    @property
    def dtype(self) -> torch.dtype:
        """That of the logits."""
        return torch.float32

    def reset_generation(self) -> None:
        """Kept for callers of the original, which needed it between calls."""

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """As Transformers' `generate`, whose own part runs on one thread."""
        self._columns = None
        with _ONE_TORCH_THREAD, self.model.meter.call() as call:
            result = super().generate(*args, **kwargs)  # type: ignore[misc]
            ids = (result if isinstance(result, torch.Tensor) else result.sequences)[:, self._columns :]
            ends = torch.isin(ids, torch.tensor(self.model.eos_token_ids))
            call.new_tokens = int((ends.cumsum(1) - ends.long() == 0).sum())  # up to a row's end, and that
        return result

    def _validate_model_kwargs(self, model_kwargs: dict[str, Any]) -> None:
        _refuse(model_kwargs)
        super()._validate_model_kwargs(model_kwargs)  # type: ignore[misc]

    def _prepare_cache_for_generation(  # type: ignore[override]
        self, generation_config: Any, model_kwargs: dict[str, Any], mode: Any, batch_size: int, *_: Any
    ) -> None:
        """Where Transformers makes the cache, knowing how large: the last step before it generates."""
        self._check_limits(generation_config, model_kwargs.get(self._mask_name), batch_size)
        generation_config.prefill_chunk_size = None  # long prompts go in windows anyway
        if generation_config.use_cache is not False and model_kwargs.get("past_key_values") is None:
            model_kwargs["past_key_values"] = DeviceCache(self.model)

    def _check_limits(self, options: Any, mask: torch.Tensor | None, prompts: int) -> None:
        rows = prompts * max(options.num_beams, options.num_return_sequences)
        if rows > self.model.options.batch_size:
            raise InputError(
                f"batch_size={self.model.options.batch_size} is what this model takes, got {rows} rows: {prompts} "
                f"prompts with num_beams={options.num_beams}, num_return_sequences={options.num_return_sequences}"
            )
        end = options.max_length - (0 if mask is None else int((mask == 0).sum(1).min()))
        if end > self.model.options.buckets.longest:
            raise InputError(
                f"n_positions={self.model.options.buckets.longest} is the longest sequence this model takes; "
                f"max_length={options.max_length} (max_new_tokens={options.max_new_tokens}) needs {end}"
            )

    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        past_key_values: DeviceCache | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | torch.Tensor = 0,
        return_dict: bool | None = None,
        **others: Any,
    ) -> ModelOutput | tuple[Any, ...]:
        """Logits after the last `logits_to_keep` tokens of each row, or after those columns, or all where it is 0.

        input_ids [batch, n] follow the columns that `past_key_values` knows of; attention_mask [batch, all columns].
        """
        _refuse(others)
        if input_ids is None:
            raise InputError("input_ids is missing: it is what a compiled model takes")
        self._columns = input_ids.shape[1] if self._columns is None else self._columns
        cache = DeviceCache(self.model) if past_key_values is None else past_key_values
        if not isinstance(cache, DeviceCache) or cache.model is not self.model:
            raise InputError(f"past_key_values wants those that this model returned, got {type(cache).__name__}")
        if (positions := others.get("position_ids")) is not None:
            cache.check_positions(positions, input_ids, attention_mask)
        last = isinstance(logits_to_keep, int) and logits_to_keep == 1
        logits = cache.feed(input_ids, attention_mask, every=not last)
        if not last:
            logits = logits[:, slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep]
        output = CausalLMOutputWithPast(logits=logits, past_key_values=None if use_cache is False else cache)
        return output.to_tuple() if return_dict is False else output


class EncoderDecoderAdapter(HuggingFaceGenerationModelAdapter):  # type: ignore[no-untyped-call]
    """The same for a model with an encoder: a source goes to the encoder, which keeps what it makes of it.

    What Transformers has as the encoder's hidden states are therefore numbers here, by which the engine knows its
    sources: f64[batch, 1, 1].
    """

    model: EncoderDecoderForSampling
    _mask_name = "decoder_attention_mask"

    def __init__(self, config: PreTrainedConfig, model: ForSampling) -> None:
        super().__init__(config, model)
        self.encoder = _Encoder(self.model)

    def forward(  # type: ignore[override]
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        decoder_input_ids: torch.Tensor | None = None,
        decoder_attention_mask: torch.Tensor | None = None,
        encoder_outputs: ModelOutput | tuple[Any, ...] | None = None,
        logits_to_keep: int | torch.Tensor = 0,
        return_dict: bool | None = None,
        **options: Any,
    ) -> ModelOutput | tuple[Any, ...]:
        """Logits as for a model without an encoder, of decoder_input_ids [batch, n].

        They are about the sources input_ids [batch, m], or those for which the encoder gave `encoder_outputs`.
        """
        if encoder_outputs is None:
            encoder_outputs = self.encoder(input_ids, attention_mask)
        self._look_at(encoder_outputs[0][:, 0, 0].long().numpy())
        output: Any = super().forward(
            decoder_input_ids, decoder_attention_mask, logits_to_keep=logits_to_keep, **options
        )
        facts = dict(past_key_values=output.past_key_values, encoder_last_hidden_state=encoder_outputs[0])
        output = Seq2SeqLMOutput(logits=output.logits, **facts)
        return tuple(output.to_tuple()) if return_dict is False else output

    def _look_at(self, numbers: np.ndarray[Any, Any]) -> None:
        """Have each row look at the source of that number."""
        decoder = self.model.decoder
        found = decoder.sources == numbers[:, None]
        if not found.any(1).all():
            raise InputError("encoder_outputs are no longer on the devices: the model has been called for others since")
        slots = np.arange(decoder.slots)
        slots[: len(numbers)] = np.where(
            decoder.sources[: len(numbers)] == numbers, slots[: len(numbers)], found.argmax(1)
        )
        decoder.redirect(slots)


class _Encoder(torch.nn.Module):
    """What `generate()` calls for the sources."""

    main_input_name = "input_ids"

    def __init__(self, model: EncoderDecoderForSampling) -> None:
        super().__init__()
        self.model = model

    def forward(
        self, input_ids: torch.Tensor | None = None, attention_mask: torch.Tensor | None = None, **others: Any
    ) -> BaseModelOutput:
        _refuse(others)
        if input_ids is None:
            raise InputError("input_ids is missing: the source that the encoder reads")
        self.model.encode(input_ids, attention_mask=attention_mask)
        numbers = torch.from_numpy(self.model.decoder.sources[: len(input_ids)].copy())
        return BaseModelOutput(last_hidden_state=numbers[:, None, None].double())


def _refuse(options: dict[str, Any]) -> None:
    for name in sorted(REFUSED & options.keys()):
        if options[name] is not None and options[name] is not False:
            raise InputError(f"{name} is not supported: a compiled model takes token ids and a mask, and gives logits")
