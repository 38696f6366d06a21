"""Models and their options: created from a checkpoint, compiled, loaded onto devices, saved.

This file knows no family: a subclass names one. Calls of a model are in `sampling`.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Hashable, Sequence
from copy import deepcopy
from dataclasses import fields, replace
from typing import Any, ClassVar, Self

from transformers_neuronx.config import (
    Blocks,
    Buckets,
    CompileOptions,
    Configuration,
    NeuronConfig,
    amp_and_quant,
    completed,
    token_ids,
)
from transformers_neuronx.config.published import form_of
from transformers_neuronx.engine.artifact_saving import save_artifact
from transformers_neuronx.engine.artifacts import Artifact, holds_artifact, open_artifact
from transformers_neuronx.engine.decoder import Decoder
from transformers_neuronx.engine.descriptions import description, modules_of
from transformers_neuronx.engine.family import Family
from transformers_neuronx.engine.keys import ProgramKey
from transformers_neuronx.engine.metrics import Meter, Metrics
from transformers_neuronx.engine.rules import Rules
from transformers_neuronx.errors import ConfigError
from transformers_neuronx.models.block_calls import check_blocks, check_runtime
from transformers_neuronx.models.weight_loading import fill
from transformers_neuronx.runtimes import get_runtime
from transformers_neuronx.runtimes.base import Runtime
from transformers_neuronx.serving.paged_slots import decoder_of
from transformers_neuronx.support.arguments import mention_unknown, path_in, take_in_order
from transformers_neuronx.support.progress import bar
from transformers_neuronx.support.turns import Turns
from transformers_neuronx.weights.adapters import open_adapted
from transformers_neuronx.weights.checkpoint import Checkpoint
from transformers_neuronx.weights.directories import PathOrName, load_config
from transformers_neuronx.weights.outputs import settled
from transformers_neuronx.weights.published import switches_of
from transformers_neuronx.weights.reading import expand
from transformers_neuronx.weights.stored_module import PretrainedModel, Readers

_AS_GIVEN = ("kv_cache_quant", "shard_over_sequence", "expert_parallel")  # switches that are also CompileOptions
_SWITCHES = [switch.name for switch in fields(NeuronConfig)]


class Model(PretrainedModel):
    """A decoder of one family, compiled for fixed shapes. The arguments of the constructor:

    - `config`: a Hugging Face configuration, or its attributes as a dictionary.
    - `n_positions`: the longest sequence in tokens, or a list of the numbers of positions that single-token programs
      are compiled for; one number stands for 128, 256, … up to it. Default: `max_model_len` of continuous batching, or
      what the model was trained for, or 2048.
    - `batch_size`: sequences that are generated at a time. Default 1, or that of continuous batching.
    - `prompt_batch_size`: prompts that one program takes. It must divide `batch_size`, and if it is smaller, each
      prompt serves several sequences. Default: `batch_size`, or 1 with continuous batching.
    - `amp`: type of activations, weights and caches: "f32" (default), "bf16" or "f16".
    - `tp_degree`: number of devices that share each layer, from 1 to 64. Default 1.
    - `unroll`, `context_unroll`: layers per program, for single tokens and for prompts. Default: all.
    - `context_length_estimate`: prompt tokens that one program takes, or a list of such sizes; 0 feeds prompts token by
      token, and "whole" is the longest sequence. Default: half of each size of `n_positions`.
    - `init_n_active_tokens`: an older name of `context_length_estimate`, used if that is None.
    - `neuron_config`: options such as quantization and the runtime. Default: `NeuronConfig()`.
    - `reorder_cache`: accepted and ignored, since beam search needs no option.
    - `prefixed_length`: number of tokens that all prompts begin with, which `set_prefixed` feeds once. Default 0.
    - `tag`: name of the model in messages and metrics. Default: the name of its class.

    Raises ConfigError for a configuration or an option that is not supported, and for options that contradict each
    other. Nothing is compiled or loaded before `to_neuron`.
    """

    family: ClassVar[Family]
    _weights: Checkpoint | Artifact | None = None
    _artifact: Artifact | None = None  # has programs
    _decoder: Decoder | None = None
    _compiled: Decoder | None = None  # may have no weights

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        take_in_order(cls)

    def __init__(
        self,
        config: Any,
        *,
        n_positions: int | Sequence[int] | None = None,
        batch_size: int | Sequence[int] | None = None,
        prompt_batch_size: int | None = None,
        amp: str | None = "f32",
        tp_degree: int = 1,
        unroll: int | None = None,
        context_length_estimate: int | Sequence[int] | str | None = None,
        context_unroll: int | None = None,
        init_n_active_tokens: int | None = None,
        neuron_config: NeuronConfig | None = None,
        reorder_cache: bool = False,
        prefixed_length: int = 0,
        tag: str | None = None,
        **unknown: Any,
    ) -> None:
        super().__init__()
        mention_unknown(type(self).__name__, unknown, _OPTIONS, _SWITCHES)
        self.config = Configuration(completed(config, self.family.images))
        self.neuron_config = neuron_config or NeuronConfig()
        self.tag = tag or type(self).__name__
        self.meter = Meter()
        self.turns = Turns(self.tag)
        self.prefixed_length = prefixed_length
        self._also: dict[Hashable, Callable[[Decoder], Sequence[ProgramKey]]] = {}  # more programs to compile
        context = init_n_active_tokens if context_length_estimate is None else context_length_estimate
        self._sizes = n_positions, context, batch_size, prompt_batch_size
        self._amp = amp
        self._choices: dict[str, Any] = dict(tp_degree=tp_degree, unroll=unroll, context_unroll=context_unroll)
        self._settle()

    def _settle(self) -> None:
        """Take over the values that the configurations have now: they may be changed until the model is compiled."""
        self.model_config = self.family.read_config(self.config.to_dict())
        self.config.complete(self.model_config)
        table = self.family.weights.table(self.model_config)
        outputs = settled(self.config, self.checkpoint, table, self.family.weights.PREFIX)
        self.switches = deepcopy(self.neuron_config)
        n_positions, context, batch_size, prompt_batch_size = self._sizes
        amp, quant = amp_and_quant(self._amp, vars(self.config).get("dtype"), self.switches.quant)
        if quant is None and (form := form_of(self.config.to_dict())):
            quant = switches_of(form, table, self.model_config.n_layer)
        self.options = CompileOptions(
            buckets=self._buckets(n_positions, context),
            **self._batch_sizes(batch_size, prompt_batch_size),  # type: ignore[arg-type]
            **self._choices,
            amp=amp,
            quant=quant,
            chunk=self.switches.tokens_per_dispatch,
            workers=self.switches.compilation_worker_count,
            **{name: getattr(self.switches, name) for name in _AS_GIVEN},
            blocks=self._blocks(),
            **vars(outputs),
        )
        if pattern := self.switches.sparse_attn:
            self.options = replace(self.options, sparse=pattern.pattern(self.options.buckets.longest))
        if self.options.blocks is not None:
            samples = self.switches.on_device_generation is not None
            check_blocks(self.tag, self.family, self.model_config, self.options, samples)
        self._rules().check(self.options.batch_size)

    def _blocks(self) -> Blocks | None:
        """The blocks that callers give to sequences, if they do."""
        batching = self.switches.continuous_batching
        if batching is None or batching.blocks is None:
            return None
        return replace(batching.blocks, all_logits=self.switches.output_all_logits)

    def _batch_sizes(self, batch_size: int | Sequence[int] | None, prompt_batch_size: int | None) -> dict[str, int]:
        asked = batch_size if batch_size is None or isinstance(batch_size, int) else max(batch_size)
        if batching := self.switches.continuous_batching:
            asked = batching.batch_size(asked)
        rows = 1 if asked is None else asked
        prompts = (1 if batching else rows) if prompt_batch_size is None else prompt_batch_size
        return dict(batch_size=rows, prompt_batch_size=prompts)

    def _buckets(self, n_positions: int | Sequence[int] | None, context: int | Sequence[int] | str | None) -> Buckets:
        trained, batching = self.model_config.n_positions, self.switches.continuous_batching
        promised = batching.max_model_len if batching else None
        buckets = Buckets.of(promised or trained or 2048 if n_positions is None else n_positions, context)
        if trained is not None and buckets.longest > trained:
            raise ConfigError(f"n_positions={buckets.longest} is more than the {trained} the model was trained with")
        if promised is not None and buckets.longest < promised:
            raise ConfigError(f"n_positions must be at least max_model_len={promised}, got {buckets.longest}")
        return buckets

    @classmethod
    def from_pretrained(
        cls,
        path_or_name: PathOrName | None = None,
        *values: Any,
        weights: PathOrName | None = None,
        cache_dir: PathOrName | None = None,
        adapter: PathOrName | None = None,
        **options: Any,
    ) -> Self:
        """Create a model from a checkpoint. Weights are read later, by `to_neuron`.

        - `path_or_name`: a directory, a GGUF file, or the name of a model on the Hugging Face hub. The directory may be
          one of Transformers (safetensors or `pytorch_model.bin`, sharded or not), of `save_pretrained_split`, or of
          `save`; options that are not given are then those of the saved model.
        - `weights`: another checkpoint, or a single file of weights, to read the weights from. Default: `path_or_name`.
        - `cache_dir`: directory for models of the hub. Default: the hub's own cache.
        - `adapter`: directory of a LoRA adapter that PEFT has saved, which is merged into the weights as they are read.
        - `values`, `options`: the other arguments of the constructor.

        Raises CheckpointError if a file is missing or damaged, and ConfigError for options as the constructor does, for
        a saved model that differs from the options, and for `weights` or an `adapter` if the saved model has weights.
        """
        path_or_name = path_in(path_or_name, options)
        if not holds_artifact(path_or_name):
            model = cls(load_config(path_or_name, cache_dir, cls.family.images), *values, **options)
            model._weights = open_adapted(weights or path_or_name, cache_dir, adapter, cls.family.images)
            return model
        artifact = open_artifact(path_or_name)
        model = cls(artifact.attributes(cls.family), *values, **artifact.options() | options)
        artifact.check(cls.family, model.model_config, model.options)
        if (other := weights or adapter) and (artifact.has_weights or weights is None):
            why = "has its own weights, got others:" if artifact.has_weights else "needs weights=… for the adapter"
            raise ConfigError(f"the artifact {os.fspath(path_or_name)} {why} {other}")
        model._artifact = artifact
        if artifact.has_weights:
            model._weights = artifact
        elif weights is not None:
            model._weights = open_adapted(weights, cache_dir, adapter, cls.family.images)
        return model

    def save(self, directory: str | os.PathLike[str], sharded_weights: bool = False) -> None:
        """Save the programs compiled so far to `directory`, as an artifact that `load` and `from_pretrained` take.

        With `sharded_weights`, also save the weights, split for the devices. Default False. An earlier artifact in the
        directory is replaced completely, or is unchanged after an error. An artifact holds machine code: load it only
        from sources whose programs you would run.

        Raises ConfigError before `to_neuron` or `cpu_compile`, if the directory cannot be used, and for a model on the
        devices of several processes; StorageError if the disk is full or fails.
        """
        decoder = self._made
        if sharded_weights and not decoder.weights:
            self._take(decoder, self._source())
        save_artifact(directory, decoder, self.config.to_dict(), sharded_weights)

    def load(self, directory: str | os.PathLike[str]) -> None:
        """Let `to_neuron` take programs, and weights if present, from the artifact in `directory`.

        `to_neuron` compiles programs that are missing, or that are for another processor or engine version.

        Raises ConfigError after `to_neuron`, if the saved model differs from this one (the message lists the
        differences), or if the artifact's weights are from another checkpoint, as far as `weights.origin` can tell.
        Raises CheckpointError if a file is missing or damaged.
        """
        if self.is_on_device:
            raise ConfigError(f"{self.tag} is already on a device: call load() before to_neuron()")
        artifact = open_artifact(directory)
        self._settle()
        artifact.check(self.family, self.model_config, self.options)
        artifact.check_weights(self._weights, self.family.weights.PREFIX)
        self._artifact = artifact
        if artifact.has_weights:
            self._weights = artifact

    def use_weights(self, checkpoint: Checkpoint) -> None:
        """Let `to_neuron` read the weights of this checkpoint. Raises ConfigError after `to_neuron`."""
        if self.is_on_device:
            raise ConfigError(f"{self.tag} is already on a device: give it weights before to_neuron()")
        self._weights = checkpoint

    @property
    def description(self) -> dict[str, Any]:
        """Family, configuration and options in the types of JSON, as an artifact has them."""
        return description(self.family, self.model_config, self.options)

    @property
    def checkpoint(self) -> Checkpoint | None:
        """The checkpoint that the weights are from, unless they are those of an artifact."""
        return self._weights if isinstance(self._weights, Checkpoint) else None

    @property
    def stored(self) -> Readers:
        """The weights of the checkpoint or artifact: for each name, a function that reads it."""
        return self._weights.readers if self._weights else {}

    @property
    def eos_token_ids(self) -> list[int]:
        """The tokens that end a sequence, as the configuration has them."""
        return token_ids(self.config.eos_token_id)

    @property
    def decoder(self) -> Decoder:
        """The engine of the model. Raises ConfigError before `to_neuron`."""
        if self._decoder is None:
            raise ConfigError(f"{self.tag} is not on a device yet: call to_neuron() first")
        return self._decoder

    @property
    def is_on_device(self) -> bool:
        """Whether `to_neuron` has loaded the model onto its devices."""
        return self._decoder is not None

    @property
    def _made(self) -> Decoder:
        """The engine on the devices, or else the one that was only compiled."""
        return self._decoder or self._compiled or self.decoder

    @property
    def metrics(self) -> Metrics:
        """Measurements of the last call and of all calls, seconds of compiling and loading, and bytes on devices.

        Raises ConfigError before `to_neuron` or `cpu_compile`.
        """
        decoder = self._made
        measured = self.meter.last, self.meter.totals
        return Metrics(self.tag, *measured, decoder.store.compile_seconds, decoder.load_seconds, decoder.memory_use)

    def to_neuron(self, ahead: bool | Sequence[int] = True) -> None:
        """Load the weights and compile the programs. Shows progress on a terminal.

        - `ahead`: compile all programs that calls need. Default True. False: each is compiled when a call first needs
          it, enough for an `Engine` over pages, which has its own. Or lengths of prompts: those that `sample` needs
          for one prompt of such a length at a time.

        Weights in a usable layout stay mapped from their file: afterwards it may be deleted, but not written to.

        Raises ConfigError if the model has no weights, CheckpointError if a tensor is missing, damaged or of another
        shape, and EngineError if the runtime is missing or cannot compile a program.
        """
        with self.turns.take("to_neuron()"):
            self._settle()
            source = self._source()
            decoder = self._new_decoder(device=True)
            self._compile(decoder, lambda: self._take(decoder, source), ahead)
            self._decoder = decoder

    def cpu_compile(self, weights: bool = False) -> None:
        """Compile the programs on a machine that may have no device to run them, for `save`.

        On the machine with the devices, call `load` and then `to_neuron`. With `weights`, read the weights while
        programs compile. Default False: `save` reads them if it has to save them. Raises the errors of `to_neuron`.
        """
        self._settle()
        source = self._source() if weights else None
        decoder = self._new_decoder(device=False)
        self._compile(decoder, lambda: self._take(decoder, source) if source else None)
        self._compiled = decoder

    @property
    def programs(self) -> list[str]:
        """The names of the programs compiled so far. Raises ConfigError before `to_neuron` or `cpu_compile`."""
        decoder = self._made
        return sorted(program.name for program in decoder.store.stored.values())

    def _source(self) -> Artifact | Checkpoint:
        """The artifact or checkpoint that has the weights."""
        if self._weights is None:
            raise ConfigError(f"{self.tag} has no weights: create it with from_pretrained from a checkpoint")
        return self._weights

    def _take(self, decoder: Decoder, source: Artifact | Checkpoint) -> None:
        """Load the weights into the decoder."""
        count = len(list(expand(decoder.programs.table, decoder.programs.layers)))
        with bar(f"{self.tag}: weights ", count) as read:
            fill(self, decoder, source, count, lambda _: read.update())

    def _new_decoder(self, device: bool) -> Decoder:
        runtime = get_runtime(self.switches.runtime, self.options.tp_degree, device, self.switches.workers)
        if self.options.blocks is not None:
            check_runtime(runtime)
        decoder = self.decoder_on(runtime)
        decoder.store.source = self._artifact.programs(decoder) if self._artifact else None
        decoder.store.before = modules_of(decoder)
        return decoder

    def decoder_on(self, runtime: Runtime, options: CompileOptions | None = None) -> Decoder:
        """Return a decoder of the model, by default with its own options, on a runtime. It has no weights yet."""
        return decoder_of(self.family, self.model_config, runtime, options or self.options)

    def compile_also(self, purpose: Hashable, wanted: Callable[[Decoder], Sequence[ProgramKey]]) -> None:
        """Compile more programs than the planned ones: now, or together with them if the model is on no device yet.

        `wanted` returns their keys. A later call with the same `purpose` replaces an earlier one.
        """
        self._also[purpose] = wanted
        if self.is_on_device:
            with self.turns.take("compile_also()"):
                self._compile(self.decoder)

    def _compile(
        self, decoder: Decoder, overlap: Callable[[], object] = lambda: None, ahead: bool | Sequence[int] = True
    ) -> None:  # fmt: skip
        planned = decoder.planned() if ahead is True else decoder.planned_for(ahead) if ahead else []
        more = [what for wanted in self._also.values() for what in wanted(decoder)]
        missing = decoder.store.missing([*planned, *more])
        with bar(f"{self.tag}: programs", len(missing)) as built:
            decoder.store.compile(missing, lambda _: built.update(), overlap)

    def _rules(self, *values: Any) -> Rules:
        """Make `Rules` of values in the order of its fields. None takes the value of on_device_generation."""
        default = self.switches.on_device_generation
        named = {f.name: value for f, value in zip(fields(Rules), values, strict=False) if value is not None}
        return Rules(**(default.rules() if default else {}) | named)

    @property
    def _broadcasts(self) -> bool:
        """Whether a prompt may serve several sequences: never if callers name the slots."""
        return self.options.repeats > 1 and self.switches.padding_side == "left"


_OPTIONS = list(inspect.signature(Model.__init__).parameters)
