"""OPT's weight table. Its checkpoints have two more positions than sequences do: two before the first."""

from functools import partial

import torch

from transformers_neuronx.opt.config import OPTConfig
from transformers_neuronx.weights import COLUMNS, ROWS, Weight, as_is, attention, linear, norm

PREFIX = "model."


def table(config: OPTConfig) -> list[Weight]:
    h, e, inner, vocab = config.hidden_size, config.embed_size, config.inner_size, config.vocab_size
    decoder = PREFIX + "decoder."
    block = decoder + "layers.{}."
    projections = [(f"{block}self_attn.{name}_proj", as_is) for name in ("q", "k", "v", "out")]
    project_in = Weight("project_in.weight", decoder + "project_in.weight", (h, e))
    project_out = Weight("project_out.weight", decoder + "project_out.weight", (e, h))
    return [
        Weight("embed", decoder + "embed_tokens.weight", (vocab, e), split=COLUMNS),
        Weight("positions", decoder + "embed_positions.weight", (config.n_positions + 2, h)),
        *([project_in, project_out] if config.projected else []),
        *_norm(config, "attn_norm", block + "self_attn_layer_norm"),
        *attention("attn", config.attention_heads, h, projections, bias=config.bias, out_bias=config.bias),
        *_norm(config, "mlp_norm", block + "final_layer_norm"),
        *linear("mlp.up", block + "fc1", inner, h, COLUMNS, bias=config.bias),
        *linear("mlp.down", block + "fc2", h, inner, ROWS, bias=config.bias),
        *(_norm(config, "final_norm", decoder + "final_layer_norm") if config.final_norm else []),
        *linear("head", decoder + "embed_tokens" if config.tied else "lm_head", vocab, e, COLUMNS, bias=False),
    ]


def _norm(config: OPTConfig, name: str, source: str) -> list[Weight]:
    """Rows of a norm; one without learned weights multiplies by ones and adds zeros."""
    h = config.hidden_size
    if config.norms_learned:
        return norm(name, source, h)
    values = dict(weight=partial(torch.ones, h), bias=partial(torch.zeros, h))
    return [Weight(f"{name}.{part}", source, (h,), dtype="f32", value=value) for part, value in values.items()]


def ignored(config: OPTConfig) -> list[str]:
    version = r"(model\.)?decoder\.version"  # in older checkpoints
    return [version, r"lm_head\.weight"] if config.tied else [version]
