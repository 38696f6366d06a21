"""Measure two models on a text, and return a `Comparison`.

Both get the same tokens, the greedy tokens of the reference, even after the other model would have chosen differently.
Each part of the model is judged by its output for the reference's hidden states, so errors from earlier parts are not
counted as its own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from transformers_neuronx.analysis.comparison.report import Changed, Comparison, Part, Place
from transformers_neuronx.analysis.comparison.sides import HuggingFace, Ours, Side
from transformers_neuronx.engine.decoder import Array, Decoder
from transformers_neuronx.engine.inputs import Integers, integers, read_rows
from transformers_neuronx.errors import CheckpointError, ConfigError, InputError
from transformers_neuronx.models.sampling import ForSampling
from transformers_neuronx.pyhlo.dtypes import numpy_to_torch

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# Largest error from rounding to a type: in logits, relative to the largest; in the output of a part, relative to its
# norm. Trained models showed from 1/30 to 2/3 of it. Random weights large enough to multiply errors can exceed it.
TOLERANCE = {"f32": 1e-5, "f16": 5e-3, "bf16": 4e-2, "s8": 5e-2, "f8e4m3fn": 1e-1, "s4": 3e-1}


@np.errstate(invalid="ignore")  # numbers that are not finite are reported
def compare(
    model: ForSampling,
    reference: ForSampling | PreTrainedModel,
    tokens: Integers,
    new_tokens: int = 32,
    tolerance: float | None = None,
) -> Comparison:
    """Compare a model on its devices with a reference, another such model or one of Transformers, after every token.

    `tokens` [n] are fed as a prompt, and then one by one the `new_tokens` that the reference generates. By default the
    `tolerance` is the sum of TOLERANCE for all types that either model rounds to, except a type of weights that both
    have. It is 0 if both run the same programs, as nothing is rounded differently then. Models of this package lose
    their sequences. Raises ConfigError unless vocabulary, layers and hidden size are the same, and InputError for a
    text that does not fit.
    """
    ours = Ours(model)
    theirs: Side = Ours(reference) if isinstance(reference, ForSampling) else HuggingFace(reference)
    if ours.sizes != theirs.sizes:
        raise ConfigError(
            "a comparison needs models with the same vocabulary, number of layers and hidden size, got "
            f"{ours.sizes} of {ours.name} and {theirs.sizes} of {theirs.name}"
        )
    prompt = _read(tokens, new_tokens, ours, theirs)
    text, wanted = _continued(theirs, prompt, new_tokens)
    got = np.concatenate(_fed(ours, ours.logits, text))
    states = _over(theirs, theirs.states, text)
    so_far = _over(ours, ours.states, text)
    own = _over(ours, lambda piece: ours.states(piece, states[:-1]), text)
    for side in (ours, theirs):
        side.begin()
    return Comparison(
        ours.name,
        theirs.name,
        len(prompt),
        _rounding(ours, theirs) if tolerance is None else tolerance,
        list(_places(got, wanted)),
        list(_parts(so_far, own, states)),
        _changed(ours.decoder, theirs),
    )


def _rounding(ours: Ours, theirs: Side) -> float:
    """Return the tolerance for all types that either model rounds to, and for types of weights that only one has."""
    if theirs.runs_as(ours.decoder):
        return 0.0
    types = ours.rounded | theirs.rounded
    if ours.quant != theirs.quant:
        types |= {quant for quant in (ours.quant, theirs.quant) if quant}
    return sum(TOLERANCE[dtype] for dtype in types)


def _read(tokens: Integers, new_tokens: int, *sides: Side) -> Array:
    """Return the prompt s64[n], if all of the text fits."""
    ids = integers("tokens", tokens, 1)
    longest, wanted = min(side.longest for side in sides), len(ids) + new_tokens
    if new_tokens < 0 or wanted > longest:
        raise InputError(f"the models take n_positions={longest}, got {len(ids)} tokens and new_tokens={new_tokens}")
    [prompt] = read_rows(ids[None], vocab_size=sides[0].sizes[0], longest=wanted).tokens
    return prompt


def _continued(side: Side, prompt: Array, count: int) -> tuple[list[Array], Array]:
    """Return the pieces of the text, the prompt and then single tokens, and the logits after every token."""
    side.begin()
    text, logits = [prompt], [side.logits(prompt)]
    for _ in range(count):
        text.append(np.array([logits[-1][-1].argmax()]))
        logits.append(side.logits(text[-1]))
    return text, np.concatenate(logits)


def _fed(side: Side, what: Callable[[Array], Any], text: Sequence[Array]) -> list[Any]:
    side.begin()
    return [what(piece) for piece in text]


def _over(side: Side, states: Callable[[Array], list[Array]], text: Sequence[Array]) -> list[Array]:
    """Return the states of the whole text, part by part."""
    return [np.concatenate(pieces) for pieces in zip(*_fed(side, states, text), strict=True)]


def _places(got: Array, wanted: Array) -> Iterator[Place]:
    """Compare logits [n, vocab] of both models, place by place."""
    got, wanted = got.astype(np.float64), wanted.astype(np.float64)
    difference = np.abs(got - wanted).max(1) / max(np.abs(wanted).max(), 1e-30)
    p, q = (torch.from_numpy(logits).log_softmax(-1).numpy() for logits in (wanted, got))
    kl = (np.exp(p) * (p - q)).sum(1)
    for n, (theirs, ours) in enumerate(zip(wanted.argmax(1), got.argmax(1), strict=True)):
        chosen = (int(theirs), float(np.exp(p[n, theirs])), int(ours), float(np.exp(p[n, ours])))
        yield Place(n, _or_infinite(difference[n]), _or_infinite(kl[n]), *chosen)


def _parts(so_far: Sequence[Array], own: Sequence[Array], states: Sequence[Array]) -> Iterator[Part]:
    names = ["embed", *(f"layer.{number}" for number in range(len(states) - 2)), "head"]
    for number, name in enumerate(names):
        before = states[number - 1] if name.startswith("layer") else None
        apart, alone = (_apart(each[number], states[number], before) for each in (so_far, own))
        yield Part(name, float(apart.max()), float(alone.max()), int(alone.argmax()))


def _apart(got: Array, wanted: Array, before: Array | None) -> Array:
    """Return the norm of the difference in each row, relative to the norm of the `wanted` row. If the row `before` has
    a larger norm, that is used: what a layer subtracts has been rounded as well.
    """
    norms = [
        np.linalg.norm(each.astype(np.float64), axis=1) for each in (got - wanted, wanted, before) if each is not None
    ]
    apart = norms[0] / np.maximum(np.max(norms[1:], axis=0), 1e-30)
    return np.where(np.isnan(apart), np.inf, apart)


def _or_infinite(value: float) -> float:
    return math.inf if math.isnan(value) else float(value)


def _changed(decoder: Decoder, reference: Side) -> list[Changed] | None:
    """Return the decoder's weights that differ, bit by bit, from the reference's in the same layout."""
    try:
        weights = reference.weights_for(decoder)
    except CheckpointError:  # of another family, or with other sizes inside
        weights = None
    if weights is None:
        return None
    found = []
    for weight in weights:
        layer, name = key = weight.keys[0]
        held, wanted = decoder.weights[key].shards(), weight.pieces()
        wanted = wanted if len(wanted) > 1 else wanted * len(held)
        count = sum(_differing(*pair) for pair in zip(held, wanted, strict=True))
        if count:
            full = name if layer is None else f"layer.{layer}.{name}"
            found.append(Changed(full, count, sum(shard.size for shard in held)))
    return found


def _differing(held: Array, wanted: torch.Tensor) -> int:
    here = numpy_to_torch(held.copy())  # the device's array is read-only
    bits = (each.contiguous().view(torch.uint8).reshape(here.numel(), -1) for each in (here, wanted.to(here.dtype)))
    return int((next(bits) != next(bits)).any(1).sum())
