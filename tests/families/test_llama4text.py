"""Llama 4 against Transformers: attention in chunks, queries that grow, experts whose inputs have their shares."""

import json

import pytest
import torch
from one_file import DEFAULT, LLAMA3, WIDE
from parity import prompts, randomized
from transformers import Llama4TextConfig

from transformers_neuronx import Engine, NeuronAutoModelForCausalLM, SamplingParams
from transformers_neuronx.errors import ConfigError
from transformers_neuronx.llama4text.config import Llama4TextConfig as OurConfig
from transformers_neuronx.llama4text.model import Llama4TextForSampling
from transformers_neuronx.speculation import PromptLookup

TINY = WIDE | dict(
    num_hidden_layers=4, attention_chunk_size=5, no_rope_layer_interval=2, num_local_experts=5, intermediate_size=40,
    intermediate_size_mlp=72, rope_parameters=LLAMA3 | dict(high_freq_factor=1.0),
)  # fmt: skip
GROWING = dict(floor_scale=8, attn_scale=0.5)  # Transformers counts padding on the left as positions
VARIANTS = {
    "Scout": GROWING,
    "Maverick": GROWING | dict(interleave_moe_layer_step=2, use_qk_norm=False, rope_parameters=DEFAULT),
    "several experts": GROWING | dict(num_experts_per_tok=3),
    "queries do not grow": dict(attn_temperature_tuning=False, attention_bias=True),
}


def config(**changes):
    return Llama4TextConfig(**TINY | changes)


@pytest.mark.parametrize("degree", [1, 3])
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.few(3)
def test_logits_are_those_of_transformers(variant, degree, parity):
    parity(Llama4TextForSampling, config(**VARIANTS[variant]), degree=degree)


@pytest.mark.parametrize("degree", [2, 8])
@pytest.mark.parametrize("variant", VARIANTS)
def test_at_other_degrees(variant, degree, parity):
    parity(Llama4TextForSampling, config(**VARIANTS[variant]), degree=degree)


@pytest.mark.parametrize("degree", [1, 2])
@pytest.mark.parametrize("variant", VARIANTS)
def test_in_bf16(variant, degree, parity):
    """Every expert for every token, as in the test of this name of families in one file."""
    changes = VARIANTS[variant] | dict(num_experts_per_tok=5)
    parity(Llama4TextForSampling, config(**changes), degree=degree, amp="bf16", largest=False)


@pytest.mark.slow
def test_requests_together_past_chunks(tmp_path):
    """Over pages, which layers with chunks give back; greedy tokens of all lengths cross the ends of chunks."""
    reference = randomized(config(**VARIANTS["Maverick"], attention_chunk_size=16))
    reference.save_pretrained(tmp_path)
    model = NeuronAutoModelForCausalLM.from_pretrained(tmp_path, n_positions=48, context_length_estimate=16)
    model.to_neuron()
    rows, greedy = prompts(131, [1, 3, 30, 15, 16, 17]), dict(do_sample=False, eos_token_id=None, pad_token_id=0)
    tensors = [torch.tensor([row]) for row in rows]
    made = [reference.generate(x, attention_mask=x >= 0, max_new_tokens=17, **greedy)[0] for x in tensors]
    params = SamplingParams(max_tokens=17, temperature=0, ignore_eos=True)
    with Engine(model, rows=4, step_tokens=16, joined_tokens=16, draft=PromptLookup(ngram=1)) as engine:
        handles = [engine.submit(row, params) for row in rows]
        assert [handle.result() for handle in handles] == [tokens[-17:].tolist() for tokens in made]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (dict(layer_types=["full_attention"] * 4), "layer_types that are 'chunked_attention' where layers rotate, got"),
        (dict(attention_chunk_size=None), "the llama4_text configuration lacks 'attention_chunk_size'"),
    ],
)
def test_what_is_not_known_is_refused(changes, said):
    attributes = json.loads(config().to_json_string(use_diff=False)) | changes
    with pytest.raises(ConfigError, match=said):
        OurConfig.from_hf(attributes)
