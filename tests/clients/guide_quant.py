"""int8 weights, as in the guide (aws-neuron-sdk, developer guide, 2023 to 2024) and in gpt2_demo's options.

QuantizationConfig in every spelling: defaults, dequant_dtype equal to amp, assigned to a NeuronConfig that exists,
without attention; the older amp="f32-u8-f32" of GPT-2; caches in int8 beside it. usage: client_guide_quant.py
[MODEL_DIR]
"""
# ruff: noqa: E402

import _reference as ref
import torch

LENGTH = 32
gpt2_path, gpt2 = ref.checkpoint("gpt2", sharp=2e4)
path, llama = ref.checkpoint("llama")
rounded = {"gpt2": ref.int8(gpt2), "llama": ref.int8(llama), "mlp": ref.int8(llama)}
for layer, exact in zip(rounded["mlp"].model.layers, llama.model.layers, strict=True):
    layer.self_attn.load_state_dict(exact.self_attn.state_dict())
rows, wants = ref.prompts(rounded["gpt2"], [9], LENGTH, gap=300)
_, floats = ref.prompts(gpt2, [9], LENGTH, gap=300)
llama_rows, llama_wants = ref.prompts(rounded["llama"], [9, 9], LENGTH, gap=0.02)
ids = torch.tensor(llama_rows)
ref.package()

from transformers_neuronx import (
    GPT2ForSamplingWithContextBroadcasting,
    LlamaForSampling,
    NeuronConfig,
    QuantizationConfig,
)
from transformers_neuronx.config import KVCacheQuantizationConfig
from transformers_neuronx.gpt2.model import GPT2ForSampling


def load(kind, folder, **options):
    neuron = kind.from_pretrained(folder, tp_degree=2, n_positions=64, **options)
    neuron.to_neuron()
    return neuron


def last(some, texts):
    return torch.stack([ref.logits(some, text)[-1] for text in texts])


neuron_config = NeuronConfig(quant=QuantizationConfig(quant_dtype="s8", dequant_dtype="bf16"))
neuron = load(GPT2ForSamplingWithContextBroadcasting, gpt2_path, amp="bf16", neuron_config=neuron_config)
ref.close("GPT-2 in bf16", neuron(torch.tensor(rows)), last(rounded["gpt2"], rows), 4e-2)
neuron = load(
    GPT2ForSampling, gpt2_path, amp="f32", batch_size=1, neuron_config=NeuronConfig(quant=QuantizationConfig())
)
ref.close("GPT-2, defaults", neuron(torch.tensor(rows)), last(rounded["gpt2"], rows))
ref.same("GPT-2, defaults", neuron.sample(torch.tensor(rows), sequence_length=LENGTH, start_ids=None), wants)
for amp in ("f32-u8-f32", "f32-u8-bf16", "bf16-u8-bf16"):  # one range for a matrix, or a scale for each output: coarse
    neuron = load(GPT2ForSampling, gpt2_path, amp=amp, batch_size=1)
    logits = neuron(torch.tensor(rows))
    ref.close(f"GPT-2, {amp}", logits, last(gpt2, rows), 0.2)
    assert (logits - last(gpt2, rows)).abs().max() > 1e-4 * logits.abs().max(), f"{amp} has not quantized"
    assert neuron.sample(torch.tensor(rows), sequence_length=LENGTH).shape == (1, LENGTH)

assigned = NeuronConfig()
assigned.quant = QuantizationConfig(quant_dtype="s8", dequant_dtype="f32", quantize_method="vector_dynamic")
only_mlp = NeuronConfig(quant=QuantizationConfig("s8", "f32", "vector_dynamic", False))
for name, some, config in (("all", "llama", assigned), ("mlp", "mlp", only_mlp)):
    neuron = load(LlamaForSampling, path, amp="f32", batch_size=2, neuron_config=config)
    ref.close(f"Llama, {name}", neuron(ids), last(rounded[some], llama_rows))
    assert neuron.neuron_config.quant.quant_dtype == "s8" and config.quant.quantize_attn == (some == "llama")
    if some == "llama":
        ref.same("Llama", neuron.sample(ids, sequence_length=LENGTH, top_k=1), llama_wants)
cached = NeuronConfig(quant=QuantizationConfig(dequant_dtype="f32"), kv_cache_quant=KVCacheQuantizationConfig())
neuron = load(LlamaForSampling, path, amp="f32", batch_size=2, neuron_config=cached)
neuron(ids)
logits = neuron(torch.tensor([want[9:10] for want in llama_wants]), cache_ids=torch.as_tensor([9]))
want = last(rounded["llama"], [want[:10] for want in llama_wants])
ref.close("int8 caches", logits, want, 5e-2)
assert (logits - want).abs().max() > 1e-4 * want.abs().max(), "the caches are not quantized"
print("ok")
