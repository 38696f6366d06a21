"""GGUF files of random weights in the shape of TinyLlama 1.1B, in mixes of types that llama.cpp's quantizer makes."""

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Type

LAYERS, HIDDEN, INNER, VOCAB, HEADS, KEYS, SIZE = 22, 2048, 5632, 32000, 32, 4, 64
# Of each type: values of a block, its bytes, and where 16-bit scales are, with values that make weights of about 0.02.
BLOCKS = {
    Type.Q4_0: (32, 18, {0: 4e-3}),
    Type.Q8_0: (32, 34, {0: 3e-4}),
    Type.Q4_K: (256, 144, {0: 6e-5, 2: 5e-4}),
    Type.Q6_K: (256, 210, {208: 1.5e-5}),
}


def write(path, mix):
    """Write a file. `mix` is Q4_K_M, Q4_0 or Q8_0: that has a Q6_K output, if it is in 4 bits."""
    draw = np.random.default_rng(0)
    plain = Type.Q4_K if mix == "Q4_K_M" else Type[mix]
    more = Type.Q6_K if mix == "Q4_K_M" else plain
    writer = gguf.GGUFWriter(path, "llama", use_temp_file=False)
    describe(writer)

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
        add(f"{block}.attn_k", KEYS * SIZE, HIDDEN)
        add(f"{block}.attn_v", KEYS * SIZE, HIDDEN, kind)
        add(f"{block}.attn_output", HIDDEN, HIDDEN)
        add(f"{block}.ffn_gate", INNER, HIDDEN)
        add(f"{block}.ffn_up", INNER, HIDDEN)
        add(f"{block}.ffn_down", HIDDEN, INNER, kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def describe(writer):
    """Write the sizes, and a vocabulary of numbers."""
    writer.add_context_length(2048)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KEYS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(SIZE)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(VOCAB)
    writer.add_tokenizer_model("llama")
    writer.add_token_list([f"\N{LOWER ONE EIGHTH BLOCK}{number}" for number in range(VOCAB)])
    writer.add_token_scores([0.0] * VOCAB)
    writer.add_token_types([1] * VOCAB)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
