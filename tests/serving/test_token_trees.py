"""Token trees of the original: their functions, and programs that speculate with them."""

from pathlib import Path

import pytest
import torch

from transformers_neuronx.errors import ConfigError, NotSupportedError
from transformers_neuronx.gpt2.model import GPT2ForSampling
from transformers_neuronx.speculation import TreeSpeculativeGenerator
from transformers_neuronx.util.token_tree import ROOT_NODE, generate_attention_mask, validate_token_tree

EXAMPLES = Path(__file__).parents[2] / "examples"
TREE = {0: [1, 2, 3], 1: [4, 5], 3: [6], 4: [7], 7: []}


def test_shape():
    assert ROOT_NODE == 0 and validate_token_tree(TREE) == (8, 4)
    assert validate_token_tree({0: []}) == (1, 1)
    assert validate_token_tree({0: [2, 1], 2: [3]}) == (4, 3)  # in any order within a level


def test_attention_mask():
    before = {0: [], 1: [0], 2: [0], 3: [0], 4: [0, 1], 5: [0, 1], 6: [0, 3], 7: [0, 1, 4]}
    want = [[int(other in (node, *nodes)) for other in before] for node, nodes in before.items()]
    mask = generate_attention_mask(TREE)
    assert mask.tolist() == want and mask.dtype is torch.int32


@pytest.mark.parametrize(
    "tree",
    [
        {}, {1: [2]}, {0: [1], 1: [0]}, {0: [1, 1]}, {0: [1, 2], 1: [3], 2: [3]}, {0: [2, 3]}, {0: [1], 5: [6]},
        {0: [1], 1: [3]}, {0: [3, 1], 3: [2]}, {0: ["a"]}, {0: [1], "b": [2]},
    ],
)  # fmt: skip
def test_what_is_no_tree(tree):
    with pytest.raises(
        ConfigError, match="token_tree must name the children of nodes that are numbered level by level"
    ):
        validate_token_tree(tree)


@pytest.mark.compiled_ahead
def test_a_program_for_the_original():
    draft, target = (
        GPT2ForSampling.from_pretrained(EXAMPLES / name, n_positions=128) for name in ("tiny-kjv-draft", "tiny-kjv")
    )
    for model in (draft, target):
        model.enable_token_tree_decoder(TREE)
        model.to_neuron()
    programs = target.decoder.store.missing(target.decoder.verifying(3))
    assert not programs, "to_neuron() has compiled them"
    ids = torch.tensor([[302, 392, 342]])
    generator = TreeSpeculativeGenerator(draft, target, TREE)
    assert (generator.k, generator.depth) == (3, 4)
    assert torch.equal(generator.sample(ids, 64), target.sample(ids, 64, top_k=1))
    drawn = generator.sample(ids, 64, top_k=20, seed=3)
    assert torch.equal(drawn, target.sample(ids, 64, top_k=20, seed=3))


def test_refused():
    model = GPT2ForSampling.from_pretrained(EXAMPLES / "tiny-kjv", n_positions=128)
    with pytest.raises(ConfigError, match="token_tree must have nodes besides its root"):
        TreeSpeculativeGenerator(None, model, {0: []})
    with pytest.raises(ConfigError, match="token_tree must name"):
        TreeSpeculativeGenerator(None, model)
    with pytest.raises(ConfigError, match="token_tree must name"):
        model.enable_speculative_decoder(4, token_tree={0: [7]})
    with pytest.raises(NotSupportedError, match="acceptor of token trees"):
        TreeSpeculativeGenerator(None, model, TREE, acceptor=print)
