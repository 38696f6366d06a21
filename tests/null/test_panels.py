"""Matrices in panels: the place of each element, and the way back."""

import pytest
import torch

from transformers_neuronx.pyhlo.dtypes import from_torch
from transformers_neuronx.weights import panels

F8 = torch.float8_e4m3fn


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.int8, torch.uint8, F8])
@pytest.mark.parametrize(("outputs", "inputs"), [(1, 1), (16, 8), (17, 9), (40, 64)])
def test_panels(dtype, outputs, inputs):
    name = from_torch(dtype).name
    matrix, word = torch.arange(outputs * inputs).view(outputs, inputs).remainder(101).to(dtype), panels.WORDS[name]
    laid = panels.laid_out(matrix, word)
    assert laid.shape == panels.sizes((outputs, inputs), word) and laid.dtype is dtype and laid.is_contiguous()
    assert panels.as_matrix(laid, (outputs, inputs)).float().equal(matrix.float())
    for output in {0, outputs // 2, outputs - 1}:
        for i in {0, inputs // 2, inputs - 1}:
            assert laid[output // 16, i // word, output % 16, i % word].float() == matrix[output, i].float()
    assert laid.double().sum() == matrix.double().sum()  # the rest are zeros


def test_a_view_of_a_larger_matrix():
    matrix = torch.arange(64.0).view(4, 16).to(torch.bfloat16)[:, 3:10]
    assert panels.as_matrix(panels.laid_out(matrix, 2), (4, 7)).equal(matrix)
