"""Mixtures whose devices have whole experts: what they compute, hold and read."""

import numpy as np
import pytest
import torch
from one_file import tiny
from parity import assert_close, randomized

from transformers_neuronx import Engine, NeuronAutoModelForCausalLM, QuantizationConfig, SamplingParams
from transformers_neuronx.config import NeuronConfig
from transformers_neuronx.errors import ConfigError
from transformers_neuronx.gpt2.model import GPT2ForSampling
from transformers_neuronx.huggingface.auto import family_of
from transformers_neuronx.weights.checkpoint import open_checkpoint
from transformers_neuronx.weights.reading import resolve, shards

IDS = np.random.default_rng(0).integers(1, 131, (2, 20)).tolist()


def opened(source, degree, expert_parallel=True, quant=None):
    config = NeuronConfig(expert_parallel=expert_parallel, quant=quant)
    model = NeuronAutoModelForCausalLM.from_pretrained(
        source, n_positions=[48], batch_size=2, tp_degree=degree, neuron_config=config
    )
    model.to_neuron(ahead=False)
    return model


@pytest.mark.parametrize("degree", [2, 3, 8])
@pytest.mark.parametrize("model_type", ["gpt_oss", "qwen2_moe", "qwen3_moe", "dots1"])  # biases, shared experts, groups
@pytest.mark.few(4)
def test_logits_are_those_of_transformers(model_type, degree, parity):
    switches = NeuronConfig(tokens_per_dispatch=0, expert_parallel=True)
    parity(family_of(model_type), tiny(model_type), degree=degree, n_positions=[48], neuron_config=switches)


@pytest.mark.compiled_ahead
@pytest.mark.parametrize("quant", [None, QuantizationConfig("s8"), QuantizationConfig("s4", activation_dtype="s8")])
def test_each_device_has_some_experts_in_artifacts_too(quant, tmp_path):
    randomized(tiny("qwen3_moe")).save_pretrained(tmp_path)  # with 5 experts
    want, three = opened(tmp_path, 1, quant=quant), opened(tmp_path, 3, quant=quant)
    matrices, whole = (model.decoder.weights[0, "moe.up.weight"].shards() for model in (three, want))
    sizes = whole[0].shape[1:]
    assert [matrix.shape for matrix in matrices] == [(2, *sizes)] * 3
    assert np.array_equal(np.concatenate(matrices)[:5].view(np.uint8), whole[0].view(np.uint8))
    assert not np.concatenate(matrices)[5:].view(np.uint8).any(), "there are only five"
    assert_close(three.score(IDS), want.score(IDS))
    three.save(tmp_path / "artifact", sharded_weights=True)
    again = NeuronAutoModelForCausalLM.from_pretrained(tmp_path / "artifact")
    again.to_neuron(ahead=False)
    assert torch.equal(again.score(IDS), three.score(IDS))
    with pytest.raises(ConfigError, match="expert_parallel"):
        NeuronAutoModelForCausalLM.from_pretrained(tmp_path / "artifact", neuron_config=NeuronConfig())


@pytest.mark.parametrize("here", [range(1, 2), range(2, 4)])
def test_a_process_reads_only_the_experts_of_its_devices(here, tmp_path):
    randomized(tiny("qwen3_moe")).save_pretrained(tmp_path)
    model = opened(tmp_path, 4)  # two experts each: the last device has none
    programs, checkpoint = model.decoder.programs, open_checkpoint(tmp_path)
    rows = [row for row in programs.table if row.experts]
    read, found = [], resolve(programs.table, programs.layers, checkpoint, "", [])
    checkpoint.read = lambda name, of=checkpoint.read: read.append(name) or of(name)
    for sharded in shards({key: row for key, row in found.items() if row.experts}, checkpoint, "f32", 4, here):
        ours = [model.decoder.weights[sharded.keys[0]].shards()[rank] for rank in here]
        for piece, wanted in zip(sharded.pieces(), ours, strict=True):
            assert np.array_equal(piece.numpy(), wanted)
    numbers = {int(name.split(".experts.")[1].split(".")[0]) for name in read}
    assert numbers == set(range(5)) & set(range(2 * here.start, 2 * here.stop))
    assert len(read) == 3 * len(numbers) * len(programs.layers) and len(rows) == 3


def test_an_engine_gives_each_request_what_it_gets_alone(tmp_path):
    randomized(tiny("qwen2_moe")).save_pretrained(tmp_path)
    params = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)
    answers = []
    for model in (opened(tmp_path, 3), opened(tmp_path, 1, False)):
        with Engine(model, rows=2, step_tokens=16) as engine:
            handles = [engine.submit(ids[:count], params) for ids in IDS for count in (5, 20)]
            answers.append([list(handle) for handle in handles])
    assert answers[0] == answers[1]


def test_a_model_without_experts_is_refused(checkpoints):
    model = GPT2ForSampling.from_pretrained(checkpoints / "gpt2", neuron_config=NeuronConfig(expert_parallel=True))
    with pytest.raises(ConfigError, match="expert_parallel=True needs a model with experts, and this has none"):
        model.to_neuron()
