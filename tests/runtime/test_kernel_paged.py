"""The CPU's attention over pages: what its body defines, at every level, and the same bits in any company."""

import numpy as np
import pytest
from levels import at_every_level

from transformers_neuronx.layers.paged import paged_attention
from transformers_neuronx.layers.rows import columns
from transformers_neuronx.layers.step import segment_row
from transformers_neuronx.pyhlo.dtypes import element_type
from transformers_neuronx.runtimes import get_runtime, kernels

pytestmark = pytest.mark.skipif(not kernels.built(), reason="the kernels were not built: they need a C++ compiler")

PAGE, MOST, PAGES = 64, 3, 13
SEGMENT = columns(segment_row(0))  # before the pages
HEADS, KV_HEADS, D = 4, 2, 20
# The number of tokens of each sequence, the position of the first one, and whether they are of a prompt.
MIXED = [(1, 70, 0), (40, 0, 1), (5, 190 - 5, 1), (1, 0, 0), (4, 62, 0), (0, 0, 0), (64, 100, 1)]


def segments(sequences, random):
    """Rows of `sequences` with pages of their own, in any order; unused places name no page."""
    table, free, first = [], list(random.permutation(PAGES)), 0
    for count, start, prompt in sequences:
        used = min(-(-(start + count) // PAGE), MOST)
        pages = [free.pop() for _ in range(used)]
        table.append([first, count, start, prompt, *pages, *[-1] * (MOST - used)])
        first += count
    return np.array(table, np.int32)


def inputs(random, sequences, tokens, dtype="f32", s8=False, heads=(HEADS, KV_HEADS), size=D, alone=False):
    kind = element_type(dtype).numpy
    q, k, v = (random.standard_normal((tokens, 1, n, size)).astype(kind) for n in (heads[0], heads[1], heads[1]))
    shape = (PAGES * heads[1], PAGE, size)
    cache = [random.standard_normal(shape).astype(kind) for _ in range(2)]
    if s8:
        cache = [random.integers(-127, 128, shape).astype(np.int8) for _ in range(2)]
        cache += [random.random((*shape[:2], 1), np.float32) / 64 for _ in range(2)]
    return [q, k, v, segments(sequences, random), *(cache[::2] if alone else cache)]


def compiled(write, arrays, count, also=(), alone=False, **named):
    """Compile a program of attention alone, with a cache of `count` arrays in place; then the operands named `also`.

    With keys `alone`, these are values, too.
    """
    named = dict(scale=0.3) | named

    def graph(*tensors):
        cache, rest = tensors[4 : 4 + count], tensors[4 + count :]
        q, k, v, table = tensors[:4]
        given = dict(zip(also, rest, strict=True))
        context, *after = paged_attention(q, k, None if alone else v, table, cache, **given, **named)
        for new, old in zip(after, tensors[4:], strict=False):
            new.set_alias_to(old, must=True)
        return [context, *after]

    module = write(graph, *arrays)
    program = get_runtime("cpu", 1).compile(module)
    assert program.text().count(kernels.target("paged_attention")) == 1
    return program, module


def by_its_body(module, arrays, monkeypatch):
    runtime = get_runtime("cpu", 1)  # registers the kernels for XLA, once in a process: other tests need them
    with monkeypatch.context() as patch:
        patch.setattr(kernels, "level", lambda: "off")
        program = runtime.compile(module)
    assert kernels.target("paged_attention") not in program.text()
    return [
        x.numpy() for x in program(*(runtime.put([np.maximum(x, 0) if x.dtype == np.int32 else x]) for x in arrays))
    ]


@pytest.fixture
def random():
    return np.random.default_rng(0)


CASES = {
    "plain": {},
    "bf16": dict(dtype="bf16"),
    "f16": dict(dtype="f16"),
    "s8": dict(s8=True),
    "window": dict(window=70),
    "small window": dict(window=9),
    "chunks": dict(chunk=70),
    "small chunks and a window": dict(chunk=9, window=4),
    "cap": dict(softcap=2.0),
    "alibi": dict(also=["alibi"]),
    "distances": dict(also=["distances"]),
    "sinks": dict(also=["sinks"]),
    "sinks, s8": dict(also=["sinks"], s8=True),
    "sinks and a small window": dict(also=["sinks"], window=9, heads=(8, 2), size=64, dtype="bf16"),
    "one head": dict(heads=(3, 3)),
    "of 64": dict(heads=(8, 2), size=64, dtype="bf16"),
    "of 512": dict(heads=(8, 2), size=512, dtype="bf16"),
    "seven of 96": dict(heads=(7, 1), size=96, dtype="bf16", softcap=2.0, window=70),
    "keys alone": dict(alone=True, heads=(6, 1)),
    "keys alone, s8": dict(alone=True, heads=(6, 1), s8=True),
    "keys alone, of 576": dict(alone=True, heads=(4, 1), size=576, dtype="bf16"),
}


@pytest.mark.parametrize("name", CASES)
def test_it_is_what_its_body_defines(name, write, random, monkeypatch):
    options = dict(CASES[name])
    given = {key: options.pop(key) for key in ("dtype", "s8", "heads", "size") if key in options}
    given["alone"] = options.get("alone", False)
    arrays = inputs(random, MIXED, 130, **given)
    count, heads = len(arrays) - 4, arrays[0].shape[2]
    if options.get("also") == ["alibi"]:
        arrays.append(random.random(heads, np.float32))
    if options.get("also") == ["distances"]:
        arrays.append(random.standard_normal((heads, 33)).astype(np.float32))
    if options.get("also") == ["sinks"]:
        arrays.append(np.resize(np.array([12, 3, -1, -np.inf], np.float32), heads))
    program, module = compiled(write, arrays, count, **options)
    wanted, *written = by_its_body(module, arrays, monkeypatch)
    bound = dict(bf16=2**-7, f16=2**-10).get(given.get("dtype"), 2e-6)
    for context, *after in at_every_level(program, *arrays):
        difference = np.abs(context.astype(np.float64) - wanted.astype(np.float64)).max()
        assert difference <= bound * max(1, np.abs(wanted.astype(np.float64)).max())
        assert not context[115:].any(), "tokens of no sequence"
        for got, want in zip(after, written, strict=True):
            np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("kind", [dict(), dict(s8=True), dict(dtype="bf16", size=64), dict(dtype="bf16")])
@pytest.mark.parametrize(("window", "sinks"), [(None, False), (50, False), (50, True)])
def test_the_same_bits_in_any_company_chunks_and_pages(kind, window, sinks, write, random):
    """A sequence of 150 tokens at once, in chunks beside others, on other pages; then single tokens beside others."""
    whole = inputs(random, [(150, 0, 1)], 150, **kind)
    q, k, v, _, *cache = whole
    others = inputs(random, [], 30, **kind)[:3]

    def run(sequences, tokens, table, cache):
        """Feed the `tokens` of the sequence last, after one of eleven tokens and one of one."""
        before = [(11, 5, 1), (1, 33, 0)] if table[0] else []
        rows = segments([*before, *sequences], np.random.default_rng(table[1]))
        rows[-1, SEGMENT:] = table
        if before:
            rows[:-1, SEGMENT:] = [[7, -1, -1], [8, -1, -1]]
        active = [np.concatenate([o[: 12 * bool(before)], x[tokens]]) for o, x in zip(others, (q, k, v), strict=True)]
        arrays = [*active, rows, *cache, *([np.array([2, 0, -1, 8], np.float32)] if sinks else [])]
        program, _ = compiled(write, arrays, len(cache), ["sinks"] if sinks else (), window=window)
        return [[context[12 * bool(before) :], after] for context, *after in at_every_level(program, *arrays)]

    once = run([(150, 0, 1)], np.arange(150), [0, 1, 2], cache)
    for level, (context, after) in enumerate(once):
        got, state = [], cache
        for low, high in ((0, 7), (7, 64), (64, 65), (65, 100), (100, 150)):
            parts = run([(high - low, low, 1)], np.arange(low, high), [5, 3, 4], state)
            got.append(parts[level][0])
            state = parts[level][1]
        np.testing.assert_array_equal(np.concatenate(got), context)
        pages = [x.reshape(PAGES, -1, *x.shape[1:]) for x in (*after, *state)]
        for here, there in zip(pages[: len(after)], pages[len(after) :], strict=True):
            np.testing.assert_array_equal(here[[0, 1]], there[[5, 3]])
            np.testing.assert_array_equal(here[2][:, : 150 - 128], there[4][:, : 150 - 128])
        singles = [run([(1, at, 0)], np.array([at]), [0, 1, 2], after)[level][0] for at in (40, 149)]
        several = run([(3, 147, 0)], np.arange(147, 150), [0, 1, 2], after)[level][0]
        np.testing.assert_array_equal(singles[1], several[2:])


def positions_of(cache, row, end, page):
    """Keys or values of a sequence's first `end` positions, [end, kv_heads, ·], where the row has the pages."""
    at = np.arange(end)
    return cache.reshape(-1, KV_HEADS, page, cache.shape[2])[row[SEGMENT:][at // page], :, at % page]


def in_pages_of(page, arrays, random):
    """The same sequences in pages of this size, in any order."""
    tokens, rows, caches = arrays[:3], arrays[3], arrays[4:]
    most = -(-MOST * PAGE // page)
    table = random.permutation(len(rows) * most).reshape(len(rows), most)
    moved = np.concatenate([rows[:, :SEGMENT], table], 1).astype(np.int32)
    others = []
    for cache in caches:
        other = np.zeros((table.size, KV_HEADS, page, cache.shape[2]), cache.dtype)
        for row, new in zip(rows, moved, strict=True):
            end = row[1] + row[2]
            at = np.arange(end)
            other[new[SEGMENT:][at // page], :, at % page] = positions_of(cache, row, end, PAGE)
        others.append(other.reshape(-1, page, cache.shape[2]))
    return [*tokens, moved, *others]


@pytest.mark.parametrize("kind", [dict(), dict(s8=True), dict(dtype="bf16", size=64)])
@pytest.mark.parametrize("window", [None, 50])
@pytest.mark.parametrize("page", [16, 32, 128])
def test_pages_of_any_size_have_the_same_bits(kind, window, page, write, random):
    arrays = inputs(random, MIXED, 130, **kind)
    both = [arrays, in_pages_of(page, arrays, random)]
    programs = [compiled(write, some, len(arrays) - 4, window=window)[0] for some in both]
    results = [list(at_every_level(program, *some)) for program, some in zip(programs, both, strict=True)]
    for (wanted, *before), (context, *after) in zip(*results, strict=True):
        assert wanted.any()
        np.testing.assert_array_equal(context, wanted)
        for old, new in zip(before, after, strict=True):
            for row, moved in zip(arrays[3], both[1][3], strict=True):
                end = row[1] + row[2]
                np.testing.assert_array_equal(positions_of(new, moved, end, page), positions_of(old, row, end, PAGE))


def test_rows_without_tokens_hide_nothing(write, random, monkeypatch):
    """Eight empty rows of prompts beside one whose queries are in several blocks: all of them read what it writes."""
    arrays = inputs(random, [(0, 0, 1)] * 8 + [(40, 0, 1)], 40)
    program, module = compiled(write, arrays, 2)
    wanted, *written = by_its_body(module, arrays, monkeypatch)
    for context, *after in at_every_level(program, *arrays):
        np.testing.assert_allclose(context, wanted, atol=1e-5)
        for got, want in zip(after, written, strict=True):
            np.testing.assert_array_equal(got, want)


def test_what_is_outside_the_cache_is_left_alone(write, random):
    arrays = inputs(random, [(3, 0, 1), (3, 190, 1), (3, 62, 1)], 9)
    arrays[3][0, SEGMENT], arrays[3][2, SEGMENT + 1] = PAGES, -1  # pages that do not exist; the middle one ends at 193
    program, _ = compiled(write, arrays, 2)
    for context, keys, _ in at_every_level(program, *arrays):
        assert not context[[0, 1, 2, 5, 6, 7, 8]].any() and context[3:5].any(), "two tokens fit"
        assert (keys != arrays[4]).any((0, 2)).sum() == 2


def test_a_row_far_outside_the_cache_does_not_read_on(write, random):
    """Its page does not exist either. The numbers after its pages are those of other rows, or no one's."""
    arrays = inputs(random, [(3, 0, 1), (3, 0, 1)], 6)
    arrays[3][1] = [3, 3, 2**31 - 1, 1, *[PAGES] * MOST]
    program, _ = compiled(write, arrays, 2)
    for context, keys, _ in at_every_level(program, *arrays):
        assert context[:3].any() and not context[3:].any()
        assert (keys != arrays[4]).any((0, 2)).sum() == 3


def test_pages_that_the_kernel_does_not_take_are_left_to_the_body(write):
    shapes = [(2, 1, 2, 8)] * 3
    arrays = [np.zeros(s, np.float32) for s in shapes] + [np.zeros((1, SEGMENT + 2), np.int32)]
    arrays += [np.zeros((6, 48, 8), np.float32)] * 2
    module = write(lambda *tensors: list(paged_attention(*tensors[:4], tensors[4:], scale=1.0)), *arrays)
    assert kernels.target("paged_attention") not in str(kernels.with_kernels(module))
