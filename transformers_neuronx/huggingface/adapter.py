"""Hugging Face's `generate()` for a compiled model.

Generation is the code of Transformers. This file gives it a model to call, and a cache object whose keys and values
stay on the devices.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, suppress
from typing import Any

import numpy as np
import torch
from transformers import CONFIG_MAPPING, GenerationConfig, PreTrainedConfig, PreTrainedModel
from transformers.generation.utils import GenerationMixin
from transformers.modeling_outputs import BaseModelOutput, CausalLMOutputWithPast, Seq2SeqLMOutput
from transformers.utils.generic import ModelOutput, TransformersKwargs

from transformers_neuronx.config import Configuration
from transformers_neuronx.errors import ConfigError, InputError
from transformers_neuronx.huggingface.device_cache import CACHE, GENERATE, DeviceCache, cache_of
from transformers_neuronx.huggingface.speech import SpeechGeneration
from transformers_neuronx.huggingface.vision import VisionGeneration
from transformers_neuronx.models.encoder_decoder import EncoderDecoderForSampling
from transformers_neuronx.models.sampling import ForSampling
from transformers_neuronx.models.vision import VisionForSampling
from transformers_neuronx.support.torch_threads import ONE_TORCH_THREAD
from transformers_neuronx.support.turns import Turns

# Arguments that Transformers' models may take. They are refused: ignoring them would change the result silently.
EMBEDDED = {"inputs_embeds", "decoder_inputs_embeds", "labels"}
REFUSED = (TransformersKwargs.__optional_keys__ | EMBEDDED) - {"position_ids"}


class HuggingFaceGenerationModelAdapter(PreTrainedModel, GenerationMixin):  # type: ignore[no-untyped-call]
    """A Transformers model that runs on a compiled one, for Transformers' `generate()`.

    - `config`: the Hugging Face configuration of the checkpoint that `model` was made from. If its `name_or_path` has
      a `generation_config.json`, that gives the defaults of `generate()`.
    - `model`: the compiled model. Call its `to_neuron` before `generate()`.

    The number of prompts, times `num_beams` or `num_return_sequences`, must be at most the model's `batch_size`. The
    class is `EncoderDecoderAdapter` with an encoder, `SpeechAdapter` for Whisper, and `VisionAdapter` with images.

    Raises ConfigError if the model has `log_softmax_scores` in its NeuronConfig: `generate()` needs logits alone.
    """

    model: ForSampling
    main_input_name = "input_ids"
    _mask_name = "attention_mask"  # of the sequences that are continued
    # The configuration may name any attention or experts: Transformers' own code for them never runs.
    _supports_sdpa = _supports_flash_attn = _supports_flex_attn = True

    @classmethod
    def _can_set_experts_implementation(cls) -> bool:
        return True

    def __new__(cls, config: PreTrainedConfig | Configuration, model: ForSampling) -> HuggingFaceGenerationModelAdapter:
        if isinstance(model, EncoderDecoderForSampling):
            cls = SpeechAdapter if config.model_type == "whisper" else EncoderDecoderAdapter
        elif isinstance(model, VisionForSampling):
            cls = VisionAdapter
        return super().__new__(cls)

    def __init__(self, config: PreTrainedConfig | Configuration, model: ForSampling) -> None:
        if isinstance(config, Configuration):
            config = CONFIG_MAPPING[config.model_type].from_dict(config.to_dict())
        if model.switches.log_softmax_scores:
            raise ConfigError("log_softmax_scores must be off for generate(): with it, forward() returns a pair")
        super().__init__(config)
        self.model = model
        self._columns: int | None = None  # columns of the prompt of the current generate()
        self._steps: DeviceCache | None = None  # for callers that keep no cache
        if config.name_or_path:
            with suppress(OSError):  # there may be none
                self.generation_config = GenerationConfig.from_pretrained(config.name_or_path, local_files_only=True)

    @property
    def device(self) -> torch.device:
        """The device of ids and logits: the CPU."""
        return torch.device("cpu")

    @property
    def dtype(self) -> torch.dtype:
        """The type of the logits: float32."""
        return torch.float32

    def reset_generation(self) -> None:
        """Start new sequences at the next `prepare_inputs_for_generation`. `generate` does not need this."""
        self._steps = None

    def _reorder_cache(self, past: Any, beam_idx: torch.Tensor) -> Any:
        """Give row `i` the sequence of row `beam_idx[i]`. `past` may be the cache, or anything else."""
        if isinstance(past, DeviceCache):
            past.reorder_cache(beam_idx)
        else:
            self.model.reorder_cache(beam_idx)
        return past

    def prepare_inputs_for_generation(  # type: ignore[override]
        self,
        input_ids: torch.Tensor,
        next_sequence_length: int | None = None,
        past_key_values: DeviceCache | None = None,
        attention_mask: torch.Tensor | int | None = None,
        cache: DeviceCache | None = None,
        **kwargs: Any,
    ) -> dict[str, Any]:
        """Return the arguments of `forward` for the next step, as Transformers' method does.

        Callers that step by themselves need not keep the cache: sequences continue until `reset_generation`.
        `input_ids` are then the next column, several columns with an `attention_mask` over all, or all columns so far.
        """
        mask = attention_mask if isinstance(attention_mask, torch.Tensor) else None  # a 1 means no padding
        cache = past_key_values if cache is None else cache
        stepping = cache is None and kwargs.get("use_cache") is not False and not self._generates
        if stepping and not self.config.is_encoder_decoder:
            if self._steps is None or not self._steps.goes_on(input_ids, mask):
                self._steps = DeviceCache(self.model)
            cache, columns = self._steps, self._steps.columns
            input_ids = input_ids[:, columns:] if input_ids.shape[1] > max(columns, 1) else input_ids
            kwargs = dict(logits_to_keep=1) | kwargs
        inputs: Any = input_ids, next_sequence_length, cache, mask
        return super().prepare_inputs_for_generation(*inputs, **kwargs)  # type: ignore[no-any-return, misc]

    @property
    def _generates(self) -> bool:
        return bool(self.model.turns.within(GENERATE))

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """Generate tokens as Transformers' `generate` does, with its arguments and its result.

        Torch uses one thread during the call. Raises InputError if the rows exceed `batch_size` or `max_length` exceeds
        `n_positions`, for `guidance_scale` and arguments other than ids and masks, and for an `assistant_model` that
        wraps the same model.
        """
        assistant = kwargs.get("assistant_model")
        if isinstance(assistant, HuggingFaceGenerationModelAdapter) and assistant.model is self.model:
            raise InputError("assistant_model must wrap another model: both would write to the same caches")
        with ONE_TORCH_THREAD, self.model.turns.take(GENERATE), self.model.meter.call() as call:
            self._columns = None
            result = super().generate(*args, **kwargs)  # type: ignore[misc]
            ids = (result if isinstance(result, torch.Tensor) else result.sequences)[:, self._columns :]
            ends = torch.isin(ids, torch.tensor(self.model.eos_token_ids))
            call.new_tokens = int((ends.cumsum(1) - ends.long() == 0).sum())  # up to and including each row's end
        return result

    def _validate_model_kwargs(self, model_kwargs: dict[str, Any]) -> None:
        _refuse(model_kwargs)
        super()._validate_model_kwargs(model_kwargs)  # type: ignore[misc]

    def _prepare_cache_for_generation(  # type: ignore[override]
        self, generation_config: Any, model_kwargs: dict[str, Any], mode: Any, batch_size: int, *_: Any
    ) -> None:
        """Check the limits and create the cache: Transformers calls this last before it generates."""
        self._check_limits(generation_config, model_kwargs.get(self._mask_name), batch_size)
        generation_config.prefill_chunk_size = None  # long prompts are fed in windows anyway
        if generation_config.use_cache is not False and model_kwargs.get(CACHE) is None:
            model_kwargs[CACHE] = DeviceCache(self.model)

    def _check_limits(self, options: Any, mask: torch.Tensor | None, prompts: int) -> None:
        if options.guidance_scale not in (None, 1):
            raise InputError(
                f"guidance_scale={options.guidance_scale} is not supported: each row would need a second sequence "
                "in the same caches; use a logits_processor with a second model, or guidance_scale=1"
            )
        rows = prompts * max(options.num_beams, options.num_return_sequences)
        if rows > self.model.options.batch_size:
            raise InputError(
                f"batch_size={self.model.options.batch_size} is the most rows this model takes, got {rows}: {prompts} "
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
        cache_ids: torch.Tensor | None = None,
        start_ids: torch.Tensor | None = None,
        cache: DeviceCache | None = None,
        **others: Any,
    ) -> ModelOutput | tuple[Any, ...]:
        """Feed tokens. Return their logits and the cache for the next call.

        - `input_ids`: s64[batch, n], the columns after those of `cache`.
        - `attention_mask`: [batch, all columns so far], zero for padding. None: the new columns have no padding.
        - `cache`: what the previous call returned. None, the default, starts new sequences. `past_key_values` is the
          same, as Transformers called it until 5.23.
        - `use_cache`: False returns no cache. Default True.
        - `logits_to_keep`: return the logits of this many last columns, or of the columns in a tensor. 0, the default,
          returns all.
        - `return_dict`: False returns a tuple. Default True.
        - `cache_ids`, `start_ids`: with one of them, the model is called with it, and only the logits of the last
          column are returned.

        Returns a `CausalLMOutputWithPast` with `logits` f32[batch, columns kept, vocab] and the cache. Raises
        InputError for a cache that another call has replaced, and for arguments that the model cannot serve.
        """
        with self._turn:
            if cache_ids is not None or start_ids is not None:
                logits = self.model.run(
                    _ids(input_ids), output_all_logits=False, cache_ids=cache_ids, start_ids=start_ids
                )
                facts: dict[str, Any] = dict(logits=logits[:, None])
            else:
                others |= dict(past_key_values=past_key_values, cache=cache)
                facts = self._step(input_ids, attention_mask, use_cache, logits_to_keep, **others)
        output = CausalLMOutputWithPast(**facts)
        return output.to_tuple() if return_dict is False else output

    @property
    def _turn(self) -> AbstractContextManager[None]:
        turns: Turns = self.model.turns
        return turns.take("forward() of the adapter", within=GENERATE)

    def _step(
        self,
        input_ids: torch.Tensor | None,
        attention_mask: torch.Tensor | None,
        use_cache: bool | None = None,
        logits_to_keep: int | torch.Tensor = 0,
        past_key_values: DeviceCache | None = None,
        cache: DeviceCache | None = None,
        **others: Any,
    ) -> dict[str, Any]:
        """Compute the logits and the cache for `forward`."""
        _refuse(others)
        input_ids = _ids(input_ids)
        self._columns = input_ids.shape[1] if self._columns is None else self._columns
        cache = cache_of(self.model, cache, past_key_values)
        if not isinstance(cache, DeviceCache) or cache.model is not self.model:
            raise InputError(f"{CACHE} must be what this model returned, got {type(cache).__name__}")
        if (positions := others.get("position_ids")) is not None:
            cache.check_positions(positions, input_ids, attention_mask)
        last = isinstance(logits_to_keep, int) and logits_to_keep == 1
        logits = cache.feed(input_ids, attention_mask, all_positions=not last)
        if not last:
            logits = logits[:, slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep]
        return {"logits": logits, CACHE: None if use_cache is False else cache}


class _Encoder(torch.nn.Module):
    """The encoder object that `generate()` calls with the sources."""

    model: EncoderDecoderForSampling
    main_input_name = "input_ids"

    def __init__(self, model: EncoderDecoderForSampling) -> None:
        super().__init__()
        object.__setattr__(self, "model", model)  # its weights are the adapter's, not also the encoder's
        if model.model_config.source_sizes:
            self.main_input_name = "input_features"

    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        input_features: torch.Tensor | None = None,
        **others: Any,
    ) -> BaseModelOutput:
        _refuse(others)
        with self.model.turns.take("encode()", within=GENERATE):
            return self.read(input_ids if input_features is None else input_features, attention_mask)

    def read(self, sources: torch.Tensor | None, attention_mask: torch.Tensor | None = None) -> BaseModelOutput:
        if sources is None:
            raise InputError(f"{self.main_input_name} is missing: the encoder needs a source")
        config = self.model.model_config
        # Frames past the end of a sound are read, too, as by Transformers' encoder.
        self.model.read_sources(sources, attention_mask=None if config.source_sizes else attention_mask)
        numbers = torch.from_numpy(self.model.decoder.memory.sources[: len(sources)].copy())[:, None, None]
        return BaseModelOutput(last_hidden_state=numbers.double().expand(-1, config.source_positions or 1, 1))


class EncoderDecoderAdapter(HuggingFaceGenerationModelAdapter):  # type: ignore[no-untyped-call]
    """The adapter of a model with an encoder. The encoder's output stays on the devices.

    In place of the encoder's hidden states, Transformers gets numbers that identify sources: f64[batch, 1, 1]; of
    sources that all have the same positions, f64[batch, positions, 1].
    """

    model: EncoderDecoderForSampling
    encoder: _Encoder
    _mask_name = "decoder_attention_mask"

    def __init__(self, config: PreTrainedConfig | Configuration, model: ForSampling) -> None:
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
        """Feed the decoder's tokens. Return their logits and the cache for the next call.

        - `input_ids`: s64[batch, m], the sources, with `attention_mask` [batch, m], zero for padding.
        - `encoder_outputs`: what the encoder returned for sources; it replaces `input_ids`.
        - `decoder_input_ids`: s64[batch, n], with `decoder_attention_mask` [batch, all columns so far].

        Other arguments are those of `HuggingFaceGenerationModelAdapter.forward`. Returns a `Seq2SeqLMOutput`. Raises
        InputError also if other sources have replaced those of `encoder_outputs`.
        """
        with self._turn:
            if encoder_outputs is None:
                encoder_outputs = self.encoder.read(input_ids, attention_mask)
            self._look_at(encoder_outputs[0][:, 0, 0].long().numpy())
            facts = self._step(decoder_input_ids, decoder_attention_mask, logits_to_keep=logits_to_keep, **options)
        output: Any = Seq2SeqLMOutput(**facts, encoder_last_hidden_state=encoder_outputs[0])
        return tuple(output.to_tuple()) if return_dict is False else output

    def _look_at(self, numbers: np.ndarray[Any, Any]) -> None:
        """Let each row attend to the source with its number."""
        decoder = self.model.decoder
        sources = decoder.memory.sources
        found = sources == numbers[:, None]
        if not found.any(1).all():
            raise InputError("encoder_outputs are no longer on the devices: another call has replaced them")
        slots = np.arange(decoder.slots)
        slots[: len(numbers)] = np.where(sources[: len(numbers)] == numbers, slots[: len(numbers)], found.argmax(1))
        decoder.redirect(slots)


class VisionAdapter(VisionGeneration, HuggingFaceGenerationModelAdapter):  # type: ignore[no-untyped-call, misc]
    """The adapter of a model that reads images: `generate()` takes all that a processor of Transformers returns."""

    model: VisionForSampling


class SpeechAdapter(SpeechGeneration, EncoderDecoderAdapter):  # type: ignore[no-untyped-call]
    """The adapter of Whisper, with the `generate()` of Transformers' `WhisperForConditionalGeneration`."""

    main_input_name = "input_features"

    def forward(  # type: ignore[override]
        self,
        input_features: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        decoder_input_ids: torch.Tensor | None = None,
        decoder_attention_mask: torch.Tensor | None = None,
        encoder_outputs: ModelOutput | tuple[Any, ...] | None = None,
        logits_to_keep: int | torch.Tensor = 0,
        return_dict: bool | None = None,
        **options: Any,
    ) -> ModelOutput | tuple[Any, ...]:
        """Feed the decoder's tokens, as `EncoderDecoderAdapter.forward` does.

        - `input_features`: f32[batch, mel bins, frames], the sources. `attention_mask` changes nothing.
        """
        ids, mask, read = decoder_input_ids, decoder_attention_mask, encoder_outputs
        return super().forward(input_features, None, ids, mask, read, logits_to_keep, return_dict, **options)


def _ids(input_ids: torch.Tensor | None) -> torch.Tensor:
    if input_ids is None:
        raise InputError("input_ids is missing: a compiled model takes token ids")
    return input_ids


def _refuse(options: dict[str, Any]) -> None:
    for name in sorted(REFUSED & options.keys()):
        if options[name] is not None and options[name] is not False:
            raise InputError(f"{name} is not supported: a compiled model takes token ids and a mask, returns logits")
