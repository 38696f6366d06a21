"""Tests of GPT-2 repeated for each family, with small programs, on three devices."""

import importlib
from pathlib import Path

import pytest
import torch
from one_file import NAMES, tiny as tiny_in_one_file
from parity import EVERY_DECODER, assert_close, continued, padded, prompts, randomized
from transformers import GPT2Config

from transformers_neuronx.analysis.comparison import compare
from transformers_neuronx.errors import CheckpointError
from transformers_neuronx.huggingface.adapter import HuggingFaceGenerationModelAdapter
from transformers_neuronx.huggingface.auto import NeuronAutoModelForCausalLM, families, family_of
from transformers_neuronx.runtimes.absent import absent_runtime
from transformers_neuronx.runtimes.xla import XlaRuntime
from transformers_neuronx.weights.checkpoint import Checkpoint, checkpoint_of
from transformers_neuronx.weights.reading import expand


def tiny(family):
    """Return the configuration of the family's own tests; a family without tests fails here."""
    if family == "gpt2":
        return GPT2Config(vocab_size=131, n_positions=64, n_embd=48, n_layer=2, n_head=6)
    if family in NAMES:
        return tiny_in_one_file(NAMES[family])
    assert (Path(__file__).parent / f"test_{family}.py").exists()
    return importlib.import_module(f"test_{family}").config()


@pytest.fixture(scope="module", params=EVERY_DECODER)
def pair(request, tmp_path_factory):
    """A family's model for two prompts that serve two sequences each, and Transformers' model."""
    reference = randomized(tiny(request.param))
    directory = tmp_path_factory.mktemp(request.param)
    reference.save_pretrained(directory)
    model = NeuronAutoModelForCausalLM.from_pretrained(
        directory, n_positions=[24, 48], batch_size=4, prompt_batch_size=2, context_length_estimate=[8], tp_degree=3,
        unroll=1, context_unroll=1,
    )  # fmt: skip
    model.to_neuron()
    return model, reference


@pytest.mark.parametrize("family", families())
def test_a_family_is_named_after_its_folder(family):
    assert family_of(family).family.name == family  # artifacts have this name


@pytest.mark.parametrize("family", EVERY_DECODER)
def test_frequencies_in_a_checkpoint_are_left_aside_where_positions_are_rotary(family):
    reference = randomized(tiny(family))
    tensors, names = checkpoint_of(reference), ["h.0.attn", "model.layers.1.self_attn"]
    frequencies = {f"{name}.rotary_emb.inv_freq": lambda _: torch.ones(4) for name in names}
    kind = family_of(family)
    model = kind(reference.config, n_positions=[16], context_length_estimate=8)
    decoder = model.decoder_on(absent_runtime(1))
    checkpoint = Checkpoint(tensors.directory, dict.fromkeys(tensors, tensors.read) | frequencies)
    if family in ("bloom", "gpt2", "gptbigcode", "gptneo", "granitemoehybrid", "mpt", "nemotronh", "opt"):
        with pytest.raises(CheckpointError, match=rf"has unexpected {', '.join(frequencies)}"):
            decoder.read(checkpoint)
    else:
        read = [key for weight in decoder.read(checkpoint) for key in weight.keys]
        assert sorted(read, key=str) == sorted(dict(expand(decoder.programs.table, decoder.programs.layers)), key=str)


def test_prompts_that_serve_several_sequences(pair):
    model, reference = pair
    rows = prompts(131, [13, 7])
    ids, mask = padded(rows, "right")
    expected = [continued(reference, row, [5, 6]) for row in rows]
    got = model.forward(ids, attention_mask=mask)
    assert_close(got, torch.stack([logits[-3] for logits in expected]))
    for column, token in enumerate([5, 6]):
        mask = torch.cat([mask, torch.ones(2, 1, dtype=mask.dtype)], 1)
        got = model.forward(torch.full((4, 1), token), attention_mask=mask.repeat(2, 1))
        assert_close(got, torch.stack([logits[column - 2] for logits in expected * 2]))


def one_that_ends(reference):
    """Return prompts, options, and a token that one row reaches early and the other never, with that row."""
    for seed in range(20):
        ids, mask = padded(prompts(131, [13, 7], seed), "left")
        greedy = dict(attention_mask=mask, do_sample=False, max_new_tokens=20)
        free = reference.generate(ids, eos_token_id=None, pad_token_id=0, **greedy)
        for row in (0, 1):
            for token in free[row, 14:18].tolist():
                if token not in free[1 - row, 13:]:
                    return ids, greedy, row, token
    raise AssertionError("no prompt gives rows that differ")


def test_greedy_generation_past_an_eos_in_one_row(pair):
    model, reference = pair
    ids, greedy, row, eos = one_that_ends(reference)
    mask = greedy["attention_mask"]
    want = reference.generate(ids, eos_token_id=eos, pad_token_id=eos, **greedy)
    assert (want[row, -2:] == eos).all() and (want[1 - row, 13:] != eos).all()
    got = model.sample(ids, ids.shape[1] + 20, attention_mask=mask, top_k=1, eos_token_override=eos)
    assert torch.equal(got, want.repeat(2, 1))
    adapter = HuggingFaceGenerationModelAdapter(reference.config, model)
    greedy |= dict(eos_token_id=eos, pad_token_id=eos)
    assert torch.equal(adapter.generate(ids, **greedy), want)
    rows = [row[real.bool()].tolist() for row, real in zip(ids, mask, strict=True)]
    ids, mask = padded(rows, "right")
    got = adapter.generate(ids, **greedy | dict(attention_mask=mask))
    assert torch.equal(got, torch.cat([ids, want[:, ids.shape[1] :]], 1))


def test_beams_of_unequal_prompts(pair):
    model, reference = pair
    ids, mask = padded(prompts(131, [13, 7]), "left")
    options = dict(attention_mask=mask, num_beams=2, num_return_sequences=2, max_new_tokens=12, pad_token_id=0)
    eos = reference.generate(ids, eos_token_id=None, **options)[0, 17].item()
    options |= dict(eos_token_id=eos, length_penalty=-1.0, early_stopping=True)
    want = reference.generate(ids, **options)
    assert torch.equal(HuggingFaceGenerationModelAdapter(reference.config, model).generate(ids, **options), want)
    assert (want[:, ids.shape[1] :] == eos).any()


@pytest.mark.compiled_ahead
@pytest.mark.slow
def test_an_artifact_has_the_programs_and_the_weights(pair, tmp_path, monkeypatch):
    model, _ = pair
    ids, mask = padded(prompts(131, [13, 7]), "right")
    want = model.forward(ids, attention_mask=mask)
    model.save(tmp_path, sharded_weights=True)
    loaded = NeuronAutoModelForCausalLM.from_pretrained(tmp_path)
    monkeypatch.setattr(XlaRuntime, "compile", None)
    monkeypatch.setenv("NEURONX_CACHE", "off")
    loaded.to_neuron()
    assert torch.equal(loaded.forward(ids, attention_mask=mask), want)


@pytest.mark.slow
def test_the_layer_that_errs_is_named(pair):
    """Prompts take several windows, one of several slots is used, and sizes are not multiples of the devices."""
    model, reference = pair
    [prompt] = prompts(131, [13])
    found = compare(model, reference, prompt, 4)
    assert found.agree and found.weights == [] and len(found.parts) == reference.config.num_hidden_layers + 2
    layers = next(layers for layers in reference.modules() if isinstance(layers, torch.nn.ModuleList))
    matrix = next(weight for weight in layers[1].parameters() if weight.ndim > 1)
    whole = matrix.detach().clone()
    matrix.data *= 1 + 0.01 * torch.randn(matrix.shape)
    found = compare(model, reference, prompt, 4)
    matrix.data.copy_(whole)
    assert found.wrong == ["layer.1"]
    assert found.weights and all(weight.name.startswith("layer.1.") for weight in found.weights)
