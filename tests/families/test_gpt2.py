"""GPT-2's logits against Transformers': the 124M shape with random weights, and the trained checkpoint."""

from pathlib import Path

import pytest
import torch
from parity import assert_close, padded, prompts
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel

from transformers_neuronx.config import NeuronConfig
from transformers_neuronx.gpt2.model import GPT2ForSampling

TINY_KJV = Path(__file__).parents[2] / "examples" / "tiny-kjv"
STEPS = NeuronConfig(tokens_per_dispatch=0)  # these tests generate no tokens
# 2 does not divide the vocabularies, 1023 and 50257; 5 does not divide 4 or 12 heads.
DEGREES = [1, pytest.param(2, marks=pytest.mark.slow), 5]


def expected(reference, rows):
    """Return the reference's last logits of each row alone, without padding."""
    with torch.inference_mode():
        return torch.stack([reference(torch.tensor([row])).logits[0, -1] for row in rows])


@pytest.fixture(scope="module")
def random_checkpoint(tmp_path_factory):
    directory = tmp_path_factory.mktemp("gpt2-124m")
    torch.manual_seed(0)
    GPT2LMHeadModel(GPT2Config()).save_pretrained(directory)
    return directory


@pytest.fixture(scope="module", params=["trained", "124M"])
def checkpoint(request, random_checkpoint):
    return TINY_KJV if request.param == "trained" else random_checkpoint


@pytest.fixture(scope="module")
def reference(checkpoint):
    return AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()


@pytest.fixture(scope="module", params=DEGREES, ids="tp{}".format)
def model(request, checkpoint):
    model = GPT2ForSampling.from_pretrained(
        checkpoint,
        tp_degree=request.param,
        batch_size=3,
        n_positions=[48, 100],
        context_length_estimate=[16, 32],
        neuron_config=STEPS,
    )
    model.to_neuron()
    return model


@pytest.mark.few(3)
class TestPrompts:
    @pytest.mark.parametrize("side", ["left", "right"])
    def test_unequal_rows_padded_on_either_side(self, model, reference, side):
        rows = prompts(model.config.vocab_size, [7, 29, 16])
        ids, mask = padded(rows, side)
        assert_close(model.forward(ids, attention_mask=mask), expected(reference, rows))

    def test_start_ids_count_the_padding_on_the_left(self, model, reference):
        rows = prompts(model.config.vocab_size, [7, 29, 16])
        ids, _ = padded(rows, "left")
        assert_close(model.forward(ids, start_ids=torch.tensor([22, 0, 13])), expected(reference, rows))

    def test_token_by_token_with_padding_on_the_left(self, model, reference):
        rows = prompts(model.config.vocab_size, [3, 9, 6])
        ids, _ = padded(rows, "left")
        start_ids = torch.tensor([6, 0, 3])
        for column in range(ids.shape[1]):
            got = model.forward(ids[:, column : column + 1], cache_ids=torch.tensor([column]), start_ids=start_ids)
        assert_close(got, expected(reference, rows))

    def test_two_windows_one_after_the_other(self, model, reference):
        rows = prompts(model.config.vocab_size, [27, 27, 27])
        ids = torch.tensor(rows)
        model.forward(ids[:, :11])
        got = model.forward(ids[:, 11:], cache_ids=torch.arange(11, 27))
        assert_close(got, expected(reference, rows))

    def test_a_prompt_longer_than_any_context_program_goes_in_windows(self, model, reference):
        # 45 and 70 tokens end in other windows than 20, and 70 in another position bucket.
        rows = prompts(model.config.vocab_size, [45, 70, 20])
        ids, mask = padded(rows, "right")
        assert_close(model.forward(ids, attention_mask=mask), expected(reference, rows))

    def test_the_last_window_may_stick_out_of_the_cache(self, model, reference):
        # The fourth window starts at position 96 of 100 and is 16 wide.
        rows = prompts(model.config.vocab_size, [99, 3, 98])
        ids, mask = padded(rows, "right")
        assert_close(model.forward(ids, attention_mask=mask), expected(reference, rows))
        rows = [[*row, 5] for row in rows]
        got = model.forward(torch.full((3, 1), 5), cache_ids=torch.tensor([[99], [3], [98]]))
        assert_close(got, expected(reference, rows))


@pytest.mark.few(3)
class TestTokens:
    def test_tokens_go_on_past_the_first_bucket(self, model, reference):
        rows = prompts(model.config.vocab_size, [44, 10, 31])
        ids, mask = padded(rows, "left")
        model.forward(ids, attention_mask=mask)
        start_ids = (mask == 0).sum(1)
        tokens = torch.tensor(prompts(model.config.vocab_size, [8, 8, 8], seed=1))
        for column in range(8):
            got = model.forward(
                tokens[:, column : column + 1], cache_ids=torch.tensor([44 + column]), start_ids=start_ids
            )
            rows = [[*row, token] for row, token in zip(rows, tokens[:, column].tolist(), strict=True)]
            assert_close(got, expected(reference, rows))

    def test_a_new_prompt_starts_anew_without_reset(self, model, reference):
        model.forward(torch.tensor(prompts(model.config.vocab_size, [40, 40, 40], seed=2)))
        rows = prompts(model.config.vocab_size, [5, 5, 5], seed=3)
        assert_close(model.forward(torch.tensor(rows)), expected(reference, rows))

    def test_fewer_rows_than_the_batch(self, model, reference):
        rows = prompts(model.config.vocab_size, [6, 6], seed=4)
        assert_close(model.forward(torch.tensor(rows)), expected(reference, rows))


@pytest.mark.parametrize(
    "options",
    [
        pytest.param(dict(unroll=1), marks=pytest.mark.slow),
        dict(unroll=4, context_unroll=5),
        dict(context_length_estimate=0),
        dict(n_positions=64),
        dict(tp_degree=3, unroll=2),
        pytest.param(dict(tp_degree=16), marks=pytest.mark.slow),
    ],
    ids=str,
)
@pytest.mark.few(1)
def test_how_a_model_is_cut_into_programs_changes_nothing(options):
    reference = AutoModelForCausalLM.from_pretrained(TINY_KJV, dtype=torch.float32)
    options = dict(n_positions=[16, 32], batch_size=2) | options
    model = GPT2ForSampling.from_pretrained(TINY_KJV, neuron_config=STEPS, **options)
    model.to_neuron()
    rows = prompts(1023, [13, 21])
    ids, mask = padded(rows, "right")
    assert_close(model.forward(ids, attention_mask=mask), expected(reference, rows))
    got = model.forward(torch.tensor([[3], [4]]), cache_ids=torch.tensor([[13], [21]]))
    assert_close(got, expected(reference, [[*rows[0], 3], [*rows[1], 4]]))


SCALES = {
    "by the layer's number": dict(scale_attn_by_inverse_layer_idx=True),
    "not at all": dict(scale_attn_weights=False),
    "by the layer's number alone": dict(scale_attn_by_inverse_layer_idx=True, scale_attn_weights=False),
}


@pytest.mark.parametrize("degree", [1, 3])
@pytest.mark.parametrize("scaled", SCALES)
@pytest.mark.few(2)
def test_how_scores_are_scaled(parity, scaled, degree):
    config = GPT2Config(vocab_size=131, n_positions=64, n_embd=48, n_layer=3, n_head=6, **SCALES[scaled])
    parity(GPT2ForSampling, config, degree=degree)
    parity(GPT2ForSampling, config, degree=degree, unroll=2, context_unroll=1)


def test_scores_scaled_by_the_layer_in_bf16(parity):
    config = GPT2Config(
        vocab_size=131, n_positions=64, n_embd=48, n_layer=3, n_head=6, **SCALES["by the layer's number"]
    )
    parity(GPT2ForSampling, config, amp="bf16")


@pytest.mark.parametrize("amp", ["bf16", "f16"])
@pytest.mark.parametrize("degree", [1, 2])
def test_half_precision_is_as_near_to_the_truth_as_transformers(amp, degree):
    rows = prompts(1023, [40, 12])
    truth = expected(AutoModelForCausalLM.from_pretrained(TINY_KJV, dtype=torch.float32), rows)
    half = {"bf16": torch.bfloat16, "f16": torch.float16}[amp]
    theirs = expected(AutoModelForCausalLM.from_pretrained(TINY_KJV, dtype=half), rows).float()
    options = dict(amp=amp, tp_degree=degree, n_positions=64, batch_size=2, neuron_config=STEPS)
    model = GPT2ForSampling.from_pretrained(TINY_KJV, **options)
    model.to_neuron()
    ids, mask = padded(rows, "right")
    ours = model.forward(ids, attention_mask=mask)
    assert (ours - truth).abs().max() <= 1.5 * (theirs - truth).abs().max()
