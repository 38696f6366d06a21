"""Checkpoints of real shapes with random weights, as Transformers saves them, and the operations of a shape.

    python -P -m peers.checkpoint SHAPE DIRECTORY

The tokenizer, which some converters need, has the ids as words.
"""

import sys
from dataclasses import dataclass


@dataclass(frozen=True)
class Shape:
    """A model: `attributes` of the configuration of `kind`, with weights in `dtype`.

    `matrices` are those that a token reads, `read` is the share of the weights that it does. After a prompt, `count`
    tokens are generated. `widths` are measured by default, which takes a few rounds and 40 GB.
    """

    title: str
    kind: str
    dtype: str
    attributes: dict
    vocab: int
    hidden: int
    layers: int
    matrices: int  # elements in a layer, on average
    count: int
    widths: tuple
    read: float = 1.0

    def operations(self, tokens):
        """Return the additions and multiplications of a prompt, up to the logits after its last token."""
        products = self.layers * self.matrices * tokens + self.vocab * self.hidden
        return 2 * products + 2 * self.layers * self.hidden * tokens**2


GPT2 = Shape(
    "GPT-2 124M", "GPT2", "float32", {}, 50257, 768, 12, 12 * 768**2, 65, ("f32", "bf16", "s8", "s4")
)  # fmt: skip
LLAMA = Shape(
    "Llama-3.2-1B", "Llama", "bfloat16",
    dict(
        vocab_size=128256, hidden_size=2048, intermediate_size=8192, num_hidden_layers=16, num_attention_heads=32,
        num_key_value_heads=8, max_position_embeddings=2048, rms_norm_eps=1e-5, tie_word_embeddings=True,
        rope_parameters=dict(rope_type="default", rope_theta=500000.0),
    ),
    128256, 2048, 16, 2048 * (2 * 2048 + 2 * 512 + 3 * 8192), 33, ("bf16", "s8", "s4"),
)  # fmt: skip
MOE = Shape(
    "Qwen3-30B-A3B, two of its layers, vocabulary 32,000", "Qwen3Moe", "bfloat16",
    dict(
        vocab_size=32000, hidden_size=2048, moe_intermediate_size=768, num_hidden_layers=2, num_attention_heads=32,
        num_key_value_heads=4, head_dim=128, num_experts=128, num_experts_per_tok=8, norm_topk_prob=True,
        max_position_embeddings=2048, rms_norm_eps=1e-6, rope_parameters=dict(rope_type="default", rope_theta=1e6),
    ),
    32000, 2048, 2, 2048 * (2 * 4096 + 2 * 512 + 128 + 8 * 3 * 768), 33, ("bf16", "s8"), read=0.13,
)  # fmt: skip
ATTENDING = (2, 5, 8, 10, 12, 14)
HYBRID = Shape(
    "LFM2 1.2B", "Lfm2", "bfloat16",
    dict(
        vocab_size=65536, hidden_size=2048, intermediate_size=8192, block_auto_adjust_ff_dim=False,
        num_hidden_layers=16, num_attention_heads=32, num_key_value_heads=8,
        max_position_embeddings=2048, rope_parameters=dict(rope_type="default", rope_theta=1e6),
        layer_types=["full_attention" if layer in ATTENDING else "conv" for layer in range(16)],
    ),
    65536, 2048, 16, 2048 * (3 * 8192 + (6 * 5120 + 10 * 8192) // 16), 33, ("bf16", "s8"),
)  # fmt: skip
DENSE = dict(gpt2=GPT2, llama=LLAMA)
SHAPES = DENSE | dict(moe=MOE, hybrid=HYBRID)
LLAMA_8B = dict(
    vocab_size=128256, hidden_size=4096, intermediate_size=14336, num_attention_heads=32, num_key_value_heads=8,
    max_position_embeddings=8192, rope_theta=500000.0,
)  # fmt: skip


def make(shape, directory):
    import torch
    import transformers
    from tokenizers import Tokenizer, models, pre_tokenizers

    torch.manual_seed(0)
    torch.set_default_dtype(getattr(torch, shape.dtype))
    config = getattr(transformers, f"{shape.kind}Config")(**shape.attributes)
    model = transformers.AutoModelForCausalLM.from_config(config)
    model.save_pretrained(directory, max_shard_size="10GB")
    words = Tokenizer(models.WordLevel({str(i): i for i in range(shape.vocab)}, unk_token="0"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    named = dict(unk_token="0", bos_token="1", eos_token="2", pad_token="2")
    transformers.PreTrainedTokenizerFast(tokenizer_object=words, **named).save_pretrained(directory)


if __name__ == "__main__":
    make(SHAPES[sys.argv[1]], sys.argv[2])
