"""The check of every family's logits."""

import pytest
import torch
from parity import assert_close, continued, padded, prompts, randomized
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM

from transformers_neuronx.config import NeuronConfig


def pytest_collection_modifyitems(items):
    """Leave eight devices, two if three are tested, and half precision to `make test-all`."""
    for item in items:
        degree = item.callspec.params.get("degree") if hasattr(item, "callspec") else None
        repeated = degree == 8 or (degree == 2 and "test_quantized" not in item.nodeid)
        if repeated or getattr(item, "originalname", "") == "test_in_bf16":
            item.add_marker(pytest.mark.slow)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """A folder with tiny checkpoints of a few families, by name."""
    from test_every_family import tiny

    directory = tmp_path_factory.mktemp("checkpoints")
    for name in ("gpt2", "llama", "mixtral", "t5"):
        kind = AutoModelForSeq2SeqLM if name == "t5" else AutoModelForCausalLM
        randomized(tiny(name), kind).save_pretrained(directory / name)
    return directory


@pytest.fixture
def parity(tmp_path):
    """`parity(cls, config, degree=…, amp=…)`: check that a family's logits are those of Transformers.

    It compares them after all positions of rows with padding on the left, in several windows, and after each of the
    next tokens, across the edge of a bucket. In half precision, the largest error is at most 1.5 times Transformers';
    or without `largest`, the mean of squared errors.
    """

    def check(cls, config, *, degree=1, amp="f32", largest=True, **options):
        reference = randomized(config)
        reference.save_pretrained(tmp_path / "model")
        step_by_step = NeuronConfig(tokens_per_dispatch=0)
        sizes = dict(n_positions=[24, 48], batch_size=3, context_length_estimate=8, neuron_config=step_by_step)
        model = cls.from_pretrained(tmp_path / "model", tp_degree=degree, amp=amp, **sizes | options)
        model.to_neuron()
        rows, tokens = prompts(config.vocab_size, [7, 21, 12]), prompts(config.vocab_size, [6, 6, 6], seed=1)
        ids, mask = padded(rows, "left")
        every = model.forward(ids, attention_mask=mask, output_all_logits=True)[mask.bool()]
        last = []
        for column in range(6):
            mask = torch.cat([mask, torch.ones(3, 1, dtype=mask.dtype)], 1)
            last.append(model.forward([[row[column]] for row in tokens], attention_mask=mask))
        got = torch.cat([every, *torch.stack(last, 1)])

        def expected(reference):
            logits = [continued(reference, *row) for row in zip(rows, tokens, strict=True)]
            every = [of[: len(row)] for of, row in zip(logits, rows, strict=True)]
            return torch.cat([*every, *(of[-6:] for of in logits)])

        want = expected(reference)
        if amp == "f32":
            assert_close(got, want)
        else:
            theirs = expected(reference.to({"bf16": torch.bfloat16, "f16": torch.float16}[amp]))
            ours, own = (each.abs().max() if largest else each.square().mean() for each in (got - want, theirs - want))
            assert ours <= 1.5 * own

    return check
