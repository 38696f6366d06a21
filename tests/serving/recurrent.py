"""A family of this suite: LLaMA, in which every second layer keeps a state of a sequence instead of keys and values.

The state of a recurrent layer is d t + (1 - d) v, where t is the one before; v and the decay d follow from the token.
"""

from dataclasses import dataclass
from types import SimpleNamespace

import torch
from safetensors.torch import save_file
from transformers import LlamaConfig as Attributes, LlamaForCausalLM

from transformers_neuronx import hlo
from transformers_neuronx.engine.family import Family
from transformers_neuronx.layers import State, gated_mlp, linear, rms_norm, scan
from transformers_neuronx.llama import graph, weights
from transformers_neuronx.llama.config import LlamaConfig
from transformers_neuronx.models.sampling import ForSampling
from transformers_neuronx.weights import COLUMNS, ROWS, linear as rows_of_linear, of_kinds

KINDS = "recurrent", "attention"
PARTS = dict(value=COLUMNS, decay=COLUMNS, out=ROWS)


@dataclass(frozen=True)
class RecurrentConfig(LlamaConfig):
    @property
    def layer_kinds(self):
        return [KINDS[number % 2] for number in range(self.n_layer)]

    def heads_of(self, kind):
        return self.attention_heads if kind == "attention" else None

    def window_of(self, kind):
        return None

    def states_of(self, kind):
        return [State("state", (self.hidden_size,), split=COLUMNS)] if kind == "recurrent" else []


def table(config):
    h = config.hidden_size
    recurrent = [
        row
        for part, split in PARTS.items()
        for row in rows_of_linear(f"mix.{part}", f"model.layers.{{}}.mix.{part}", h, h, split, bias=False)
    ]
    return weights.table(config) + of_kinds(["recurrent"], recurrent)


def layer(config, w, x, cache, step, rotate, kind):
    if kind == "attention":
        return graph.layer(config, w, x, cache, step, rotate, kind)
    h = rms_norm(x, w.attn_norm, config.eps)
    value, decay = (hlo.convert(linear(h, w.mix.__dict__[part]), "f32") for part in ("value", "decay"))
    y, cache = scan(cell, [value, decay], cache, step)
    x = step.needed_rows(x) + linear(step.needed_rows(hlo.convert(y, x.dtype)), w.mix.out)
    return x + gated_mlp(rms_norm(x, w.mlp_norm, config.eps), w.mlp, config.activation), cache


def cell(inputs, states):
    [value, decay], [state] = inputs, states
    keep = hlo.logistic(decay)
    after = keep * state + (1.0 - keep) * value
    return after, [after]


class RecurrentForSampling(ForSampling):
    family = Family(
        RecurrentConfig.from_hf,
        SimpleNamespace(table=table, ignored=weights.ignored, PREFIX=weights.PREFIX),
        SimpleNamespace(embed=graph.embed, layer=layer, norm=graph.norm, head=graph.head),
        "recurrent",
        prepare=graph.prepare,
    )


class Mix(torch.nn.Module):
    """A recurrent layer in torch, in the place of attention."""

    def __init__(self, parts):
        super().__init__()
        self.parts = parts

    def forward(self, hidden_states, **_):
        value, decay = (hidden_states @ self.parts[part].T for part in ("value", "decay"))
        keep, state, states = torch.sigmoid(decay), torch.zeros_like(value[:, 0]), []
        for place in range(value.shape[1]):
            state = keep[:, place] * state + (1 - keep[:, place]) * value[:, place]
            states.append(state)
        return torch.stack(states, 1) @ self.parts["out"].T, None


def checkpoint(directory):
    """Write a random checkpoint of four layers, and return the same model in torch."""
    torch.manual_seed(3)
    attributes = Attributes(
        vocab_size=96, hidden_size=32, intermediate_size=48, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=256, tie_word_embeddings=False, initializer_range=0.3,
    )  # fmt: skip
    reference = LlamaForCausalLM(attributes).eval()
    attributes.save_pretrained(directory)
    state = reference.state_dict()
    for number in range(0, 4, 2):
        prefix = f"model.layers.{number}."
        state = {name: each for name, each in state.items() if not name.startswith(prefix + "self_attn")}
        parts = {part: torch.randn(32, 32) * 0.3 for part in PARTS}
        state |= {f"{prefix}mix.{part}.weight": each for part, each in parts.items()}
        reference.model.layers[number].self_attn = Mix(parts)
    save_file({name: each.contiguous() for name, each in state.items()}, directory / "model.safetensors")
    return reference
