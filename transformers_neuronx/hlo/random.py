"""Random numbers that depend only on a key and a counter: the same on every engine, device and batch."""

from __future__ import annotations

from transformers_neuronx.hlo.elementwise import (
    add,
    constant,
    convert,
    log,
    log1p,
    logical_or,
    logical_xor,
    multiply,
    negate,
    shift_left,
    shift_right,
)
from transformers_neuronx.pyhlo import Tensor

_ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))
_PARITY = 0x1BD11BDA


def threefry(key: tuple[Tensor, Tensor], counter: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Two words of random bits from Threefry-2x32 with 20 rounds (Salmon et al., doi:10.1145/2063384.2063405).

    Words are u32. The shapes of the four operands must broadcast.
    """
    keys = (*key, logical_xor(logical_xor(*key), constant(_PARITY, "u32")))
    a, b = add(counter[0], keys[0]), add(counter[1], keys[1])
    for group in range(5):
        for distance in _ROTATIONS[group % 2]:
            a = add(a, b)
            b = logical_xor(a, logical_or(shift_left(b, distance), shift_right(b, 32 - distance)))
        a, b = add(a, keys[(group + 1) % 3]), add(add(b, keys[(group + 2) % 3]), group + 1)
    return a, b


def gumbel(bits: Tensor) -> Tensor:
    """Convert u32 bits to noise of the standard Gumbel distribution.

    The argmax of logits plus this noise is a draw from the softmax of the logits.
    """
    # Floats are finest near zero, where the noise is largest. At one the noise is -inf, which never wins the argmax.
    uniform = multiply(add(convert(bits, "f32"), 0.5), 2.0**-32)
    return negate(log(negate(log1p(negate(uniform)))))
