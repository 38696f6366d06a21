"""Comparison of two models: rounding is not reported, and a change in one place is found there."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GPT2Config, T5Config

from transformers_neuronx.analysis.comparison import TOLERANCE, compare
from transformers_neuronx.config import KVCacheQuantizationConfig, NeuronConfig, QuantizationConfig
from transformers_neuronx.errors import ConfigError, InputError
from transformers_neuronx.gpt2.model import GPT2ForSampling
from transformers_neuronx.t5.model import T5ForSampling

TINY_KJV = Path(__file__).parents[2] / "examples" / "tiny-kjv"
TEXT = "And God said unto Moses, Go in unto Pharaoh, and say unto him,"


def made(path=TINY_KJV, **options):
    options = dict(n_positions=64) | options
    switches = {name: options.pop(name) for name in ("quant", "kv_cache_quant") if name in options}
    model = GPT2ForSampling.from_pretrained(path, neuron_config=NeuronConfig(**switches), **options)
    model.to_neuron()
    return model


@pytest.fixture(scope="module")
def ids():
    return AutoTokenizer.from_pretrained(TINY_KJV)(TEXT).input_ids


@pytest.fixture(scope="module")
def model():
    return made()


@pytest.fixture
def reference():
    return AutoModelForCausalLM.from_pretrained(TINY_KJV, dtype=torch.float32)


def test_what_is_said_of_logits_is_so(model, reference, ids):
    """Compare with the same numbers computed in another way, for a model that sometimes picks other tokens."""
    with torch.no_grad():
        reference.transformer.h[2].mlp.c_fc.weight *= 1.5
    found = compare(model, reference, ids, 12)
    greedy = reference.generate(torch.tensor([ids]), max_new_tokens=12, do_sample=False, eos_token_id=None)
    with torch.inference_mode():
        want = reference(greedy).logits[0]
    got = model.forward(greedy, output_all_logits=True)[0]
    assert len(found.places) == len(ids) + 12 and found.prompt_tokens == len(ids)
    parting = [place.position for place in found.parting]
    assert parting == (want.argmax(1) != got.argmax(1)).nonzero()[:, 0].tolist() and len(parting) > 1
    for place in found.places:
        mine, theirs = got[place.position], want[place.position]
        assert place.difference == pytest.approx(float((mine - theirs).abs().max() / want.abs().max()), rel=1e-3)
        p, q = theirs.double().log_softmax(-1), mine.double().log_softmax(-1)
        assert place.kl == pytest.approx(float((p.exp() * (p - q)).sum()), rel=1e-3)
        assert (place.wanted, place.chosen) == (int(theirs.argmax()), int(mine.argmax()))
        assert place.chosen_probability == pytest.approx(float(p.exp()[place.chosen]), rel=1e-3)
    assert found.worst.difference > TOLERANCE["f32"] and not found.agree


def slow(*values):
    return pytest.param(*values, marks=pytest.mark.slow)


ROUNDED = {  # options, and the smallest error that layers have with them
    "f32 in windows": (dict(context_length_estimate=8), 1e-8),
    "bf16 and s8": (dict(amp="bf16", quant=QuantizationConfig("s8")), 1e-3),
    "three devices": (dict(tp_degree=3), 1e-8),
    "bf16 on two, in groups of layers": (dict(amp="bf16", tp_degree=2, unroll=2), 1e-3),
    "f16": (dict(amp="f16"), 1e-4),
    "activations in s8": (dict(quant=QuantizationConfig("s8", activation_dtype="s8")), 1e-3),
    "f8": (dict(quant=QuantizationConfig("f8e4m3fn")), 1e-3),
    "s4": (dict(quant=QuantizationConfig("s4")), 1e-2),
    "caches in s8": (dict(kv_cache_quant=KVCacheQuantizationConfig("s8")), 1e-4),
    "caches in f8": (dict(kv_cache_quant=KVCacheQuantizationConfig("f8e4m3fn")), 1e-3),
}


@pytest.mark.parametrize("case", [*list(ROUNDED)[:2], *map(slow, list(ROUNDED)[2:])])
def test_rounding_accuses_nobody(reference, ids, case):
    """Errors grow from layer to layer, but each layer's own error stays within rounding."""
    options, least = ROUNDED[case]
    found = compare(made(**options), reference, ids, 16)
    assert found.agree and found.wrong == [] and found.weights == []
    assert all(least < part.own for part in found.parts[1:-1])
    assert found.parts[-2].so_far > found.parts[-2].own
    assert "The models agree" in str(found)


@torch.no_grad()
def scaled(weight, by):
    weight *= by


@torch.no_grad()
def transposed(weight, _):
    weight.copy_(weight.T.clone())


@torch.no_grad()
def one_element(weight, deviations):
    weight[(3,) * weight.ndim] += deviations * weight.std()


PLANTED = {
    "a matrix, scaled": ("layer.3", "mlp.up.weight", "h.3.mlp.c_fc.weight", scaled, 1.0003),
    "a square matrix, transposed": ("layer.0", "attn.out.weight", "h.0.attn.c_proj.weight", transposed, None),
    "one query weight": ("layer.3", "attn.q.weight", "h.3.attn.c_attn.weight", one_element, 0.3),
    "one value weight": ("layer.5", "attn.v.weight", "h.5.attn.c_attn.weight", None, 0.3),
    "one weight of the feed-forward": ("layer.1", "mlp.down.weight", "h.1.mlp.c_proj.weight", one_element, 0.3),
    "one weight of a norm": ("layer.4", "mlp_norm.weight", "h.4.ln_2.weight", one_element, 0.1),
    "one bias": ("layer.2", "attn.out.bias", "h.2.attn.c_proj.bias", one_element, 0.3),
    "a position": ("embed", "positions", "wpe.weight", one_element, 0.1),
    "the last norm": ("head", "final_norm.weight", "ln_f.weight", one_element, 0.1),
}


@pytest.mark.parametrize("case", PLANTED)
def test_a_planted_error_is_found_where_it_is(model, reference, ids, case):
    part, weight, name, change, by = PLANTED[case]
    parameter = reference.transformer.get_parameter(name)
    if change is None:
        parameter.data[3, 2 * 128 + 3] += by * parameter.std()
    else:
        change(parameter, by)
    found = compare(model, reference, ids, 4)
    assert found.wrong == [part] and not found.agree
    changed = [changed.name for changed in found.weights]
    assert changed == [f"{part}.{weight}" if part.startswith("layer") else weight]
    if change is not transposed and change is not scaled:
        assert [changed.count for changed in found.weights] == [1]


def test_several_layers_and_one_that_is_not_in_the_weights(model, reference, ids):
    reference.transformer.h[1].ln_1.eps = 0.1
    scaled(reference.transformer.h[4].mlp.c_proj.weight, 1.01)
    found = compare(model, reference, ids, 4)
    assert found.wrong == ["layer.1", "layer.4"]
    assert [weight.name for weight in found.weights] == ["layer.4.mlp.down.weight"]
    assert "layer.1 is the first of 2 parts with own errors above the tolerance." in str(found)


@pytest.mark.parametrize("options", [dict(), slow(dict(amp="bf16", tp_degree=2, quant=QuantizationConfig("s8")))])
def test_an_error_on_the_devices(ids, options):
    """An error in one of the loaded weights, next to a model with the same file and programs, is found.

    In f32 it may have any size. Rounding to bf16 may hide a small one: see below.
    """
    broken, whole = made(**options), made(**options)
    key = 2, "attn.out.weight"
    shards = [shard.copy() for shard in broken.decoder.weights[key].shards()]
    number = shards[0].flat[77]
    shards[0].flat[77] += number.dtype.type(1e-5 if number.dtype != np.int8 else -64 if number > 0 else 64)
    broken.decoder.weights[key] = broken.decoder.runtime.put(shards)
    assert compare(whole, made(**options), ids, 4).agree
    found = compare(broken, whole, ids, 4)
    assert found.tolerance == 0 and [part.own for part in found.parts[4:]] == [0] * 4
    assert found.wrong == ["layer.2"] and [vars(weight) for weight in found.weights] == [
        dict(name="layer.2.attn.out.weight", count=1, total=sum(shard.size for shard in shards))
    ]


def test_what_rounding_hides_the_weights_still_show(reference, ids):
    one_element(reference.transformer.h[3].mlp.c_fc.weight, 1.0)
    found = compare(made(amp="bf16"), reference, ids, 4)
    assert found.wrong == [] and found.worst.difference < found.tolerance and not found.agree
    assert [weight.name for weight in found.weights] == ["layer.3.mlp.up.weight"]
    assert str(found).endswith("\nlayer.3.mlp.up.weight differs from the reference's.")


def test_a_number_that_is_none(ids):
    broken, whole = made(), made()
    key = 2, "mlp_norm.weight"
    broken.decoder.weights[key] = broken.decoder.runtime.put([np.full(128, np.nan, np.float32)])
    found = compare(broken, whole, ids, 4)
    assert found.wrong == ["layer.2"]
    told = json.loads(json.dumps(found.as_dict(), allow_nan=False))
    assert told["difference"] is None and told["parts"][3]["own"] is None and told["parts"][4]["own"] < 1e-5
    assert compare(whole, whole, ids, 4).agree


def test_other_settings_and_a_tolerance(ids, tmp_path):
    narrow, wide = made(amp="bf16"), made(tp_degree=2)
    found = compare(narrow, wide, ids, 8)
    assert found.agree and found.weights == [] and found.tolerance == TOLERANCE["bf16"] + TOLERANCE["f32"]
    assert not compare(narrow, wide, ids, 8, tolerance=1e-3).agree
    wide.save(tmp_path / "artifact", sharded_weights=True)
    again = GPT2ForSampling.from_pretrained(tmp_path / "artifact")
    again.to_neuron()
    assert compare(again, wide, ids, 8).agree
    assert compare(narrow, again, ids, 8).weights is None


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["s8", "s4"])
def test_weights_that_are_rounded_alike_leave_no_room(ids, dtype):
    one, two = (made(tp_degree=degree, quant=QuantizationConfig(dtype)) for degree in (1, 2))
    found = compare(one, two, ids, 4)
    assert found.agree and found.tolerance == TOLERANCE["f32"]


def test_weights_of_other_sizes(model, ids):
    torch.manual_seed(0)
    sizes = dict(vocab_size=1023, n_embd=128, n_layer=6, n_head=4, n_positions=64, bos_token_id=0, eos_token_id=0)
    found = compare(model, AutoModelForCausalLM.from_config(GPT2Config(**sizes, n_inner=64)).eval(), ids, 2)
    assert found.weights is None and found.wrong == [part.name for part in found.parts]
    assert "weights    not compared: layouts differ" in str(found)


def test_for_people_and_machines(model, reference, ids):
    scaled(reference.transformer.h[0].mlp.c_fc.weight, 3.0)
    for layer in reference.transformer.h:
        one_element(layer.ln_1.weight, 1.0)
        one_element(layer.ln_2.weight, 1.0)
    found = compare(model, reference, ids, 24)
    text = found.text(lambda token: f"{token} is a token with a very long name")
    assert max(map(len, text.splitlines())) <= 80
    assert len(found.parting) > 10 and f"… and {len(found.parting) - 10} more" in text and "… and 3 more" in text
    told = json.loads(json.dumps(found.as_dict()))
    assert told["agree"] is False and told["wrong"] == found.wrong and len(told["places"]) == len(ids) + 24
    assert told["difference"] == max(place["difference"] for place in told["places"])
    assert told["kl_mean"] == pytest.approx(np.mean([place["kl"] for place in told["places"]]))


def test_what_cannot_be_compared(model, reference, ids):
    with pytest.raises(InputError, match=r"the models take n_positions=64, got 19 tokens and new_tokens=46"):
        compare(model, reference, ids, 46)
    with pytest.raises(InputError, match="the prompt is empty"):
        compare(model, reference, [])
    with pytest.raises(InputError, match="ids from 0 to 1022, got 1023"):
        compare(model, reference, [1023])
    with pytest.raises(
        ConfigError, match=r"same vocabulary, number of layers and hidden size, got \(1023, 6, 128\) of"
    ):
        compare(model, AutoModelForCausalLM.from_config(GPT2Config(n_layer=1, n_embd=16, n_head=2)).eval(), ids)
    with pytest.raises(ConfigError, match=r"call eval\(\) on GPT2LMHeadModel"):
        compare(model, reference.train(), ids)
    with pytest.raises(ConfigError, match=r"in f32, f16, bf16, got torch.float64"):
        compare(model, reference.eval().double(), ids)
    with pytest.raises(ConfigError, match="without an encoder, got T5ForSampling"):
        compare(T5ForSampling(T5Config(d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2)), reference, ids)
