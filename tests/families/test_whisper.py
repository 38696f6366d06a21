"""Whisper, whose sources are features of sounds, against Transformers'."""

import json

import numpy as np
import pytest
import torch
from parity import assert_close, prompts, randomized
from published import SPEECH
from test_quantized import TOLERANCE, emulated, in_groups_of, rounded
from transformers import (
    CONFIG_MAPPING,
    AutoModelForSpeechSeq2Seq,
    GenerationConfig,
    WhisperConfig,
    WhisperFeatureExtractor,
    logging,
)

from transformers_neuronx.config import (
    ContinuousBatchingConfig,
    KVCacheQuantizationConfig,
    NeuronConfig,
    QuantizationConfig,
)
from transformers_neuronx.engine.slots import SlotDecoder
from transformers_neuronx.errors import ConfigError, InputError
from transformers_neuronx.huggingface.adapter import HuggingFaceGenerationModelAdapter
from transformers_neuronx.huggingface.auto import NeuronAutoModelForSeq2SeqLM
from transformers_neuronx.huggingface.device_cache import CACHE
from transformers_neuronx.runtimes.xla import XlaRuntime
from transformers_neuronx.weights.checkpoint import save_pretrained_split
from transformers_neuronx.whisper.config import WhisperConfig as OurConfig
from transformers_neuronx.whisper.model import WhisperForSampling

MEL, POSITIONS = 8, 50  # of a second
SPECIAL = dict(decoder_start_token_id=92, eos_token_id=1, pad_token_id=1, bos_token_id=1)
# What `generate()` knows of the tokens of published checkpoints, with their kinds in the same order.
OF_TOKENS = dict(
    lang_to_id={"<|en|>": 93, "<|de|>": 94}, task_to_id=dict(translate=95, transcribe=96), is_multilingual=True,
    prev_sot_token_id=97, no_timestamps_token_id=99, suppress_tokens=[5, 11, 92, 93, 94, 95, 96, 97, 98],
    begin_suppress_tokens=[1, 20], max_initial_timestamp_index=10, return_timestamps=False, max_length=40,
)  # fmt: skip


def config(**changes):
    heads = dict(encoder_attention_heads=6, decoder_attention_heads=6)
    sizes = dict(vocab_size=131, d_model=48, encoder_ffn_dim=72, decoder_ffn_dim=72, encoder_layers=2, decoder_layers=2)
    positions = dict(num_mel_bins=MEL, max_source_positions=POSITIONS, max_target_positions=64)
    others = dict(suppress_tokens=None, begin_suppress_tokens=None)
    return WhisperConfig(**heads | sizes | positions | SPECIAL | others | changes)


def made(directory, **options):
    model = WhisperForSampling.from_pretrained(directory, **dict(n_positions=[24, 48], batch_size=3) | options)
    model.to_neuron()
    return model


def features(count, length=1, seed=0, frames=2 * POSITIONS):
    """Features of random sounds, f32[count, mel bins, frames], and the mask of real frames; sounds get shorter."""
    generator = np.random.default_rng(seed)
    sounds = [generator.normal(size=int(16000 * (length - 0.2 * i))).astype(np.float32) for i in range(count)]
    extractor = WhisperFeatureExtractor(feature_size=MEL, chunk_length=1)
    padding = dict(padding="longest", truncation=False) if length > 1 else {}
    made = extractor(sounds, sampling_rate=16000, return_tensors="pt", return_attention_mask=True, **padding)
    return made["input_features"], made["attention_mask"]


@torch.no_grad()
def varied(reference):
    """Change weights so that tokens depend on the sound and on each other: else one is repeated for ever."""
    for name, weight in reference.named_parameters():
        if name.endswith("norm.bias"):
            weight -= 1
        elif "embed_tokens" in name:
            weight *= 0.3
    return reference


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """`saved(**changes)`: a random model of the changed configuration, and its directory."""
    known = {}

    def saved(**changes):
        key = json.dumps(changes, sort_keys=True)
        if key not in known:
            directory = tmp_path_factory.mktemp("whisper")
            reference = varied(randomized(config(**changes), AutoModelForSpeechSeq2Seq))
            reference.generation_config = GenerationConfig(**SPECIAL, **OF_TOKENS)
            reference.save_pretrained(directory)
            known[key] = reference, directory
        return known[key]

    return saved


@pytest.fixture(scope="module")
def pair(saved):
    """A model for six sequences, and Transformers' model."""
    reference, directory = saved()
    return made(directory, batch_size=6, n_positions=64), reference


@pytest.fixture(autouse=True)
def quiet():
    """Leave out Transformers' remarks on the arguments of its `generate()`."""
    before = logging.get_verbosity()
    logging.set_verbosity_error()
    yield
    logging.set_verbosity(before)


def adapted(model, reference):
    """The adapter, with the defaults of `generate()` that are saved beside the weights."""
    adapter = HuggingFaceGenerationModelAdapter(reference.config, model)
    adapter.generation_config = GenerationConfig(**SPECIAL, **OF_TOKENS)
    return adapter


@torch.inference_mode()
def expected(reference, sources, targets):
    """Return Transformers' logits after every token of each target, f32[batch, n, vocab]."""
    return reference(sources.to(reference.dtype), decoder_input_ids=torch.tensor(targets)).logits.float()


def check(model, reference, tolerance=1e-5):
    """Encode sounds; feed many tokens of each target at once, then single ones past a bucket."""
    sources, targets = features(3)[0], prompts(131, [30] * 3)
    model.encode(sources)
    first = model.forward([ids[:20] for ids in targets], output_all_logits=True)
    more = [model.forward([[ids[column]] for ids in targets], cache_ids=[column]) for column in range(20, 30)]
    got, want = torch.cat([first, torch.stack(more, 1)], 1), expected(reference, sources, targets)
    if tolerance:
        assert_close(got, want, tolerance)
    return got, want


VARIANTS = {
    "as the first": {},
    "more layers that decode": dict(decoder_layers=3, encoder_layers=1),
    "fewer": dict(decoder_layers=1, encoder_layers=3),
    "heads of their own": dict(encoder_attention_heads=4, decoder_attention_heads=8),
    "widths of their own": dict(encoder_ffn_dim=40, decoder_ffn_dim=80, activation_function="relu"),
    "a head of its own": dict(tie_word_embeddings=False),
    "a scale that is not applied": dict(scale_embedding=True),
    "more mel bins": dict(num_mel_bins=11, max_source_positions=31),
}
FAST = ("as the first", "heads of their own")


@pytest.mark.parametrize(
    "variant", [each if each in FAST else pytest.param(each, marks=pytest.mark.slow) for each in VARIANTS]
)
@pytest.mark.few(1)
def test_logits_are_those_of_transformers(saved, variant):
    reference, directory = saved(**VARIANTS[variant])
    if variant != "more mel bins":
        check(made(directory), reference)
        return
    sources = torch.randn(3, 11, 62, generator=torch.Generator().manual_seed(0))
    model, targets = made(directory), prompts(131, [9] * 3)
    model.encode(sources)
    assert_close(model.forward(targets, output_all_logits=True), expected(reference, sources, targets))


@pytest.mark.parametrize(
    "options", [dict(tp_degree=3), dict(unroll=1, context_unroll=1), dict(prompt_batch_size=1, tp_degree=2)]
)
@pytest.mark.few(1)
def test_however_it_is_divided(saved, options):
    reference, directory = saved()
    check(made(directory, **options), reference)


@pytest.mark.slow
@pytest.mark.parametrize("degree", [2, 3, 8])
def test_at_other_degrees(saved, degree):
    """Heads of the decoder do not divide by three, and those of the encoder only by two."""
    reference, directory = saved(**VARIANTS["heads of their own"])
    check(made(directory, tp_degree=degree), reference)


@pytest.mark.parametrize("degree", [1, 3])
def test_the_encoder_alone(saved, degree):
    """Its output, as the memory has it: keys and values of all layers of the decoder."""
    reference, directory = saved()
    model, sources = made(directory, tp_degree=degree), features(3)[0]
    model.encode(sources)
    lengths, *arrays = model.decoder.memory.arrays
    assert (lengths.numpy() == POSITIONS).all()
    with torch.inference_mode():
        encoded = reference.model.encoder(sources).last_hidden_state
        layers = [layer.encoder_attn for layer in reference.model.decoder.layers]
        want = [projection(encoded) for layer in layers for projection in (layer.k_proj, layer.v_proj)]
    for got, each in zip(arrays, want, strict=True):
        shards = np.concatenate(got.shards(), 2)  # of heads
        assert_close(torch.from_numpy(shards).flatten(2), each)


@pytest.mark.slow
@pytest.mark.parametrize("amp", ["bf16", "f16"])
def test_in_half_precision(saved, amp):
    """The difference from f32 is no larger than 1.5 times that of Transformers."""
    reference, directory = saved()
    got, want = check(made(directory, amp=amp), reference, tolerance=None)
    kind = {"bf16": torch.bfloat16, "f16": torch.float16}[amp]
    theirs = AutoModelForSpeechSeq2Seq.from_pretrained(directory, dtype=kind)
    theirs = expected(theirs, features(3)[0], prompts(131, [30] * 3))
    assert (got - want).abs().max() <= 1.5 * (theirs - want).abs().max()


@pytest.mark.parametrize("name", SPEECH)
@pytest.mark.few(1)
def test_published_configurations(name, tmp_path):
    published = SPEECH[name]
    reference = randomized(CONFIG_MAPPING["whisper"].from_dict(dict(published.attributes)), AutoModelForSpeechSeq2Seq)
    reference.save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(published.attributes))
    model = NeuronAutoModelForSeq2SeqLM.from_pretrained(tmp_path, batch_size=2, n_positions=32)
    model.to_neuron()
    sizes = reference.config.num_mel_bins, 2 * reference.config.max_source_positions
    sources, targets = torch.randn(2, *sizes), prompts(131, [9] * 2)
    model.encode(sources)
    assert_close(model.forward(targets, output_all_logits=True), expected(reference, sources, targets))


def test_a_split_checkpoint(saved, tmp_path):
    reference, _ = saved()
    save_pretrained_split(reference, tmp_path)
    model, [sources, _] = made(tmp_path), features(1)
    model.encode(sources)
    assert_close(model.forward([[92, 9]]), expected(reference, sources, [[92, 9]])[:, -1])


def test_greedy_tokens_past_the_end_of_one_row(pair):
    model, reference = pair
    sources, begun = features(2)[0], torch.tensor([[92, 93, 96, 99], [92, 94, 95, 99]])
    free = model.sample(sources, 24, decoder_input_ids=begun, top_k=1, eos_token_override=-1)
    ends = [token for token in free[1, 6:10].tolist() if token not in free[0]]
    assert ends, "the rows have the same tokens"
    rows = begun
    with torch.inference_mode():
        encoder = reference.model.encoder(sources)
        for _ in range(20):
            ids = reference(encoder_outputs=encoder, decoder_input_ids=rows).logits[:, -1].argmax(-1, keepdim=True)
            rows = torch.cat([rows, ids], 1)
    assert torch.equal(free, rows)
    got = model.sample(sources, 24, decoder_input_ids=begun, top_k=1, eos_token_override=ends[0])
    end = rows[1].tolist().index(ends[0])
    want = rows.clone()
    want[1, end:] = ends[0]
    assert torch.equal(got, want)


def test_sources_one_after_the_other_in_the_same_slots(pair):
    """Nothing remains of an earlier source, or of one that is not finite."""
    model, reference = pair
    decoder, targets = model.decoder, [[92, 5]] * 6
    lengths, *arrays = decoder.memory.arrays
    broken = [decoder.runtime.put([np.full(each.shape, np.nan, np.float32)]) for each in arrays]
    decoder.memory.arrays = [lengths, *broken]
    for seed in (1, 2):
        sources = features(6, seed=seed)[0] if seed == 1 else features(3, seed=2)[0].repeat(2, 1, 1)
        model.encode(sources)
        assert_close(model.forward(targets), expected(reference, sources, targets)[:, -1])


def test_slots_that_are_named(saved):
    reference, directory = saved()
    batching = ContinuousBatchingConfig(max_num_seqs=3, max_model_len=48)
    model = made(directory, batch_size=None, n_positions=48, neuron_config=NeuronConfig(continuous_batching=batching))
    first, second = features(2)[0].split(1)
    model.encode(first, slots=[2])
    got = model.forward([[92, 5]], cache_ids=[[0, 1]], start_ids=[2])
    assert_close(got, expected(reference, first, [[92, 5]])[:, -1])
    model.encode(second, slots=[0])
    assert_close(model.forward([[92]], cache_ids=[[0]], start_ids=[0]), expected(reference, second, [[92]])[:, -1])
    got = model.forward([[6]], cache_ids=[[2]], start_ids=[2])
    assert_close(got, expected(reference, first, [[92, 5, 6]])[:, -1])


@pytest.mark.parametrize("options", [{}, dict(unroll=1)], ids=["pages", "slots"])
def test_sources_that_serve_several_sequences(saved, options, request):
    if not options:
        request.getfixturevalue("needs_pages")
    reference, directory = saved()
    model = made(directory, batch_size=4, prompt_batch_size=2, **options)
    assert isinstance(model.decoder, SlotDecoder) == bool(options)
    sources = features(2)[0]
    begun = [[92, 93, 96, 99], [92, 94, 96, 99]]
    got = model.sample(sources, 18, decoder_input_ids=begun, top_k=1, eos_token_override=-1)
    assert torch.equal(got[:2], got[2:]) and not torch.equal(got[0], got[1])
    alone = [
        model.sample(sources[row : row + 1], 18, decoder_input_ids=begun[row : row + 1], top_k=1, eos_token_override=-1)
        for row in range(2)
    ]
    assert torch.equal(got[:2], torch.cat(alone))
    options = dict(language="en", num_beams=2, max_new_tokens=14)
    assert torch.equal(adapted(model, reference).generate(sources, **options), reference.generate(sources, **options))


GENERATION = {
    "a language that is found": {},
    "a language and a task": dict(language="en", task="translate"),
    "a language for each": dict(language=["en", "de"]),
    "beams": dict(language="en", num_beams=3, num_return_sequences=1, length_penalty=0.5),
    "timestamps": dict(return_timestamps=True),
    "timestamps of beams": dict(return_timestamps=True, num_beams=3),
    "a prompt": dict(prompt_ids=torch.tensor([97, 30, 31, 32]), language="en"),
    "drawn": dict(do_sample=True, top_k=20, num_return_sequences=2),
    "all that Transformers returns": dict(return_dict_in_generate=True, output_scores=True, output_logits=True),
}


@pytest.mark.parametrize("options", GENERATION.values(), ids=GENERATION)
@pytest.mark.few(4)
def test_generate_as_transformers_does(pair, options):
    model, reference = pair
    results = []
    for each in (reference, adapted(model, reference)):
        torch.manual_seed(0)
        results.append(each.generate(features(2)[0], **options))
    if "return_dict_in_generate" in options:
        assert_close(torch.stack(results[1].logits), torch.stack(results[0].logits))
        assert getattr(results[1], CACHE) is None
        results = [result.sequences for result in results]
    assert torch.equal(*results)
    assert len(set(results[0][0].tolist())) > 4, "the tokens hardly differ"


HARD = dict(logprob_threshold=-2.735, no_speech_threshold=0.2, compression_ratio_threshold=1.35)
LONG_FORM = {
    "segments": {},
    "each after the text before it": dict(condition_on_prev_tokens=True),
    "a prompt": dict(prompt_ids=torch.tensor([97, 30, 31]), language="en"),
    "beams": dict(num_beams=2, language="de"),
    "higher temperatures": dict(temperature=(0.0, 0.2, 0.6), condition_on_prev_tokens=True, **HARD),
    "higher temperatures after beams": dict(temperature=(0.0, 0.4), num_beams=2, **HARD),
    "silence": dict(temperature=(0.0,), logprob_threshold=0.0, no_speech_threshold=1e-9, language="en"),
}


@pytest.mark.parametrize("options", LONG_FORM.values(), ids=LONG_FORM)
@pytest.mark.few(3)
def test_sounds_longer_than_the_encoder_reads(pair, options):
    """Segments have the times and the tokens that those of Transformers have."""
    model, reference = pair
    (sources, mask), results = features(2, length=3), []
    assert sources.shape[2] > 4 * POSITIONS
    options = dict(attention_mask=mask, return_timestamps=True, return_segments=True, max_new_tokens=14) | options
    for each in (reference, adapted(model, reference)):
        torch.manual_seed(0)
        results.append(each.generate(sources, **options))

    def told(result):
        return [
            [(float(part["start"]), float(part["end"]), part["tokens"].tolist()) for part in row]
            for row in result["segments"]
        ]

    want, got = map(told, results)
    assert got == want and torch.equal(results[1]["sequences"], results[0]["sequences"])
    silent = options.get("no_speech_threshold") == 1e-9
    assert all((len(row) == 0) if silent else (len(row) > 2) for row in want)


def test_temperatures_rise(pair, monkeypatch):
    """The case of `LONG_FORM` is one: segments are generated again."""
    model, reference = pair
    adapter, seen = adapted(model, reference), []
    run = adapter._need_fallback
    monkeypatch.setattr(adapter, "_need_fallback", lambda *args: seen.append(run(*args)) or seen[-1], raising=False)
    sources, mask = features(2, length=3)
    options = LONG_FORM["higher temperatures"] | dict(attention_mask=mask, return_timestamps=True, max_new_tokens=14)
    adapter.generate(sources, **options)
    assert {again for again, _ in seen} == {True, False}


def test_encoder_outputs_are_taken_while_they_are_there(pair):
    model, reference = pair
    adapter, sources = adapted(model, reference), features(2)[0]
    outputs = adapter.get_encoder()(sources)
    assert outputs[0].shape == (2, POSITIONS, 1)
    options = dict(language="en", return_timestamps=True)
    theirs = reference.generate(encoder_outputs=reference.get_encoder()(sources), **options)
    assert torch.equal(adapter.generate(encoder_outputs=outputs, **options), theirs)
    logits = adapter(encoder_outputs=outputs, decoder_input_ids=torch.tensor([[92, 93]] * 2), return_dict=False)[0]
    assert_close(logits, expected(reference, sources, [[92, 93]] * 2))
    model.encode(sources)
    with pytest.raises(InputError, match="encoder_outputs are no longer on the devices"):
        adapter.generate(encoder_outputs=outputs, **options)


@pytest.mark.parametrize("degree", [1, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", ["s8", "s4"])
def test_fewer_bits_as_in_numpy(saved, kind, degree):
    """Quantized are all matrices of linear layers, also those of the encoder and the memory, except the head's."""
    reference, directory = saved()

    def change(name, matrix):
        if matrix.ndim == 3:
            return matrix
        if kind == "s8":
            return rounded(matrix)
        inputs = 8 if name.endswith("out_proj.weight") else 32 if name.endswith("fc2.weight") else matrix.shape[1]
        return in_groups_of(np.gcd(32, inputs), matrix)

    quantized = made(directory, tp_degree=degree, neuron_config=NeuronConfig(quant=QuantizationConfig(kind)))
    _, want = check(quantized, emulated(reference, change), tolerance=TOLERANCE)
    plain = expected(reference, features(3)[0], prompts(131, [30] * 3))
    assert (want - plain).abs().max() > 10 * TOLERANCE * want.abs().max()


def test_a_cache_of_eight_bits(saved):
    reference, directory = saved()
    switches = NeuronConfig(kv_cache_quant=KVCacheQuantizationConfig("s8"))
    got, want = check(made(directory, neuron_config=switches), reference, tolerance=None)
    assert 0 < (got - want).abs().max() <= 0.1 * want.abs().max()


@pytest.mark.compiled_ahead
@pytest.mark.parametrize("degree", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_an_artifact_needs_neither_compiler_nor_checkpoint(saved, tmp_path, monkeypatch, degree):
    _, directory = saved()
    model, sources = made(directory, tp_degree=degree), features(3)[0]
    want = model.sample(sources, 24, top_k=5, seed=1)
    model.save(tmp_path / "artifact", sharded_weights=True)
    monkeypatch.setattr(XlaRuntime, "compile", lambda *_: pytest.fail("something was compiled"))
    loaded = WhisperForSampling.from_pretrained(tmp_path / "artifact")
    loaded.to_neuron()
    assert loaded.options == model.options
    assert torch.equal(loaded.sample(sources, 24, top_k=5, seed=1), want)


def test_what_is_compiled_before_it_is_needed(pair):
    names = [key.name for key in pair[0].decoder.planned()]
    assert names[0] == "encode_rows6_tokens50" and not any(name.startswith("encode") for name in names[1:])


def test_the_profile_has_the_encoder(pair):
    assert "encode_rows6_tokens50" in pair[0].profile(20, 5).programs


REFUSED = {
    "a prompt without a source": (lambda model: model.forward([[0]] * 6), "slots [0, 1, 2, 3, 4, 5] have no source"),
    "ids": (lambda model: model.encode([[5, 6]]), "this model are numbers [batch, 8, 100], with at least one row, got"),
    "other frames": (lambda model: model.encode(torch.zeros(1, MEL, 99)), "got float32[1, 8, 99]"),
    "no sources": (lambda model: model.encode(torch.zeros(0, MEL, 100)), "got float32[0, 8, 100]"),
    "what is not finite": (
        lambda model: model.encode(torch.full((1, MEL, 100), torch.nan)),
        "sources must be finite numbers, got NaN or infinity",
    ),
    "a mask": (
        lambda model: model.encode(torch.zeros(1, MEL, 100), attention_mask=torch.ones(1, 100)),
        "attention_mask is for sources of tokens: those of WhisperForSampling are numbers without padding",
    ),
    "a slot twice": (
        lambda model: model.encode(torch.zeros(2, MEL, 100), slots=[1, 1]),
        "slots must be unique, one for each of 2",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_calls_that_are_refused(pair, case):
    model, _ = pair
    call, message = REFUSED[case]
    model.reset()
    with pytest.raises(InputError) as caught:
        call(model)
    assert message in str(caught.value)


def test_times_of_tokens_are_refused(pair):
    model, reference = pair
    with pytest.raises(InputError, match="return_token_timestamps is not supported: it needs the weights"):
        adapted(model, reference).generate(features(1)[0], return_token_timestamps=True)


def test_sizes_of_sources_are_the_models():
    sizes = dict(max_source_positions=1500, max_target_positions=448)
    buckets = WhisperForSampling(config(**sizes)).options.buckets
    assert buckets.sources == (1500,) and buckets.longest == 448
    with pytest.raises(ConfigError, match="context_length_estimate must be 50, as all sources have, or None, got 40"):
        WhisperForSampling(config(), context_length_estimate=40)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(activation_function="mish"), "activation_function='mish'; supported"),
        (dict(quantization_config=dict(bits=4)), r"is quantized \(an unnamed format, 4 bits\)"),
    ],
)
def test_what_is_not_known_is_refused(changes, message):
    attributes = json.loads(config().to_json_string(use_diff=False)) | changes
    with pytest.raises(ConfigError, match=message):
        OurConfig.from_hf(attributes)


@pytest.mark.slow
@pytest.mark.parametrize("degree", [1, 2])
def test_at_a_true_size(tmp_path, degree):
    """The shape of whisper-tiny."""
    torch.manual_seed(0)
    reference = AutoModelForSpeechSeq2Seq.from_config(WhisperConfig(vocab_size=51865)).eval()
    reference.save_pretrained(tmp_path)
    sources, targets = torch.randn(2, 80, 3000), prompts(51865, [9] * 2)
    model = made(tmp_path, batch_size=2, n_positions=448, tp_degree=degree)
    model.encode(sources)
    assert_close(model.forward(targets, output_all_logits=True), expected(reference, sources, targets))
