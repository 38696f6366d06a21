"""Qwen3-VL, whose prompts have images, against Transformers'."""

import copy
import json

import numpy as np
import pytest
import torch
from multimodal import ATTRIBUTES, QWEN3_VL
from parity import assert_close, padded, prompts, randomized
from test_quantized import TOLERANCE, emulated, in_groups_of, rounded
from transformers import CONFIG_MAPPING, AutoModelForImageTextToText

from transformers_neuronx import Engine, SamplingParams
from transformers_neuronx.config import ContinuousBatchingConfig, NeuronConfig, QuantizationConfig
from transformers_neuronx.engine.slots import SlotDecoder
from transformers_neuronx.errors import ConfigError, InputError
from transformers_neuronx.huggingface.adapter import HuggingFaceGenerationModelAdapter
from transformers_neuronx.huggingface.auto import NeuronAutoModelForCausalLM, NeuronAutoModelForImageTextToText
from transformers_neuronx.huggingface.device_cache import CACHE
from transformers_neuronx.qwen3vl.model import Qwen3VLForSampling
from transformers_neuronx.runtimes.xla import XlaRuntime
from transformers_neuronx.serving.guesses import PromptLookup
from transformers_neuronx.weights.checkpoint import checkpoint_of

IMAGE, VIDEO, BEGIN, END = 125, 126, 127, 128
GRIDS = torch.tensor([[1, 4, 6], [1, 2, 4], [1, 6, 4]])  # times, rows and columns of patches; four become a row
COUNTS = [6, 2, 6]
# Two images, none, and one.
ROWS = [
    [5, 6, BEGIN, *[IMAGE] * 6, END, 9, BEGIN, *[IMAGE] * 2, END, 11, 12, 13],
    prompts(120, [15])[0],
    [BEGIN, *[IMAGE] * 6, END, 3],
]
NEXT = prompts(120, [4, 4, 4], seed=1)
FREE = dict(eos_token_id=None, pad_token_id=0, do_sample=False, suppress_tokens=[IMAGE, VIDEO])


def config(**changes):
    """A published configuration with small sizes. `vision_…` changes the tower's."""
    attributes = copy.deepcopy(ATTRIBUTES["qwen3_vl"])
    for name, value in changes.items():
        home, name = ("vision", name[7:]) if name.startswith("vision_") else ("text", name)
        attributes[f"{home}_config"][name] = value
    attributes["tie_word_embeddings"] = attributes["text_config"]["tie_word_embeddings"]
    return CONFIG_MAPPING["qwen3_vl"].from_dict(attributes)


def patches(grids=GRIDS, seed=0):
    """Patches of images, as a processor returns them."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(int(grids.prod(1).sum()), 1536, generator=generator)


def told(ids, grids, seed=0):
    """What a processor returns for images of these ids, besides ids."""
    kinds = (torch.as_tensor(ids) == IMAGE).int()
    return dict(pixel_values=patches(grids, seed), image_grid_thw=grids, mm_token_type_ids=kinds)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """`saved(**changes)`: a random model of the changed configuration, and its directory."""
    known = {}

    def saved(**changes):
        key = json.dumps(changes, sort_keys=True)
        if key not in known:
            directory = tmp_path_factory.mktemp("qwen3vl")
            reference = randomized(config(**changes), AutoModelForImageTextToText)
            reference.save_pretrained(directory)
            known[key] = reference, directory
        return known[key]

    return saved


def made(directory, **options):
    sizes = dict(n_positions=[32, 64], batch_size=3, context_length_estimate=[8], image_patches=[16, 64])
    model = NeuronAutoModelForImageTextToText.from_pretrained(directory, **sizes | options)
    model.to_neuron()
    return model


@pytest.fixture(scope="module")
def pair(saved):
    """A model for six sequences, and Transformers' model."""
    reference, directory = saved()
    return made(directory, batch_size=6), reference


@torch.inference_mode()
def expected(reference, side="left"):
    """Logits after all tokens of three rows, and after four more of each, f32[tokens, vocab]."""
    reference = copy.deepcopy(reference)  # it keeps offsets of an earlier call
    ids, mask = padded(ROWS, side)
    images = told(ids, GRIDS)
    images["pixel_values"] = images["pixel_values"].to(reference.dtype)
    found, logits = reference(ids, attention_mask=mask, **images), []
    logits.append(found.logits[mask.bool()])
    for column in range(4):
        mask = torch.cat([mask, torch.ones(3, 1, dtype=mask.dtype)], 1)
        where = mask.sum(1, keepdim=True) - 1 + reference.model.rope_deltas
        found = reference(
            torch.tensor(NEXT)[:, column : column + 1], attention_mask=mask, **{CACHE: found[CACHE]},
            position_ids=where.expand(3, -1, -1),
        )  # fmt: skip
        logits.append(found.logits[:, -1])
    return torch.cat(logits).float()


def logits(model, side="left"):
    ids, mask = padded(ROWS, side)
    images = dict(pixel_values=patches(), image_grid_thw=GRIDS)
    found = [model.forward(ids, attention_mask=mask, output_all_logits=True, **images)[mask.bool()]]
    for column in range(4):
        mask = torch.cat([mask, torch.ones(3, 1, dtype=mask.dtype)], 1)
        found.append(model.forward([[row[column]] for row in NEXT], attention_mask=mask))
    return torch.cat(found)


VARIANTS = {
    "as the first": {},
    "several features of images": dict(vision_deepstack_visual_indexes=[0, 2], vision_depth=3, num_hidden_layers=3),
    "more of them than layers": dict(vision_deepstack_visual_indexes=[0, 1, 2], vision_depth=3),
    "none": dict(vision_deepstack_visual_indexes=[]),
    "heads that divide nothing": dict(
        vision_num_heads=3, vision_hidden_size=36, num_attention_heads=5, num_key_value_heads=1
    ),
    "biases, and a head of its own": dict(attention_bias=True, tie_word_embeddings=False),
    "more positions of patches": dict(vision_num_position_embeddings=49, vision_hidden_act="gelu"),
    "sections by default": dict(rope_scaling=dict(rope_type="default")),
    "other sections, stretched": dict(
        rope_scaling=dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=16, mrope_section=[2, 3, 3])
    ),
}


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.few(2)
def test_logits_are_those_of_transformers(saved, variant):
    reference, directory = saved(**VARIANTS[variant])
    assert_close(logits(made(directory)), expected(reference))


@pytest.mark.parametrize("options", [{}, dict(unroll=1, context_unroll=1)], ids=["pages", "slots"])
@pytest.mark.parametrize("degree", [1, 2, 3, 8])
@pytest.mark.few(2)
def test_at_other_degrees(saved, degree, options, request):
    """In pages and in slots; two parts of a prompt have tokens of one image."""
    if not options:
        request.getfixturevalue("needs_pages")
    reference, directory = saved(**VARIANTS["several features of images"])
    model = made(directory, tp_degree=degree, **options)
    assert isinstance(model.decoder, SlotDecoder) == bool(options)
    assert_close(logits(model), expected(reference))


@pytest.mark.parametrize("degree", [1, 3])
def test_the_tower_alone(saved, degree):
    reference, directory = saved(**VARIANTS["several features of images"])
    model = made(directory, tp_degree=degree)
    with torch.inference_mode():
        found = reference.model.visual(patches(), grid_thw=GRIDS, return_dict=True)
    want = torch.stack([found.pooler_output, *found.deepstack_features], 1)
    images = model.read_images(patches(), GRIDS)
    rows = [torch.tensor(model.decoder.tower.read(image)) for image in images]
    assert [len(each) for each in rows] == COUNTS
    assert_close(torch.cat(rows), want)
    assert model.programs == ["tower_patches16", "tower_patches64"]  # images of 8 patches, and of 24


@pytest.mark.slow
@pytest.mark.parametrize("amp", ["bf16", "f16"])
def test_in_half_precision(saved, amp):
    """The difference from f32 is no larger than 1.5 times that of Transformers."""
    reference, directory = saved()
    got, want = logits(made(directory, amp=amp)), expected(reference)
    kind = {"bf16": torch.bfloat16, "f16": torch.float16}[amp]
    theirs = expected(AutoModelForImageTextToText.from_pretrained(directory, dtype=kind))
    assert (got - want).abs().max() <= 1.5 * (theirs - want).abs().max()


@pytest.mark.parametrize("kind", ["s8", "s4"])
def test_fewer_bits_as_in_numpy(saved, kind):
    """Matrices of the tower are stored as those for text, besides what makes patches."""
    reference, directory = saved()

    def change(name, matrix):
        if any(whole in name for whole in ("patch_embed", "pos_embed", "embed_tokens", "lm_head")):
            return matrix
        if kind == "s8":
            return rounded(matrix)
        of_heads = name.endswith(("o_proj.weight", "attn.proj.weight"))
        down = name.endswith(("down_proj.weight", "linear_fc2.weight"))
        return in_groups_of(16 if of_heads else 32 if down else np.gcd(32, matrix.shape[-1]), matrix)

    got = logits(made(directory, tp_degree=2, neuron_config=NeuronConfig(quant=QuantizationConfig(kind))))
    assert_close(got, want := expected(emulated(reference, change)), TOLERANCE)
    assert (want - expected(reference)).abs().max() > 10 * TOLERANCE * want.abs().max()


@pytest.mark.slow
def test_at_a_true_size(tmp_path):
    """Qwen3-VL 2B, with two layers of each half and a small vocabulary."""
    torch.manual_seed(0)
    sizes = dict(hidden_size=2048, intermediate_size=6144, num_attention_heads=16, num_key_value_heads=8, head_dim=128)
    rope = dict(rope_type="default", mrope_interleaved=True, mrope_section=[24, 20, 20])
    tower = dict(hidden_size=1024, intermediate_size=4096, num_heads=16, out_hidden_size=2048)
    tower |= dict(num_position_embeddings=2304, deepstack_visual_indexes=[0, 1])
    changed = config(**sizes, rope_scaling=rope, **{f"vision_{name}": value for name, value in tower.items()})
    reference = AutoModelForImageTextToText.from_config(changed, dtype=torch.float32).eval()
    reference.save_pretrained(tmp_path)
    want = expected(reference)
    del reference
    for degree in (1, 2):
        assert_close(logits(made(tmp_path, tp_degree=degree)), want)


@pytest.mark.parametrize("name", QWEN3_VL)
@pytest.mark.few(1)
def test_published_configurations(name, tmp_path):
    attributes = QWEN3_VL[name]
    reference = randomized(CONFIG_MAPPING["qwen3_vl"].from_dict(copy.deepcopy(attributes)), AutoModelForImageTextToText)
    reference.save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(attributes))
    assert_close(logits(made(tmp_path)), expected(reference))


def test_without_images_it_is_its_text_half(saved, pair):
    _, directory = saved()
    half = NeuronAutoModelForCausalLM.from_pretrained(directory, n_positions=[32, 64], context_length_estimate=[8])
    half.to_neuron(ahead=False)
    assert half.tag == "Qwen3ForSampling" and not any("tower" in name for name in half.programs)
    assert_close(pair[0].forward([ROWS[1]]), half.forward([ROWS[1]]))


def test_a_model_in_memory(saved):
    reference, _ = saved()
    model = Qwen3VLForSampling(reference.config, n_positions=[64], batch_size=3, image_patches=64)
    model.use_weights(checkpoint_of(reference))
    model.to_neuron()
    assert_close(logits(model, "right"), expected(reference))


def test_generate_as_transformers_does(pair):
    """Greedy tokens and beams of prompts with two images, none and one."""
    model, reference = pair
    adapter = HuggingFaceGenerationModelAdapter(reference.config, model)
    ids, mask = padded(ROWS, "left")
    options = dict(attention_mask=mask, max_new_tokens=14, **FREE, **told(ids, GRIDS))
    want = reference.generate(ids, **options)
    assert torch.equal(adapter.generate(ids, **options), want)
    assert torch.equal(adapter.generate(ids, use_cache=False, **options), want)
    for row, (grids, first) in enumerate([(GRIDS[:2], 0), (GRIDS[:0], 0), (GRIDS[2:], 32)]):
        own = dict(
            mm_token_type_ids=(torch.tensor([ROWS[row]]) == IMAGE).int(), attention_mask=torch.ones(1, len(ROWS[row]))
        )
        if len(grids):
            own |= dict(pixel_values=patches()[first : first + int(grids.prod(1).sum())], image_grid_thw=grids)
        beams = dict(num_beams=2, num_return_sequences=2, max_new_tokens=14, **FREE)
        alone = reference.generate(torch.tensor([ROWS[row]]), **beams, **own)[:, -14:]
        both = adapter.generate(ids, **options | beams)[2 * row : 2 * row + 2, -14:]
        assert torch.equal(both, alone)


def test_sampled_tokens_do_not_depend_on_how(saved, pair):
    """With draft tokens from the text, in slots, on a host that sees logits, and in another order of rows."""
    model, reference = pair
    ids, mask = padded(ROWS, "left")
    images = dict(pixel_values=patches(), image_grid_thw=GRIDS)
    want = reference.generate(ids, attention_mask=mask, max_new_tokens=14, **told(ids, GRIDS), **FREE | dict(
        suppress_tokens=None))  # fmt: skip
    greedy = dict(attention_mask=mask, top_k=1, eos_token_override=-1, **images)
    assert torch.equal(model.sample(ids, ids.shape[1] + 14, **greedy), want)
    got, scores = model.sample(ids, ids.shape[1] + 14, output_scores=True, **greedy)
    assert torch.equal(got, want) and len(scores) == 14
    slotted = made(saved()[1], unroll=2)
    assert torch.equal(slotted.sample(ids, ids.shape[1] + 14, **greedy), want)


def alone(reference, ids, image=None, count=10):
    more = told([ids], *image) if image else {}
    options = dict(max_new_tokens=count, attention_mask=torch.ones(1, len(ids)), **FREE | dict(suppress_tokens=None))
    return reference.generate(torch.tensor([ids]), **more, **options)[0, len(ids) :].tolist()


@pytest.fixture(scope="module")
def wide(saved):
    reference, directory = saved()
    sizes = dict(n_positions=256, context_length_estimate=64, batch_size=4, image_patches=[64, 256])
    model = NeuronAutoModelForImageTextToText.from_pretrained(directory, **sizes)
    model.to_neuron(ahead=False)
    return model, reference


def submitted(engine, ids, image=None):
    params = SamplingParams(max_tokens=10, temperature=0, ignore_eos=True)
    images = dict(pixel_values=patches(*image), image_grid_thw=image[0]) if image else {}
    return engine.submit(ids, params, **images)


@pytest.mark.usefixtures("needs_pages")
def test_images_in_an_engine(wide):
    """Requests with images and without get what each gets alone. Those with the same image share pages of its rows;
    those with another image of the same size, and so the same ids, do not.
    """
    model, reference = wide
    large, small = torch.tensor([[1, 16, 10]]), GRIDS[:1]
    begin, end, text = prompts(120, [40, 50, 90], seed=3)
    first = [*begin, BEGIN, *[IMAGE] * 40, END, *end]
    last = [*end, *begin, BEGIN, *[IMAGE] * 40, END, 7]
    jobs = [
        (first, (large, 1)), (first, (large, 2)), (last, (large, 1)), (last, (large, 2)),
        ([4, 5, BEGIN, *[IMAGE] * 6, END, 9], (small, 3)), (text, None), ([*begin, *text], None),
    ]  # fmt: skip
    want = [alone(reference, *job) for job in jobs]
    assert want[2] != want[3]
    textual = NeuronAutoModelForCausalLM.from_pretrained(model._weights.directory, n_positions=256)
    textual.to_neuron(ahead=False)
    sizes = dict(rows=4, step_tokens=32, joined_tokens=32, cache_tokens=2048)
    for draft in (None, PromptLookup(ngram=1), textual):
        with Engine(model, draft=draft, adjustments=False, **sizes) as engine:
            handles = [submitted(engine, *job) for job in jobs]
            assert [handle.result() for handle in handles] == want
            again = [submitted(engine, *job) for job in jobs]
            assert [handle.result() for handle in again] == want
            assert [handle.usage.cached_tokens for handle in again[:4]] == [128, 128, 128, 128]
            other = submitted(engine, first, (large, 4))
            assert other.result() == alone(reference, first, (large, 4))
            assert other.usage.cached_tokens == 41  # up to the image


def test_an_engine_over_slots(wide, monkeypatch):
    monkeypatch.setattr(XlaRuntime, "attends_in_place", lambda *_: False)
    model, reference = wide
    model = made(model._weights.directory, batch_size=2)
    jobs = [(ROWS[2], (GRIDS[2:], 5)), (ROWS[1], None), (ROWS[2], (GRIDS[2:], 6))]
    assert isinstance(model.decoder, SlotDecoder)
    with Engine(model, draft=PromptLookup(ngram=1), adjustments=False) as engine:
        handles = [submitted(engine, *job) for job in jobs]
        assert [handle.result() for handle in handles] == [alone(reference, *job) for job in jobs]


@pytest.mark.compiled_ahead
def test_an_artifact_needs_neither_compiler_nor_checkpoint(saved, tmp_path, monkeypatch):
    model = made(saved()[1], batch_size=6)
    want = logits(model)
    model.save(tmp_path / "artifact", sharded_weights=True)
    monkeypatch.setattr(XlaRuntime, "compile", lambda *_: pytest.fail("something was compiled"))
    loaded = Qwen3VLForSampling.from_pretrained(tmp_path / "artifact")
    loaded.to_neuron()
    assert loaded.options == model.options
    assert torch.equal(logits(loaded), want)


def test_names_of_bare_models(saved, tmp_path):
    reference, _ = saved()
    reference.model.save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(reference.config.to_dict()))
    assert_close(logits(made(tmp_path)), expected(reference))


LARGE = torch.tensor([[1, 16, 16]])
REFUSED = {
    "no images": (dict(), "6 tokens for images, and its images have 0 rows"),
    "pixels alone": (dict(pixel_values=patches(GRIDS[2:])), "need both pixel_values and image_grid_thw"),
    "another size": (
        dict(pixel_values=patches(GRIDS[1:2]), image_grid_thw=GRIDS[1:2]), "6 tokens for images, and its images have 2"
    ),
    "too many": (dict(pixel_values=patches(GRIDS[1:]), image_grid_thw=GRIDS[1:].flip(0)), "no tokens for 1 of the"),
    "other patches": (dict(pixel_values=patches(GRIDS[2:])[:, 1:], image_grid_thw=GRIDS[2:]), r"\[24, 1536\], got"),
    "what is not finite": (
        dict(pixel_values=torch.full((24, 1536), torch.nan), image_grid_thw=GRIDS[2:]), "must be finite numbers"
    ),
    "a video": (dict(pixel_values=patches(), image_grid_thw=torch.tensor([[2, 4, 7]])), "videos are not supported"),
    "half a row": (dict(pixel_values=patches()[:15], image_grid_thw=torch.tensor([[1, 3, 5]])), "multiples of 2 rows"),
    "too large": (dict(pixel_values=patches(LARGE), image_grid_thw=LARGE), "image_patches=64 is the largest image"),
    "another shape": (dict(pixel_values=patches(), image_grid_thw=torch.tensor([4, 6])), r"integers \[images, 3\]"),
}  # fmt: skip


@pytest.mark.parametrize("what", REFUSED)
def test_images_that_do_not_fit_are_refused(pair, wide, what):
    images, message = REFUSED[what]
    calls = [lambda: pair[0].forward([ROWS[2]], **images), lambda: pair[0].sample([ROWS[2]], 30, **images)]
    for call in calls:
        with pytest.raises(InputError, match=message):
            call()


@pytest.mark.usefixtures("needs_pages")
def test_what_is_refused_by_name(pair, wide, saved):
    model, reference = pair
    one = dict(pixel_values=patches(GRIDS[2:]), image_grid_thw=GRIDS[2:])
    with pytest.raises(InputError, match="videos are not supported, and token 126"):
        model.forward([[5, VIDEO]])
    model.forward([[5, 6]])
    with pytest.raises(InputError, match="must come with the call that starts a sequence"):
        model.forward([ROWS[2]], cache_ids=list(range(2, 11)), **one)
    with Engine(wide[0], rows=1, step_tokens=8) as engine:
        with pytest.raises(InputError, match="6 tokens for images, and its images have 0 rows"):
            engine.embed(ROWS[2])
        with pytest.raises(InputError, match="has no tokens for 1 of its images"):
            engine.submit([5, 6], **one)
    half = NeuronAutoModelForCausalLM.from_pretrained(saved()[1], n_positions=64, batch_size=6)
    half.to_neuron(ahead=False)
    with (
        Engine(half, rows=1, step_tokens=8, adjustments=False) as engine,
        pytest.raises(InputError, match="Qwen3ForSampling reads no images"),
    ):
        engine.submit(ROWS[2], **one)
    with pytest.raises(ConfigError, match="Qwen3VLForSampling: a draft reads text alone"):
        Engine(half, draft=model)
    batching = ContinuousBatchingConfig(2, max_model_len=64, optimized_paged_attention=True)
    batching.init_cache_engine(16, 8)
    for options, message in (
        (dict(neuron_config=NeuronConfig(continuous_batching=batching)), "cannot bring: make the model without"),
        (dict(prefixed_length=4), "prefixed_length must be 0 for a model with images, got 4"),
        (dict(image_patches=[6]), r"image_patches must be positive multiples of 4, got \[6\]"),
    ):
        with pytest.raises(ConfigError, match=message):
            Qwen3VLForSampling(reference.config, **options)
    for changes, name in (
        (dict(vision_out_hidden_size=32), "out_hidden_size"),
        (dict(vision_patch_size=[16, 16]), "patch_size"),
        (dict(vision_deepstack_visual_indexes=[1, 0]), "deepstack_visual_indexes"),
    ):
        with pytest.raises(ConfigError, match=f"vision_config has values that are not supported: .*{name}"):
            Qwen3VLForSampling(config(**changes))
    with pytest.raises(ConfigError, match="has no tower for images: load it as one for text"):
        Qwen3VLForSampling(CONFIG_MAPPING["llama"]())


def test_the_order_in_which_images_are_read_is_that_of_the_rows(pair):
    """Each prompt takes its own; a prompt of another place in the batch has the same logits."""
    model, _ = pair
    images = model.read_images(patches(), GRIDS)
    whole = model.forward(ROWS[0:1], pixel_values=patches()[:32], image_grid_thw=GRIDS[:2])
    ids, mask = padded([ROWS[2], ROWS[0]], "right")
    moved = torch.cat([patches()[32:], patches()[:32]])
    both = model.forward(ids, attention_mask=mask, pixel_values=moved, image_grid_thw=GRIDS[[2, 0, 1]])
    assert_close(both[1], whole[0])
    assert len({image.digest for image in images}) == 3
    assert np.array_equal(images[0].numbers, patches()[:24])
