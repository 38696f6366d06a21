"""T5's weight table. Encoder and decoder have similar blocks, and each has one table of biases for all its layers."""

from transformers_neuronx.layers import causal_distances, distances_both_ways
from transformers_neuronx.t5.config import T5Config
from transformers_neuronx.weights import COLUMNS, Layout, Weight, as_is, attention, mlp, norm

PREFIX = ""
EMBED = "shared.weight|encoder.embed_tokens.weight|decoder.embed_tokens.weight"
CROSS = "decoder.block.{}.layer.1."


def table(config: T5Config) -> list[Weight]:
    h, far, vocabulary = config.hidden_size, config.furthest, (config.vocab_size, config.hidden_size)
    head = EMBED if config.scaled_head else f"lm_head.weight|{EMBED}"
    return [
        Weight("embed", EMBED, vocabulary, split=COLUMNS),
        *_block(config, "", "decoder", 2),
        _biases(config, "attn.distances", "decoder", far + 1, causal_distances(far), config.n_layer),
        *norm("cross_norm", CROSS + "layer_norm", h, bias=False),
        *_attention(config, "cross", CROSS + "EncDecAttention."),
        *norm("final_norm", "decoder.final_layer_norm", h, bias=False),
        Weight("head.weight", head, vocabulary, split=COLUMNS),
        _biases(config, "source.distances", "encoder", 2 * far + 1, distances_both_ways(far), None),
        *_block(config, "encoder.", "encoder", 1),
        *norm("source.final_norm", "encoder.final_layer_norm", h, bias=False),
    ]


def ignored(config: T5Config) -> list[str]:
    return [r"(encoder|decoder)\.embed_tokens\.weight", r"lm_head\.weight"]  # copies of `shared`, unless they are read


def _block(config: T5Config, name: str, part: str, feed_forward: int) -> list[Weight]:
    """The rows that layers of the encoder and the decoder have in common."""
    h, inner, layer = config.hidden_size, config.inner_size, part + ".block.{}.layer."
    dense = f"{layer}{feed_forward}.DenseReluDense."
    matrices = ("wi_0", "wi_1", "wo") if config.gated else ("wi", "wo")
    return [
        *norm(f"{name}attn_norm", f"{layer}0.layer_norm", h, bias=False),
        *_attention(config, f"{name}attn", f"{layer}0.SelfAttention."),
        *norm(f"{name}mlp_norm", f"{layer}{feed_forward}.layer_norm", h, bias=False),
        *mlp(f"{name}mlp", [(dense + matrix, as_is) for matrix in matrices], inner, h),
    ]


def _attention(config: T5Config, name: str, source: str) -> list[Weight]:
    projections = [(source + part, as_is) for part in "qkvo"]
    return attention(name, config.attention_heads, config.hidden_size, projections, bias=False, out_bias=False)


def _biases(config: T5Config, name: str, part: str, count: int, layout: Layout, layers: int | None) -> Weight:
    source, split = f"{part}.block.0.layer.0.SelfAttention.", config.attention_heads.split(0, unit=1)
    source += "relative_attention_bias.weight"
    return Weight(name, source, (config.n_head, count), layout, split, dtype="f32", layers=layers)
