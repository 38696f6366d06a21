"""EAGLE heads as they are published, for an engine's `draft`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from transformers_neuronx.config import Buckets
from transformers_neuronx.engine.decoder import Decoder
from transformers_neuronx.engine.family import Family
from transformers_neuronx.errors import ConfigError
from transformers_neuronx.serving.draft_heads import DraftHead
from transformers_neuronx.serving.paged_slots import decoder_of
from transformers_neuronx.speculation.eagle import first, graph
from transformers_neuronx.speculation.eagle.config import EagleConfig, FirstConfig
from transformers_neuronx.speculation.eagle.weights import FirstTable, Table
from transformers_neuronx.weights.checkpoint import Checkpoint, open_checkpoint
from transformers_neuronx.weights.directories import PathOrName, load_config
from transformers_neuronx.weights.reading import Key
from transformers_neuronx.weights.rows import Weight, matrix_of

SHARED = {"embed": "embed_tokens.weight", "head.weight": "lm_head.weight"}  # as tables and heads name them
NESTED = "transformer_layer_config"  # what the library speculators has of the layer


def is_head(path_or_name: PathOrName, cache_dir: PathOrName | None = None) -> bool:
    """Whether a checkpoint is that of an EAGLE head. Raises CheckpointError if there is none."""
    attributes = load_config(path_or_name, cache_dir)
    single = attributes.get("num_hidden_layers") == 1  # otherwise its weights need not be opened
    return _is_third(attributes) or (single and "fc.weight" in _names(open_checkpoint(path_or_name, cache_dir)))


def _is_third(attributes: Mapping[str, Any]) -> bool:
    """Whether a configuration says that it is of EAGLE-3."""
    told = [*(attributes.get("architectures") or ()), attributes.get("speculators_model_type")]
    return any("eagle3" in str(name).lower() for name in told) or "draft_vocab_size" in attributes


def _names(checkpoint: Checkpoint) -> set[str]:
    return {name.rpartition("model.")[2] for name in checkpoint}


class EagleDraft(DraftHead):
    """An EAGLE head: drafts for the model that it was trained with, in an `Engine` or a `SpeculativeGenerator`.

    One of EAGLE-3 is a layer of LLaMA's that reads the model's hidden states of three depths, and may draft a part of
    the vocabulary. One of the first EAGLE reads the last hidden states. One without an embedding, or without an output
    layer in the first EAGLE, has the model's. Its own weights are loaded when an engine is made, in the type of the
    model's activations.
    """

    def __init__(self, attributes: Mapping[str, Any], checkpoint: Checkpoint) -> None:
        self.checkpoint, self.names = checkpoint, _names(checkpoint)
        third = _is_third(attributes) or any(name.endswith("hidden_norm.weight") for name in self.names)
        self.config = (EagleConfig if third else FirstConfig).from_hf(attributes)

    @classmethod
    def from_pretrained(cls, path_or_name: PathOrName, cache_dir: PathOrName | None = None) -> EagleDraft:
        """Open a head: a directory, or the name of one on the Hugging Face hub, in the form of EAGLE's authors, which
        vLLM and SGLang read, or in that of speculators.

        Raises CheckpointError if it is damaged, and ConfigError if it is no EAGLE head that is supported.
        """
        attributes = load_config(path_or_name, cache_dir)
        attributes |= attributes.pop("eagle_config", None) or {}
        if NESTED in attributes:
            own = {name: value for name, value in attributes.items() if not isinstance(value, Mapping)}
            attributes = {"norm_before_residual": True, **own, **attributes[NESTED]}
        return cls(attributes, open_checkpoint(path_or_name, cache_dir))

    @property
    def tag(self) -> str:
        return f"{type(self).__name__} {self.checkpoint.directory}"

    def depths_in(self, model: Any) -> tuple[int, ...]:
        config, own = model.decoder.config, self.config
        depths = own.depths_in(config.n_layer)
        if config.undivided or model.decoder.memory.layout or not model.decoder.programs.reads_pages:
            raise ConfigError(f"{self.tag}: a draft head needs a decoder whose cache can be in pages, got {model.tag}")
        if (own.of_size, own.vocab_size) != (config.hidden_size, config.vocab_size):
            wanted = f"a model of hidden size {own.of_size} and {own.vocab_size} tokens"
            found = f"{config.hidden_size} and {config.vocab_size}"
            raise ConfigError(f"{self.tag} is for {wanted}, and {model.tag} has {found}")
        if isinstance(own, EagleConfig) and not all(0 <= depth < config.n_layer for depth in depths):
            raise ConfigError(f"{self.tag} reads layers {list(depths)}, and {model.tag} has {config.n_layer}")
        return depths

    def decoder_for(self, model: Any) -> Decoder:
        self.depths_in(model)
        target = model.decoder
        may = SHARED if isinstance(self.config, FirstConfig) else [*SHARED][:1]
        missing = [name for name in may if SHARED[name] not in self.names]
        rows = [row for row in target.programs.table if matrix_of(row.name) in missing]
        if missing and self.config.hidden_size != target.config.hidden_size:
            raise ConfigError(f"{self.tag} has no embedding, and that of {model.tag} has another size")
        buckets = Buckets((target.options.buckets.longest,), ())
        plain = dict(quant=None, kv_cache_quant=None, sparse=None, score=None, score_tokens=(), patches=())
        options = replace(
            target.options, buckets=buckets, batch_size=1, prompt_batch_size=1, head=True, unroll=None,
            context_unroll=None, expert_parallel=False, shard_over_sequence=False, **plain,
        )  # fmt: skip
        decoder = decoder_of(self._family(rows), self.config, target.runtime, options)
        shared: list[Key] = [(None, row.name) for row in rows]
        decoder.take(decoder.read(self.checkpoint, shared))
        decoder.weights.update({key: target.weights[key] for key in shared})
        return decoder

    def _family(self, shared: Sequence[Weight]) -> Family:
        """Return the head as a family, with these rows of the model."""
        if isinstance(self.config, FirstConfig):
            told = self.config.combined_bias
            table = FirstTable(shared, biased="fc.bias" in self.names if told is None else told)
            return Family(FirstConfig.from_hf, table, first, prepare=first.prepare)
        return Family(EagleConfig.from_hf, Table(shared, "d2t" in self.names), graph, prepare=graph.prepare)
