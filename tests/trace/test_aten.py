"""Compare every lowering with PyTorch: each program has many operations, with a named output for each."""

import math

import pytest
import torch
import torch.nn.functional as F  # noqa: N812

from transformers_neuronx.errors import GraphError
from transformers_neuronx.trace import trace
from transformers_neuronx.trace.aten import TABLE
from transformers_neuronx.trace.export import decompositions, export

aten = torch.ops.aten

torch.manual_seed(0)
X = torch.randn(3, 4, 5) * 2
Y = torch.randn(3, 4, 5) * 2
UNIT = torch.rand(3, 4, 5) * 1.8 - 0.9
SOME = torch.tensor([[1.0, math.inf, -math.inf], [math.nan, -0.0, 2.5]])
INTS = torch.randint(-9, 9, (3, 4, 5))
MORE = torch.randint(1, 9, (3, 4, 5))
TRUTHS = X > 0
IMAGE = torch.randn(2, 6, 9, 8)


CALLED, FINISHED = set(), []


@pytest.fixture(scope="module", autouse=True)
def _lowerings_are_noted():
    """Collect the table's functions that this file's tests call."""
    before = dict(TABLE)

    def noted(operation, lowering):
        return lambda *operands, **options: CALLED.add(operation) or lowering(*operands, **options)

    TABLE.update({operation: noted(operation, lowering) for operation, lowering in before.items()})
    yield
    TABLE.update(before)


@pytest.fixture(autouse=True)
def _finished(request):
    yield
    FINISHED.append(request.node.name)


def agree(name, got, want, tolerance=1e-5):
    assert got.dtype == want.dtype and got.shape == want.shape, f"{name}: {got.dtype}{list(got.shape)}"
    torch.testing.assert_close(got, want, atol=tolerance, rtol=tolerance, equal_nan=True, msg=lambda m: f"{name}: {m}")


def compare(functions, *inputs, tolerance=1e-5):
    """Trace all functions as one, and compare each result with PyTorch's."""

    def together(*inputs):
        results = {name: function(*inputs) for name, function in functions.items()}
        return {
            f"{name}.{number}": part
            for name, result in results.items()
            for number, part in enumerate(result if isinstance(result, tuple | list) else [result])
        }

    want = together(*(each.clone() for each in inputs))
    got = trace(together, inputs)(*inputs)
    assert list(got) == list(want)
    for name in want:
        agree(name, got[name], want[name], tolerance)


NAMES = "abs ceil cos cosh erf exp exp2 expm1 floor neg reciprocal relu round sigmoid sign sin sinh tan tanh trunc"


def test_functions_of_one_number():
    compare({name: getattr(torch, name) for name in NAMES.split()}, X)
    compare({name: getattr(torch, name) for name in "acos asin atan atanh asinh log1p".split()}, UNIT)
    compare({name: getattr(torch, name) for name in "log log2 log10 sqrt rsqrt acosh".split()}, UNIT.abs() + 1)
    compare({name: getattr(torch, name) for name in "isnan isinf isfinite abs sign relu floor".split()}, SOME)
    compare({name: getattr(torch, name) for name in "abs neg sign relu floor bitwise_not exp sqrt".split()}, MORE)
    compare({name: getattr(torch, name) for name in "logical_not bitwise_not isnan".split()}, TRUTHS)


def test_activations():
    compare(
        dict(
            gelu=F.gelu,
            gelu_tanh=lambda x: F.gelu(x, approximate="tanh"),
            silu=F.silu,
            mish=F.mish,
            elu=lambda x: F.elu(x, 0.7),
            selu=F.selu,
            celu=lambda x: F.celu(x, 1.3),
            leaky_relu=lambda x: F.leaky_relu(x, 0.2),
            hardtanh=lambda x: F.hardtanh(x, -0.5, 0.7),
            relu6=F.relu6,
            hardswish=F.hardswish,
            hardsigmoid=F.hardsigmoid,
            softplus=F.softplus,
            logsigmoid=F.logsigmoid,
            softsign=F.softsign,
            glu=lambda x: F.glu(x, 1),
            prelu=lambda x: F.prelu(x, torch.tensor([0.3])),
        ),
        X,
    )


def test_arithmetic():
    compare(
        dict(
            add=lambda a, b: torch.add(a, b, alpha=2),
            sub=lambda a, b: torch.sub(a, b, alpha=0.5),
            rsub=lambda a, b: 3 - a,
            mul=torch.mul,
            div=torch.div,
            floor=lambda a, b: torch.div(a, b, rounding_mode="floor"),
            trunc=lambda a, b: torch.div(a, b, rounding_mode="trunc"),
            floor_number=lambda a, b: a // 0.7,
            remainder=torch.remainder,
            remainder_number=lambda a, b: a % -1.5,
            fmod=torch.fmod,
            square=lambda a, b: a**2,
            cube=lambda a, b: a**3.0,
            root=lambda a, b: a.abs() ** 0.5,
            inverse_root=lambda a, b: a.abs() ** -0.5,
            power=lambda a, b: a.abs() ** b,
            exponent=lambda a, b: 2.0**b,
            atan2=torch.atan2,
            maximum=torch.maximum,
            minimum=torch.minimum,
            clamp=lambda a, b: a.clamp(-1, 0.5),
            clamp_tensor=lambda a, b: torch.clamp(a, min=b),
            clamp_min=lambda a, b: a.clamp_min(0.1),
            clamp_max=lambda a, b: a.clamp(max=b),
            lerp=lambda a, b: torch.lerp(a, b, 0.3),
            addcmul=lambda a, b: torch.addcmul(a, a, b, value=0.5),
            where=lambda a, b: torch.where(a > b, a, b),
            masked_fill=lambda a, b: a.masked_fill(b > 0, -math.inf),
            xlogy=lambda a, b: torch.xlogy(a, b.abs()),
            hypot=torch.hypot,
        ),
        X,
        Y,
    )


def test_arithmetic_of_integers_and_of_mixed_types():
    compare(
        dict(
            add=torch.add,
            div=torch.div,
            floor=lambda a, b: a // b,
            trunc=lambda a, b: torch.div(a, b, rounding_mode="trunc"),
            remainder=lambda a, b: a % b,
            fmod=torch.fmod,
            power=lambda a, b: a**2,
            bits=lambda a, b: (a & b, a | b, a ^ b, a << 2, a >> 1),
            float_number=lambda a, b: a * 0.5,
            narrower=lambda a, b: a.to(torch.int32) + b.to(torch.int8),
            with_floats=lambda a, b: a + b.float(),
            scalar_tensor=lambda a, b: a.to(torch.float16) * torch.tensor(2.0),
            truths=lambda a, b: (a > 0) * b,
            truth_and_truth=lambda a, b: ((a > 0) & (b > 2), (a > 0) + (b > 2), (a > 0) * (b > 2)),
            logic=lambda a, b: (torch.logical_and(a, b), torch.logical_or(a, b), torch.logical_xor(a, b)),
            clamp=lambda a, b: a.clamp(-2, 3),
        ),
        INTS,
        MORE,
    )


def test_comparisons_promote_as_pytorch_does():
    compare(
        dict(
            tensors=lambda a, b: (a == b, a != b, a < b, a <= b, a > b, a >= b),
            numbers=lambda a, b: (a == 1, a != 1, a < 0.5, a <= 2, a > -1, a >= 0),
            mixed=lambda a, b: (a < b.float() + 0.5, a.to(torch.int32) == b, (a > 0) == (b > 2)),
            truth_and_number=lambda a, b: (a > 0) == 1,
        ),
        INTS,
        MORE,
    )
    compare(dict(nan=lambda x: (x == x, x != x, x < x, x > 0)), SOME)


def test_conversions():
    types = [torch.float16, torch.bfloat16, torch.float64, torch.int32, torch.int64, torch.uint8, torch.bool]
    compare({str(dtype): lambda x, dtype=dtype: x.abs().to(dtype) for dtype in types}, X)
    compare({str(dtype): lambda x, dtype=dtype: x.to(dtype) for dtype in types}, MORE)
    compare({str(dtype): lambda x, dtype=dtype: x.to(dtype) for dtype in types}, TRUTHS)
    compare(dict(bits=lambda x: x.view(torch.int32)), X)


def test_made_of_nothing():
    compare(
        dict(
            full=lambda x: torch.full((2, 3), 1.5),
            zeros=lambda x: torch.zeros(3, dtype=torch.int64),
            like=lambda x: (torch.ones_like(x), torch.full_like(x, 7), torch.zeros_like(x, dtype=torch.bool)),
            new=lambda x: x.new_full((2,), 3),
            arange=lambda x: (torch.arange(5), torch.arange(2, 9, 3), torch.arange(0, 1, 0.25), torch.arange(5, 0, -2)),
            linspace=lambda x: torch.linspace(0, 1, 7),
            eye=lambda x: torch.eye(4),
            tri=lambda x: (torch.tril(x[0]), torch.triu(x[0], 1)),
            scalar=lambda x: torch.tensor(2.5),
            least=lambda x: torch.full((2,), torch.finfo(torch.float32).min),
            minus=lambda x: torch.full((2,), -math.inf),
            one_hot=lambda x: F.one_hot(torch.tensor([1, 0, 3]), 4),
        ),
        X,
    )


def test_views():
    compare(
        dict(
            view=lambda x: x.view(12, 5),
            reshape=lambda x: x.transpose(0, 1).reshape(4, -1),
            flatten=lambda x: x.flatten(1),
            unflatten=lambda x: x.unflatten(1, (2, 2)),
            squeeze=lambda x: (x[:1].squeeze(), x[:1].squeeze(0), x[:1, :1].squeeze((0, 1)), x.squeeze(0)),
            unsqueeze=lambda x: (x.unsqueeze(0), x.unsqueeze(-1)),
            expand=lambda x: (x[:1].expand(3, -1, -1), x[0, 0].expand(2, 5)),
            permute=lambda x: (x.permute(2, 0, 1), x.transpose(-1, -2), x.movedim(0, 2), x.mT),
            slices=lambda x: (x[1:, ::2], x[:, -2:], x[..., 1:-1], x[5:], x[:, :99]),
            select=lambda x: (x[1], x[:, -1], x.select(2, 3)),
            diagonal=lambda x: (x.diagonal(), x.diagonal(1, 1, 2), x.diagonal(-1, 2, 1)),
            clone=lambda x: (x.clone(), x.contiguous(), x.detach()),
        ),
        X,
    )


def test_cutting_and_joining():
    compare(
        dict(
            cat=lambda a, b: (torch.cat([a, b], 1), torch.cat([a, a[:0]], 0), torch.cat([a, b.int()], -1)),
            stack=lambda a, b: torch.stack([a, b], 2),
            split=lambda a, b: (*a.split(2, 1), *a.chunk(2, -1), *a.split([1, 2], 0), *a.unbind(1)),
            repeat=lambda a, b: (a.repeat(2, 1, 3), a.repeat(2, 1, 1, 1), a.repeat_interleave(2, 1), a.tile((2,))),
            flip=lambda a, b: (a.flip(0), a.flip((1, 2))),
            roll=lambda a, b: (a.roll(1, 0), a.roll((-1, 2), (1, 2)), a.roll(3)),
            pad=lambda a, b: (F.pad(a, (1, 2)), F.pad(a, (0, 0, 1, 0), value=3.0), F.pad(a, (-1, 1))),
            reflect=lambda a, b: (F.pad(a, (2, 1), "reflect"), F.pad(a[None], (1, 2, 3, 0), "reflect")),
            replicate=lambda a, b: (F.pad(a, (2, 1), "replicate"), F.pad(a[None], (1, 2, 3, 0), "replicate")),
            meshgrid=lambda a, b: torch.meshgrid(a[0, 0], b[0, :, 0], indexing="ij"),
            shuffle=lambda a, b: F.pixel_shuffle(a.reshape(1, 60, 1, 1)[:, :8], 2),
        ),
        X,
        Y,
    )


def test_writing_to_a_part():
    def write(x, y):
        x, z, u, v = x.clone(), x.clone(), x.clone(), x.clone()
        x[1:, 2] = 5.0
        z[:, 1:3] += y[:, :2]
        u[..., ::2] = y[..., :3]
        v[0] = y[1]
        return x, z, u, v

    compare(dict(write=write, fill=lambda x, y: x.clone().fill_(2.0), copy=lambda x, y: x.clone().copy_(y)), X, Y)


INDICES = torch.tensor([[0, 2], [-1, 1]])


def test_looking_up():
    compare(
        dict(
            embedding=lambda x, i: F.embedding(i.clamp(0), x[0]),
            index=lambda x, i: (x[i], x[:, i], x[i, i], x[:, i, i], x[i, :, i], x[i[0]], x[i, 1]),
            spread=lambda x, i: x[torch.arange(3)[:, None], torch.arange(4)[None, :]],
            index_select=lambda x, i: (x.index_select(1, i[0]), x.index_select(-1, i[0])),
            gather=lambda x, i: x.gather(1, i.clamp(0)[:, :, None].expand(2, 2, 5)),
            take_along=lambda x, i: torch.take_along_dim(x, i.clamp(0)[:1, :, None], 1),
        ),
        X,
        INDICES,
    )


def test_writing_by_index():
    index = torch.tensor([[0, 2, 1, 0], [2, 1, 0, 2]])
    unique = torch.tensor([[0, 2, 1], [2, 1, 0]])

    def put(x, i, u):
        a, b, c, d = (x.clone() for _ in range(4))
        a[torch.tensor([0, 2])] = 1.5
        b[:, torch.tensor([1, 3])] = x[:, :2]
        c[x > 0] = -1.0
        d.index_put_((torch.tensor([0, 0, 1]),), x, accumulate=True)
        return a, b, c, d

    compare(
        dict(
            put=put,
            scatter=lambda x, i, u: (x[:, 0].scatter(1, u, x[:2, 1, :3]), x[:, 0].scatter(1, u, 9.0)),
            add=lambda x, i, u: x[:, 0].scatter_add(1, i, x[:2, 1, :4]),
            largest=lambda x, i, u: x[:, 0].scatter_reduce(1, i, x[:2, 1, :4], "amax"),
            index_add=lambda x, i, u: (x.index_add(1, i[0], x), x.index_add(-2, i[0], x.sin(), alpha=0.5)),
            index_copy=lambda x, i, u: x.index_copy(2, u[0], x.flip(1)[..., :3]),
            index_fill=lambda x, i, u: (x.index_fill(1, u[0, :2] - 2, 4), x.index_fill(0, u[0, 2:], x.sum())),
        ),
        X,
        index,
        unique,
    )


def test_reductions():
    compare(
        dict(
            sum=lambda x: (
                x.sum(),
                x.sum(1),
                x.sum((0, 2), keepdim=True),
                (x > 0).sum(),
                x.sum(-1, dtype=torch.float64),
            ),
            mean=lambda x: (x.mean(), x.mean((1, 2)), x.mean(-1, keepdim=True)),
            prod=lambda x: (x.prod(), x.prod(1)),
            extremes=lambda x: (x.amax(1), x.amin((0, 1)), x.max(), x.min(), *x.max(1), *x.min(2, keepdim=True)),
            places=lambda x: (x.argmax(), x.argmax(1), x.argmin(-1, keepdim=True), (x > 0).int().argmax(2)),
            logic=lambda x: ((x > 3).any(), (x > 0).any(1), (x > -9).all(), (x > 0).all((0, 1)), x.any(2)),
            var=lambda x: (x.var(), x.var(1), x.var((0, 1), correction=0), x.std(-1, keepdim=True)),
            norm=lambda x: (x.norm(), x.norm(dim=1), torch.linalg.vector_norm(x, 1, dim=2), F.normalize(x, dim=1)),
            logsumexp=lambda x: x.logsumexp(1),
            running=lambda x: (x.cumsum(1), (x > 0).cumsum(0), x.cumprod(2), *x.cummax(1), x.long().cumsum(-1)),
            softmax=lambda x: (x.softmax(-1), x.softmax(0), x.log_softmax(1), F.softmin(x, 2)),
            diff=lambda x: x.diff(dim=1),
        ),
        X,
        tolerance=2e-5,
    )


def test_orders():
    ties = torch.randint(0, 4, (3, 7)).float()
    compare(
        dict(
            sort=lambda x: (*torch.sort(x, stable=True), *torch.sort(x, dim=0, descending=True, stable=True)),
            argsort=lambda x: x.argsort(dim=1, stable=True),
            values=lambda x: (x.topk(3).values, x.topk(2, 0).values, x.topk(3, largest=False).values),
        ),
        ties,
    )
    compare(dict(topk=lambda x: (*x.topk(3), *x.topk(2, 1), *x.topk(2, largest=False))), X)


def test_norms():
    weight, bias = torch.randn(5), torch.randn(5)
    channels = torch.rand(6), torch.rand(6), torch.rand(6), torch.rand(6)
    compare(
        dict(
            layer=lambda x: (
                F.layer_norm(x, (5,), weight, bias),
                F.layer_norm(x, (4, 5)),
                F.layer_norm(x, (5,), weight),
            ),
            rms=lambda x: (F.rms_norm(x, (5,), weight, 1e-6), F.rms_norm(x, (4, 5))),
        ),
        X,
    )
    compare(
        dict(
            group=lambda x: (F.group_norm(x, 3, channels[0], channels[1]), F.group_norm(x, 6)),
            batch=lambda x: F.batch_norm(x, channels[0], channels[1], channels[2], channels[3]),
            instance=lambda x: F.instance_norm(x),
        ),
        IMAGE,
    )


def test_products():
    matrix, bias = torch.randn(5, 7), torch.randn(7)
    compare(
        dict(
            linear=lambda x, y: (F.linear(x, matrix.T, bias), F.linear(x, matrix.T), F.linear(x[0, 0], matrix.T, bias)),
            matmul=lambda x, y: (x @ matrix, x @ y.mT, x[0] @ y[0].T, x[0, 0] @ y[0, 0], x[0] @ y[0, 0]),
            addmm=lambda x, y: torch.addmm(bias, x[0], matrix, beta=0.5, alpha=2),
            baddbmm=lambda x, y: torch.baddbmm(x @ y.mT, x, y.mT),
            einsum=lambda x, y: (torch.einsum("bij,bkj->bik", x, y), torch.einsum("bij,bij->b", x, y)),
            outer=lambda x, y: torch.outer(x[0, 0], y[0, 0]),
            integers=lambda x, y: x.round().long() @ y.round().long().mT,
        ),
        X,
        Y,
    )


def test_attention():
    q, k, v = torch.randn(2, 4, 3, 8), torch.randn(2, 4, 6, 8), torch.randn(2, 4, 6, 8)
    seen, added = torch.rand(2, 1, 3, 6) > 0.4, torch.randn(2, 1, 3, 6)
    seen[0, 0, 1] = False  # who sees nothing
    attend = F.scaled_dot_product_attention
    compare(
        dict(
            plain=attend,
            causal=lambda q, k, v: attend(q, k, v, is_causal=True),
            scaled=lambda q, k, v: attend(q, k, v, scale=0.3),
            added=lambda q, k, v: attend(q, k, v, added),
            groups=lambda q, k, v: attend(q, k[:, :2], v[:, :2], enable_gqa=True),
            three_axes=lambda q, k, v: (attend(q[0], k[0], v[0]), attend(q[0], k[0], v[0], added[0])),
            five_axes=lambda q, k, v: attend(q[:, None], k[:, None], v[:, None], added[:, None]),
            two_axes=lambda q, k, v: attend(q[0, 0], k[0, 0], v[0, 0], added[0, 0]),
            one_row_of_keys=lambda q, k, v: attend(q, k[:1, :1], v[:1, :1], added[:1, :, :1]),
            a_mask_of_columns=lambda q, k, v: attend(q, k, v, added[:, :, :, :1] + added[:, :, :1]),
            values_of_another_size=lambda q, k, v: attend(q, k, v[..., :5]),
            wide=lambda q, k, v: attend(q.double(), k.double(), v.double(), added.double()),
        ),
        q,
        k,
        v,
    )
    got = trace(lambda q, k, v: attend(q, k, v, seen), (q, k, v))(q, k, v)
    want = attend(q, k, v, seen).nan_to_num(0.0)
    agree("masked", got, want)


W, B = torch.randn(7, 5), torch.randn(7)
# What follows a layer, and how many of the two operations remain.
FOLLOWING = dict(
    gelu=(1, lambda y: F.gelu(y)),
    gelu_tanh=(1, lambda y: F.gelu(y, approximate="tanh")),
    silu=(1, F.silu),
    relu=(1, F.relu),
    tanh=(1, torch.tanh),
    used_twice=(2, lambda y: F.silu(y) * y),
    of_another_kind=(2, torch.sigmoid),
)


@pytest.mark.parametrize("given", [False, True])
@pytest.mark.parametrize(("left", "activation"), FOLLOWING.values(), ids=FOLLOWING)
def test_activations_of_layers(left, activation, given):
    def layer(x, *weight):
        return activation(F.linear(x, *(weight or (W, B)))) * 2

    inputs = [X, W][: 1 + given]
    operations = [node.target for node in export(layer, inputs).graph.nodes if node.op == "call_function"]
    assert operations.count(aten.linear.default) == 1 and len(operations) - operations.count(aten.mul.Tensor) == left
    compare(dict(layer=layer), *inputs)


# Masks [2, 1, 3, 6] for visible keys [2, 6], and the number of their rows that are read.
MASKS = dict(
    expanded=(1, lambda seen: seen[:, None, None].expand(2, 1, 3, 6)),
    of_all_queries=(1, lambda seen: seen[:, None, None] & (torch.arange(3)[:, None] >= 0)),
    in_numbers=(1, lambda seen: torch.where(seen[:, None, None].expand(2, 1, 3, 6), 0.0, -3.0) * torch.ones(3, 6)),
    causal=(3, lambda seen: seen[:, None, None] & (torch.arange(3)[:, None] >= torch.arange(6))),
    given=(3, lambda seen: seen[:, None, :3, None] & seen[:, None, None]),
)


@pytest.mark.parametrize(("rows", "mask"), MASKS.values(), ids=MASKS)
def test_masks_that_are_alike_for_all_queries(rows, mask):
    def attend(q, k, v, seen):
        return F.scaled_dot_product_attention(q, k, v, mask(seen))

    q, k, v, seen = torch.randn(2, 4, 3, 8), torch.randn(2, 4, 6, 8), torch.randn(2, 4, 6, 8), torch.rand(2, 6) > 0.4
    seen[:, 0] = True
    [node] = export(attend, (q, k, v, seen)).graph.find_nodes(
        op="call_function", target=aten.scaled_dot_product_attention.default
    )
    assert node.args[3].meta["val"].shape[-2] == rows
    compare(dict(attention=attend), q, k, v, seen)


def weights_of(q, k, scale=0.3, *biases):
    scores = q @ k.mT * scale
    for bias in biases:
        scores = scores + bias
    return F.softmax(scores, -1)


# Attention written as products, and whether it becomes one operation.
MADE_OF_PRODUCTS = dict(
    plain=(1, lambda q, k, v: F.softmax(q @ k.mT, -1) @ v),
    scaled_twice=(1, lambda q, k, v: F.dropout(F.softmax(q @ k.mT / 3 * 2, 3), 0.1, training=False) @ v),
    biased=(1, lambda q, k, v: weights_of(q, k, 0.3, q[:, :1, :, :1], k[:, :, None, :, 0]) @ v),
    bias_first=(1, lambda q, k, v: F.softmax(q[..., :1] + q @ k.mT, -1) @ v),
    in_f32=(1, lambda q, k, v: F.softmax(q @ k.mT, -1, dtype=torch.float32).to(q.dtype) @ v),
    three_axes=(1, lambda q, k, v: torch.bmm(F.softmax(torch.bmm(q[0], k[0].mT), -1), v[0]) * 2),
    twice=(2, lambda q, k, v: weights_of(weights_of(q, k) @ v, k) @ v),
    weights_come_out=(0, lambda q, k, v: ((weights := weights_of(q, k)) @ v, weights)),
    scores_come_out=(0, lambda q, k, v: (F.softmax(scores := q @ k.mT, -1) @ v, scores)),
    along_another_axis=(0, lambda q, k, v: F.softmax(q @ k.mT, 1) @ v),
    scaled_with_a_bias=(0, lambda q, k, v: F.softmax((q @ k.mT + q[..., :1]) * 0.3, -1) @ v),
    weights_are_changed=(0, lambda q, k, v: weights_of(q, k).square() @ v),
    in_whole_numbers=(0, lambda q, k, v: F.softmax((q @ k.mT * 3).long().float(), -1) @ v),
    divided_by_nothing=(0, lambda q, k, v: F.softmax(q.abs() @ k.abs().mT / 0, -1) @ v),
    no_softmax=(0, lambda q, k, v: q @ k.mT @ v),
    shared_keys=(0, lambda q, k, v: F.softmax(q @ k[:, :1].mT, -1) @ v),
)


@pytest.mark.parametrize(("joined", "function"), MADE_OF_PRODUCTS.values(), ids=MADE_OF_PRODUCTS)
def test_attention_made_of_products(joined, function):
    def used(*inputs):  # what comes out of a function itself is left as it is
        results = function(*inputs)
        return [result + 1 for result in (results if isinstance(results, tuple) else (results,))]

    q, k, v = torch.randn(2, 4, 3, 8), torch.randn(2, 4, 6, 8), torch.randn(2, 4, 6, 8)
    operations = [node.target for node in export(used, (q, k, v)).graph.nodes]
    assert operations.count(aten.scaled_dot_product_attention.default) == joined
    compare(dict(attention=used), q, k, v)


def test_convolutions():
    two, groups, one = torch.randn(4, 6, 3, 2), torch.randn(6, 2, 3, 3), torch.randn(4, 6, 5)
    back, back_groups, bias = torch.randn(6, 4, 3, 2), torch.randn(6, 2, 3, 3), torch.randn(4)
    compare(
        dict(
            plain=lambda x: (F.conv2d(x, two, bias), F.conv2d(x, two, stride=(2, 3), padding=(1, 2), dilation=(2, 1))),
            groups=lambda x: F.conv2d(x, groups, groups=3, padding="same"),
            depthwise=lambda x: F.conv2d(x, torch.ones(6, 1, 3, 3), groups=6),
            one_axis=lambda x: F.conv1d(x[:, :, 0], one, bias, stride=2, padding=2),
            three_axes=lambda x: F.conv3d(x[None], torch.ones(3, 2, 2, 3, 3)),
            patches=lambda x: F.conv2d(x[..., :8, :], torch.ones(4, 6, 4, 4) * 0.1, bias, stride=4),
            back=lambda x: (F.conv_transpose2d(x, back), F.conv_transpose2d(x, back, bias, 2, 1, 1, dilation=2)),
            back_groups=lambda x: F.conv_transpose2d(x, back_groups, groups=3, stride=2, output_padding=1),
            back_one=lambda x: F.conv_transpose1d(x[:, :, 0], one.transpose(0, 1), stride=3),
        ),
        IMAGE,
        tolerance=1e-4,
    )


def test_pooling():
    compare(
        dict(
            largest=lambda x: (F.max_pool2d(x, 2), F.max_pool2d(x, 3, 2, 1), F.max_pool2d(x, 2, ceil_mode=True)),
            mean=lambda x: (F.avg_pool2d(x, 2), F.avg_pool2d(x, 3, 2, 1), F.avg_pool2d(x, 3, 2, 1, True, False)),
            ceil=lambda x: F.avg_pool2d(x, 4, 3, 1, ceil_mode=True),
            one_axis=lambda x: F.avg_pool1d(x[:, :, 0], 3, 2),
            adaptive=lambda x: (F.adaptive_avg_pool2d(x, 1), F.adaptive_avg_pool2d(x, (4, 3))),
            adaptive_one=lambda x: F.adaptive_avg_pool1d(x[:, :, 0], 3),
        ),
        IMAGE,
    )


def test_where_the_largest_of_a_window_was():
    """The first of equal values counts, the last NaN, and never padding, even if all values are minus infinity."""

    def places(pool, *sizes, **options):
        return lambda x: pool(x, *sizes, return_indices=True, **options)

    two = dict(
        plain=places(F.max_pool2d, 2),
        over_edges=places(F.max_pool2d, 3, 2, 1),
        dilated=places(F.max_pool2d, 2, 1, 1, 2),
        beyond_the_end=places(F.max_pool2d, (2, 3), (2, 2), ceil_mode=True),
        only_places=lambda x: F.max_pool2d(x, 2, return_indices=True)[1],
        one_axis=lambda x: F.max_pool1d(x[0], 3, return_indices=True),
        put_back=lambda x: F.max_unpool2d(*F.max_pool2d(x, 2, return_indices=True), 2, output_size=x.shape),
    )
    odd = IMAGE.clone()
    odd[0, 0, :3, :3], odd[0, 1, 2, 3:5], odd[0, 1, 4:] = -math.inf, math.nan, 1.0
    for image in (IMAGE, odd, IMAGE.round()):
        compare({name: two[name] for name in two if name != "put_back" or image is IMAGE}, image)
    compare(dict(plain=two["plain"], over_edges=two["over_edges"]), (IMAGE * 9).long())
    volume = torch.randn(1, 2, 5, 6, 4, generator=torch.Generator().manual_seed(3))
    compare(
        dict(
            values=lambda x: F.max_pool3d(x, 2),
            over_edges=places(F.max_pool3d, 3, 2, 1),
            uneven=places(F.max_pool3d, (1, 2, 3), (2, 1, 1)),
        ),
        volume,
    )


def test_operations_that_are_called_by_their_own_names():
    """Operations that PyTorch rewrites or decomposes unless they are called directly."""
    weight, bias = torch.randn(5), torch.randn(5)
    compare(
        dict(
            numbers=lambda x, i: (aten.add.Scalar(x, 2, 3), aten.sub.Scalar(x, 2), aten.mul.Scalar(x, 2)),
            division=lambda x, i: (aten.div.Scalar(x, 2), aten.div.Scalar_mode(x, 2, rounding_mode="floor")),
            fmod=lambda x, i: aten.fmod.Scalar(x, 1.5),
            bits=lambda x, i: (
                aten.bitwise_and.Scalar(i, 5),
                aten.bitwise_or.Scalar(i, 5),
                aten.bitwise_xor.Scalar(i, 5),
            ),
            shifts=lambda x, i: (torch.bitwise_left_shift(i, 2), torch.bitwise_right_shift(i, i.abs() % 3), i << i % 3),
            more_shifts=lambda x, i: (torch.bitwise_left_shift(i, i % 3), torch.bitwise_right_shift(i, 1), i >> i % 3),
            sort=lambda x, i: tuple(aten.sort.default(x)),
            softmax=lambda x, i: (aten._softmax(x, 1, False), aten._log_softmax(x, 1, False)),
            var_mean=lambda x, i: torch.var_mean(x, 1),
            norm=lambda x, i: torch.native_layer_norm(x, (5,), weight, bias, 1e-5)[0],
            group_norm=lambda x, i: torch.native_group_norm(x, weight[:4], bias[:4], 3, 4, 5, 2, 1e-5)[0],
            pools=lambda x, i: (F.avg_pool3d(x[None], 2), F.adaptive_avg_pool3d(x[None], (1, 2, 3))),
            empty=lambda x, i: (torch.empty(2, 0), torch.tensor([1.5, 2.0]) * 2),
        ),
        X,
        MORE,
    )


@pytest.mark.parametrize(
    "function",
    [
        lambda x: F.dropout(x, 0.5),
        lambda x: F.scaled_dot_product_attention(x, x, x, dropout_p=0.5),
        lambda x: F.dropout(F.softmax(x @ x.mT, -1), 0.5) @ x * 2,
    ],
)
def test_what_a_model_does_in_training_is_refused(function):
    with pytest.raises(GraphError, match=r"at random in training mode: call the model's eval\(\) first"):
        trace(function, X)


def test_no_lowering_is_dead():
    """No lowering is for an operation that PyTorch decomposes first."""
    table = decompositions()
    assert not [str(operation) for operation in TABLE if operation in table]


def test_resizing():
    compare(
        dict(
            nearest=lambda x: (F.interpolate(x, scale_factor=2), F.interpolate(x, (5, 11))),
            bilinear=lambda x: (
                F.interpolate(x, (12, 5), mode="bilinear"),
                F.interpolate(x, (12, 5), mode="bilinear", align_corners=True),
            ),
            bicubic=lambda x: F.interpolate(x, (12, 13), mode="bicubic"),
            linear=lambda x: F.interpolate(x[:, :, 0], 13, mode="linear"),
        ),
        IMAGE,
        tolerance=1e-4,
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_as_near_as_pytorch_s_own(dtype):
    """The mean error of a block against f32 is at most one and a half times that of PyTorch's own result."""
    torch.manual_seed(1)
    weight, bias = torch.randn(32, 32) / 6, torch.randn(32)

    def block(x):
        w, b = weight.to(x.dtype), bias.to(x.dtype)
        y = F.layer_norm(x, (32,), b, b)
        y = F.gelu(F.linear(y, w, b))
        heads = y.view(2, 6, 4, 8).transpose(1, 2)
        return F.softmax(F.scaled_dot_product_attention(heads, heads, heads), -1) * F.silu(heads)

    x = torch.randn(2, 6, 32)
    exact = block(x)
    own = (block(x.to(dtype)).float() - exact).square().mean()
    got = trace(block, x.to(dtype))(x.to(dtype))
    assert got.dtype == dtype
    assert (got.float() - exact).square().mean() <= 1.5**2 * own


def test_every_lowering_was_called(request):
    here = [item.name for item in request.session.items if item.path == request.node.path]
    if set(here) - {*FINISHED, request.node.name}:
        pytest.skip("needs all other tests of this file to have run before")
    assert sorted(str(operation) for operation in TABLE if operation not in CALLED) == []
