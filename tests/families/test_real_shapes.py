"""Models as large as published ones, but for their number of layers, with random weights."""

import tempfile

import pytest
import torch
from parity import assert_close, continued, padded, prompts
from transformers import AutoConfig, AutoModelForCausalLM
from true_sizes import FOLDERS, ONE_FILE

from transformers_neuronx.config import NeuronConfig
from transformers_neuronx.huggingface.auto import NeuronAutoModelForCausalLM


@pytest.mark.slow
@pytest.mark.parametrize("model_type", FOLDERS | ONE_FILE)
def test_at_a_true_size(model_type):
    torch.manual_seed(0)
    config = AutoConfig.for_model(model_type, **(FOLDERS | ONE_FILE)[model_type])
    reference = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    if (
        model_type == "gemma4_text"
    ):  # its scores are not divided by the root of a head's size: trained norms make up for it
        for name, weight in reference.named_parameters():
            if name.endswith("q_norm.weight"):
                weight.data.fill_(len(weight) ** -0.5)
    for name, weight in reference.named_parameters():
        if name.endswith("router.gate.weight"):  # AFMoE's are zeros at first, and of equal experts any may be chosen
            weight.data.normal_(std=0.02)
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
