"""gpt-oss against Transformers: sinks of every size, generation past a window, and experts in MXFP4."""

import pytest
import torch
from one_file import tiny
from parity import assert_close, continued, prompts, randomized

from transformers_neuronx import NeuronAutoModelForCausalLM, NeuronConfig

# Logits of sinks by which they take nearly all of the mass, some of it, and nearly none; and each head its own share.
SINKS = {"most": [12.0], "some": [2.0], "none": [-50.0], "each": [9.0, 4.0, 1.0, 0.0, -4.0, -50.0]}


def with_sinks(sinks, **changes):
    config = tiny("gpt_oss")
    config.update(changes)
    reference = randomized(config)
    with torch.no_grad():
        for layer in reference.model.layers:
            heads = len(layer.self_attn.sinks)
            layer.self_attn.sinks.copy_(torch.tensor(sinks).repeat(heads)[:heads])
    return reference


def loaded(directory, degree=1, **options):
    model = NeuronAutoModelForCausalLM.from_pretrained(
        directory, n_positions=48, context_length_estimate=32, tp_degree=degree, **options
    )
    model.to_neuron()
    return model


def logits(model, ids, more):
    """Return the logits after each token of a prompt, and of those that follow one by one."""
    mask = torch.ones(1, len(ids), dtype=torch.int64)
    found = [model.forward(torch.tensor([ids]), attention_mask=mask, output_all_logits=True)[0]]
    for token in more:
        mask = torch.cat([mask, torch.ones(1, 1, dtype=mask.dtype)], 1)
        found.append(model.forward(torch.tensor([[token]]), attention_mask=mask))
    return torch.cat(found)


@pytest.mark.parametrize("degree", [1, 3])
@pytest.mark.parametrize("sinks", SINKS)
@pytest.mark.few(2)
def test_sinks_of_every_size(sinks, degree, tmp_path, compiled_when_needed):
    """A prompt, and tokens one by one, beyond the window of five."""
    reference = with_sinks(SINKS[sinks])
    reference.save_pretrained(tmp_path)
    [ids], more = prompts(131, [13]), [5, 6, 7]
    wanted = continued(reference, ids, more)
    assert (wanted - continued(with_sinks([0.0]), ids, more)).abs().max() > 1e-3 * wanted.abs().max()
    model = loaded(tmp_path, degree, neuron_config=NeuronConfig(tokens_per_dispatch=0))
    assert_close(logits(model, ids, more), wanted)


def test_greedy_tokens_past_the_window(tmp_path, compiled_when_needed):
    reference = with_sinks(SINKS["each"])
    reference.save_pretrained(tmp_path)
    ids = torch.tensor(prompts(131, [13]))
    wanted = reference.generate(ids, max_new_tokens=20, do_sample=False, eos_token_id=None, pad_token_id=0)
    assert loaded(tmp_path, 2).sample(ids, 33, top_k=1, eos_token_override=-1).equal(wanted)


def test_positions_divided_over_devices(tmp_path, compiled_when_needed):
    """Four devices share each of two key heads; one of them counts a sink."""
    reference = with_sinks(SINKS["each"], num_attention_heads=8)
    reference.save_pretrained(tmp_path)
    [ids], more = prompts(131, [13]), [5, 6]
    how = NeuronConfig(tokens_per_dispatch=0, shard_over_sequence=True)
    model = loaded(tmp_path, 8, neuron_config=how)
    assert_close(logits(model, ids, more), continued(reference, ids, more))
