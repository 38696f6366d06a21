"""Published configurations: each is read as Transformers reads it, or refused for a correct reason."""

import copy
import json
import logging
import re
from pathlib import Path

import pytest
import torch
from codes_in_bytes import store_in_codes
from eight_bits import store_in_eight_bits
from four_bits import store_in_words
from parity import assert_close, continued, padded, prompts, randomized
from published import PUBLISHED as FOLDERS
from published_one_file import ONE_FILE
from safetensors.torch import load_file, save_file
from transformers import CONFIG_MAPPING

from transformers_neuronx.config import NeuronConfig, attributes
from transformers_neuronx.errors import ConfigError
from transformers_neuronx.huggingface.auto import NeuronAutoModelForCausalLM

PUBLISHED = FOLDERS | ONE_FILE
REFUSED = [name for name, published in PUBLISHED.items() if published.refused]
READ = [name for name in PUBLISHED if name not in REFUSED]
BEYOND = [9, 40]  # tokens: within and beyond windows and the original lengths of stretched positions


def checkpoint(published, directory):
    """A published configuration with random weights, and Transformers' model of it."""
    kind = attributes.known_type(published.attributes)
    reference = randomized(CONFIG_MAPPING[kind].from_dict(copy.deepcopy(published.attributes) | dict(model_type=kind)))
    reference.save_pretrained(directory)
    if published.stored:
        reference = store_in_eight_bits(reference, directory, *published.stored)
    if published.words:
        reference = store_in_words(reference, directory, *published.words)
    if published.coded:
        reference = store_in_codes(reference, directory, *published.coded)
    file = directory / "model.safetensors"
    tensors = {name: tensor.clone() for name, tensor in load_file(file).items()}
    if published.bare:
        tensors = {name.removeprefix("model."): value for name, value in tensors.items() if "lm_head" not in name}
    save_file(tensors | {name: torch.ones(4) for name in published.buffers}, file)
    (directory / "config.json").write_text(json.dumps(published.attributes))
    return reference


@pytest.mark.parametrize("degree", [1, pytest.param(3, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", READ)
@pytest.mark.few(8)
def test_it_is_read_as_transformers_reads_it(name, degree, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(attributes, "_MENTIONED", set())
    published = PUBLISHED[name]
    reference = checkpoint(published, tmp_path)
    with caplog.at_level(logging.WARNING):
        model = NeuronAutoModelForCausalLM.from_pretrained(
            tmp_path, tp_degree=degree, batch_size=2, n_positions=[48], context_length_estimate=40,
            neuron_config=NeuronConfig(tokens_per_dispatch=0),
        )  # fmt: skip
    said = [record.getMessage() for record in caplog.records if record.name == attributes.__name__]
    listed = ", ".join(sorted(published.mentioned))
    assert [line.rpartition(": ")[2] for line in said] == [f"{listed}."] * bool(listed)

    model.to_neuron()
    rows, tokens = prompts(131, BEYOND), prompts(131, [3, 3], seed=1)
    ids, mask = padded(rows, "right")
    got = [model.forward(ids, attention_mask=mask, output_all_logits=True)[mask.bool()]]
    for column in range(3):
        mask = torch.cat([mask, torch.ones(2, 1, dtype=mask.dtype)], 1)
        got.append(model.forward([[row[column]] for row in tokens], attention_mask=mask))
    want = [continued(reference, *row) for row in zip(rows, tokens, strict=True)]
    steps = [torch.stack([logits[column - 3] for logits in want]) for column in range(3)]
    assert_close(torch.cat(got), torch.cat([*(logits[:-3] for logits in want), *steps]))


def test_the_numbers_of_the_list_of_models_are_these():
    text = re.sub(r"\s+", " ", (Path(__file__).parents[2] / "docs" / "models.md").read_text())
    numbers = r"Of (\d+) configurations published on the hub, .*?, (\d+) load and .* The other (\d+) are refused"
    assert [*map(int, re.search(numbers, text).groups())] == [len(PUBLISHED), len(READ), len(REFUSED)]


@pytest.mark.parametrize("name", REFUSED)
def test_it_is_refused_for_a_reason_that_is_true(name, tmp_path):
    published = PUBLISHED[name]
    (tmp_path / "config.json").write_text(json.dumps(published.attributes))
    with pytest.raises(ConfigError, match=published.refused):
        NeuronAutoModelForCausalLM.from_pretrained(tmp_path)
