"""GGUF files of random weights in the shape of TinyLlama 1.1B, in mixes of types that llama.cpp's quantizer makes."""

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Type

from peers.gguf_files import describe, name_tokens

LAYERS, HIDDEN, INNER, VOCAB, KEYS = 22, 2048, 5632, 32000, 4 * 64
CONFIG = dict(
    model_type="llama", vocab_size=VOCAB, hidden_size=HIDDEN, intermediate_size=INNER, num_hidden_layers=LAYERS,
    num_attention_heads=32, num_key_value_heads=4, max_position_embeddings=2048, rms_norm_eps=1e-5,
    rope_parameters=dict(rope_theta=10000.0),
)  # fmt: skip
# Of each type: values of a block, its bytes, and where 16-bit scales are, with values that make weights of about 0.02.
BLOCKS = {
    Type.Q4_0: (32, 18, {0: 4e-3}),
    Type.Q8_0: (32, 34, {0: 3e-4}),
    Type.Q4_K: (256, 144, {0: 6e-5, 2: 5e-4}),
    Type.Q6_K: (256, 210, {208: 1.5e-5}),
}


def write(path, mix):
    """Write a file. `mix` is Q4_K_M, Q4_0 or Q8_0. In 4 bits, the output is in Q6_K."""
    draw = np.random.default_rng(0)
    plain = Type.Q4_K if mix == "Q4_K_M" else Type[mix]
    more = Type.Q6_K if mix == "Q4_K_M" else plain
    writer = gguf.GGUFWriter(path, "llama", use_temp_file=False)
    describe(writer, CONFIG)
    name_tokens(writer, VOCAB)

    def add(name, outputs, inputs, kind=plain):
        values, size, scales = BLOCKS[kind]
        blocks = draw.integers(0, 256, (outputs, inputs // values, size), dtype=np.uint8)
        for place, scale in scales.items():
            blocks[..., place : place + 2] = np.full((*blocks.shape[:2], 1), scale, np.float16).view(np.uint8)
        writer.add_tensor(f"{name}.weight", blocks.reshape(outputs, -1), raw_dtype=kind)

    def add_norm(name):
        writer.add_tensor(f"{name}.weight", np.ones(HIDDEN, np.float32))

    add("token_embd", VOCAB, HIDDEN)
    add("output", VOCAB, HIDDEN, Type.Q8_0 if mix == "Q8_0" else Type.Q6_K)
    add_norm("output_norm")
    for layer in range(LAYERS):
        block, eighth = f"blk.{layer}", LAYERS // 8
        kind = more if layer < eighth or layer >= 7 * LAYERS // 8 or (layer - eighth) % 3 == 2 else plain
        for name in ("attn_norm", "ffn_norm"):
            add_norm(f"{block}.{name}")
        add(f"{block}.attn_q", HIDDEN, HIDDEN)
        add(f"{block}.attn_k", KEYS, HIDDEN)
        add(f"{block}.attn_v", KEYS, HIDDEN, kind)
        add(f"{block}.attn_output", HIDDEN, HIDDEN)
        add(f"{block}.ffn_gate", INNER, HIDDEN)
        add(f"{block}.ffn_up", INNER, HIDDEN)
        add(f"{block}.ffn_down", HIDDEN, INNER, kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
