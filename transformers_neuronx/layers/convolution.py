"""Short convolutions over the tokens of a sequence, which keep the last inputs as a state, and layers of them."""

from __future__ import annotations

from typing import Any

from transformers_neuronx import hlo
from transformers_neuronx.layers.activation import ACTIVATIONS
from transformers_neuronx.layers.linear import linear, linears
from transformers_neuronx.layers.rows import field
from transformers_neuronx.layers.state import states_after, states_before
from transformers_neuronx.layers.step import SEQUENCE, Cache, Step, located
from transformers_neuronx.pyhlo import Tensor


def gated_convolution(x: Tensor, w: Any, cache: Cache, step: Step) -> tuple[Tensor, Cache]:
    """Project, gate, convolve, gate again, project back. x [b, n, h] -> [b, n, h], and the state

    Liquid AI, arXiv:2511.23404. `w` has linear layers `before`, `after` and `inputs`, for the two gates and what passes
    them, and `out`; `taps`, f32[size, h], and an optional bias of the convolution, `bias`, f32[h].
    """
    before, after, inputs = (hlo.convert(y, "f32") for y in linears(x, w.before, w.after, w.inputs))
    [state] = cache
    bias, how = w.bias.tensor if hasattr(w, "bias") else None, dict(together=step.segments is None)
    y, state = short_convolution(before * inputs, w.taps.tensor, step.sequences, state, bias, **how)
    return linear(hlo.convert(step.needed_rows(after * y), x.dtype), w.out), (state,)


def _short_convolution_body(
    x: Tensor,
    weight: Tensor,
    table: Tensor,
    state: Tensor,
    bias: Tensor | None = None,
    *,
    together: bool,
    activation: str | None = None,
) -> tuple[Tensor, Tensor]:
    """Convolve each feature with its own weights over a token and those before it, in f32, and activate the sums.

    x [b, n, c]; weight f32[size, c], the last one for the token itself; state f32[places, size - 1, c], the inputs of
    the tokens before; bias f32[c]; table, `Step.sequences`, and `together` as `scan_sequences` has it. Before the first
    token of a sequence, inputs are 0. -> f32[b, n, c], and the states after the step
    """
    size = weight.sizes[0]
    inputs, before = hlo.convert(x, "f32"), states_before(state, table)
    parts, last = (_of_rows if together else _of_tokens)(inputs, before, table, size)
    y = parts[0] * hlo.slice(weight, 0, 0, 1)
    for i in range(1, size):
        y = y + parts[i] * hlo.slice(weight, 0, i, i + 1)
    y = hlo.reshape(y if bias is None else y + bias, *x.sizes)
    kept = hlo.concatenate([hlo.reshape(each, -1, 1, x.sizes[-1]) for each in last], 1)
    return ACTIVATIONS[activation](y) if activation else y, states_after(state, kept, table)


short_convolution = hlo.composite("short_convolution", _short_convolution_body)


def _of_rows(x: Tensor, before: Tensor, table: Tensor, size: int) -> tuple[list[Tensor], list[Tensor]]:
    """Return for each weight what it multiplies, [b, n, c], and the inputs [b, c] to keep of each sequence."""
    n, count = x.sizes[1], field(table, SEQUENCE, "count")
    window = hlo.concatenate([before, x], 1)
    parts = [hlo.slice(window, 1, i, i + n) for i in range(size)]
    return parts, [hlo.take_rows(window, count + i) for i in range(size - 1)]


def _of_tokens(x: Tensor, before: Tensor, table: Tensor, size: int) -> tuple[list[Tensor], list[Tensor]]:
    """Do the same for single tokens, x [b, 1, c] -> [b, c] each, and the inputs [sequences, c] to keep."""
    b, _, c = x.sizes
    kept, rows = size - 1, before.sizes[0]
    pool = hlo.concatenate([hlo.reshape(before, -1, c), hlo.reshape(x, b, c)], 0)
    first, count, start = (field(table, SEQUENCE, name) for name in ("first", "count", "start"))
    _, sequence, position = located(table, b)
    offset = position - hlo.take(start, sequence)  # of a token in its sequence's part of the step

    def inputs(sequence: Tensor, first: Tensor, offset: Tensor) -> Tensor:
        """The inputs of these tokens of sequences; if the number is negative, from the state."""
        earlier = sequence * kept + (kept + offset)
        return hlo.take(pool, hlo.select(offset >= 0, rows * kept + first + offset, earlier))

    own = hlo.take(first, sequence)
    parts = [inputs(sequence, own, offset - (kept - i)) for i in range(size)]
    return parts, [inputs(hlo.iota("s32", [rows]), first, count - (kept - i)) for i in range(kept)]
