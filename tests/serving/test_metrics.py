"""Metrics of calls: the number of tokens and of steps, and times that add up."""

import json
from pathlib import Path

import pytest
import torch
from prometheus_client.parser import text_string_to_metric_families
from transformers import AutoConfig

from transformers_neuronx.config import NeuronConfig
from transformers_neuronx.engine.metrics import Meter
from transformers_neuronx.errors import ConfigError, InputError
from transformers_neuronx.gpt2.model import GPT2ForSampling
from transformers_neuronx.huggingface.adapter import HuggingFaceGenerationModelAdapter
from transformers_neuronx.speculation.drafts import SpeculativeGenerator

pytestmark = pytest.mark.compiled_ahead

TINY_KJV = Path(__file__).parents[2] / "examples" / "tiny-kjv"
IDS = torch.tensor([[5, 6, 7, 8], [9, 10, 11, 12]])


@pytest.fixture
def model():
    model = GPT2ForSampling.from_pretrained(TINY_KJV, n_positions=64, batch_size=2, tag="kjv")
    model.to_neuron()
    return model


def adds_up(call):
    assert call.time_to_first_token + sum(call.token_latencies) <= call.seconds


@pytest.mark.parametrize("how", ["loop on the devices", "loop on the host", "guesses"])
def test_a_sample(model, how):
    options = {
        "loop on the devices": {},
        "loop on the host": dict(no_repeat_ngram_size=2),
        "guesses": dict(speculator=SpeculativeGenerator(None, model, 3)),
    }
    assert model.metrics.call.seconds == 0
    model.sample(IDS, 30, top_k=1, eos_token_override=-1, **options[how])
    call = model.metrics.call
    assert (call.prompt_tokens, call.new_tokens, len(call.token_latencies)) == (8, 52, 25)
    adds_up(call)


def test_tokens_after_a_row_s_end_are_not_made(model):
    free = model.sample(IDS, 20, top_k=1, eos_token_override=-1)
    eos = next(token for token in free[0, 5:].tolist() if token not in free[1, 4:])
    model.sample(IDS, 20, top_k=1, eos_token_override=eos)
    assert model.metrics.call.new_tokens == 16 + free[0, 4:].tolist().index(eos) + 1


def test_padding_is_no_prompt_and_logits_are_no_tokens(model):
    model.forward(IDS, attention_mask=torch.tensor([[0, 1, 1, 1], [1, 1, 1, 1]]))
    call = model.metrics.call
    assert (call.prompt_tokens, call.new_tokens, call.token_latencies) == (7, 0, [])
    adds_up(call)
    model.score(IDS)
    assert model.metrics.call.prompt_tokens == 8 and model.metrics.totals.calls == 2


@pytest.mark.parametrize("options", [dict(), dict(num_beams=2), dict(use_cache=False)], ids=str)
def test_generate_is_one_call(model, options):
    adapter = HuggingFaceGenerationModelAdapter(AutoConfig.from_pretrained(TINY_KJV), model)
    ids = IDS[:1] if "num_beams" in options else IDS
    result = adapter.generate(ids, do_sample=False, max_new_tokens=9, eos_token_id=None, pad_token_id=0, **options)
    call = model.metrics.call
    ended = torch.isin(result[:, 4:], torch.tensor(model.eos_token_ids)).any()
    assert call.new_tokens == 9 * len(ids) or ended
    assert (call.prompt_tokens, len(call.token_latencies)) == (8, 8)
    assert model.metrics.totals.calls == 1
    adds_up(call)


def test_a_call_that_fails_is_not_measured(model):
    with pytest.raises(InputError):
        model.sample(IDS, 65)

    def fails(*_):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        model.sample(IDS, 30, stopping_criteria_list=fails)
    assert model.metrics.totals.calls == 0
    model.sample(IDS, 30, top_k=1)
    assert model.metrics.totals.calls == 1


def test_a_call_inside_another_is_a_part_of_it():
    meter = Meter()
    with meter.call() as outer:
        with meter.call(3) as inner:
            inner.mark()
        with meter.call(1) as inner:
            inner.mark()
            inner.mark(steps=2)
    assert inner is outer is meter.last and meter.totals.calls == 1
    assert outer.prompt_tokens == 3 and len(outer.token_latencies) == 3


def test_before_the_devices_there_is_nothing(tmp_path):
    with pytest.raises(ConfigError, match=r"not on a device yet: call to_neuron\(\) first"):
        GPT2ForSampling.from_pretrained(TINY_KJV).metrics  # noqa: B018


@pytest.mark.parametrize("degree", [1, 2])
def test_what_is_held(degree):
    switches = NeuronConfig(tokens_per_dispatch=0)
    model = GPT2ForSampling.from_pretrained(TINY_KJV, n_positions=64, tp_degree=degree, neuron_config=switches)
    model.to_neuron()
    model.sample(IDS[:1], 20, top_k=1)  # programs that are found are loaded when they are used
    held, decoder = model.metrics.held, model.decoder
    shards = [shard for tensor in {id(t): t for t in decoder.weights.values()}.values() for shard in tensor.shards()]
    assert held.weights == sum(shard.nbytes for shard in shards)
    config = model.config
    assert held.caches == 2 * config.n_layer * 64 * config.hidden_size * 4
    assert held.temporaries > 0
    assert model.metrics.compile_seconds > 0 and model.metrics.load_seconds > 0


def test_for_machines(model):
    model.sample(IDS, 20, top_k=1, eos_token_override=-1)
    model.sample(IDS, 10, top_k=1, eos_token_override=-1)
    metrics = model.metrics
    facts = json.loads(json.dumps(metrics.as_dict()))
    assert facts["model"] == "kjv" and facts["new_tokens"] == 12 and facts["weights_bytes"] == metrics.held.weights
    assert facts["token_latency_p50"] <= facts["token_latency_p99"]
    samples = {
        (sample.name.removeprefix("transformers_neuronx_"), sample.labels.get("le")): sample.value
        for family in text_string_to_metric_families(metrics.prometheus())
        for sample in family.samples
        if sample.labels["model"] == "kjv"
    }
    assert samples["calls_total", None] == 2
    assert samples["prompt_tokens_total", None] == 16 and samples["new_tokens_total", None] == 44
    assert samples["time_to_first_token_seconds_count", None] == 2
    assert samples["token_latency_seconds_bucket", "+Inf"] == samples["token_latency_seconds_count", None] == 20
    assert samples["weights_bytes", None] == metrics.held.weights
    assert samples["compile_seconds", None] == metrics.compile_seconds


def test_for_people(model):
    def table():
        lines = str(model.metrics).splitlines()
        assert max(map(len, lines)) <= 60
        return {name.strip(): value.strip() for name, value in (line.rsplit("  ", 1) for line in lines)}

    assert table()["time to first token"] == "-"
    model.sample(IDS, 20, top_k=1, eos_token_override=-1)
    assert table()["new tokens"] == "32" and table()["weights bytes"].endswith("MiB")
    assert table()["time to first token"].endswith("ms")
