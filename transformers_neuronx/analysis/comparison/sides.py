"""The two kinds of models that can be compared: those of this package, and those of Transformers.

A side reads a text in pieces, twice: for logits, with the programs that serve it, and for the states between its parts.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch

from transformers_neuronx.engine.decoder import Array, Decoder
from transformers_neuronx.engine.inputs import Rows
from transformers_neuronx.errors import ConfigError
from transformers_neuronx.huggingface.device_cache import CACHE
from transformers_neuronx.models.sampling import ForSampling
from transformers_neuronx.pyhlo.dtypes import numpy_to_torch
from transformers_neuronx.runtimes.base import DeviceTensor
from transformers_neuronx.weights.checkpoint import checkpoint_of
from transformers_neuronx.weights.reading import Sharded

if TYPE_CHECKING:
    from transformers import PreTrainedModel

DTYPES = {torch.float32: "f32", torch.float16: "f16", torch.bfloat16: "bf16"}


class Side(Protocol):
    """What a comparison needs of a model. `rounded` are the types that it rounds to, except `quant`, the type of
    quantized weights. `sizes` are those of the vocabulary, the number of layers, and the hidden size.
    """

    name: str
    rounded: frozenset[str]
    quant: str | None
    sizes: tuple[int, ...]
    longest: float

    def begin(self) -> None:
        """Start a text."""
        ...

    def logits(self, tokens: Array) -> Array:
        """Return the logits after each of the next tokens, f32[n, vocab]."""
        ...

    def states(self, tokens: Array) -> list[Array]:
        """Return the states after the embedding and each layer, f32[n, hidden], and the logits. Call `logits` for all
        pieces of the text first.
        """
        ...

    def runs_as(self, decoder: Decoder) -> bool:
        """Whether it runs the same programs as `decoder`, so that equal weights give equal bits."""
        ...

    def weights_for(self, decoder: Decoder) -> Iterable[Sharded] | None:
        """Return its weights as the devices of `decoder` would hold them, or None if unknown. Raises CheckpointError
        if `decoder` needs other weights.
        """
        ...


class Ours:
    """A model of this package."""

    def __init__(self, model: ForSampling) -> None:
        if model.family.encoder:
            raise ConfigError(f"a comparison needs models without an encoder, got {type(model).__name__}")
        self.decoder, self.checkpoint = model.decoder, model.checkpoint
        options, config = model.options, model.model_config
        quant, cache = options.quant, options.kv_cache_quant
        self.quant = quant.quant_dtype if quant else None
        activations = quant.activation_dtype if quant else None
        caches = cache.quant_dtype if cache else None
        self.rounded = frozenset(dtype for dtype in (options.amp, activations, caches) if dtype)
        degree, runtime = options.tp_degree if options.tp_degree > 1 else None, model.switches.runtime
        told: dict[str, Any] = dict(
            weights=self.quant, activations=activations, caches=caches, tp=degree, runtime=runtime
        )
        self.name = ", ".join([model.tag, options.amp, *(f"{name} {value}" for name, value in told.items() if value)])
        self.sizes: tuple[int, ...] = (config.vocab_size, config.n_layer, config.hidden_size)
        self.longest: float = options.buckets.longest
        self.fed = 0

    def begin(self) -> None:
        self.decoder.reset()
        self.fed = 0

    def logits(self, tokens: Array) -> Array:
        rows = Rows([tokens], np.array([self.fed]), np.ones((1, len(tokens)), bool), np.array([0]))
        self.fed += len(tokens)
        logits: Array = self.decoder.feed(rows, all_positions=True)[0]
        return logits

    def states(self, tokens: Array, given: Sequence[Array] | None = None) -> list[Array]:
        """With `given` states of the whole text, each part gets as input the given output of the part before it."""
        windows, end = [], self.fed + len(tokens)
        while self.fed < end:
            left = tokens[self.fed - end :]
            window = left[: self.decoder.options.buckets.active(len(left))]
            after = self.fed + len(window)
            here = [state[self.fed : after] for state in given] if given else None
            windows.append(_layer_states(self.decoder, window, self.fed, end, here))
            self.fed = after
        return [np.concatenate(part) for part in zip(*windows, strict=True)]

    def runs_as(self, decoder: Decoder) -> bool:
        one, other = ((d.family, d.config, d.options, dict(d.runtime.fingerprint)) for d in (self.decoder, decoder))
        return one == other

    def weights_for(self, decoder: Decoder) -> Iterable[Sharded] | None:
        """Return those on its devices if their layout is the same, else those of its checkpoint, if it has one."""
        here, there = (
            (d.family, d.config, d.options.amp, d.options.quant, d.programs.degree, d.programs.panels)
            for d in (self.decoder, decoder)
        )
        if here == there:
            return (Sharded([key], "", partial(_shards, tensor)) for key, tensor in self.decoder.weights.items())
        return decoder.read(self.checkpoint) if self.checkpoint else None


def _layer_states(decoder: Decoder, ids: Array, start: int, end: int, replaced: Sequence[Array] | None) -> list[Array]:
    """Feed ids s32[n], at most a context bucket, to slot 0 from position `start`, layer by layer.

    Returns the outputs of the embedding and of each layer, f32[n, h], and the logits, f32[n, vocab]. Each part after
    the embedding takes the next of `replaced`, if given, in place of the output before it. `end` is as in `StepInputs`.
    """
    count, (parts, packed) = len(ids), decoder.layerwise(ids, start, end)
    outputs: list[Array] = []

    def between(out: DeviceTensor) -> DeviceTensor:
        state = out.numpy()
        outputs.append(state.reshape(-1, state.shape[2])[:count].astype(np.float32))
        if replaced is None or len(outputs) == len(parts):
            return out
        state = state.copy()
        state.reshape(-1, state.shape[2])[:count] = replaced[len(outputs) - 1]
        return decoder.runtime.put([state])

    with decoder.guarded():
        decoder.execute(parts, decoder.runtime.put([packed]), between=between)
    return outputs


def _shards(tensor: DeviceTensor) -> list[torch.Tensor]:
    return [numpy_to_torch(shard.copy()) for shard in tensor.shards()]


class HuggingFace:
    """A model of Transformers. It runs once, and the states between its parts are kept."""

    quant: str | None = None
    longest = math.inf

    def __init__(self, model: PreTrainedModel) -> None:
        self.model, config = model, model.config.get_text_config()
        if model.training:
            raise ConfigError(f"a comparison needs a model without dropout: call eval() on {type(model).__name__}")
        if model.dtype not in DTYPES:
            raise ConfigError(f"a comparison needs a reference in {', '.join(DTYPES.values())}, got {model.dtype}")
        dtype = DTYPES[model.dtype]
        self.rounded = frozenset([dtype])
        self.name = f"{model.name_or_path or type(model).__name__} in Transformers, {dtype}"
        self.sizes: tuple[int, ...] = (config.vocab_size, config.num_hidden_layers, config.hidden_size)
        decoder: Any = model.get_decoder()  # type: ignore[no-untyped-call]  # a tower has layers, too
        lists = (each for each in decoder.modules() if isinstance(each, torch.nn.ModuleList))
        found = next((each for each in lists if len(each) == config.num_hidden_layers), None)
        if found is None:
            raise ConfigError(f"{type(model).__name__} has no list of its {config.num_hidden_layers} layers")
        self.layers = list(found)
        self.seen: list[list[Array]] = []
        self.begin()

    def begin(self) -> None:
        self.past: Any = None
        self.again = iter(self.seen)

    def logits(self, tokens: Array) -> Array:
        states: list[Array] = []

        def note(value: Any) -> None:
            state = value[0] if isinstance(value, tuple) else value  # older layers return a tuple
            states.append(state[0].float().cpu().numpy())

        def before(_: Any, args: Any, named: Any) -> None:
            note(args or named["hidden_states"])

        with ExitStack() as hooks, torch.inference_mode():
            hooks.callback(self.layers[0].register_forward_pre_hook(before, with_kwargs=True).remove)
            for layer in self.layers:
                hooks.callback(layer.register_forward_hook(lambda *call: note(call[-1])).remove)
            ids = torch.from_numpy(tokens[None]).to(self.model.device)
            out = self.model(ids, use_cache=True, **{CACHE: self.past}, **self._positions(ids))
        self.past = getattr(out, CACHE)
        note(out.logits)
        self.seen.append(states)
        return states[-1]

    def _positions(self, ids: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the positions, which Bamba's code needs: without any, it begins at 0 in every call."""
        if self.model.config.model_type != "bamba":
            return {}
        first = self.past.get_seq_length() if self.past else 0
        return dict(position_ids=torch.arange(first, first + ids.shape[1], device=ids.device)[None])

    def states(self, tokens: Array) -> list[Array]:
        return next(self.again)

    def runs_as(self, decoder: Decoder) -> bool:
        return False

    def weights_for(self, decoder: Decoder) -> Iterable[Sharded] | None:
        """Return None if its weights are rounded, and not as the decoder would round them."""
        rounds_alike = self.rounded == {decoder.options.amp} and decoder.options.quant is None
        return decoder.read(checkpoint_of(self.model)) if rounds_alike or self.rounded == {"f32"} else None
