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
    nodes, levels, level = 0, 0, [ROOT_NODE]
    while level and sorted(level) == [*range(nodes, nodes + len(level))]:
        nodes, levels = nodes + len(level), levels + 1
        level = [child for node in level for child in token_tree.get(node, ())]
    if level or ROOT_NODE not in token_tree or any(node not in range(nodes) for node in token_tree):
        raise ConfigError(
            f"token_tree must name the children of nodes that are numbered level by level, from the root 0 on, got "
            f"{dict(token_tree)}"
        )
    return nodes, levels


def draft_tokens(token_tree: Tree) -> int:
    """Return the number of draft tokens on the longest path of a tree. Raises ConfigError if there is none."""
    count = validate_token_tree(token_tree)[1] - 1
    if not count:
        raise ConfigError("token_tree must have nodes besides its root")
    return count


def generate_attention_mask(token_tree: Tree) -> torch.Tensor:
    """Return which nodes each node comes after, and itself. s32[nodes, nodes]"""
    import torch

    mask = torch.eye(validate_token_tree(token_tree)[0], dtype=torch.int32)
    for node in sorted(token_tree):  # parents come before their children
        for child in token_tree[node]:
            mask[child] += mask[node]
    return mask
