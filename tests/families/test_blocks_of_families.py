"""Every family over a cache of blocks: chunks of prompts and running rows in one call have Transformers' logits."""

import pytest
import torch
from blocks import Caller, batching, schedule
from one_file import WITH_STATES
from parity import EVERY_DECODER, assert_close, prompts, randomized
from test_every_family import tiny
from transformers import LlamaConfig

from transformers_neuronx.errors import ConfigError
from transformers_neuronx.huggingface.auto import NeuronAutoModelForCausalLM

LENGTHS = [41, 36, 23, 12]


def check(reference, directory, size, **options):
    reference.save_pretrained(directory)
    options = dict(n_positions=[48], context_length_estimate=16) | options
    options.setdefault("neuron_config", batching(size, 4 * -(-48 // size), longest=48))
    model = NeuronAutoModelForCausalLM.from_pretrained(directory, **options)
    model.to_neuron()
    rows = prompts(reference.config.vocab_size, LENGTHS)
    with torch.inference_mode():
        wants = [reference(torch.tensor([row])).logits[0] for row in rows]
    caller, mixed = Caller(model), 0
    for number, parts in enumerate(schedule(LENGTHS)):
        counts = [end - start for start, end in parts.values()]
        mixed += 1 in counts and max(counts) > 1
        every = bool(number % 2)
        got = caller({at: (rows[at], *part) for at, part in parts.items()}, output_all_logits=every)
        spans = [wants[at][start if every else end - 1 : end] for at, (start, end) in parts.items()]
        assert_close(got[0] if every else got[: len(parts)], torch.cat(spans))
    assert mixed > 3


@pytest.mark.parametrize("family", EVERY_DECODER)
@pytest.mark.few(3)
def test_chunks_and_running_rows_have_the_logits_of_transformers(family, tmp_path):
    if family in WITH_STATES:
        with pytest.raises(ConfigError, match=r"has layers with states, which are not in blocks"):
            check(randomized(tiny(family)), tmp_path, 16)
    else:
        check(randomized(tiny(family)), tmp_path, 16)


@pytest.mark.parametrize("family", ["gemma2", "mistral"])
@pytest.mark.parametrize("size", [8, 32])
@pytest.mark.few(1)
def test_blocks_of_other_sizes(family, size, tmp_path):
    """Blocks of 8 positions have no kernel. Layers with windows read them, too."""
    config = tiny(family)
    config.sliding_window = 11
    check(randomized(config), tmp_path, size)


def test_two_devices(tmp_path):
    config = LlamaConfig(
        vocab_size=131, hidden_size=48, intermediate_size=64, num_hidden_layers=2, num_attention_heads=6,
        num_key_value_heads=2, max_position_embeddings=64,
    )  # fmt: skip
    check(randomized(config), tmp_path, 16, tp_degree=2)
