"""Operations without a function in `hlo`, written as `dtype[sizes].Op(...)` and run by XLA:CPU."""

import numpy as np
import pytest
from ml_dtypes import bfloat16

from transformers_neuronx import hlo
from transformers_neuronx.errors import EngineError
from transformers_neuronx.pyhlo import dtype_named

F32, S32, U32, U64, PRED = map(dtype_named, ("f32", "s32", "u32", "u64", "pred"))
X = np.array([[1, -2, 4, 0.5], [3, 8, -1, 6]], np.float32)


def pair(op, dtype=F32, out=None, **fields):
    """Write the computation `op(a, b)` of two scalars."""

    def combine(_):
        a, b = dtype.Parameter(parameter_number=0), dtype.Parameter(parameter_number=1)
        return getattr(out or dtype, op)(a, b, **fields)

    return combine


def zero():
    return F32.Constant(constant_value=0)


def elements(x, count):
    return [hlo.element(x, index) for index in range(count)]


def window(*sizes):
    """Return a window of adjacent blocks of `sizes`."""
    return dict(dimensions=[dict(size=size, stride=size, window_dilation=1, base_dilation=1) for size in sizes])


def close(got, *wanted):
    for result, want in zip(got, wanted, strict=True):
        assert result.shape == np.shape(want)
        np.testing.assert_allclose(result, want, rtol=1e-6, atol=1e-6)


ONE_OPERAND = dict(
    Cbrt=np.cbrt,
    Copy=np.array,
    Round=lambda x: np.copysign(np.floor(np.abs(x) + 0.5), x),
    RoundNearestEven=np.rint,
    Tan=np.tan,
)


@pytest.mark.parametrize("op", ONE_OPERAND)
def test_functions_of_one_float(run, op):
    x = np.array([-3.5, -2.5, -0.5, 0, 0.5, 1.25, 2.5, 8], np.float32)
    close(run(lambda x: getattr(x.shape, op)(x), x), ONE_OPERAND[op](x))


def test_bits_are_counted(run):
    x = np.array([0, 1, 7, 2**20, -1], np.int32)
    got = run(lambda x: (x.shape.PopulationCount(x), x.shape.CountLeadingZeros(x)), x)
    assert [result.tolist() for result in got] == [[0, 1, 3, 1, 32], [32, 31, 29, 11, 0]]


def test_atan2_knows_the_quadrant(run):
    y, x = np.array([1, 1, -1, -1], np.float32), np.array([1, -1, 1, -1], np.float32)
    close(run(lambda y, x: y.shape.Atan2(y, x), y, x), np.arctan2(y, x))


def test_reduce_precision_to_that_of_bf16(run):
    x = np.array([1 / 3, 1.00390625, 3e38], np.float32)
    (got,) = run(lambda x: x.shape.ReducePrecision(x, exponent_bits=8, mantissa_bits=7), x)
    want = x.astype(bfloat16).astype(np.float32)
    assert got.tolist() == want.tolist() != x.tolist()


def test_map_applies_a_computation_to_every_element(run):
    close(
        run(lambda x: x.shape.Map(x, x, dimensions=[0, 1], to_apply=pair("Power")), np.abs(X)), np.abs(X) ** np.abs(X)
    )


def test_pad_between_before_and_less_than_nothing_after(run):
    config = dict(dimensions=[dict(), dict(edge_padding_low=1, edge_padding_high=-2, interior_padding=1)])
    want = np.zeros((2, 6), np.float32)
    want[:, 1::2] = X[:, :3]
    close(run(lambda x: F32[2, 6].Pad(x, zero(), padding_config=config), X), want)


def test_convolution(run):
    kernel = np.array([[[1, 10]], [[2, 0]]], np.float32)  # [features out, in, width]
    dimensions = dict(
        input_batch_dimension=0,
        input_feature_dimension=1,
        input_spatial_dimensions=[2],
        kernel_output_feature_dimension=0,
        kernel_input_feature_dimension=1,
        kernel_spatial_dimensions=[2],
        output_batch_dimension=0,
        output_feature_dimension=1,
        output_spatial_dimensions=[2],
    )
    step = dict(size=2, stride=2, padding_low=1, padding_high=1, window_dilation=1, base_dilation=1)
    (got,) = run(
        lambda x, k: F32[2, 2, 3].Convolution(
            hlo.reshape(x, 2, 1, 4),
            k,
            window=dict(dimensions=[step]),
            convolution_dimension_numbers=dimensions,
            feature_group_count=1,
            batch_group_count=1,
        ),
        X,
        kernel,
    )
    blocks = np.pad(X, [(0, 0), (1, 1)]).reshape(2, 3, 2)
    np.testing.assert_allclose(got, np.einsum("bsw,ow->bos", blocks, kernel[:, 0]))


def test_reduce_window(run):
    (got,) = run(lambda x: F32[2, 2].ReduceWindow(x, zero(), window=window(1, 2), to_apply=pair("Add")), X)
    np.testing.assert_array_equal(got, X.reshape(2, 2, 2).sum(2))


def test_select_and_scatter_returns_to_where_the_largest_was(run):
    source = np.array([[10, 20], [30, 40]], np.float32)
    chosen = pair("Compare", out=PRED, comparison_direction="GE")
    (got,) = run(
        lambda x, s: x.shape.SelectAndScatter(x, s, zero(), window=window(1, 2), to_apply=[chosen, pair("Add")]),
        X,
        source,
    )
    assert got.tolist() == [[10, 0, 20, 0], [0, 30, 0, 40]]


def test_batch_norm(run):
    scale, offset = np.array([1, 2, 3, 4], np.float32), np.array([0, 0, 1, -1], np.float32)
    mean, variance = X.mean(0), X.var(0)
    want = (X - mean) / np.sqrt(variance + 0.25) * scale + offset
    fields = dict(epsilon=0.25, feature_index=1)

    def training(x, scale, offset):
        shape = x.scribe.tuple(x.shape, scale.shape, scale.shape)
        return elements(shape.BatchNormTraining(x, scale, offset, **fields), 3)

    close(run(training, X, scale, offset), want, mean, variance)
    close(run(lambda x, *p: x.shape.BatchNormInference(x, *p, **fields), X, scale, offset, mean, variance), want)


def test_gather_of_single_elements_and_scatter_that_adds(run):
    places = np.array([[0, 3], [1, 1], [0, 3]], np.int32)
    gathered, added = run(
        lambda x, i: (
            F32[3].Gather(
                x,
                i,
                gather_dimension_numbers=dict(collapsed_slice_dims=[0, 1], start_index_map=[0, 1], index_vector_dim=1),
                gather_slice_sizes=[1, 1],
            ),
            x.shape.Scatter(
                x,
                i,
                hlo.constant([1.0, 2.0, 4.0], "f32"),
                scatter_dimension_numbers=dict(
                    inserted_window_dims=[0, 1], scatter_dims_to_operand_dims=[0, 1], index_vector_dim=1
                ),
                to_apply=pair("Add"),
            ),
        ),
        X,
        places,
    )
    assert gathered.tolist() == [0.5, 8, 0.5]
    want = X.copy()
    np.add.at(want, tuple(places.T), [1, 2, 4])
    np.testing.assert_array_equal(added, want)


def test_uniform_and_normal_random_numbers(run):
    def both(low):
        one = F32.Constant(constant_value=1)
        return [F32[4000].Rng(low, one, distribution=name) for name in ("RNG_UNIFORM", "RNG_NORMAL")]

    uniform, normal = run(both, np.float32(0))
    assert 0 <= uniform.min() < 0.01 and 0.99 < uniform.max() <= 1
    assert abs(uniform.mean() - 0.5) < 0.05
    assert abs(normal.mean()) < 0.1 and abs(normal.std() - 1) < 0.1


@pytest.mark.parametrize("algorithm", ["RNG_THREE_FRY", "RNG_PHILOX", "RNG_DEFAULT"])
def test_random_bits_follow_from_their_state(run, algorithm):
    def bits(state):
        return elements(state.scribe.tuple(state.shape, U32[64]).RngBitGenerator(state, rng_algorithm=algorithm), 2)

    seed = np.array([1, 2], np.uint64)
    after, first = run(bits, seed)
    assert first.tolist() == run(bits, seed)[1].tolist() != run(bits, after)[1].tolist()
    assert abs(np.unpackbits(first.view(np.uint8)).mean() - 0.5) < 0.05


def test_three_fry_is_the_published_one(run):
    """Threefry-2x32 with 20 rounds of Salmon et al. (SC 2011): key and counter all zeros."""

    def bits(state):
        shape = state.scribe.tuple(state.shape, U32[2])
        return elements(shape.RngBitGenerator(state, rng_algorithm="RNG_THREE_FRY"), 2)

    assert run(bits, np.zeros(2, np.uint64))[1].tolist() == [0x6B200159, 0x99BA4EFE]


def test_a_conditional_chooses_among_several_branches(run):
    def branch(op):
        return lambda _: getattr(F32, op)(F32.Parameter(parameter_number=0))

    def choose(index, x):
        return F32.Conditional(index, x, x, x, branch_computations=[branch(op) for op in ("Negate", "Sqrt", "Exp")])

    got = [run(choose, np.int32(index), np.float32(4))[0] for index in (0, 1, 2, 9)]
    np.testing.assert_allclose(got, [-4, 2, np.exp(4), np.exp(4)], rtol=1e-6)


def test_call_and_a_barrier_of_a_tuple(run):
    def graph(x):
        shape = x.scribe.tuple(x.shape, x.shape)
        doubled = x.shape.Call(x, to_apply=lambda _: (p := x.shape.Parameter(parameter_number=0)) + p)
        return elements(shape.OptimizationBarrier(shape.Tuple(x, doubled)), 2)

    close(run(graph, X), X, 2 * X)


# Operations between devices.


def rank():
    return hlo.convert(hlo.replica_id(), "f32")


def everyone(x, degree):
    """Gather the values of all devices, side by side."""
    return hlo.all_gather(hlo.reshape(x, -1), degree, 0)


def test_there_is_one_partition(run):
    (got,) = run(lambda x: everyone(U32.PartitionId(), 2), np.float32(0), degree=2)
    assert got.tolist() == [0, 0]


def test_collective_permute_sends_to_the_next_and_gives_zero_to_the_rest(run):
    def graph(x):
        pairs = [dict(source=source, target=target) for source, target in ((2, 0), (0, 1))]
        return everyone(F32.CollectivePermute(x + rank(), source_target_pairs=pairs), 3)

    assert run(graph, np.float32(10), degree=3)[0].tolist() == [12, 10, 0]


def test_all_to_all_transposes_devices_and_pieces(run):
    groups = [dict(replica_ids=[0, 1])]

    def array(x):
        return everyone(F32[4].AllToAll(x + rank() * 10.0, dimensions=[0], replica_groups=groups), 2)

    def pieces(x):
        low, high = hlo.split(x + rank() * 10.0, 2)
        both = x.scribe.tuple(F32[2], F32[2]).AllToAll(low, high, replica_groups=groups)
        return everyone(hlo.concatenate(elements(both, 2), 0), 2)

    for graph in (array, pieces):
        assert run(graph, np.arange(4, dtype=np.float32), degree=2)[0].tolist() == [0, 1, 10, 11, 2, 3, 12, 13]


def test_groups_of_devices_sum_apart(run):
    groups = [dict(replica_ids=[0, 2]), dict(replica_ids=[1, 3])]

    def graph(x):
        return everyone(F32.AllReduce(x + rank(), replica_groups=groups, to_apply=pair("Add")), 4)

    assert run(graph, np.float32(1), degree=4)[0].tolist() == [4, 6, 4, 6]


def test_bitcast_is_for_compilers_only(run):
    with pytest.raises(EngineError, match=r"Unexpected bitcast operation|failed to legalize operation 'mhlo.bitcast'"):
        run(lambda x: F32[4, 2].Bitcast(x), X)
