"""The true sizes of published models, a layer or two of each, with random weights."""

import tempfile

import pytest
import torch
from parity import DECODERS, assert_close, continued, padded, prompts
from transformers import AutoConfig, AutoModelForCausalLM

from transformers_neuronx.config import NeuronConfig
from transformers_neuronx.huggingface.auto import NeuronAutoModelForCausalLM

SHAPES = {
    "gpt2": dict(n_embd=1600, n_head=25, n_layer=2),  # gpt2-xl
    "opt": dict(hidden_size=2048, ffn_dim=8192, num_attention_heads=32, num_hidden_layers=2),  # opt-1.3b
    "gptj": dict(n_embd=4096, n_head=16, rotary_dim=64, vocab_size=50400, n_layer=1),  # gpt-j-6b
    "gptneox": dict(  # pythia-1.4b
        hidden_size=2048, intermediate_size=8192, num_attention_heads=16, vocab_size=50304, num_hidden_layers=2
    ),
    "bloom": dict(hidden_size=1024, n_head=16, n_layer=2),  # bloom-560m
    "llama": dict(  # Llama-3.2-1B
        hidden_size=2048, intermediate_size=8192, num_attention_heads=32, num_key_value_heads=8, vocab_size=128256,
        num_hidden_layers=2, tie_word_embeddings=True, max_position_embeddings=131072, rms_norm_eps=1e-5,
        rope_parameters=dict(
            rope_type="llama3", rope_theta=500000.0, factor=32.0, low_freq_factor=1.0, high_freq_factor=4.0,
            original_max_position_embeddings=8192,
        ),
    ),
    "mistral": dict(num_hidden_layers=1),  # Mistral-7B-v0.1, Transformers' default
    "mixtral": dict(num_hidden_layers=1, num_local_experts=3),  # Mixtral-8x7B with fewer experts
    "qwen2": dict(  # Qwen2.5-0.5B
        hidden_size=896, intermediate_size=4864, num_attention_heads=14, num_key_value_heads=2, num_hidden_layers=2,
        tie_word_embeddings=True, rope_parameters=dict(rope_type="default", rope_theta=1e6),
    ),
    "qwen3": dict(  # Qwen3-0.6B
        hidden_size=1024, intermediate_size=3072, num_attention_heads=16, num_key_value_heads=8, head_dim=128,
        num_hidden_layers=2, tie_word_embeddings=True, rope_parameters=dict(rope_type="default", rope_theta=1e6),
    ),
    "phi3": dict(sliding_window=2047, num_hidden_layers=1),  # Phi-3-mini-4k
    "gemma2": dict(num_hidden_layers=2),  # gemma-2-2b, Transformers' default
    "gemma4text": dict(  # gemma-4-E2B with a smaller vocabulary; the last two layers read keys of the first
        hidden_size=1536, intermediate_size=6144, num_attention_heads=8, num_key_value_heads=1, num_hidden_layers=4,
        layer_types=["sliding_attention", "full_attention"] * 2, num_kv_shared_layers=2, use_double_wide_mlp=True,
        final_logit_softcapping=30.0, vocab_size=8000, vocab_size_per_layer_input=8000,
    ),
    "llama4text": dict(  # Llama-4-Scout with fewer experts, a smaller vocabulary and smaller chunks
        num_hidden_layers=1, num_local_experts=3, vocab_size=8000, attention_chunk_size=16, rope_parameters=dict(
            rope_type="llama3", rope_theta=500000.0, factor=16.0, low_freq_factor=1.0, high_freq_factor=1.0,
            original_max_position_embeddings=8192,
        ),
    ),
}  # fmt: skip
MODEL_TYPES = {"gptneox": "gpt_neox", "gemma4text": "gemma4_text", "llama4text": "llama4_text"}


@pytest.mark.slow
@pytest.mark.parametrize("family", DECODERS)
def test_at_a_true_size(family):
    torch.manual_seed(0)
    config = AutoConfig.for_model(MODEL_TYPES.get(family, family), **SHAPES[family])
    reference = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    if family == "gemma4text":  # its scores are not divided by the root of a head's size: trained norms make up for it
        for name, weight in reference.named_parameters():
            if name.endswith("q_norm.weight"):
                weight.data.fill_(len(weight) ** -0.5)
    rows, tokens = prompts(config.vocab_size, [40, 17]), prompts(config.vocab_size, [2, 2], seed=1)
    want = torch.stack([continued(reference, *row)[-3:] for row in zip(rows, tokens, strict=True)])
    with tempfile.TemporaryDirectory() as directory:
        reference.save_pretrained(directory)
        del reference
        for degree in (1, 2):
            model = NeuronAutoModelForCausalLM.from_pretrained(
                directory,
                n_positions=128,
                batch_size=2,
                context_length_estimate=64,
                tp_degree=degree,
                neuron_config=NeuronConfig(tokens_per_dispatch=0),
            )
            model.to_neuron()
            ids, mask = padded(rows, "left")
            got = [model.forward(ids, attention_mask=mask)]
            for column in range(2):
                mask = torch.cat([mask, torch.ones(2, 1, dtype=mask.dtype)], 1)
                got.append(model.forward([[row[column]] for row in tokens], attention_mask=mask))
            assert_close(torch.stack(got, 1), want)
