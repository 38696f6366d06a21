"""Models as users make them: from a checkpoint, with options, brought to the devices, saved.

It knows no family: a subclass names one. What a model is called with is for `sampling`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import fields
from typing import Any, ClassVar, Self

from transformers_neuronx.config import Buckets, CompileOptions, NeuronConfig, completed, token_ids
from transformers_neuronx.decoder import Decoder
from transformers_neuronx.errors import ConfigError
from transformers_neuronx.keys import ProgramKey
from transformers_neuronx.metrics import Meter, Metrics
from transformers_neuronx.module import Checkpoint, PathOrName, load_config, open_weights
from transformers_neuronx.origin import Marked
from transformers_neuronx.programs import Family
from transformers_neuronx.progress import bar
from transformers_neuronx.rules import Rules
from transformers_neuronx.runtimes import get_runtime
from transformers_neuronx.serialization import Artifact, holds_artifact, open_artifact, save_artifact
from transformers_neuronx.turns import Turns
from transformers_neuronx.weights import expand


class Model:
    """A decoder of one family, compiled for fixed shapes.

    `config` is a Hugging Face configuration, or its attributes as a dictionary. `n_positions` is the longest
    sequence, or the sizes that token programs are compiled for; by default what the model was trained for, or 2048.
    `batch_size` sequences are generated at once, from prompts of which `prompt_batch_size` are encoded at once; when
    it is the smaller, each prompt serves several sequences. `amp` is the type of activations, weights and cache:
    f32, bf16 or f16. `tp_degree` devices share each layer. `context_length_estimate` is the number of prompt tokens
    that one program encodes, or several; 0 is one by one; `init_n_active_tokens` is an older name of it. `unroll` and
    `context_unroll` are the layers per program. `reorder_cache` changes nothing: beams need no option. `tag` names the
    model in what is shown of it. `neuron_config` has what is not of one model; its `continuous_batching` says
    `batch_size`, and has prompts encoded one at a time.
    """

    family: ClassVar[Family]
    engine: ClassVar[type[Decoder]] = Decoder
    _checkpoint: Checkpoint | None = None
    _artifact: Artifact | None = None
    _decoder: Decoder | None = None
    _compiled: Decoder | None = None  # perhaps without weights

    def __init__(
        self,
        config: Any,
        *,
        n_positions: int | Sequence[int] | None = None,
        batch_size: int | None = None,
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
        self._attributes = completed(config if isinstance(config, Mapping) else config.to_dict())
        self.config = self.family.read_config(self._attributes)
        self.eos_token_ids = token_ids(self.config.eos_token_id)
        self.neuron_config = neuron_config or NeuronConfig()
        self.tag = tag or type(self).__name__
        self.meter = Meter()
        self.turns = Turns(self.tag)
        self._also: dict[Hashable, Callable[[Decoder], Sequence[ProgramKey]]] = {}  # to compile besides what is planned
        context = init_n_active_tokens if context_length_estimate is None else context_length_estimate
        self.options = CompileOptions(
            buckets=self._buckets(n_positions, context),
            **self._batch_sizes(batch_size, prompt_batch_size),
            amp=amp,
            tp_degree=tp_degree,
            unroll=unroll,
            context_unroll=context_unroll,
            chunk=self.neuron_config.tokens_per_dispatch,
            workers=self.neuron_config.compilation_worker_count,
            quant=self.neuron_config.quant,
            kv_cache_quant=self.neuron_config.kv_cache_quant,
        )
        self._rules().packed(self.options.batch_size)

    def _batch_sizes(self, batch_size: int | None, prompt_batch_size: int | None) -> dict[str, int]:
        if batching := self.neuron_config.continuous_batching:
            batch_size = batching.batch_size(batch_size)
        rows = 1 if batch_size is None else batch_size
        prompts = (1 if batching else rows) if prompt_batch_size is None else prompt_batch_size
        return dict(batch_size=rows, prompt_batch_size=prompts)

    def _buckets(self, n_positions: int | Sequence[int] | None, context: int | Sequence[int] | str | None) -> Buckets:
        trained, batching = self.config.n_positions, self.neuron_config.continuous_batching
        promised = batching.max_model_len if batching else None
        buckets = Buckets.of(promised or trained or 2048 if n_positions is None else n_positions, context)
        if trained is not None and buckets.longest > trained:
            raise ConfigError(f"n_positions={buckets.longest} is more than the {trained} the model was made with")
        if promised is not None and buckets.longest < promised:
            raise ConfigError(f"n_positions={buckets.longest} wants to be max_model_len={promised} or more")
        return buckets

    @classmethod
    def from_pretrained(
        cls,
        path_or_name: PathOrName,
        *,
        weights: PathOrName | None = None,
        cache_dir: PathOrName | None = None,
        **options: Any,
    ) -> Self:
        """A model for the checkpoint in a directory, or of that name on the Hugging Face hub.

        The directory is one of Transformers' (safetensors or `pytorch_model.bin`, sharded or not), one that
        `save_pretrained_split` made, or one that `save` made with weights, of which an option that is not given is
        taken. `options` are those of the constructor. Weights are read by `to_neuron`, from there or from `weights`,
        another checkpoint or a single file of one. `cache_dir` is where the hub's models are kept.
        """
        if not holds_artifact(path_or_name):
            model = cls(load_config(path_or_name, cache_dir), **options)
            model._checkpoint = open_weights(path_or_name if weights is None else weights, cache_dir)
            return model
        artifact = open_artifact(path_or_name)
        model = cls(artifact.attributes(cls.family), **artifact.options() | options)
        artifact.check(cls.family, model.config, model.options)
        model._artifact = artifact
        if weights is not None and artifact.has_weights:
            raise ConfigError(f"the artifact {os.fspath(path_or_name)} has weights of its own, got others: {weights}")
        model._checkpoint = None if weights is None else open_weights(weights, cache_dir)
        return model

    def save(self, directory: str | os.PathLike[str], sharded_weights: bool = False) -> None:
        """Save the programs compiled so far, and with `sharded_weights` the weights as the devices have them.

        An earlier artifact there is replaced at the end or not at all. What is saved is machine code: `load` it from
        where you would run a program. ConfigError where nothing can be written, StorageError where the disk is why.
        """
        decoder = self._made
        if sharded_weights and not decoder.weights:
            self._take(decoder, self._source())
        save_artifact(directory, decoder, self._attributes, sharded_weights)

    def load(self, directory: str | os.PathLike[str]) -> None:
        """Let `to_neuron` take programs, and weights if they are there, from what `save` has made of such a model.

        Programs that are not there, or are for another processor or version of the engine, are compiled. ConfigError
        lists what is different in the model that was saved, and names tensors where the artifact has the weights of
        another checkpoint than this model, as far as `transformers_neuronx.origin` can tell. CheckpointError names the
        file that is damaged.
        """
        if self.is_on_device:
            raise ConfigError(f"{self.tag} is on a device already: load() comes before to_neuron()")
        artifact = open_artifact(directory)
        artifact.check(self.family, self.config, self.options)
        artifact.check_weights(self._checkpoint or self._artifact, self.family.weights.PREFIX)
        self._artifact = artifact

    _save_compiled_artifacts, _load_compiled_artifacts = save, load

    @property
    def decoder(self) -> Decoder:
        """The engine below. Raises ConfigError before `to_neuron`."""
        if self._decoder is None:
            raise ConfigError(f"{self.tag} is not on a device yet: call to_neuron() first")
        return self._decoder

    @property
    def is_on_device(self) -> bool:
        """Whether `to_neuron` has brought it there."""
        return self._decoder is not None

    @property
    def _made(self) -> Decoder:
        """The one on its devices, or else the one that was only compiled."""
        return self._decoder or self._compiled or self.decoder

    @property
    def metrics(self) -> Metrics:
        """What the last call took, and all so far, and what is held on the devices."""
        decoder = self._made
        measured = self.meter.last, self.meter.totals
        return Metrics(self.tag, *measured, decoder.compile_seconds, decoder.load_seconds, decoder.memory_use)

    def to_neuron(self) -> None:
        """Load the weights and compile the programs, showing progress on a terminal.

        Weights that can be used as they lie in a file stay there: it may be deleted then, but not be written to.
        """
        with self.turns.take("to_neuron()"):
            source = self._source()
            decoder = self._new_decoder(device=True)
            self._compile(decoder, lambda: self._take(decoder, source))
            self._decoder = decoder

    def cpu_compile(self, weights: bool = False) -> None:
        """Compile the programs, on a machine that may have no device to run them: `save` them then.

        Where they are to run, `load` takes them, and `to_neuron` brings them and the weights to the devices. Weights
        that are to be saved as well are read by `save`, or, with `weights`, here meanwhile.
        """
        source = self._source() if weights else None
        decoder = self._new_decoder(device=False)
        self._compile(decoder, lambda: self._take(decoder, source) if source else None)
        self._compiled = decoder

    @property
    def programs(self) -> list[str]:
        """The names of the programs compiled so far."""
        decoder = self._made
        return sorted(module.name for module, _ in decoder.executables.values())

    def _source(self) -> Artifact | Checkpoint:
        """Where the weights are."""
        artifact = self._artifact
        source = artifact if artifact and artifact.has_weights else self._checkpoint
        if source is None:
            raise ConfigError(f"{self.tag} has no weights: make it with from_pretrained, of what has some")
        return source

    def _take(self, decoder: Decoder, source: Artifact | Checkpoint) -> None:
        """Bring the weights to where the decoder wants them."""
        marked = source if isinstance(source, Artifact) else Marked(source, self.family.weights.PREFIX)
        incoming = marked.weights(decoder) if isinstance(marked, Artifact) else decoder.read(marked)
        count = len(list(expand(decoder.programs.table, self.config.n_layer)))
        with bar(f"{self.tag}: weights ", count) as read:
            decoder.take(incoming, lambda _: read.update())
        decoder.origin = marked.marks

    def _new_decoder(self, device: bool) -> Decoder:
        runtime = get_runtime(self.neuron_config.runtime, self.options.tp_degree, device)
        decoder = self.engine(self.family, self.config, runtime, self.options)
        decoder.source = self._artifact.programs(decoder) if self._artifact else None
        return decoder

    def compile_also(self, purpose: Hashable, wanted: Callable[[Decoder], Sequence[ProgramKey]]) -> None:
        """Compile programs besides those that are planned: now, or, of a model that is on no device yet, with them.

        Those of one `purpose` are asked for once, however often it comes up.
        """
        self._also[purpose] = wanted
        if self.is_on_device:
            with self.turns.take("compile_also()"):
                self._compile(self.decoder)

    def _compile(self, decoder: Decoder, overlap: Callable[[], object] = lambda: None) -> None:
        wanted = [*decoder.planned(), *(what for wanted in self._also.values() for what in wanted(decoder))]
        missing = decoder.missing(wanted)
        with bar(f"{self.tag}: programs", len(missing)) as built:
            decoder.compile(missing, lambda _: built.update(), overlap)

    def _rules(self, *values: Any) -> Rules:
        """The fields of `Rules` in order; in place of None is what on_device_generation says."""
        default = self.neuron_config.on_device_generation
        named = {f.name: value for f, value in zip(fields(Rules), values, strict=False) if value is not None}
        return Rules(**(default.rules() if default else {}) | named)

    @property
    def _broadcasts(self) -> bool:
        """Whether a prompt may serve several sequences: never where callers name the slots."""
        return self.options.repeats > 1 and self.neuron_config.padding_side == "left"
