"""After `to_neuron` no call compiles: for every family, prompts of every length, and every call of a model."""

import pytest
import torch
from parity import DECODERS, ONE_FILE
from test_every_family import tiny
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM

from transformers_neuronx.config import ContinuousBatchingConfig, GenerationConfig, NeuronConfig
from transformers_neuronx.huggingface.adapter import HuggingFaceGenerationModelAdapter
from transformers_neuronx.huggingface.auto import NeuronAutoModelForCausalLM, NeuronAutoModelForSeq2SeqLM
from transformers_neuronx.runtimes.xla import XlaRuntime
from transformers_neuronx.speculation.drafts import SpeculativeGenerator
from transformers_neuronx.speculation.fused import FusedSpeculativeDecoder

pytestmark = pytest.mark.compiled_ahead

LONGEST = 32
SIZES = dict(n_positions=[16, LONGEST], context_length_estimate=[4, 12])
ANY = torch.randint(3, 100, (4, LONGEST), generator=torch.Generator().manual_seed(0))
GREEDY = dict(top_k=1, eos_token_override=-1)


@pytest.fixture
def saved(tmp_path):
    def saved(family):
        kind = AutoModelForSeq2SeqLM if family == "t5" else AutoModelForCausalLM
        kind.from_config(tiny(family)).save_pretrained(tmp_path / family)
        return tmp_path / family

    return saved


@pytest.fixture
def ready(monkeypatch):
    """`ready(model)`: compiling fails the test from now on."""

    def ready(*models):
        for model in models:

            def fail(module, *_, **__):
                pytest.fail(f"{module.name} is compiled inside a call")

            monkeypatch.setattr(model.decoder.store, "build", fail)

    return ready


def made(directory, **options):
    model = NeuronAutoModelForCausalLM.from_pretrained(directory, **SIZES | options)
    model.to_neuron()
    return model


def every_call(model, rows):
    """Run prompts of all lengths, alone and in batches, and continue them in every possible way."""
    for length in range(1, LONGEST + 1):
        ids = ANY[:rows, :length]
        mask = torch.ones_like(ids)
        mask[0, : length // 2] = 0
        model.forward(ids, attention_mask=mask)
        model.score(ids)
        if length < LONGEST:
            model.forward(ids, output_all_logits=True)
            assert model.sample(ids, min(length + 5, LONGEST), attention_mask=mask, **GREEDY).shape[1] > length
        for more in {1, 7, LONGEST - length} - {0, *range(LONGEST - length + 1, LONGEST)}:
            model.forward(ids)
            model.forward(ANY[: model.options.batch_size, :more], cache_ids=range(length, length + more))
    model.sample(ANY[:rows, :5], LONGEST, top_k=20, repetition_penalty=1.2, output_scores=True)
    model.reorder_cache([*range(1, rows), 0])


def generated(model, config, prompts, beams):
    adapter = HuggingFaceGenerationModelAdapter(config, model)
    options = dict(attention_mask=torch.ones_like(ANY), pad_token_id=0, eos_token_id=None)
    for length in (1, 11, LONGEST - 4):
        ids = ANY[:prompts, :length]
        for how in (dict(num_beams=beams), dict(use_cache=False), dict(prompt_lookup_num_tokens=3)):
            ids = ids[:1] if "prompt_lookup_num_tokens" in how else ids
            options["attention_mask"] = torch.ones_like(ids)
            adapter.generate(ids, max_new_tokens=4, do_sample=False, **options | how)


# The engine plans programs, so CI tests three families: among them one whose layers differ and one with experts.
FAMILIES = [
    f if f in ("gpt2", "gemma2", "mixtral") else pytest.param(f, marks=pytest.mark.slow) for f in DECODERS + ONE_FILE
]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.few(1)
def test_of_any_length_with_beams_and_speculation(saved, ready, family):
    model = made(saved(family), batch_size=2)
    speculator = SpeculativeGenerator(None, model, k=3)
    ready(model)
    every_call(model, 2)
    generated(model, tiny(family), 1, 2)
    for length in (1, 11, LONGEST - 4):
        speculator.sample(ANY[:2, :length], LONGEST, **GREEDY)


@pytest.mark.parametrize("options", [{}, dict(neuron_config=NeuronConfig(tokens_per_dispatch=2))], ids=str)
def test_of_speculation_with_a_draft(saved, ready, options):
    """Also if a dispatch gives the host fewer tokens than it needs draft tokens."""
    model, draft = (made(saved("gpt2"), batch_size=2, **options) for _ in range(2))
    guessing = [SpeculativeGenerator(draft, model, k=3), FusedSpeculativeDecoder(draft, model, k=2)]
    ready(model, draft)
    for speculator in guessing:
        for length in (1, 11, LONGEST - 4):
            speculator.sample(ANY[:2, :length], LONGEST, **GREEDY)


@pytest.mark.parametrize(
    "family", ["gpt2", *(pytest.param(f, marks=pytest.mark.slow) for f in DECODERS + ONE_FILE if f != "gpt2")]
)
def test_of_prompts_that_serve_several_sequences(saved, ready, family):
    model = made(saved(family), batch_size=4, prompt_batch_size=2)
    ready(model)
    every_call(model, 2)
    generated(model, tiny(family), 2, 2)


@pytest.mark.parametrize(
    "options",
    [
        dict(unroll=1),
        dict(context_unroll=1, tp_degree=2),
        dict(neuron_config=NeuronConfig(tokens_per_dispatch=0)),
        dict(context_length_estimate=0),
        dict(batch_size=4, prompt_batch_size=1, context_length_estimate=0),
    ],
    ids=str,
)
@pytest.mark.few(2)
def test_of_other_programs(saved, ready, options):
    rows = options.get("prompt_batch_size", 2)
    model = made(saved("gpt2"), **dict(batch_size=2) | options)
    ready(model)
    every_call(model, rows)


def test_where_attention_reads_all_positions(saved, ready, monkeypatch):
    """Without kernels attention reads all positions, so there are programs for several numbers of them."""
    monkeypatch.setattr(XlaRuntime, "attends_in_place", lambda *_: False)
    model = made(saved("gpt2"), batch_size=2)
    assert model.decoder.programs.widths(1) == (16, LONGEST)
    speculator = SpeculativeGenerator(None, model, k=3)
    ready(model)
    every_call(model, 2)
    for length in (1, 11, LONGEST - 4):
        speculator.sample(ANY[:2, :length], LONGEST, **GREEDY)


@pytest.mark.parametrize("chooses", [False, True])
def test_of_requests_that_come_and_go(saved, ready, chooses):
    rules = GenerationConfig(do_sample=True, top_k=20) if chooses else None
    switches = NeuronConfig(continuous_batching=ContinuousBatchingConfig(3), on_device_generation=rules)
    model = made(saved("gpt2"), neuron_config=switches)
    ready(model)
    for length in range(1, LONGEST):
        # a prompt, a continuation by several tokens, and one by a single token
        model.forward(ANY[:2, :4], torch.arange(4).repeat(2, 1), [0, 2])
        count = max(length, LONGEST - length)
        ids, positions = torch.zeros(2, 3, count, dtype=torch.long)
        positions[0, :length], positions[1, : LONGEST - length] = torch.arange(length), torch.arange(LONGEST - length)
        positions[1, : LONGEST - length] += min(length, 4)
        positions[2, 0] = 4
        model.forward(ids[:, :count], positions[:, :count], [1, 0, 2])


def test_of_a_source_and_what_is_made_of_it(saved, ready):
    sizes = dict(n_positions=[16, LONGEST], batch_size=2, context_length_estimate=[8, LONGEST])
    model = NeuronAutoModelForSeq2SeqLM.from_pretrained(saved("t5"), **sizes)
    model.to_neuron()
    ready(model)
    for length in range(1, LONGEST + 1):
        model.encode(ANY[:2, :length])
        model.forward(ANY[:2, :length])
        model.score(ANY[:2, :length])
        assert model.sample(ANY[:2, :length], 6, **GREEDY).shape == (2, 6)
    adapter = HuggingFaceGenerationModelAdapter(tiny("t5"), model)
    adapter.generate(ANY[:1, :7], num_beams=2, max_length=LONGEST, do_sample=False)
