"""Indices out of range: an error where PyTorch raises one, and PyTorch's numbers everywhere else."""

import io

import pytest
import torch

from transformers_neuronx.errors import InputError
from transformers_neuronx.trace import OutOfRangeError, bucket_model_trace, trace
from transformers_neuronx.trace.buckets import BucketModelConfig

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning", "ignore:.*torch.jit:FutureWarning")
F = torch.nn.functional
TABLE = torch.randn(5, 3, generator=torch.Generator().manual_seed(0))
CUBE = torch.randn(2, 5, 4, generator=torch.Generator().manual_seed(1))


def ids(*values, dtype=torch.int64):
    return torch.tensor(values, dtype=dtype)


# Functions of indices, and the size of what these look up. PyTorch says which are outside.
USES = {
    "embedding": (lambda i: F.embedding(i, TABLE), 5),
    "embedding of a view": (lambda i: F.embedding(i.view(-1, 1).expand(-1, 2).flip(0).unsqueeze(0), TABLE), 5),
    "embedding of a sum": (lambda i: F.embedding(i + 1, TABLE), 4),
    "embedding of a part": (lambda i: F.embedding(i[1:], TABLE), 5),
    "embedding of a table that is an output": (lambda i: F.embedding(i, TABLE * 2), 5),
    "embedding of a layer's matrix": (lambda i: F.embedding(i, TABLE) @ TABLE.T, 5),
    "index": (lambda i: TABLE[i], 5),
    "index of a later axis": (lambda i: CUBE[:, i], 5),
    "index of two axes": (lambda i: CUBE[i, :, i], 2),
    "index of a sum": (lambda i: TABLE[i - 1], 6),
    "index_select": (lambda i: TABLE.index_select(0, i), 5),
    "index_select of a sum": (lambda i: CUBE.index_select(1, i * 1), 5),
    "gather": (lambda i: TABLE.gather(0, i[:, None].expand(-1, 3)), 5),
    "take_along_dim": (lambda i: torch.take_along_dim(TABLE, i[:, None], 0), 5),
    "scatter": (lambda i: TABLE.scatter(0, i[:, None], 0.0), 5),
    "scatter_add": (lambda i: TABLE.scatter_add(0, i[:, None], torch.ones(3, 1)), 5),
    "index_put": (lambda i: TABLE.index_put((i,), torch.ones(3)), 5),
    "index_add": (lambda i: TABLE.index_add(0, i, torch.ones(3, 3), alpha=2), 5),
    "index_copy": (lambda i: CUBE.index_copy(-2, i, torch.arange(24.0).reshape(2, 3, 4)), 5),
    "index of all": (lambda i: TABLE.take(i), 15),
    "index_fill": (lambda i: TABLE.index_fill(0, i, 1.0), 5),
    "one_hot": (lambda i: F.one_hot(i, 5), 5),
    "cross_entropy": (lambda i: F.cross_entropy(torch.ones(3, 5), i), 5),
}


SAID = r"must be from -?\d+ to \d+ for aten\.\w+\.\w+, got -?\d+\. |Class values must be "


@pytest.mark.parametrize("use", USES)
def test_an_index_that_is_outside_is_refused_where_pytorch_refuses_it(use):
    function, size = USES[use]
    traced = trace(function, ids(0, 1, 0))
    for value in (-size - 1, -size, -1, 0, 1, size - 1, size, size + 1000, 2**40):
        given = ids(0, value, 1)
        try:
            want = function(given)
        except (IndexError, RuntimeError):
            with pytest.raises(InputError, match=SAID) as raised:
                traced(given)
            assert isinstance(raised.value, OutOfRangeError) or use == "one_hot"
        else:
            torch.testing.assert_close(traced(given), want)


class Tagger(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.table = torch.nn.Embedding(40, 4)
        self.register_buffer("positions", torch.arange(8))
        self.places = torch.nn.Embedding(8, 4)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, tokens, kinds):
        self.calls += 1
        return self.table(tokens) + self.places(self.positions[: tokens.shape[1]]) + self.table(kinds.clamp(0) + 30)


def test_what_is_said():
    model = Tagger()
    traced = trace(model, (ids([1, 2]), ids([3, 4])))
    with pytest.raises(
        IndexError, match=r"^tokens must be from 0 to 39 for aten\.embedding\.default, got 57\. "
    ) as raised:
        traced(ids([1, 57]), ids([0, 0]))
    assert "Source: table (Embedding) in" in str(raised.value)
    assert "test_ranges.py, line" in str(raised.value) and "self.table(tokens)" in str(raised.value)
    assert isinstance(raised.value, InputError)
    assert traced.state_0.item() == 0  # nothing has run
    with pytest.raises(IndexError, match=r"^tokens must be from 0 to 39 .*, got -1\. "):
        traced(ids([1, -1]), ids([0, 0]))
    with pytest.raises(IndexError, match=r"^an index that the program computes must be from 0 to 39 .*, got 41\. "):
        traced(ids([1, 2]), ids([0, 11]))
    assert traced.state_0.item() == 1
    traced(ids([1, 39]), ids([0, 9]))
    assert traced.state_0.item() == 2


def test_what_is_constant_costs_a_call_nothing_and_is_refused_at_once():
    traced = trace(Tagger(), (ids([1, 2]), ids([3, 4])))
    from transformers_neuronx.trace.program import Traced

    (program,) = Traced.from_bytes(bytes(traced.program)).programs
    assert [(each.argument, each.high) for each in program.ranges] == [(0, 39), (None, 39)]  # not that of positions
    with pytest.raises(IndexError, match=r"^a constant index must be from 0 to 4 .*, got 5\. "):
        trace(lambda x: x + F.embedding(torch.arange(6), TABLE), torch.zeros(3))


def test_an_index_in_fewer_bits():
    """An index that a conversion changes is checked after the conversion."""
    for dtype in (torch.int32, torch.int16, torch.uint8):
        traced = trace(lambda i: F.embedding(i.long(), TABLE), ids(0, 1, dtype=dtype))
        assert traced(ids(4, 4, dtype=dtype)).shape == (2, 3)
        with pytest.raises(IndexError, match=r"i must be from 0 to 4 .*, got 5"):
            traced(ids(4, 5, dtype=dtype))
    function = lambda i: F.embedding(i.int(), TABLE)  # noqa: E731
    traced = trace(function, ids(0, 1))
    torch.testing.assert_close(traced(ids(2**32 + 1, 4)), function(ids(2**32 + 1, 4)))


def test_saved_and_in_buckets():
    file = io.BytesIO()
    torch.jit.save(trace(USES["embedding"][0], ids(0, 1, 2)), file)
    loaded = torch.jit.load(io.BytesIO(file.getvalue()))
    with pytest.raises(RuntimeError, match=r"OutOfRangeError: i must be from 0 to 4 .*, got 5\. "):
        loaded(ids(0, 5, 1))

    def kernel(inputs: list[torch.Tensor]):
        return [F.pad(inputs[0], [0, 4 - inputs[0].shape[0]])], torch.tensor([0])

    config = BucketModelConfig(lambda: torch.jit.script(kernel))
    traced = bucket_model_trace(lambda: (lambda i: F.embedding(i, TABLE), {}), [ids(0, 1, 2, 3)], config)
    assert traced(ids(4, 4)).shape == (4, 3)
    with pytest.raises(IndexError, match=r"i must be from 0 to 4 .*, got -3"):
        traced(ids(4, -3))


def test_no_elements():
    traced = trace(lambda i: F.embedding(i, TABLE), torch.zeros(0, 2, dtype=torch.int64))
    assert traced(torch.zeros(0, 2, dtype=torch.int64)).shape == (0, 2, 3)


def test_what_a_function_asserts():
    def function(x):
        torch._assert_async((x > 0).all(), "x must be positive.")
        return x * 2

    traced = trace(function, torch.ones(3))
    assert traced(torch.ones(3)).tolist() == [2, 2, 2]
    with pytest.raises(InputError, match=r"^x must be positive\. Source: "):
        traced(torch.tensor([1.0, 0.0, 1.0]))


def test_index_add_to_a_number():
    x, i = torch.tensor(2.0), ids(0)
    for function in (
        lambda x, i: x.index_add(0, i, x),
        lambda x, i: x.index_copy(0, i, x * 3),
        lambda x, i: x.index_fill(0, i, 3),
        lambda x, i: x.index_fill(0, i, x.sum()),
    ):
        torch.testing.assert_close(trace(function, (x, i))(x, i), function(x, i))
