"""T5, whose decoder attends to an encoder's output, against Transformers'."""

import json

import numpy as np
import pytest
import torch
from parity import assert_close, padded, prompts, randomized
from test_quantized import TOLERANCE, emulated, in_groups_of, rounded
from transformers import AutoModelForSeq2SeqLM, T5Config

from transformers_neuronx.config import (
    ContinuousBatchingConfig,
    KVCacheQuantizationConfig,
    NeuronConfig,
    QuantizationConfig,
)
from transformers_neuronx.engine.encoding import RedirectKey
from transformers_neuronx.engine.slots import SlotDecoder
from transformers_neuronx.errors import ConfigError, InputError
from transformers_neuronx.huggingface.adapter import HuggingFaceGenerationModelAdapter
from transformers_neuronx.runtimes.xla import XlaRuntime
from transformers_neuronx.t5.config import T5Config as OurConfig
from transformers_neuronx.t5.model import T5ForSampling
from transformers_neuronx.weights.checkpoint import save_pretrained_split

LENGTHS = [70, 33, 5]  # of sources; one exceeds the largest distance, 24


def config(**changes):
    sizes = dict(vocab_size=131, d_model=48, d_kv=10, d_ff=72, num_layers=2, num_heads=6)
    ids = dict(pad_token_id=0, eos_token_id=1, decoder_start_token_id=0)
    return T5Config(**sizes | ids | dict(relative_attention_max_distance=24) | changes)


def made(directory, **options):
    model = T5ForSampling.from_pretrained(
        directory, **dict(n_positions=[24, 48], batch_size=3, context_length_estimate=[40, 80]) | options
    )
    model.to_neuron()
    return model


@torch.no_grad()
def scaled(reference):
    """Scale weights down, as training does: T5 does not divide scores, and its gates multiply.

    With larger ones Transformers' logits in f32 differ more from f64 than the tolerance of these tests.
    """
    for name, weight in reference.named_parameters():
        if name.endswith((".q.weight", "wi_1.weight")):
            weight /= reference.config.d_kv**0.5
    return reference


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """`saved(**changes)`: a random model of the changed configuration, and its directory."""
    known = {}

    def saved(**changes):
        key = json.dumps(changes, sort_keys=True)
        if key not in known:
            directory = tmp_path_factory.mktemp("t5")
            reference = scaled(randomized(config(**changes), AutoModelForSeq2SeqLM))
            reference.save_pretrained(directory)
            known[key] = reference, directory
        return known[key]

    return saved


@pytest.fixture(scope="module")
def pair(saved):
    """A model for four sequences, and Transformers' model."""
    reference, directory = saved(tie_word_embeddings=False)
    return made(directory, batch_size=4), reference


@torch.inference_mode()
def expected(reference, sources, targets):
    """Return Transformers' logits after every token of each target, f32[n, vocab] each."""
    rows = zip(sources, targets, strict=True)
    return [reference(torch.tensor([of]), decoder_input_ids=torch.tensor([ids])).logits[0].float() for of, ids in rows]


def check(model, reference, targets=None, tolerance=1e-5, side="right"):
    """Encode sources of unequal lengths; feed many tokens of each target at once, then single ones past a bucket."""
    sources, targets = prompts(131, LENGTHS), targets or prompts(131, [30, 30, 30], seed=1)
    ids, mask = padded(sources, side)
    model.encode(ids, attention_mask=mask)
    first = model.forward([ids[:20] for ids in targets], output_all_logits=True)
    more = [
        model.forward([[ids[column]] for ids in targets], cache_ids=[column]) for column in range(20, len(targets[0]))
    ]
    got = torch.cat([first, torch.stack(more, 1)], 1)
    want = torch.stack(expected(reference, sources, targets))
    if tolerance:
        assert_close(got, want, tolerance)
    return got, want


VARIANTS = {
    "as the first": {},
    "with a head of its own": dict(tie_word_embeddings=False),
    "gated": dict(feed_forward_proj="gated-gelu", tie_word_embeddings=False),
    "more layers that decode": dict(num_decoder_layers=3),
    "fewer": dict(num_decoder_layers=1),
    "few buckets": dict(relative_attention_num_buckets=8, relative_attention_max_distance=17),
    "heads that are all of it": dict(d_kv=8),
}


FAST = ("as the first", "gated", "more layers that decode")


@pytest.mark.parametrize(
    "variant", [each if each in FAST else pytest.param(each, marks=pytest.mark.slow) for each in VARIANTS]
)
@pytest.mark.few(1)
def test_logits_are_those_of_transformers(saved, variant):
    reference, directory = saved(**VARIANTS[variant])
    check(made(directory), reference)


@pytest.mark.parametrize("options", [dict(tp_degree=3), dict(unroll=1, context_unroll=1), dict(prompt_batch_size=1)])
@pytest.mark.few(1)
def test_however_it_is_divided(saved, options):
    reference, directory = saved(tie_word_embeddings=False)
    check(made(directory, **options), reference, side="left")


@pytest.mark.slow
@pytest.mark.parametrize("degree", [2, 8])
@pytest.mark.parametrize("variant", ["as the first", "gated"])
def test_at_other_degrees(saved, variant, degree):
    reference, directory = saved(**VARIANTS[variant])
    check(made(directory, tp_degree=degree), reference)


@pytest.mark.slow
@pytest.mark.parametrize("amp", ["bf16", "f16"])
def test_in_half_precision(saved, amp):
    """The difference from f32 is no larger than that of Transformers."""
    reference, directory = saved()
    got, want = check(made(directory, amp=amp), reference, tolerance=None)
    theirs = AutoModelForSeq2SeqLM.from_pretrained(directory, dtype={"bf16": torch.bfloat16, "f16": torch.float16}[amp])
    theirs = torch.stack(expected(theirs, prompts(131, LENGTHS), prompts(131, [30, 30, 30], seed=1)))
    assert (got - want).abs().max() <= 1.5 * (theirs - want).abs().max()


def test_a_checkpoint_with_a_head_of_its_own_and_copies_of_the_embedding(saved, tmp_path):
    reference, _ = saved(tie_word_embeddings=False)
    weights = {name: weight.clone() for name, weight in reference.state_dict().items()}
    weights["lm_head.weight"] = weights["shared.weight"].flip(0)
    torch.save(weights, tmp_path / "pytorch_model.bin")
    reference.config.save_pretrained(tmp_path)
    model = made(tmp_path)
    ids = torch.tensor([[5, 6, 7]])
    model.encode(ids)
    got = model.forward([[0]])
    with torch.inference_mode():
        want = reference(ids, decoder_input_ids=torch.tensor([[0]])).logits[:, 0]
    assert_close(got, want.flip(1))


def test_a_split_checkpoint(saved, tmp_path):
    reference, _ = saved()
    save_pretrained_split(reference, tmp_path)
    model = made(tmp_path)
    model.encode([[5, 6, 7]])
    assert_close(model.forward([[0, 9]]), expected(reference, [[5, 6, 7]], [[0, 9]])[0][-1:])


def one_that_ends(reference):
    """Return sources, and a token that one of them soon leads to and the other never."""
    for seed in range(40):
        ids, mask = padded(prompts(131, [30, 17], seed), "right")
        free = reference.generate(ids, attention_mask=mask, do_sample=False, max_length=20, eos_token_id=None)
        for token in free[1, 3:8].tolist():
            if token not in free[0]:
                return ids, mask, token
    raise AssertionError("no sources give rows that differ")


def test_greedy_tokens_past_the_end_of_one_row(pair):
    model, reference = pair
    ids, mask, eos = one_that_ends(reference)
    options = dict(attention_mask=mask, do_sample=False, max_length=20, eos_token_id=eos, pad_token_id=eos)
    want = reference.generate(ids, **options)
    assert (want[1, -2:] == eos).all() and (want[0, 1:] != eos).all()
    got = model.sample(ids, 20, attention_mask=mask, top_k=1, eos_token_override=eos)
    assert torch.equal(got, want)
    assert torch.equal(HuggingFaceGenerationModelAdapter(reference.config, model).generate(ids, **options), want)


def test_tokens_that_the_decoder_begins_with(pair):
    model, reference = pair
    ids, begun = torch.tensor(prompts(131, [11, 11])), torch.tensor([[0, 7, 8], [0, 9, 11]])
    want = reference.generate(ids, decoder_input_ids=begun, do_sample=False, max_length=12, eos_token_id=None)
    assert torch.equal(model.sample(ids, 12, decoder_input_ids=begun, top_k=1, eos_token_override=-1), want)


def test_sources_one_after_the_other_in_the_same_slots(pair):
    """Nothing remains of a longer source, or of one that is not finite."""
    model, reference = pair
    decoder = model.decoder
    decoder.memory.arrays = [
        decoder.runtime.put([np.full(a.shape, np.nan, np.float32)]) for a in decoder.memory.arrays[1:]
    ]
    decoder.memory.arrays.insert(0, decoder.runtime.put([np.full(4, 80, np.int32)]))
    for length in (70, 3, 40):
        sources = prompts(131, [length] * 4, seed=length)
        model.encode(sources)
        want = torch.stack([logits[-1] for logits in expected(reference, sources, [[0, 5]] * 4)])
        assert_close(model.forward([[0, 5]] * 4), want)


def test_slots_that_are_named(saved):
    reference, directory = saved(tie_word_embeddings=False)
    batching = ContinuousBatchingConfig(max_num_seqs=3, max_model_len=48)
    model = made(directory, batch_size=None, n_positions=48, neuron_config=NeuronConfig(continuous_batching=batching))
    first, second = prompts(131, [20, 9])
    model.encode([first], slots=[2])
    got = model.forward([[0, 5]], cache_ids=[[0, 1]], start_ids=[2])
    assert_close(got, expected(reference, [first], [[0, 5]])[0][-1:])
    model.encode([second], slots=[0])
    got = [model.forward([[0]], cache_ids=[[0]], start_ids=[0]), model.forward([[6]], cache_ids=[[2]], start_ids=[2])]
    assert_close(got[0], expected(reference, [second], [[0]])[0][-1:])
    assert_close(got[1], expected(reference, [first], [[0, 5, 6]])[0][-1:])


def test_sources_that_serve_several_sequences(saved):
    reference, directory = saved(tie_word_embeddings=False)
    model = made(directory, batch_size=4, prompt_batch_size=2)
    ids = torch.tensor(prompts(131, [21, 21]))
    want = reference.generate(ids, do_sample=False, max_length=16, eos_token_id=None)
    got = model.sample(ids, 16, top_k=1, eos_token_override=-1)
    assert torch.equal(got, want.repeat(2, 1))


GENERATION = {
    "greedy": {},
    "beams": dict(num_beams=2),
    "beams, all of them": dict(num_beams=2, num_return_sequences=2, length_penalty=0.5, early_stopping=True),
    "without a cache": dict(use_cache=False),
    "what the source has": dict(encoder_no_repeat_ngram_size=2, no_repeat_ngram_size=3, repetition_penalty=1.2),
    "drawn": dict(do_sample=True, num_return_sequences=2, top_k=20),
}


@pytest.mark.parametrize("options", GENERATION.values(), ids=GENERATION)
def test_generate_as_transformers_does(pair, options):
    model, reference = pair
    ids, mask = padded(prompts(131, [30, 17]), "right")
    options = dict(attention_mask=mask, max_length=20, do_sample=False) | options
    results = []
    for each in (reference, HuggingFaceGenerationModelAdapter(reference.config, model)):
        torch.manual_seed(0)
        results.append(each.generate(ids, **options))
    assert torch.equal(*results)


def test_encoder_outputs_are_taken_while_they_are_there(pair):
    model, reference = pair
    adapter = HuggingFaceGenerationModelAdapter(reference.config, model)
    ids = torch.tensor(prompts(131, [12, 12]))
    options = dict(max_length=12, do_sample=False)
    outputs = adapter.get_encoder()(ids)
    want = reference.generate(ids, **options)
    assert torch.equal(adapter.generate(encoder_outputs=outputs, **options), want)
    logits = adapter(encoder_outputs=outputs, decoder_input_ids=want[:, :3], return_dict=False)[0]
    assert_close(logits, torch.stack(expected(reference, ids.tolist(), want[:, :3].tolist())))
    model.encode(ids)
    with pytest.raises(InputError, match="encoder_outputs are no longer on the devices"):
        adapter.generate(encoder_outputs=outputs, **options)


@pytest.mark.parametrize("degree", [1, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", ["s8", "s4"])
def test_fewer_bits_as_in_numpy(saved, kind, degree):
    """Quantized are all matrices except the embedding and the head, also those of the encoder and the memory."""
    reference, directory = saved(tie_word_embeddings=False)

    def change(name, matrix):
        if "relative_attention_bias" in name or "shared" in name:
            return matrix
        if kind == "s8":
            return rounded(matrix)
        inputs = 10 if name.endswith(".o.weight") else 32 if name.endswith(".wo.weight") else matrix.shape[1]
        return in_groups_of(np.gcd(32, inputs), matrix)

    quantized = made(directory, tp_degree=degree, neuron_config=NeuronConfig(quant=QuantizationConfig(kind)))
    _, want = check(quantized, emulated(reference, change), tolerance=TOLERANCE)
    plain = torch.stack(expected(reference, prompts(131, LENGTHS), prompts(131, [30, 30, 30], seed=1)))
    assert (want - plain).abs().max() > 10 * TOLERANCE * want.abs().max()


def test_a_cache_of_eight_bits(saved):
    reference, directory = saved(tie_word_embeddings=False)
    switches = NeuronConfig(kv_cache_quant=KVCacheQuantizationConfig("s8"))
    got, want = check(made(directory, neuron_config=switches), reference, tolerance=None)
    assert 0 < (got - want).abs().max() <= 0.1 * want.abs().max()


@pytest.mark.compiled_ahead
@pytest.mark.parametrize("degree", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_an_artifact_needs_neither_compiler_nor_checkpoint(saved, tmp_path, monkeypatch, degree):
    _, directory = saved(tie_word_embeddings=False, num_decoder_layers=3)
    ids = prompts(131, [14, 14])
    model = made(directory, tp_degree=degree, reorder_cache=True, context_length_estimate=[16, 40])
    want = model.sample(ids, 24, top_k=5, seed=1)
    model.save(tmp_path / "artifact", sharded_weights=True)
    monkeypatch.setattr(XlaRuntime, "compile", lambda *_: pytest.fail("something was compiled"))
    loaded = T5ForSampling.from_pretrained(tmp_path / "artifact")
    loaded.to_neuron()
    assert loaded.options == model.options
    assert torch.equal(loaded.sample(ids, 24, top_k=5, seed=1), want)


@pytest.mark.usefixtures("needs_pages")
def test_what_is_compiled_before_it_is_needed(pair):
    model, _ = pair
    names = [key.name for key in model.decoder.planned()]
    assert names[:2] == ["encode_rows4_tokens40", "encode_rows4_tokens80"]
    kinds = [name.partition("_")[0] for name in names[2:]]
    assert list(dict.fromkeys(kinds)) == ["step", "logits", "copy", "sample", "redirect"]
    assert {"step_tokens1_sequences1_samples1", "step_tokens24_sequences4_samples4"} <= set(names)


def test_beams_of_one_source_leave_the_memory_where_it_is(pair):
    model, reference = pair
    adapter = HuggingFaceGenerationModelAdapter(reference.config, model)
    held = []
    run = model.decoder.reorder

    def watched(source):
        held.append(model.decoder.memory.arrays)
        run(source)
        assert model.decoder.memory.arrays is held[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(model.decoder, "reorder", watched)
        adapter.generate(torch.tensor(prompts(131, [12, 12])), num_beams=2, max_length=8)
    assert held and any(isinstance(what, RedirectKey) for what in model.decoder.store._built)


def test_slots_instead_of_pages(saved):
    """Programs of a part of the layers have slots."""
    reference, directory = saved(tie_word_embeddings=False)
    model = made(directory, batch_size=4, prompt_batch_size=2, unroll=1)
    assert isinstance(model.decoder, SlotDecoder)
    ids, mask = padded(prompts(131, [30, 17]), "right")
    options = dict(attention_mask=mask, max_length=16, eos_token_id=None)
    want = reference.generate(ids, do_sample=False, **options)
    assert torch.equal(model.sample(ids, 16, attention_mask=mask, top_k=1, eos_token_override=-1), want.repeat(2, 1))
    want = reference.generate(ids, num_beams=2, **options)
    assert torch.equal(
        HuggingFaceGenerationModelAdapter(reference.config, model).generate(ids, num_beams=2, **options), want
    )


def test_the_profile_has_the_encoder(pair):
    assert "encode_rows4_tokens40" in pair[0].profile(20, 5).programs


def test_what_is_broken_does_not_stay(pair):
    model, reference = pair
    decoder, ids, first = model.decoder, prompts(131, [9] * 4), [[0]] * 4
    model.encode(ids)
    arrays = decoder.memory.arrays
    arrays[1] = decoder.runtime.put([np.full(arrays[1].shape, np.nan, np.float32)])
    assert model.forward(first).isnan().all()
    model.encode(ids)
    want = torch.stack([logits[-1] for logits in expected(reference, ids, first)])
    assert_close(model.forward(first), want)


REFUSED = {
    "a prompt without a source": (lambda model: model.forward([[0]] * 4), "slots [0, 1, 2, 3] have no source"),
    "a source that is too long": (
        lambda model: model.encode([[5] * 81]),
        "context_length_estimate=80 is the longest source this model takes, got 81 tokens",
    ),
    "padding between tokens": (
        lambda model: model.encode([[5, 6, 7]], attention_mask=[[1, 0, 1]]),
        "attention_mask must have a source's tokens side by side, got padding between them",
    ),
    "an empty source": (lambda model: model.encode([[5]], attention_mask=[[0]]), "row 0 has only padding"),
    "more sources than slots": (
        lambda model: model.encode([[5]] * 5),
        "slots must be at least 0 and below batch_size=4, got [0, 1, 2, 3, 4]",
    ),
    "a slot twice": (lambda model: model.encode([[5]] * 2, slots=[1, 1]), "slots must be unique, one for each of 2"),
    "more tokens than positions": (lambda model: model.sample([[5]], 49), "n_positions=48 is the longest sequence"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_calls_that_are_refused(pair, case):
    model, _ = pair
    call, message = REFUSED[case]
    model.reset()
    with pytest.raises(InputError) as caught:
        call(model)
    assert message in str(caught.value)


@pytest.mark.parametrize("size", [0, "whole"])
def test_sizes_of_sources_are_numbers(size):
    with pytest.raises(ConfigError, match="context_length_estimate must be the longest source, or several sizes"):
        T5ForSampling(config(), context_length_estimate=size)


def test_sizes_by_default():
    buckets = T5ForSampling(config()).options.buckets
    assert buckets.positions == buckets.sources == (128, 256, 512)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(dense_act_fn="mish"), "dense_act_fn='mish'; supported"),
        (dict(quantization_config=dict(bits=4)), r"is quantized \(an unnamed format, 4 bits\)"),
    ],
)
def test_what_is_not_known_is_refused(changes, message):
    attributes = json.loads(config().to_json_string(use_diff=False)) | changes
    with pytest.raises(ConfigError, match=message):
        OurConfig.from_hf(attributes)


@pytest.mark.slow
def test_at_a_true_size(tmp_path):
    torch.manual_seed(0)
    sizes = dict(vocab_size=32128, d_model=1024, d_kv=64, d_ff=4096, num_layers=2, num_heads=16)  # t5-large
    reference = AutoModelForSeq2SeqLM.from_config(T5Config(**sizes, decoder_start_token_id=0)).eval()
    reference.save_pretrained(tmp_path)
    sources, targets = prompts(32128, [200, 130]), prompts(32128, [9, 9], seed=1)
    want = torch.stack(expected(reference, sources, targets))
    ids, mask = padded(sources, "right")
    for degree in (1, 2):
        model = made(tmp_path, batch_size=2, context_length_estimate=256, tp_degree=degree)
        model.encode(ids, attention_mask=mask)
        assert_close(model.forward(targets, output_all_logits=True), want)
