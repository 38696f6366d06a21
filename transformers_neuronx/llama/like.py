"""What decoders with a block like LLaMA's can have different: numbers, parts, and names in their checkpoints."""

from collections.abc import Mapping
from typing import ClassVar, Literal

from transformers_neuronx.layers import RotaryConfig, window_of

# Norms before and after both blocks, as they are named where there are four.
SANDWICH = {
    "attn_norm": "input_layernorm",
    "attn_out_norm": "post_attention_layernorm",
    "mlp_norm": "pre_feedforward_layernorm",
    "mlp_out_norm": "post_feedforward_layernorm",
}


class LlamaLike(RotaryConfig):
    """A configuration for LLaMA's graph and weight table. The values here are LLaMA's.

    A family overrides what differs: with a field if checkpoints of the family differ, otherwise with a value. The
    attributes here are not fields, because artifacts list a family's fields.
    """

    activation: str
    tied: bool  # the head is the embedding

    # Factors of the embedding, of what a block adds to its input, of scores (by default 1 / sqrt(head_dim)), of logits.
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    attention_scale: float | None = None
    logit_scale: float = 1.0
    softcap: float | None = None  # of scores
    logit_softcap: float | None = None
    clip: float | None = None  # the largest magnitude of a query, key or value

    window: int | None = None  # of all layers; if the configuration has layer_kinds, of "sliding_attention" alone
    chunked: bool = False  # a window is a chunk of positions, and tokens read their own
    parallel: bool = False  # attention and feed-forward read the same hidden states
    in_pairs: bool = False  # neighbouring features rotate together, not those of two halves

    # Norms by the graph's names, and by those of the checkpoint. A layer norm's bias is in the checkpoint, or zero.
    norms: ClassVar[Mapping[str, str]] = {"attn_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"}
    final_norm: ClassVar[str] = "norm"
    layer_norm: bool = False  # norms subtract the mean
    norm_bias: bool = False
    norm_plus_one: bool = False  # norms multiply by one plus their weight

    # Norms of queries and keys: with one weight for every head; for layer norms, one for each without a bias, which may
    # be separate tensors, with the number of the head as `#`; or of all heads together.
    qk_norm: bool = False
    qk_norms: ClassVar[tuple[str, str]] = ("self_attn.q_norm", "self_attn.k_norm")
    qk_norm_of: ClassVar[Literal["every head", "each head", "all heads"]] = "every head"
    qk_norm_last: bool = False  # after the rotation

    # Queries, keys, values and output; gate, up and down, or up and down. A layer that is repeated has several parts.
    projections: ClassVar[tuple[str, ...]] = tuple(f"self_attn.{part}_proj" for part in "qkvo")
    feed_forward: ClassVar[tuple[str, ...]] = ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
    attention_bias: bool = False  # of queries, keys, values and output
    qkv_bias: bool = False  # of queries, keys and values, whatever attention_bias is
    out_bias: bool = False  # of the output
    attention_gate: bool = False  # the projection of queries has gates, too, of what each head returns
    mlp_bias: bool = False
    head_bias: bool = False

    @property
    def unread(self) -> list[str]:
        """Patterns of names in checkpoints of parts that do not run, such as layers that guess further tokens."""
        return []

    def window_of(self, kind: str) -> int | None:
        return window_of(kind, self.window) if kind else self.window
