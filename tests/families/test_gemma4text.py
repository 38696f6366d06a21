"""Gemma 4 against Transformers: sizes and keys by kind of layer, keys of other layers, inputs of each layer."""

import json

import pytest
import torch
from one_file import KINDS, WIDE
from parity import assert_close, prompts, randomized
from transformers import Gemma4TextConfig

from transformers_neuronx import Engine, NeuronAutoModelForCausalLM, SamplingParams
from transformers_neuronx.compiler import check
from transformers_neuronx.engine.slots import SlotDecoder
from transformers_neuronx.errors import ConfigError
from transformers_neuronx.gemma4text.config import Gemma4TextConfig as OurConfig
from transformers_neuronx.gemma4text.model import Gemma4TextForSampling
from transformers_neuronx.neuron.form import neuron_form
from transformers_neuronx.neuron.targets import TARGETS
from transformers_neuronx.runtimes.absent import absent_runtime
from transformers_neuronx.speculation import PromptLookup

TINY = WIDE | dict(
    num_hidden_layers=4, layer_types=KINDS * 2, sliding_window=5, hidden_size_per_layer_input=0, global_head_dim=32,
    attention_k_eq_v=True, num_global_key_value_heads=1, final_logit_softcapping=30.0,
)  # fmt: skip
SMALL = dict(
    attention_k_eq_v=False, hidden_size_per_layer_input=8, vocab_size_per_layer_input=131, num_kv_shared_layers=2
)
VARIANTS = {
    "31B": {},
    "26B-A4B": dict(enable_moe_block=True, num_experts=5, top_k_experts=2, moe_intermediate_size=40),
    "E2B": SMALL | dict(num_key_value_heads=1, use_double_wide_mlp=True),
    "E4B": SMALL | dict(num_hidden_layers=6, layer_types=KINDS * 3),
}


def config(**changes):
    return Gemma4TextConfig(**TINY | changes)


@pytest.mark.parametrize("degree", [1, 3])
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.few(3)
def test_logits_are_those_of_transformers(variant, degree, parity):
    parity(Gemma4TextForSampling, config(**VARIANTS[variant]), degree=degree)


@pytest.mark.parametrize("degree", [2, 8])
@pytest.mark.parametrize("variant", VARIANTS)
def test_at_other_degrees(variant, degree, parity):
    parity(Gemma4TextForSampling, config(**VARIANTS[variant]), degree=degree)


@pytest.mark.parametrize("degree", [1, 2])
@pytest.mark.parametrize("variant", VARIANTS)
def test_in_bf16(variant, degree, parity):
    """Every expert for every token, as in the test of this name of families in one file."""
    mixture = variant == "26B-A4B"
    changes = VARIANTS[variant] | (dict(top_k_experts=5) if mixture else {})
    parity(Gemma4TextForSampling, config(**changes), degree=degree, amp="bf16", largest=not mixture)


def saved(directory, **changes):
    reference = randomized(config(**VARIANTS["E2B"] | changes))
    reference.save_pretrained(directory)
    return reference


def opened(directory, **options):
    model = NeuronAutoModelForCausalLM.from_pretrained(directory, n_positions=48, context_length_estimate=16, **options)
    model.to_neuron()
    return model


def continuations(reference, rows):
    greedy = dict(max_new_tokens=15, do_sample=False, eos_token_id=None, pad_token_id=0)
    return [reference.generate(torch.tensor([row]), **greedy)[0, len(row) :].tolist() for row in rows]


@pytest.mark.parametrize("draft", [None, PromptLookup(ngram=1)], ids=["plain", "draft tokens"])
@pytest.mark.parametrize("degree", [1, 3])
@pytest.mark.slow
def test_requests_together_where_layers_read_the_keys_of_others(draft, degree, tmp_path):
    """Past the window, over pages that layers with the window give back."""
    reference, rows = saved(tmp_path), prompts(131, [1, 3, 30, 9, 17, 2])
    model = opened(tmp_path, tp_degree=degree)
    assert [len(arrays) for arrays in model.decoder.programs.cache.by_layer(model.decoder.caches)] == [2, 2, 0, 0]
    params = SamplingParams(max_tokens=15, temperature=0, ignore_eos=True)
    with Engine(model, rows=4, step_tokens=16, joined_tokens=16, draft=draft) as engine:
        handles = [engine.submit(row, params) for row in rows]
        assert [handle.result() for handle in handles] == continuations(reference, rows)
        handle = engine.embed(rows[2])
        handle.result()
        hidden = reference.base_model(torch.tensor([rows[2]])).last_hidden_state
        assert_close(torch.from_numpy(handle.embedding), hidden[0, -1])


def test_an_artifact_and_the_loop_where_layers_read_the_keys_of_others(tmp_path):
    reference, rows = saved(tmp_path / "checkpoint"), prompts(131, [13])
    opened(tmp_path / "checkpoint").save(tmp_path / "artifact", sharded_weights=True)
    found = opened(tmp_path / "artifact").sample(torch.tensor(rows), 28, top_k=1, eos_token_override=-1)
    assert found[:, 13:].tolist() == continuations(reference, rows)


def test_programs_for_neuron_where_layers_read_the_keys_of_others():
    model = Gemma4TextForSampling(
        config(**VARIANTS["E2B"]), n_positions=[16], context_length_estimate=[8], batch_size=2
    )
    decoder = SlotDecoder(model.family, model.model_config, absent_runtime(1, loops=False), model.options)
    for what in decoder.planned():
        [piece] = what.segments(decoder.programs)
        form = neuron_form(what.written(decoder.programs, piece))
        assert [finding for target in TARGETS for finding in check(form, target)] == []


@pytest.mark.compiled_ahead
def test_layers_that_read_the_keys_of_others_are_in_one_program(tmp_path):
    saved(tmp_path)
    model = NeuronAutoModelForCausalLM.from_pretrained(tmp_path, n_positions=48, unroll=1)
    with pytest.raises(ConfigError, match="so one program has them all: unroll must be None or 4, got 1"):
        model.to_neuron()


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (dict(use_bidirectional_attention="all"), "use_bidirectional_attention='all'; supported: None, 'vision'"),
        (dict(per_layer_config={"1": dict(head_dim=8)}), "the same head_dim and num_key_value_heads in all layers of"),
        (
            dict(rope_parameters={kind: dict(rope_type="linear", rope_theta=1e4, factor=2.0) for kind in KINDS}),
            "needs positions of type 'default' or 'proportional', got 'linear'",
        ),
    ],
)
def test_what_is_not_known_is_refused(changes, said):
    attributes = json.loads(config().to_json_string(use_diff=False)) | changes
    with pytest.raises(ConfigError, match=said):
        OurConfig.from_hf(attributes)
