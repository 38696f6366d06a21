"""Phi-3's weight table. Its checkpoints store queries, keys and values in one layer, and gate and up in another."""

from transformers_neuronx.llama.weights import BLOCK, PREFIX as PREFIX, ignored as ignored, table_of
from transformers_neuronx.phi3.config import Phi3Config
from transformers_neuronx.weights import Weight, as_is, part, section


def table(config: Phi3Config) -> list[Weight]:
    sizes = tuple(heads * config.head_dim for heads in (config.n_head, config.n_kv_head, config.n_kv_head))
    qkv = [(BLOCK + "self_attn.qkv_proj", section(i, sizes)) for i in range(3)]
    gate_up = [(BLOCK + "mlp.gate_up_proj", part(i, 2)) for i in range(2)]
    out, down = (BLOCK + "self_attn.o_proj", as_is), (BLOCK + "mlp.down_proj", as_is)
    return table_of(config, [*qkv, out], [*gate_up, down])
