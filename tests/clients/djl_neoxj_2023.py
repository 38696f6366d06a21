"""DJL Serving's first handler (deepjavalibrary/djl-serving, transformers_neuronx.py, 2023-06): OPT, GPT-J, GPT-NeoX,
GPT-2.

Attention, MLP and head are cast with dtypes.to_torch_dtype(amp), norms and embeddings stay f32, and the split
checkpoint is written only if its folder has no "verify" file. GPT-2 loads compiled artifacts from the checkpoint's own
folder before there are any, and saves them there after to_neuron(). The config for the adapter is read from the
original model, unroll is passed as None, batches are padded left. usage: djl_neoxj_2023.py [MODEL_DIR]
"""
# ruff: noqa: E402

import os

import _reference as ref
import transformers

BATCH, LENGTH = 2, 28
PARTS = {  # layers, what is cast in each
    "opt": ("model.decoder.layers", ("self_attn", "fc1", "fc2")),
    "gptj": ("transformer.h", ("attn", "mlp")),
    "gpt_neox": ("gpt_neox.layers", ("attention", "mlp")),
    "gpt2": ("transformer.h", ("attn", "mlp")),
}
material = {}
for family in PARTS:
    path, model = ref.checkpoint(family, sharp=2e3)
    material[family] = path, *ref.prompts(model, [12, 7], LENGTH, gap=50)
ref.package()

from transformers_neuronx import dtypes
from transformers_neuronx.generation_utils import HuggingFaceGenerationModelAdapter
from transformers_neuronx.gpt2.model import GPT2ForSampling
from transformers_neuronx.gptj.model import GPTJForSampling
from transformers_neuronx.gptneox.model import GPTNeoXForSampling
from transformers_neuronx.module import save_pretrained_split
from transformers_neuronx.opt.model import OPTForSampling

CLASSES = {"opt": OPTForSampling, "gptj": GPTJForSampling, "gpt_neox": GPTNeoXForSampling, "gpt2": GPT2ForSampling}


class Service:
    def __init__(self, model_id, amp, download_dir):
        config = transformers.AutoConfig.from_pretrained(model_id)
        self.load_path = os.path.join(download_dir, f"inf2_{config.model_type}_{amp}")
        os.makedirs(self.load_path, exist_ok=True)
        verify = os.path.join(self.load_path, "verify")
        if not os.path.exists(verify):
            self.convert(model_id, config.model_type, dtypes.to_torch_dtype(amp))
            with open(verify, "w") as file:
                file.write(f"{config.model_type}-converted-{amp}")
        neuron = CLASSES[config.model_type].from_pretrained(
            self.load_path, batch_size=BATCH, amp=amp, tp_degree=2, n_positions=128, unroll=None
        )
        if config.model_type == "gpt2":
            neuron._load_compiled_artifacts(self.load_path)
            neuron.to_neuron()
            neuron._save_compiled_artifacts(self.load_path)
        else:
            neuron.to_neuron()
        self.model = HuggingFaceGenerationModelAdapter(config, neuron)

    def convert(self, model_id, family, dtype):
        full = transformers.AutoModelForCausalLM.from_pretrained(model_id, low_cpu_mem_usage=True)
        layers, parts = PARTS[family]
        for layer in full.get_submodule(layers):
            for part in parts:
                getattr(layer, part).to(dtype)
        full.get_output_embeddings().to(dtype)
        save_pretrained_split(full, self.load_path)

    def infer(self, ids, mask, parameters):
        if len(ids) != BATCH:
            raise ValueError(f"batch of {BATCH} expected, got {len(ids)}")
        return self.model.generate(input_ids=ids, attention_mask=mask, **parameters)


downloads = ref.scratch()
for family, amp in (("opt", "f32"), ("gptj", "f32"), ("gpt_neox", "f16"), ("gpt2", "f32"), ("gpt2", "f32")):
    path, rows, wants = material[family]
    service = Service(path, amp, downloads)
    ids, mask = ref.padded(rows, "left")
    for parameters in (
        {"max_length": LENGTH},
        {"do_sample": True, "top_k": 40, "temperature": 0.8, "max_new_tokens": 9},
    ):
        got = service.infer(ids, mask, parameters).tolist()
        total = parameters.get("max_length", ids.shape[1] + 9)
        pads = [ids.shape[1] - len(row) for row in rows]
        ref.same(
            f"{family} {amp} {parameters}",
            [row[n:] for row, n in zip(got, pads, strict=True)],
            [want[: total - n] for want, n in zip(wants, pads, strict=True)],
        )
print("ok")
