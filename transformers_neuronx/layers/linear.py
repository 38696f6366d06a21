"""Linear layers: the only graph code that knows that a weight may be split over devices, or quantized."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from transformers_neuronx import hlo
from transformers_neuronx.layers.activation import ACTIVATIONS, Gate
from transformers_neuronx.layers.lora import adapted
from transformers_neuronx.layers.storage import as_matrix, as_rounded, numbers
from transformers_neuronx.pyhlo import Tensor
from transformers_neuronx.weights.parameters import Parameter


def _product(
    x: Tensor,
    weight: Tensor,
    scale: Tensor | None = None,
    minimum: Tensor | None = None,
    *units: Tensor | None,
    codes: str = "",
) -> Tensor:
    """Multiply x [..., in] by weight [out, in], summing in f32. -> f32[..., out]

    A scale is f32[out], one per output, or [out, groups], one per group of a weight's row, which can have a minimum,
    too, and both can have units. 8-bit integers are exact in every type of activations. With `codes`, weights are
    those.
    """
    if weight.dtype is not x.dtype:  # else XLA widens the weights of all layers ahead of time and keeps them
        x, weight = hlo.optimization_barrier(x, weight)
    if scale is not None and len(scale.sizes) == 2:
        return _product(x, numbers(weight, scale, x.dtype.name, minimum, *units, inputs=x.sizes[-1], codes=codes))
    *lead, features = x.sizes
    rows, weight = hlo.reshape(x, -1, features), hlo.convert(weight, x.dtype)
    count = rows.sizes[0]
    # XLA:CPU multiplies one row fast only as an f32 vector, or in bf16 with a second row: 12 and 13 ms a token with
    # the 124M shape. A matrix of one row takes 130 ms.
    if count == 1 and x.dtype.name == "f32":
        rows = hlo.reshape(rows, features)
    elif count == 1:
        rows = hlo.pad(rows, 0, 0, 1)
    y = hlo.dot(rows, weight, contract=([-1], [1]), dtype="f32")
    y = hlo.reshape(y if len(y.sizes) == 1 else hlo.slice(y, 0, 0, count), *lead, weight.sizes[0])
    return y if scale is None else y * scale


class Part(NamedTuple):
    """The tensors of one of the layers that are applied together: those after its weight if it has them."""

    weight: Tensor
    scale: Tensor | None = None
    minimum: Tensor | None = None
    scale_unit: Tensor | None = None
    minimum_unit: Tensor | None = None
    bias: Tensor | None = None


def _linear_body(
    x: Tensor,
    parts: Sequence[Part],
    experts: Tensor | None = None,
    *,
    activation: str = "",
    dtype: str = "f32",
    panels: Sequence[Sequence[int]] = (),
    rounded: int = 0,
    codes: str = "",
) -> Tensor | tuple[Tensor, ...]:
    """Multiply x by the weight of each part, and add its bias.

    With an `activation` there is one result: the activation of the first product, times the second, if there is one.
    `panels` are the sizes of matrices that are stored in panels. With `rounded`, x is rounded to 8 bits, with a scale
    for every `rounded` features. With `codes`, weights are those, two in a byte. With `experts`, s32[rows], parts are
    stacks [experts, ...], and row i of x [rows, in] is multiplied by that of its expert. A row whose number is that of
    none becomes zeros.
    """
    x = as_rounded(x, rounded) if rounded else x
    sizes = panels or [()] * len(parts)
    how: dict[str, Any] = dict(dtype=dtype, codes=codes)
    if experts is None:
        products = [_of_part(x, *each, **how) for each in zip(parts, sizes, strict=True)]
    else:
        products = [_of_experts(x, experts, *each, **how) for each in zip(parts, sizes, strict=True)]
    if activation:
        activated = ACTIVATIONS[activation](products[0])
        return activated if len(parts) == 1 else activated * products[1]
    return products[0] if len(parts) == 1 else tuple(products)


def _of_part(x: Tensor, part: Part, panels: Sequence[int], *, dtype: str, codes: str) -> Tensor:
    weight, *of_groups, bias = part
    if panels:
        weight = as_matrix(weight, *panels)
        of_groups = [_of_groups(each, panels[0]) for each in of_groups]
    y = _product(x, weight, *of_groups, codes=codes)
    return hlo.convert(y if bias is None else y + hlo.convert(bias, "f32"), dtype)


def _of_experts(x: Tensor, experts: Tensor, part: Part, panels: Sequence[int], **how: str) -> Tensor:
    """Apply each expert in turn to all rows, and keep what is its own. One that no row has does not run."""
    count, outputs, *_ = part.weight.sizes

    def expert(number: Tensor, y: Tensor) -> Sequence[Tensor]:
        own = hlo.equal(experts, number)

        def applied() -> Tensor:
            matrix = Part._make(each and _at(each, number) for each in part)
            return hlo.select(hlo.reshape(own, -1, 1), _of_part(x, matrix, panels, **how), y)

        return number + 1, hlo.conditional(hlo.any(own, [0]), applied, lambda: y)

    first = hlo.full(0, how["dtype"], [x.sizes[0], panels[0] if panels else outputs])
    return hlo.while_loop(lambda n, _: n < count, expert, [hlo.constant(0, "s32"), first], count)[1]


def _at(x: Tensor, number: Tensor) -> Tensor:
    """Return x[number]."""
    sizes, zero = x.sizes[1:], hlo.constant(0, "s32")
    return hlo.reshape(hlo.dynamic_slice(x, [number, *(zero for _ in sizes)], [1, *sizes]), *sizes)


def _of_groups(part: Tensor | None, outputs: int) -> Tensor | None:
    return as_matrix(part, outputs, part.sizes[1]) if part is not None and len(part.sizes) == 4 else part


_linear = hlo.composite("linear", _linear_body)


def _one(
    x: Tensor, layers: Sequence[Any], dtype: str, activation: str = "", biased: bool = True,
    experts: Tensor | None = None,
) -> Any:  # fmt: skip
    """Apply layers of the same storage, which need no sum over the devices, as one operation.

    If inputs have an order, there is one layer.
    """
    x = _by_group(x, layers[0].weight, experts)
    biased = biased and hasattr(layers[0], "bias")
    parts = []
    for w in layers:
        weight, bias = w.weight, w.bias.tensor if biased else None
        parts.append(Part(weight.tensor, weight.scale, weight.minimum, weight.scale_unit, weight.minimum_unit, bias))
    attributes: dict[str, Any] = dict(activation=activation, dtype=dtype)
    row = layers[0].weight.row
    if row.word:
        attributes |= dict(panels=[w.weight.sizes for w in layers])
    if row.rounded:
        attributes |= dict(rounded=row.rounded)
    if row.codes:
        attributes |= dict(codes=row.codes)
    return _linear(x, parts, experts, **attributes)


def _by_group(x: Tensor, weight: Parameter, experts: Tensor | None) -> Tensor:
    """Return x [..., in] in the order of a weight's inputs, if that has one of its own.

    If it is split by inputs, a device needs inputs that others have.
    """
    if weight.order is None:
        return x
    if weight.row.reduces:
        x = hlo.all_gather(x, weight.degree, -1)
    padded = hlo.pad(x, -1, 1, 0)  # zero is the number of padding
    if experts is None:
        return hlo.take(padded, weight.order, -1)
    rows, size = padded.sizes
    begins = hlo.reshape(hlo.iota("s32", [rows]) * size, rows, 1)
    return hlo.take(hlo.reshape(padded, -1), hlo.take(weight.order, experts) + begins)


def _can_be_one(*layers: Any) -> bool:
    if len(layers) > 1 and any(w.weight.order is not None for w in layers):
        return False
    storage = {(*w.weight.storage, hasattr(w, "bias")) for w in layers}
    return len(storage) == 1 and not any(w.weight.row.reduces and w.weight.degree > 1 for w in layers)


def linears(x: Tensor, *layers: Any, experts: Tensor | None = None) -> Sequence[Tensor]:
    """Apply `linear` to x [..., in] with each of several layers. -> [..., out] of each"""
    if len(layers) == 1 or not _can_be_one(*layers):
        return [linear(x, w, experts) for w in layers]
    outputs: Sequence[Tensor] = _one(x, layers, x.dtype.name, experts=experts)
    return [adapted(y, x, w) for y, w in zip(outputs, layers, strict=True)]


def activated(x: Tensor, activation: str | Gate, *layers: Any, experts: Tensor | None = None) -> Tensor:
    """Apply `linear` and an activation to x [..., in]; multiply by `linear` of a second layer, if any. -> [..., out]

    An activation that is a function is that of both products. With `experts`, s32[rows], layers are stacks, and row i
    of x [rows, in] is multiplied by that of its expert.
    """
    if not isinstance(activation, str):
        return activation(*linears(x, *layers, experts=experts))
    if _can_be_one(*layers) and not any(hasattr(w, "lora") for w in layers):
        y: Tensor = _one(x, layers, x.dtype.name, activation, experts=experts)
        return y
    y, *up = (linear(x, w, experts) for w in layers)
    y = ACTIVATIONS[activation](y)
    return y * up[0] if up else y


def product(x: Tensor, w: Any, experts: Tensor | None = None, biased: bool = False) -> Tensor:
    """Multiply x [..., in] by `w.weight` [out, in], by default without a bias. -> f32[..., out]

    If the weight is split by outputs, each device returns its own outputs; if by inputs, its part of the sum. With
    `experts` as `activated`.
    """
    return adapted(_one(x, [w], "f32", biased=biased, experts=experts), x, w)


def summed(y: Tensor, weight: Parameter) -> Tensor:
    """Sum the devices' products with `weight`, or linear functions of them, if each has a part of the sum."""
    return hlo.all_reduce(y, weight.degree) if weight.row.reduces or weight.row.whole_experts else y


def linear(x: Tensor, w: Any, experts: Tensor | None = None) -> Tensor:
    """Multiply x [..., in] by `w.weight` [out, in] and add `w.bias` [out]. -> [..., out]

    If the weight is split by outputs, each device returns its own outputs; if by inputs, the sum over the devices. With
    `experts` as `activated`.
    """
    if _can_be_one(w):
        return adapted(_one(x, [w], x.dtype.name, experts=experts), x, w)
    y = summed(product(x, w, experts), w.weight)
    if hasattr(w, "bias"):
        y = y + hlo.convert(w.bias.tensor if experts is None else hlo.take(w.bias.tensor, experts), "f32")
    return hlo.convert(y, x.dtype)


def logits(x: Tensor, w: Any) -> Tensor:
    """Apply the head: `linear` in f32, with all outputs on every device, without the padding of the split."""
    y = hlo.all_gather(_one(x, [w], "f32"), w.weight.degree, -1)
    return hlo.slice(y, -1, 0, w.weight.row.shape[0])
