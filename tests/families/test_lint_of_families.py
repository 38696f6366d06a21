"""Every program of every family, in the form for Neuron's compiler, passes the linter."""

from itertools import product

import pytest
import test_t5
from parity import ONE_FILE
from test_every_family import tiny

from transformers_neuronx.compiler import check
from transformers_neuronx.config import KVCacheQuantizationConfig, NeuronConfig, QuantizationConfig
from transformers_neuronx.engine.encoding import RedirectKey
from transformers_neuronx.engine.rectangles import HeadKey, LayerwiseKey, StepKey, VerifyKey
from transformers_neuronx.engine.slots import SlotDecoder
from transformers_neuronx.huggingface.auto import families, family_of
from transformers_neuronx.neuron.form import neuron_form
from transformers_neuronx.neuron.targets import TARGETS
from transformers_neuronx.runtimes.absent import absent_runtime

IN_S8 = NeuronConfig(quant=QuantizationConfig("s8"), kv_cache_quant=KVCacheQuantizationConfig("s8"))
IN_S4 = NeuronConfig(quant=QuantizationConfig("s4", quantize_head=True, activation_dtype="s8"))
IN_F8 = NeuronConfig(quant=QuantizationConfig("f8e4m3fn"), kv_cache_quant=KVCacheQuantizationConfig("f8e4m3fn"))
OPTIONS = {
    "f32": dict(),
    "bf16 on eight": dict(amp="bf16", tp_degree=8),
    "s8 on two": dict(amp="f16", tp_degree=2, neuron_config=IN_S8),
    "s4": dict(amp="bf16", neuron_config=IN_S4),
}


def modules(family, **options):
    """Return the modules of the programs that a model may use."""
    config = test_t5.config() if family == "t5" else tiny(family)
    kind = family_of(family)
    sizes = dict(context_length_estimate=None if family == "whisper" else [8])  # its sources have one size
    model = kind(config, n_positions=[16], batch_size=2, **sizes, **options)
    runtime = absent_runtime(model.options.tp_degree, loops=False)
    decoder = SlotDecoder(kind.family, model.model_config, runtime, model.options)
    whats = [*decoder.planned(), StepKey(1, 8, 16), HeadKey(1, 8), LayerwiseKey(1, 8, 16), VerifyKey(3, 16)]
    if kind.family.encoder:
        whats = [what for what in [*whats, RedirectKey()] if type(what) is not LayerwiseKey]
    for what in whats:
        for piece in dict.fromkeys(what.segments(decoder.programs)):
            yield what.written(decoder.programs, piece)


def at_once(family, options):
    """Whether `make test` may run it."""
    return family in ("llama", "t5", "whisper") or (options == "s8 on two" and family not in ONE_FILE)


@pytest.mark.parametrize(
    ("family", "options"),
    [pytest.param(*each, marks=() if at_once(*each) else pytest.mark.slow) for each in product(families(), OPTIONS)],
)
@pytest.mark.few(3)
def test_nothing_is_found(family, options):
    count = 0
    for module in modules(family, **OPTIONS[options]):
        form, count = neuron_form(module), count + 1
        for target in TARGETS:
            assert [str(finding) for finding in check(form, target)] == []
    assert count >= 7


def test_numbers_that_neuron_does_not_have_are_all_that_is_found():
    found = [finding for module in modules("llama", neuron_config=IN_F8) for finding in check(neuron_form(module))]
    assert found and {finding.message for finding in found} == {"f8e4m3fn is not a type of this target"}
