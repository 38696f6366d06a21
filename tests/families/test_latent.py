"""Latent attention: what the cache keeps, in 8 bits as well, and how devices divide it."""

import pytest
import torch
from one_file import tiny
from parity import assert_close, continued, prompts, randomized
from transformers import AutoModelForCausalLM, DeepseekV3Config, DynamicCache

from transformers_neuronx.config import KVCacheQuantizationConfig, NeuronConfig
from transformers_neuronx.engine.programs import Programs
from transformers_neuronx.huggingface.auto import family_of
from transformers_neuronx.huggingface.device_cache import CACHE

LATENT = ["deepseek_v2", "deepseek_v3", "glm4_moe_lite", "youtu"]


@pytest.mark.parametrize("degree", [1, 3, 5, 8])
@pytest.mark.parametrize("model_type", LATENT)
def test_the_cache_has_one_compressed_key_of_each_position(model_type, degree):
    """Each device has it once, and as many of the six heads as the others, some of them of zeros."""
    config = tiny(model_type)
    size, of_head = (config.qk_rope_head_dim + rest for rest in (config.kv_lora_rank, config.qk_nope_head_dim))
    for quant in (None, KVCacheQuantizationConfig()):
        switches = NeuronConfig(kv_cache_quant=quant)
        model = family_of(model_type)(config, n_positions=48, batch_size=2, tp_degree=degree, neuron_config=switches)
        programs = Programs(model.family, model.model_config, model.options, degree)
        for layer in programs.cache.of_layers:
            keys = ("keys", "s8" if quant else "f32", (2, 48, size))
            assert layer.arrays == [keys, ("key_scales", "f32", (2, 48, 1))][: 2 if quant else 1]
    [queries] = [row for row in programs.table if row.name == "attn.q_b.weight"]
    assert queries.share(degree)[0] == -(-6 // degree) * of_head


class InEightBits(DynamicCache):
    """Transformers' cache of the latent and of the key that rotates, with one scale of both for a position."""

    def update(self, latent, turned, *more, **named):
        both = torch.cat([latent, turned], -1)
        scale = both.abs().amax(-1, keepdim=True) / 127
        rounded = (both / scale).round() * scale
        return super().update(*rounded.split([latent.shape[-1], turned.shape[-1]], -1), *more, **named)


@pytest.mark.parametrize("switches", [{}, dict(shard_over_sequence=True)], ids=["whole", "divided"])
@pytest.mark.parametrize("degree", [1, 3, 5])
@pytest.mark.parametrize("cached", [None, "s8"])
@pytest.mark.parametrize("model_type", LATENT)
@pytest.mark.few(3)
def test_what_devices_have_of_the_cache(model_type, cached, degree, switches, tmp_path):
    """The whole of it or some positions, at degrees that divide neither heads nor positions."""
    reference = randomized(tiny(model_type))
    reference.save_pretrained(tmp_path)
    quant = KVCacheQuantizationConfig(cached) if cached else None
    switches = NeuronConfig(tokens_per_dispatch=0, kv_cache_quant=quant, **switches)
    model = family_of(model_type).from_pretrained(
        tmp_path, n_positions=[48], context_length_estimate=8, tp_degree=degree, neuron_config=switches
    )
    model.to_neuron()
    [ids] = prompts(131, [21])
    got = [model.forward([ids])[0]]
    for count, token in enumerate((5, 6), len(ids) + 1):
        got.append(model.forward([[token]], attention_mask=torch.ones(1, count))[0])
    with torch.inference_mode():
        cache = InEightBits() if cached else DynamicCache()
        want = reference(torch.tensor([[*ids, 5, 6]]), use_cache=True, **{CACHE: cache}).logits[0, -3:]
        exact = reference(torch.tensor([[*ids, 5, 6]])).logits[0, -3:]
    assert_close(torch.stack(got), want)
    assert not cached or (want - exact).abs().max() > 1e-3 * want.abs().max()


@pytest.mark.slow
def test_attention_of_a_true_size(tmp_path):
    """One layer of DeepSeek-V3's attention, whose keys have 576 numbers, with a small feed-forward block."""
    yarn = dict(beta_fast=32, beta_slow=1, mscale=1.0, mscale_all_dim=1.0)
    rope = dict(rope_type="yarn", rope_theta=1e4, factor=40.0, original_max_position_embeddings=4096, **yarn)
    sizes = dict(vocab_size=1000, intermediate_size=512, num_hidden_layers=1, first_k_dense_replace=1)
    config = DeepseekV3Config(max_position_embeddings=163840, rope_parameters=rope, **sizes)
    torch.manual_seed(0)
    reference = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    reference.save_pretrained(tmp_path)
    [ids] = prompts(1000, [40])
    want = continued(reference, ids, [5, 6])[-3:]
    del reference
    for degree in (1, 2):
        model = family_of("deepseek_v3").from_pretrained(
            tmp_path, n_positions=128, context_length_estimate=64, tp_degree=degree,
            neuron_config=NeuronConfig(tokens_per_dispatch=0),
        )  # fmt: skip
        model.to_neuron()
        got = [model.forward([ids])[0]]
        for count, token in enumerate((5, 6), len(ids) + 1):
            got.append(model.forward([[token]], attention_mask=torch.ones(1, count))[0])
        assert_close(torch.stack(got), want)
