"""Numbers that tutorials quote from `inspect` are those it prints, for the configurations on the hub."""

import re
import shlex

import pytest
from transformers import GPT2Config, GPTJConfig, LlamaConfig, OPTConfig
from tutorials import blocks

STRETCHED = dict(
    rope_type="llama3", rope_theta=500000.0, low_freq_factor=1.0, high_freq_factor=4.0,
    original_max_position_embeddings=8192,
)  # fmt: skip
LLAMA = dict(vocab_size=128256, rms_norm_eps=1e-5, max_position_embeddings=131072, num_key_value_heads=8)
CONFIGS = {
    "gpt2": GPT2Config(),
    "facebook/opt-13b": OPTConfig(
        hidden_size=5120, word_embed_proj_dim=5120, ffn_dim=20480, num_hidden_layers=40, num_attention_heads=40,
    ),
    "EleutherAI/gpt-j-6b": GPTJConfig(),
    "meta-llama/Llama-3.2-1B-Instruct": LlamaConfig(
        **LLAMA, hidden_size=2048, intermediate_size=8192, num_hidden_layers=16, num_attention_heads=32,
        tie_word_embeddings=True, rope_parameters=STRETCHED | dict(factor=32.0),
    ),
    "meta-llama/Llama-3.1-70B": LlamaConfig(
        **LLAMA, hidden_size=8192, intermediate_size=28672, num_hidden_layers=80, num_attention_heads=64,
        rope_parameters=STRETCHED | dict(factor=8.0),
    ),
}  # fmt: skip
TUTORIALS = ["facebook-opt-13b-sampling.md", "gptj-sampling.md", "llama-chat.md", "tensor-parallelism.md"]


@pytest.mark.parametrize(
    "tutorial", ["gpt2-sampling.md", *(pytest.param(t, marks=pytest.mark.slow) for t in TUTORIALS)]
)
def test_figures_of_a_tutorial(command, tmp_path, tutorial):
    [block] = blocks(tutorial, "console")
    for line, figures in re.findall(r"^\$ (.*)\n((?:[^$].*\n)+)", block, re.M):
        arguments = shlex.split(line.removeprefix("python -m transformers_neuronx "))
        CONFIGS[arguments[1]].save_pretrained(tmp_path / arguments[1])
        printed, _ = command(*arguments)
        assert figures.count("\n") == 2 and printed.startswith(figures)
