"""Whisper's weight table. Keys have no bias; they get one of zeros, to be computed together with queries and values."""

from dataclasses import replace
from functools import partial

import torch

from transformers_neuronx.weights import COLUMNS, Heads, Weight, as_is, attention, linear, mlp, norm
from transformers_neuronx.whisper.config import WhisperConfig

PREFIX = "model."
ENCODER, DECODER = PREFIX + "encoder.", PREFIX + "decoder."
EMBED = DECODER + "embed_tokens"


def table(config: WhisperConfig) -> list[Weight]:
    h, mel, vocab, block = config.hidden_size, config.mel_bins, config.vocab_size, DECODER + "layers.{}."
    return [
        Weight("embed", EMBED + ".weight", (vocab, h), split=COLUMNS),
        Weight("positions", DECODER + "embed_positions.weight", (config.n_positions, h)),
        *_block(config, "", block, config.n_head, config.inner_size),
        *norm("cross_norm", block + "encoder_attn_layer_norm", h),
        *_attention(config, "cross", block + "encoder_attn.", config.n_head),
        *norm("final_norm", DECODER + "layer_norm", h),
        *linear("head", EMBED if config.tied else "proj_out", vocab, h, COLUMNS, bias=False),
        *_convolution("source.conv1", ENCODER + "conv1", h, mel),
        *_convolution("source.conv2", ENCODER + "conv2", h, h),
        Weight("source.positions", ENCODER + "embed_positions.weight", (config.source_positions, h)),
        *_block(config, "encoder.", ENCODER + "layers.{}.", config.encoder_n_head, config.encoder_inner_size),
        *norm("source.final_norm", ENCODER + "layer_norm", h),
    ]


def ignored(config: WhisperConfig) -> list[str]:
    return [r"proj_out\.weight"] if config.tied else []  # a copy of the embedding


def _block(config: WhisperConfig, name: str, source: str, heads: int, inner: int) -> list[Weight]:
    """The rows that layers of the encoder and the decoder have in common."""
    h, matrices = config.hidden_size, [(source + matrix, as_is) for matrix in ("fc1", "fc2")]
    return [
        *norm(f"{name}attn_norm", source + "self_attn_layer_norm", h),
        *_attention(config, f"{name}attn", source + "self_attn.", heads),
        *norm(f"{name}mlp_norm", source + "final_layer_norm", h),
        *mlp(f"{name}mlp", matrices, inner, h, bias=True),
    ]


def _attention(config: WhisperConfig, name: str, source: str, heads: int) -> list[Weight]:
    h, projections = config.hidden_size, [(f"{source}{part}_proj", as_is) for part in ("q", "k", "v", "out")]
    rows = attention(name, Heads(heads, heads, h // heads), h, projections, bias=True, out_bias=True)
    zeros = partial(torch.zeros, h)
    return [replace(row, value=zeros) if row.name == f"{name}.k.bias" else row for row in rows]


def _convolution(name: str, source: str, outputs: int, inputs: int) -> list[Weight]:
    """The rows of a convolution over three positions, whole on each device: it takes little of the encoder's time."""
    weight = Weight(f"{name}.weight", f"{source}.weight", (outputs, inputs, 3))
    return [weight, Weight(f"{name}.bias", f"{source}.bias", (outputs,))]
