"""Matrices in fewer bits: scales, rounding to nearest, and GPTQ's compensation of errors."""

import pytest
import torch

from transformers_neuronx.errors import CheckpointError, ConfigError
from transformers_neuronx.weights.quantizing import SCHEMES, scheme_named
from transformers_neuronx.weights.quantizing.matrices import compensated, rounded
from transformers_neuronx.weights.words import in_words

GROUPS = dict(W4A16=16, W4A16_ASYM=16)


def scheme(name):
    return scheme_named(name, GROUPS.get(name))


def drawn(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def correlated(inputs, tokens=400):
    """Inputs that can make up for each other, as those of layers do."""
    return drawn(tokens, inputs // 4, seed=1) @ drawn(inputs // 4, inputs, seed=2) + drawn(tokens, inputs, seed=3) / 4


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", SCHEMES)
def test_values_are_in_range_and_scales_exact(name, dtype):
    matrix = drawn(24, 48)
    matrix[:, 16:32] += 1  # groups that are not around zero
    matrix[3] = 0
    found = rounded(scheme(name), matrix, dtype)
    assert found.scales.equal(found.scales.to(dtype).float()) and found.scales.shape == (24, 3 if name in GROUPS else 1)
    bits, limit = found.scheme.bits, 448 if name == "FP8A16" else 1 << (found.scheme.bits - 1)
    assert found.values.min() >= -limit and found.values.max() <= (448 if name == "FP8A16" else limit - 1)
    assert (found.zeros != 0).any() == (name == "W4A16_ASYM")
    off = (found.numbers - matrix).square().mean().sqrt() / matrix.square().mean().sqrt()
    assert off < (0.1 if bits == 4 else 0.03) and found.numbers[3].equal(torch.zeros(48))


def test_clipping_lowers_the_error_of_four_bits_alone(monkeypatch):
    matrix = drawn(64, 128)
    errors = {}
    for tried in (True, False):
        if not tried:
            monkeypatch.setattr("transformers_neuronx.weights.quantizing.rounding.TRIED", [])
        for name in ("W4A16", "W8A16"):
            found = rounded(scheme_named(name), matrix, torch.float32)
            errors[name, tried] = (found.numbers - matrix).square().sum(1)
    assert (errors["W4A16", True] <= errors["W4A16", False]).all()
    assert errors["W4A16", True].sum() < 0.9 * errors["W4A16", False].sum()
    assert errors["W8A16", True].equal(errors["W8A16", False])


@pytest.mark.parametrize("name", SCHEMES)
def test_of_independent_inputs_nothing_is_compensated(name):
    matrix = drawn(24, 192)
    nearest = rounded(scheme(name), matrix, torch.float32)
    for hessian in (3 * torch.eye(192), torch.zeros(192, 192)):
        found = compensated(scheme(name), matrix, hessian, torch.float32, "a matrix")
        assert found.numbers.equal(nearest.numbers)


@pytest.mark.parametrize("name", SCHEMES)
def test_compensation_lowers_the_error_of_products(name):
    matrix, x = drawn(24, 192), correlated(192)
    wanted = x @ matrix.T
    nearest, found = (
        x @ each.numbers.T - wanted
        for each in (
            rounded(scheme(name), matrix, torch.float32),
            compensated(scheme(name), matrix, x.T @ x, torch.float32, "a matrix"),
        )
    )
    assert found.square().sum() < 0.6 * nearest.square().sum()


@pytest.mark.parametrize("name", ["W8A16", "W4A16_ASYM"])
def test_compensation_is_that_of_one_input_after_the_other(name):
    """As the method is derived: the inverse of the Hessian loses a row and a column for each input that is rounded."""
    matrix, x = drawn(12, 160), correlated(160)
    hessian = x.T @ x
    found = compensated(scheme(name), matrix, hessian, torch.float32, "a matrix")
    damped = hessian.double() + 0.01 * hessian.double().diagonal().mean() * torch.eye(160)
    rest, inverse = matrix.double(), torch.linalg.inv(damped)
    group = GROUPS.get(name, 160)
    for column in range(160):
        scales, zeros = (part[:, column // group] for part in (found.scales.double(), found.zeros.double()))
        half = 1 << (found.scheme.bits - 1)
        values = ((rest[:, column] / scales).round() + zeros).clamp(-half, half - 1)
        assert (values - found.values[:, column]).abs().max() <= 1  # one that is between two may round either way
        error = (rest[:, column] - (found.values[:, column] - zeros) * scales) / inverse[column, column]
        rest -= error[:, None] * inverse[column]
        inverse = inverse - inverse[:, column : column + 1] * inverse[column] / inverse[column, column]
        assert (values == found.values[:, column]).double().mean() > 0.8


@pytest.mark.parametrize(("bits", "count"), [(4, 13), (4, 16), (8, 3), (8, 8)])
def test_words_have_the_first_number_in_the_lowest_bits(bits, count):
    numbers = torch.randint(0, 1 << bits, (3, count), dtype=torch.uint8)
    words = in_words(numbers, bits)
    assert words.dtype is torch.int32 and words.shape == (3, -(-count * bits // 32))
    for row, read in zip(numbers.tolist(), words.tolist(), strict=True):
        whole = sum((word % 2**32) << (32 * place) for place, word in enumerate(read))
        assert whole == sum(number << (bits * place) for place, number in enumerate(row))


@pytest.mark.parametrize(
    ("hessian", "said"),
    [
        (torch.full((32, 32), torch.nan), "a matrix: its inputs are not all finite in f32; leave the calibration out"),
        (-torch.eye(32), "a matrix: too few tokens for the calibration of its inputs; take a longer text"),
    ],
)
def test_hessians_that_cannot_be_used(hessian, said):
    with pytest.raises(CheckpointError, match=said):
        compensated(scheme("W4A16"), drawn(8, 32), hessian, torch.float32, "a matrix")


@pytest.mark.parametrize(
    ("name", "group", "said"),
    [
        ("W4A8", None, "the scheme must be one of W8A16, W4A16, W4A16_ASYM, FP8A16, got 'W4A8'"),
        ("W8A16", 32, "W8A16 has one scale for each output; a group size is for W4A16, W4A16_ASYM: leave it out"),
        ("W4A16", 12, "the group size must be a multiple of 8, got 12; take 32, 64 or 128"),
    ],
)
def test_schemes_that_there_are_not(name, group, said):
    with pytest.raises(ConfigError, match=said):
        scheme_named(name, group)
