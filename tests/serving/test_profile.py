"""Where the time of a call goes."""

from pathlib import Path

import pytest

from transformers_neuronx.config import NeuronConfig
from transformers_neuronx.gpt2.model import GPT2ForSampling
from transformers_neuronx.runtimes import kernels

pytestmark = pytest.mark.compiled_ahead

TINY_KJV = Path(__file__).parents[2] / "examples" / "tiny-kjv"


@pytest.mark.parametrize("degree", [1, 2])
def test_profile(degree):
    options = dict(n_positions=[64], context_length_estimate=[16], amp="bf16", tp_degree=degree)
    switches = NeuronConfig(tokens_per_dispatch=8)
    model = GPT2ForSampling.from_pretrained(TINY_KJV, **options, neuron_config=switches)
    model.to_neuron()
    profile = model.profile(prompt_tokens=16, new_tokens=17)
    calls = {name: program.calls for name, program in profile.programs.items()}
    prompt, token = "step_tokens16_sequences1_samples1", "step_tokens1_sequences1_samples1"
    assert calls == {prompt: 1, token: 2}
    assert 0 < profile.host < profile.seconds
    spent = profile.kernels[token]
    if kernels.level() == "off":
        assert not spent
    else:
        assert spent["attention"].calls == 16 * model.config.n_layer * degree
        assert 0 < sum(kernel.seconds for kernel in spent.values()) < profile.programs[token].seconds
    text = str(profile)
    assert all(len(line) <= 80 for line in text.splitlines())
    assert text.splitlines()[-1].split()[0] == "all" and text.endswith("100.0%")
    again = model.sample([[1, 2, 3]], 8, top_k=1)
    assert again.shape == (1, 8)
    assert profile.programs[token].calls == 2  # nothing is measured any more
