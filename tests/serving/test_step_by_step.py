"""The adapter without `generate()`: called for every token, as serving stacks of the original library do."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, DynamicCache

from transformers_neuronx.errors import InputError
from transformers_neuronx.gpt2.model import GPT2ForSampling
from transformers_neuronx.huggingface.adapter import HuggingFaceGenerationModelAdapter
from transformers_neuronx.huggingface.device_cache import CACHE

TINY_KJV = Path(__file__).parents[2] / "examples" / "tiny-kjv"
COLUMNS, STEPS = 9, 4
IDS = torch.randint(1, 1000, (2, COLUMNS + STEPS), generator=torch.Generator().manual_seed(0))
PADDED = torch.ones_like(IDS)
PADDED[1, :3] = 0


@pytest.fixture(scope="module")
def reference():
    return AutoModelForCausalLM.from_pretrained(TINY_KJV)


@pytest.fixture(scope="module")
def adapter(reference):
    model = GPT2ForSampling.from_pretrained(TINY_KJV, n_positions=32, context_length_estimate=8, batch_size=2)
    model.to_neuron()
    return HuggingFaceGenerationModelAdapter(reference.config, model)


@pytest.fixture(scope="module")
def expected(reference):
    """`expected(mask)`: logits after the prompt, and after each of the columns that follow."""

    @torch.inference_mode()
    def expected(mask):
        cache, logits = DynamicCache(config=reference.config), []
        for first, last in [(0, COLUMNS), *((column, column + 1) for column in range(COLUMNS, COLUMNS + STEPS))]:
            positions = (mask.cumsum(1) - 1).clamp(min=0)[:, first:last]
            where = {"attention_mask": mask[:, :last], CACHE: cache, "position_ids": positions}
            out = reference(IDS[:, first:last], **where)
            logits.append(out.logits[:, -1:])
        return logits

    return expected


def close(got, want):
    assert got.shape == want.shape, f"{list(got.shape)} in place of {list(want.shape)}"
    error = ((got - want).abs().max() / want.abs().max()).item()
    assert error <= 1e-5, f"the logits part by {error:.2e} of the largest"


NEXT = {
    "one column": lambda end: IDS[:, end - 1 : end],
    "all columns so far": lambda end: IDS[:, :end],
}
MASKS = {
    "none": lambda mask, end: None,
    "a one": lambda mask, end: 1,
    "over all columns": lambda mask, end: mask[:, :end],
    "of floats": lambda mask, end: mask[:, :end].float(),
    "of truths": lambda mask, end: mask[:, :end].bool(),
}


@pytest.mark.parametrize("use_cache", [dict(), dict(use_cache=True), dict(use_cache=None)], ids=str)
@pytest.mark.parametrize("padded", [False, True], ids=["whole", "padded"])
@pytest.mark.parametrize("masked", MASKS)
@pytest.mark.parametrize("following", NEXT)
def test_sequences_go_on_until_they_are_reset(adapter, expected, following, masked, padded, use_cache):
    mask = PADDED if padded else torch.ones_like(IDS)
    options = dict(past_key_values=None) | use_cache
    adapter.reset_generation()
    first = mask[:, :COLUMNS] if padded else MASKS[masked](mask, COLUMNS)
    got = []
    for end in range(COLUMNS, COLUMNS + STEPS + 1):
        ids = IDS[:, :end] if end == COLUMNS else NEXT[following](end)
        where = first if end == COLUMNS else MASKS[masked](mask, end)
        inputs = adapter.prepare_inputs_for_generation(ids, attention_mask=where, **options)
        got.append(adapter(**inputs, return_dict=True).logits)
    for step, want in zip(got, expected(mask), strict=True):
        close(step, want)


def test_positional_arguments_are_those_of_the_original(adapter, expected):
    adapter.reset_generation()
    for end, want in zip(range(COLUMNS, COLUMNS + STEPS + 1), expected(torch.ones_like(IDS)), strict=True):
        ids = IDS[:, :end] if end == COLUMNS else IDS[:, end - 1 : end]
        close(adapter(**adapter.prepare_inputs_for_generation(ids, None), return_dict=True).logits, want)


def test_several_columns_go_on_with_a_mask_over_all(adapter, expected):
    adapter.reset_generation()
    adapter(**adapter.prepare_inputs_for_generation(IDS[:, :COLUMNS], attention_mask=PADDED[:, :COLUMNS]))
    inputs = adapter.prepare_inputs_for_generation(IDS[:, COLUMNS:], attention_mask=PADDED)
    close(adapter(**inputs, return_dict=True).logits, expected(PADDED)[-1])


@pytest.mark.parametrize("name", ["past_key_values", "cache"])  # Transformers' before and since 5.24
@pytest.mark.parametrize("how", ["the cache is passed", "as generate() does"])
def test_callers_that_keep_the_cache(adapter, expected, how, name):
    logits, cache = [], None
    for end in range(COLUMNS, COLUMNS + STEPS + 1):
        new = COLUMNS if cache is None else 1
        ids, options = IDS[:, end - new : end], {name: cache, "attention_mask": PADDED[:, :end]}
        if how == "as generate() does":
            options |= dict(next_sequence_length=new, is_first_iteration=cache is None, logits_to_keep=1)
            ids = IDS[:, :end]
        out = adapter(**adapter.prepare_inputs_for_generation(ids, **options), return_dict=True)
        logits.append(out.logits[:, -1:])
        cache = out[CACHE]
    for step, want in zip(logits, expected(PADDED), strict=True):
        close(step, want)


def test_all_columns_begin_anew_after_another_call(adapter, expected):
    adapter.reset_generation()
    adapter(**adapter.prepare_inputs_for_generation(IDS[:, :COLUMNS]))
    adapter.generate(IDS[:, :3], max_new_tokens=2, pad_token_id=0)
    want = expected(torch.ones_like(IDS))
    for end, logits in zip(range(COLUMNS, COLUMNS + STEPS + 1), want, strict=True):
        close(adapter(**adapter.prepare_inputs_for_generation(IDS[:, :end]), return_dict=True).logits, logits)


def test_a_new_prompt_begins_anew_without_a_reset(adapter, expected):
    adapter.reset_generation()
    adapter(**adapter.prepare_inputs_for_generation(IDS[:, 1:7]))
    inputs = adapter.prepare_inputs_for_generation(IDS[:, :COLUMNS])
    close(adapter(**inputs, return_dict=True).logits, expected(torch.ones_like(IDS))[0])
    inputs = adapter.prepare_inputs_for_generation(IDS[:1, :1])  # of other rows
    assert adapter(**inputs, return_dict=True).logits.shape == (1, 1, 1023)


def test_without_a_cache_all_columns_are_fed_each_time(adapter, expected):
    adapter.reset_generation()
    wants = expected(torch.ones_like(IDS))
    for end, want in zip(range(COLUMNS, COLUMNS + STEPS + 1), wants, strict=True):
        inputs = adapter.prepare_inputs_for_generation(IDS[:, :end], use_cache=False)
        close(adapter(**inputs, return_dict=True).logits[:, -1:], want)


def test_sequences_that_another_call_took_the_place_of_are_an_error(adapter):
    adapter.reset_generation()
    adapter(**adapter.prepare_inputs_for_generation(IDS[:, :COLUMNS]))
    adapter.generate(IDS[:, :4], attention_mask=torch.ones(2, 4), max_length=8, pad_token_id=0)
    with pytest.raises(InputError, match=r"no longer on the devices.*call reset_generation\(\)"):
        adapter(**adapter.prepare_inputs_for_generation(IDS[:, :1]))


def test_generate_needs_no_reset_and_leaves_none_behind(adapter, reference):
    options = dict(attention_mask=torch.ones_like(IDS), max_length=24, do_sample=False, pad_token_id=0)
    want = reference.generate(IDS, **options)
    adapter.reset_generation()
    adapter(**adapter.prepare_inputs_for_generation(IDS[:, :COLUMNS]))
    for uncached in (False, True):
        assert torch.equal(adapter.generate(IDS, **options, use_cache=not uncached), want)


@pytest.mark.parametrize("kind", [torch.float32, torch.float16, torch.bool, torch.int32])
def test_masks_of_any_type(adapter, reference, kind):
    options = dict(max_length=24, do_sample=False, pad_token_id=0)
    want = reference.generate(IDS, attention_mask=PADDED, **options)
    assert torch.equal(adapter.generate(IDS, attention_mask=PADDED.to(kind), **options), want)
    assert torch.equal(
        adapter.model.sample(IDS, 24, attention_mask=PADDED.to(kind), top_k=1, eos_token_override=-1), want
    )


def test_options_that_need_a_second_cache_are_named(adapter):
    options = dict(attention_mask=torch.ones_like(IDS), max_length=16, pad_token_id=0)
    with pytest.raises(InputError, match=r"guidance_scale=1.5 is not supported: each row would need a second"):
        adapter.generate(IDS, guidance_scale=1.5, **options)
    with pytest.raises(InputError, match="assistant_model must wrap another model"):
        adapter.generate(IDS[:1], assistant_model=adapter, **options | dict(attention_mask=torch.ones_like(IDS[:1])))
    adapter.generate(IDS, guidance_scale=1.0, **options)
