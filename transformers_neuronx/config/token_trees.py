"""Token trees: the children of each draft token, as programs for the original library write them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from transformers_neuronx.errors import ConfigError

if TYPE_CHECKING:
    import torch

ROOT_NODE = 0  # the token before all draft tokens
Tree = Mapping[int, Sequence[int]]


def validate_token_tree(token_tree: Tree) -> tuple[int, int]:
    """Return the numbers of nodes and of levels of a tree, with its root.

    Raises ConfigError unless it names the children of nodes that are numbered level by level, from the root 0 on.
    """
    levels = _levels(token_tree)
    return sum(map(len, levels)), len(levels)


def draft_tokens(token_tree: Tree) -> int:
    """Return the number of draft tokens on the longest path of a tree. Raises ConfigError if there is none."""
    count = len(_levels(token_tree)) - 1
    if not count:
        raise ConfigError("token_tree must have nodes besides its root")
    return count


def generate_attention_mask(token_tree: Tree) -> torch.Tensor:
    """Return which nodes each node comes after, and itself. s32[nodes, nodes]"""
    import torch

    mask = torch.eye(validate_token_tree(token_tree)[0], dtype=torch.int32)
    for level in _levels(token_tree):  # parents come before their children
        for node in level:
            for child in token_tree.get(node, ()):
                mask[child] += mask[node]
    return mask


def _levels(tree: Tree) -> list[list[int]]:
    """Return the nodes of each level."""
    levels, nodes, level = list[list[int]](), 0, [ROOT_NODE]
    while level:
        if sorted(level) != list(range(nodes, nodes + len(level))):
            nodes = -1
            break
        levels.append(level)
        nodes += len(level)
        level = [child for node in level for child in tree.get(node, ())]
    if ROOT_NODE not in tree or any(node not in range(nodes) for node in tree):
        raise ConfigError(
            f"token_tree must name the children of nodes that are numbered level by level, from the root 0 on, got "
            f"{dict(tree)}"
        )
    return levels
