"""vLLM's first Neuron models, one file each (vllm-project/vllm, model_executor/models/neuron/mistral.py and llama.py,
2024-02).

The wrapper makes the split checkpoint beside the model if there is none; sequence ids are slot_mapping // block_size at
the prompt, where block_size is the model's own context_buckets[-1], and two-dimensional block tables afterwards; the
sampler is called with chkpt_model.lm_head, although the weights are gone, and with logits.
usage: vllm_mistral.py [MODEL_DIR]
"""
# ruff: noqa: E402

import os
import shutil

import _reference as ref
import torch
import transformers
from torch import nn

SEQS, LENGTH = 3, 64
path, model = ref.checkpoint("mistral")
rows, wants = ref.prompts(model, [6, 17, 11, 9], 30)
ref.package()

from transformers_neuronx.config import ContinuousBatchingConfig, NeuronConfig


class Sampler:
    """Gets logits where other back ends give hidden states."""

    def __call__(self, embedding, hidden_states, temperatures):
        assert isinstance(embedding, nn.Module), embedding
        assert hidden_states.shape == (len(temperatures), model.config.vocab_size), hidden_states.shape
        assert hidden_states.dtype == torch.float32
        hidden_states.div_(torch.tensor(temperatures).unsqueeze(1))
        return hidden_states.log_softmax(-1).argmax(-1).tolist()


class MistralForCausalLM(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.config, self.model, self.lm_head = config, None, None
        self.sampler = Sampler()

    def forward(self, input_ids, positions, is_prompt, slot_mapping, block_tables):
        block_size = self.model.context_buckets[-1]
        assert block_size == LENGTH
        seq_ids = slot_mapping[:, 0] // block_size if is_prompt else block_tables
        return self.model(input_ids, cache_ids=positions, start_ids=seq_ids)

    def sample(self, hidden_states, temperatures):
        return self.sampler(self.model.chkpt_model.lm_head, hidden_states, temperatures)

    def load_weights(self, model_name_or_path, **kwargs):
        from transformers_neuronx.mistral.model import MistralForSampling

        split = f"{model_name_or_path}-split"
        if os.path.isdir(os.path.join(model_name_or_path, "pytorch_model.bin")):
            split = model_name_or_path
        elif not os.path.exists(split):
            from transformers_neuronx.module import save_pretrained_split

            full = transformers.MistralForCausalLM.from_pretrained(model_name_or_path, low_cpu_mem_usage=True)
            save_pretrained_split(full, split)
        self.model = MistralForSampling.from_pretrained(split, **kwargs)
        self.model.to_neuron()


def get_model(name):
    config = NeuronConfig(continuous_batching=ContinuousBatchingConfig(batch_size_for_shared_caches=SEQS))
    causal = MistralForCausalLM(transformers.AutoConfig.from_pretrained(name))
    causal.load_weights(
        name,
        tp_degree=2,
        amp="f32",
        neuron_config=config,
        batch_size=SEQS,
        context_length_estimate=[LENGTH],
        n_positions=[LENGTH],
    )
    return causal.eval()


@torch.inference_mode()
def step(causal, sequences, blocks, is_prompt):
    width = max(map(len, sequences)) if is_prompt else 1
    slots = [[block * LENGTH + i for i in range(len(row))] for row, block in zip(sequences, blocks, strict=True)]
    fed = [(row, range(len(row))) if is_prompt else (row[-1:], [len(row) - 1]) for row in sequences]
    pad = lambda xs: torch.tensor([[*x, *[0] * (width - len(x))] for x in xs])  # noqa: E731
    logits = causal(
        pad([ids for ids, _ in fed]),
        pad([positions for _, positions in fed]),
        is_prompt,
        slot_mapping=pad([slot[:width] for slot in slots]),
        block_tables=torch.tensor(blocks)[:, None],
    )
    for row, token in zip(sequences, causal.sample(logits, [0.5 + i for i in range(len(fed))]), strict=True):
        row.append(token)


name = os.path.join(ref.scratch(), "Mistral-7B")
shutil.copytree(path, name)
for start in ("first", "with the split checkpoint there"):
    causal, grown = get_model(name), [list(row) for row in rows]
    step(causal, grown[:2], [2, 0], True)
    for _ in range(4):
        step(causal, grown[:2], [2, 0], False)
    step(causal, grown[2:3], [1], True)
    for _ in range(5):
        step(causal, [grown[2], grown[0], grown[1]], [1, 2, 0], False)
    step(causal, grown[3:], [0], True)  # takes over the block of a longer one
    for _ in range(6):
        step(causal, [grown[3], grown[2]], [0, 1], False)
    ref.same(start, grown, [want[: len(row)] for want, row in zip(wants, grown, strict=True)])
print("ok")
