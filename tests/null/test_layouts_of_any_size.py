"""How weights are cut and laid out, for sizes and degrees that hypothesis draws."""

from contextlib import nullcontext
from itertools import chain
from unittest.mock import patch

import torch
from hypothesis import given, settings, strategies as st

from transformers_neuronx.pyhlo.dtypes import to_torch
from transformers_neuronx.weights import loops, panels
from transformers_neuronx.weights.bits import BITS, in_bytes, together
from transformers_neuronx.weights.quantization import Storage
from transformers_neuronx.weights.splits import Heads, Split

drawn = settings(max_examples=200, deadline=None)
DEGREES = st.integers(1, 9)
NO_LIBRARY = patch.object(loops, "built", lambda: None)


@drawn
@given(DEGREES, st.integers(1, 40), st.integers(1, 6), st.integers(0, 1))
def test_pieces_are_the_tensor_in_order(degree, size, unit, axis):
    tensor = (
        torch.arange(1, 2 * size * unit + 1).view(2, -1) if axis else torch.arange(1, 2 * size * unit + 1).view(-1, 2)
    )
    split = Split(axis, unit)
    pieces = split.cut(tensor, degree)
    assert {tuple(piece.shape) for piece in pieces} == {split.share(tuple(tensor.shape), degree)}
    assert pieces[0].shape[axis] % unit == 0
    whole = torch.cat(pieces, axis)
    assert whole.narrow(axis, 0, tensor.shape[axis]).equal(tensor) and whole.count_nonzero() == tensor.count_nonzero()
    rank = degree - 1
    assert split.cut(tensor, degree, [rank])[0].equal(pieces[rank])


@drawn
@given(DEGREES, st.integers(1, 12), st.integers(1, 8), st.integers(1, 3), st.booleans())
def test_each_query_head_is_where_its_key_head_is(degree, kv_heads, group, unit, latent):
    heads = Heads(kv_heads * group, 1 if latent else kv_heads, unit, latent)
    numbers = [torch.arange(1, count + 1).repeat_interleave(unit) for count in (heads.heads, heads.kv_heads)]
    splits = heads.split(0), heads.split(0, keys=True)
    found = []
    for queries, keys in zip(*(split.cut(x, degree) for split, x in zip(splits, numbers, strict=True)), strict=True):
        queries, keys = queries.view(-1, unit), keys.view(-1, unit)
        assert len(keys) == heads.kv_share(degree) and len(queries) % len(keys) == 0
        assert all(len(set(head)) == 1 for head in chain(queries.tolist(), keys.tolist())), "heads stay whole"
        shared = len(queries) // len(keys)
        for place, head in enumerate(queries[:, 0].tolist()):
            assert not head or keys[place // shared, 0] == (head - 1) // heads.group + 1
        found += queries[:, 0].tolist()
    assert sorted(filter(None, found)) == list(range(1, heads.heads + 1)), "each head is on one device"


@drawn
@given(st.sampled_from(list(panels.WORDS)), st.integers(1, 70), st.integers(1, 40), st.booleans())
def test_panels_have_each_element_once(name, outputs, inputs, with_library):
    dtype = to_torch(name)
    matrix = (torch.arange(outputs * inputs) % 100 + 1).view(outputs, inputs).to(dtype)
    with nullcontext() if with_library else NO_LIBRARY:
        laid = panels.laid_out(matrix, panels.WORDS[name])
    assert laid.shape == panels.sizes((outputs, inputs), panels.WORDS[name])
    assert panels.as_matrix(laid, (outputs, inputs)).float().equal(matrix.float())
    assert laid.float().count_nonzero() == outputs * inputs, "the rest are zeros"


def taken_apart(packed, dtype, group):
    """Numbers that were put into bytes, as the description of `weights.bits` has it. int8[out, in]"""
    high_bits, rows = BITS[dtype] - 4, []
    for row in packed.tolist():
        numbers = []
        size = 8 if high_bits or group % 8 == 0 else group  # inputs whose low bits share a word
        words = together(dtype) // 8 if high_bits else 1  # before a word of high bits
        step = words * 4 + 4 if high_bits else size // 2
        for at in range(0, len(row), step):
            low = row[at : at + (words * 4 if high_bits else step)]
            for first in range(0, len(low), size // 2):
                part = low[first : first + size // 2]
                numbers += [byte & 15 for byte in part] + [byte >> 4 for byte in part]
            for i in range(len(numbers) - words * 8, len(numbers)) if high_bits else ():
                of_words, within = divmod(i % (words * 8), 8)
                high = row[at + words * 4 + within % 4] >> (high_bits * (2 * of_words + within // 4))
                numbers[i] |= (high & ((1 << high_bits) - 1)) << 4
        rows.append(numbers)
    values = torch.tensor(rows)
    return values - (8 << high_bits) if high_bits else values - (values > 7) * 16


@drawn
@given(st.sampled_from(list(BITS)), st.integers(1, 3), st.integers(1, 4), st.data())
def test_numbers_in_bytes_are_found_again(dtype, outputs, groups, data):
    group = together(dtype) * data.draw(st.integers(1, 4))
    limit = 1 << BITS[dtype] - 1
    values = torch.randint(-limit, limit, (outputs, groups * group), dtype=torch.int8)
    made = in_bytes(values, dtype, group)
    with NO_LIBRARY:
        assert in_bytes(values, dtype, group).equal(made)
    assert taken_apart(made, dtype, group).equal(values.long())


@drawn
@given(st.sampled_from([None, 8, 16, 32]), st.integers(1, 5), st.integers(1, 4), st.floats(1e-3, 1e3))
def test_numbers_are_rounded_by_half_of_a_scale_at_most(group, outputs, groups, size):
    matrix = torch.randn(outputs, groups * 32) * size
    storage = Storage("s8", group)
    values, scales = storage.values(matrix).float(), storage.scales(matrix).view(outputs, -1)
    each = scales.repeat_interleave(group or matrix.shape[1], 1)
    assert ((values * each - matrix).abs() <= each * 0.5001).all()
    largest = values.view(outputs, scales.shape[1], -1).abs().amax(2)
    assert largest.eq(127).all(), "the largest number of a group is the largest value"
