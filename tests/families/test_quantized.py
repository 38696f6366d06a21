"""Quantized weights: every family against Transformers' model with weights quantized in NumPy."""

import copy
import functools
import re
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import torch
from parity import DECODERS, EVERY_DECODER, ONE_FILE, assert_close, continued, prompts, randomized
from test_every_family import tiny
from transformers import AutoTokenizer
from transformers.models.llama4.modeling_llama4 import Llama4TextExperts
from transformers.pytorch_utils import Conv1D

from transformers_neuronx.analysis.perplexity import perplexity as of_text
from transformers_neuronx.config import (
    Buckets,
    CompileOptions,
    KVCacheQuantizationConfig,
    NeuronConfig,
    QuantizationConfig,
)
from transformers_neuronx.engine.programs import Programs
from transformers_neuronx.engine.rectangles import LoopKey, StepKey
from transformers_neuronx.errors import ConfigError
from transformers_neuronx.gpt2.config import GPT2Config
from transformers_neuronx.gpt2.model import GPT2ForSampling
from transformers_neuronx.huggingface.auto import NeuronAutoModelForCausalLM, family_of
from transformers_neuronx.llama.delta import DeltaNetLike
from transformers_neuronx.runtimes import get_runtime

TINY_KJV = Path(__file__).parents[2] / "examples" / "tiny-kjv"
KEPT = (
    "lm_head", "embed", "wte", "wpe", "router", "project_in", "project_out", "_proj_bias", "conv1d", "conv.conv",
    "mlp.gate.", "mixer.gate.", "feed_forward.gate.", "shared_expert_gate", "kv_b_proj",
)  # fmt: skip
OTHERS = [family for family in DECODERS + ONE_FILE if family != "gpt2"]
# Matrices whose inputs are heads, and those at the end of a feed-forward.
OF_HEADS = ("attn.c_proj", "o_proj", "out_proj", "attn.dense", "attention.dense")
DOWN = ("mlp.c_proj", "down_proj", "4h_to_h", "fc2", "fc_out", "w2", "output_linear")
TOLERANCE = 1e-4  # relative to the largest logit


def rounded(matrix):
    """Round `matrix` [out, in] in steps that are a fraction of each output's largest value."""
    step = (np.abs(matrix).max(-1, keepdims=True) / np.float32(127)).astype(np.float32)
    return np.rint(matrix / np.where(step == 0, 1, step)) * step


def in_groups_of(group, matrix):
    """Round `matrix` [out, in] in steps of an eighth of the largest value of each group of an output's inputs."""
    *lead, size = matrix.shape
    padded = np.pad(matrix, [*((0, 0) for _ in lead), (0, -size % group)])
    grouped = padded.reshape(*lead, -1, group)
    largest = np.take_along_axis(grouped, np.abs(grouped).argmax(-1)[..., None], -1)
    step = (largest / -8).astype(ml_dtypes.bfloat16).astype(np.float32)
    values = np.clip(np.rint(grouped / np.where(step == 0, 1, step)), -8, 7)
    return (values * step).reshape(padded.shape)[..., :size]


def emulated(reference, change):
    """Return Transformers' model with each linear layer's matrix, [out, in], replaced by `change(name, matrix)`."""
    model = copy.deepcopy(reference)
    transposed = {f"{name}.weight" for name, module in model.named_modules() if isinstance(module, Conv1D)}
    experts = [
        name for name, module in model.named_modules()
        if getattr(module, "is_transposed", False) or isinstance(module, Llama4TextExperts)
    ]  # fmt: skip
    transposed |= {f"{name}.{part}_proj" for name in experts for part in ("gate_up", "down")}
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.ndim > 1 and not any(kept in name for kept in KEPT):
                matrix = weight.mT if name in transposed else weight
                new = torch.from_numpy(change(name, matrix.numpy()))
                weight.copy_(new.mT if name in transposed else new)
    return model


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """`saved(family)`: the random model of a family and its directory."""
    made = {}

    def saved(family):
        if family not in made:
            reference = randomized(tiny(family))
            directory = tmp_path_factory.mktemp(family)
            reference.save_pretrained(directory)
            made[family] = reference, directory
        return made[family]

    return saved


def logits_of(directory, ids, degree=1, **switches):
    switches = NeuronConfig(output_all_logits=True, tokens_per_dispatch=0, **switches)
    model = NeuronAutoModelForCausalLM.from_pretrained(
        directory, n_positions=32, context_length_estimate=32, tp_degree=degree, neuron_config=switches
    )
    model.to_neuron()
    return model(torch.tensor([ids]))[0]


@pytest.mark.parametrize(
    "degree", [pytest.param(1, marks=pytest.mark.slow), 2, pytest.param(5, marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("family", EVERY_DECODER)
@pytest.mark.few(4)
def test_int8_as_in_numpy(saved, family, degree):
    reference, directory = saved(family)
    [ids] = prompts(131, [20])
    want = continued(emulated(reference, lambda name, matrix: rounded(matrix)), ids, [])
    assert (want - continued(reference, ids, [])).abs().max() > 10 * TOLERANCE * want.abs().max()
    assert_close(logits_of(directory, ids, degree, quant=QuantizationConfig()), want, TOLERANCE)


@pytest.mark.parametrize("degree", [1, pytest.param(2, marks=pytest.mark.slow), 5])
@pytest.mark.parametrize("family", ["gpt2", *(pytest.param(f, marks=pytest.mark.slow) for f in OTHERS)])
def test_groups_of_four_bits_as_in_numpy(saved, family, degree):
    """A group has 32 inputs, or fewer that divide them, and stays inside a head if heads are the inputs."""
    reference, directory = saved(family)
    config = family_of(reference.config.model_type).family.read_config(reference.config.to_dict())
    kinds = getattr(config, "layer_kinds", [""] * config.n_layer)

    def in_groups(name, matrix):
        if any(of_heads in name for of_heads in OF_HEADS):
            heads = config.heads_of(kinds[int(re.search(r"\d+", name)[0])])
            delta = heads is None and isinstance(config, DeltaNetLike)
            own = config.delta_value_dim if delta else (heads or config.attention_heads).head_dim
            group = np.gcd(32, getattr(config, "value_dim", own))  # of what a head returns
        else:
            group = 32 if any(down in name for down in DOWN) else np.gcd(32, matrix.shape[-1])
        return in_groups_of(group, matrix)

    [ids] = prompts(131, [20])
    want = continued(emulated(reference, in_groups), ids, [])
    assert_close(logits_of(directory, ids, degree, quant=QuantizationConfig("s4")), want, TOLERANCE)


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_activations_of_eight_bits_as_in_torch(saved, family):
    """A value on the edge may round up here and down there, which changes all later values, in a few sequences."""
    reference, directory = saved(family)
    several = prompts(131, [7] * 3)
    model = emulated(reference, lambda name, matrix: rounded(matrix))
    exact = [continued(model, ids, []) for ids in several]

    def in_eight_bits(module, operands):
        x = operands[0]
        groups = torch.nn.functional.pad(x, (0, -x.shape[-1] % 32)).unflatten(-1, (-1, 32))
        scale = groups.abs().amax(-1, keepdim=True) / 127
        return ((groups / torch.where(scale == 0, 1, scale)).round() * scale).flatten(-2)[..., : x.shape[-1]]

    for name, module in model.named_modules():
        if type(module).__name__ in ("Linear", "Conv1D") and "head" not in name:
            module.register_forward_pre_hook(in_eight_bits)
    want = [continued(model, ids, []) for ids in several]
    got = [logits_of(directory, ids, quant=QuantizationConfig(activation_dtype="s8")) for ids in several]
    off = [(g - w).abs().max() / (e - w).abs().max() for g, w, e in zip(got, want, exact, strict=True)]
    assert np.median(off) < 1e-3, off


@pytest.mark.parametrize("method", ["vector_dynamic", "direct_cast"])
def test_eight_bits_of_float(saved, method):
    reference, directory = saved("llama")

    def as_float(_, matrix):
        scale = np.abs(matrix).max(1, keepdims=True) / 448 if method == "vector_dynamic" else np.float32(1)
        return (matrix / scale).astype(ml_dtypes.float8_e4m3fn).astype(np.float32) * scale

    [ids] = prompts(131, [20])
    quant = QuantizationConfig("f8e4m3fn", quantize_method=method)
    assert_close(logits_of(directory, ids, quant=quant), continued(emulated(reference, as_float), ids, []), TOLERANCE)


@pytest.mark.parametrize(
    ("options", "kept"),
    [
        (dict(quantize_attn=False), ["attn"]),
        (dict(no_quantize_list=["mlp.down"]), ["mlp.down_proj"]),
        (dict(no_quantize_list=["o_proj", "up_proj"]), ["o_proj", "up_proj"]),
    ],
    ids=str,
)
@pytest.mark.few(1)
def test_layers_that_stay_as_they_are(saved, options, kept):
    reference, directory = saved("llama")
    same = emulated(reference, lambda name, matrix: matrix if any(part in name for part in kept) else rounded(matrix))
    [ids] = prompts(131, [20])
    got = logits_of(directory, ids, quant=QuantizationConfig(**options))
    assert_close(got, continued(same, ids, []), TOLERANCE)


@pytest.mark.parametrize("degree", [pytest.param(1, marks=pytest.mark.slow), 3])
@pytest.mark.parametrize("quant_dtype", ["s8", "s4"])
def test_the_embedding_and_the_head(tmp_path, quant_dtype, degree):
    """If they are tied, they are one tensor on the devices."""
    config = tiny("llama")
    config.tie_word_embeddings = True
    reference = randomized(config)
    reference.save_pretrained(tmp_path)
    model = copy.deepcopy(reference)
    table = model.get_input_embeddings().weight
    matrix, group = table.detach().numpy(), np.gcd(32, config.hidden_size)
    table.data = torch.from_numpy(rounded(matrix) if quant_dtype == "s8" else in_groups_of(group, matrix))
    [ids] = prompts(131, [20])
    layers = ["self_attn", "mlp"]
    quant = QuantizationConfig(quant_dtype, quantize_head=True, quantize_embedding=True, no_quantize_list=layers)
    assert_close(logits_of(tmp_path, ids, degree, quant=quant), continued(model, ids, []), TOLERANCE)


@pytest.mark.parametrize("quant_dtype", ["s8", "s4", pytest.param("f8e4m3fn", marks=pytest.mark.slow)])
@pytest.mark.slow
def test_rows_and_columns_of_zeros_are_zeros(tmp_path, quant_dtype):
    """Zeros may be in the weights, or be padding that makes sizes divisible by five."""
    reference = randomized(tiny("llama"))
    with torch.no_grad():
        for weight in (reference.model.layers[0].mlp.up_proj.weight, reference.model.layers[1].self_attn.o_proj.weight):
            weight[:3] = 0
            weight[:, :40] = 0
    reference.save_pretrained(tmp_path)
    [ids] = prompts(131, [20])
    one, five = (logits_of(tmp_path, ids, degree, quant=QuantizationConfig(quant_dtype)) for degree in (1, 5))
    assert torch.isfinite(one).all()
    assert_close(five, one)


@pytest.mark.parametrize("degree", [1, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize("quant_dtype", ["s8", pytest.param("f8e4m3fn", marks=pytest.mark.slow)])
def test_a_quantized_cache_in_the_loop_over_tokens(saved, quant_dtype, degree):
    """A loop on the devices generates the same tokens as single steps, also for rows that are reordered in between."""
    _, directory = saved("mistral")
    ids, made = torch.tensor(prompts(131, [9, 9])), []
    for tokens in (0, 8):
        switches = NeuronConfig(tokens_per_dispatch=tokens, kv_cache_quant=KVCacheQuantizationConfig(quant_dtype))
        model = NeuronAutoModelForCausalLM.from_pretrained(
            directory, n_positions=[16, 40], batch_size=2, tp_degree=degree, neuron_config=switches
        )
        model.to_neuron()
        made.append(model.sample(ids, 40, top_k=1, eos_token_override=-1))
        model(ids)
        model.reorder_cache([1, 0])
        made.append(model.sample(ids.flip(0), 40, top_k=1, eos_token_override=-1).flip(0))
    assert all(torch.equal(made[0], other) for other in made[1:])


QUANTIZED = {
    "s8": (dict(quant=QuantizationConfig()), 0.01),
    "s8, head and embedding too": (
        dict(quant=QuantizationConfig(quantize_head=True, quantize_embedding=True)),
        0.01,
    ),
    "s8, and activations": (dict(quant=QuantizationConfig(quantize_head=True, activation_dtype="s8")), 0.01),
    "s4, and activations in s8": (dict(quant=QuantizationConfig("s4", activation_dtype="s8")), 0.05),
    "s4 in groups of 32": (dict(quant=QuantizationConfig("s4", group_size=32)), 0.05),
    "f8e4m3fn": (dict(quant=QuantizationConfig("f8e4m3fn")), 0.01),
    "a cache of s8": (dict(kv_cache_quant=KVCacheQuantizationConfig()), 0.01),
    "a cache of f8e4m3fn": (dict(kv_cache_quant=KVCacheQuantizationConfig("f8e4m3fn")), 0.01),
}


@pytest.fixture(scope="module")
def perplexity():
    """`perplexity(windows, **switches)` of the trained checkpoint on held-out text, in f32 arithmetic."""
    ids = AutoTokenizer.from_pretrained(TINY_KJV)((TINY_KJV / "heldout.txt").read_text(), verbose=False).input_ids

    @functools.cache
    def unquantized(windows):
        return measured(windows)

    def measured(windows, **switches):
        switches = NeuronConfig(tokens_per_dispatch=0, **switches)
        options = dict(n_positions=[512], context_length_estimate=512, neuron_config=switches)
        model = NeuronAutoModelForCausalLM.from_pretrained(TINY_KJV, **options)
        model.to_neuron()
        return of_text(model, ids[: windows and windows * 511 + 1], 512)

    return lambda windows, **switches: measured(windows, **switches) if switches else unquantized(windows)


@pytest.mark.parametrize("windows", [4, pytest.param(None, marks=pytest.mark.slow)], ids=["a part", "all"])
@pytest.mark.parametrize("name", QUANTIZED)
@pytest.mark.few(3)
def test_perplexity_of_the_trained_checkpoint(perplexity, name, windows):
    switches, bound = QUANTIZED[name]
    rise = perplexity(windows, **switches) / perplexity(windows) - 1
    print(f"perplexity over held-out text, {name}: {rise:+.2%}")
    assert rise < bound


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(no_quantize_list=["mlp.dwon"]), r"list must be names of layers \(.*mlp.down.*\), got mlp.dwon"),
        (dict(no_quantize_list=["model.layers.0.mlp.down_proj"]), "no_quantize_list must be names of layers"),
    ],
    ids=str,
)
def test_names_that_are_no_layers(saved, options, message):
    _, directory = saved("llama")
    with pytest.raises(ConfigError, match=message):
        logits_of(directory, [1], quant=QuantizationConfig(**options))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: QuantizationConfig("s2"), "quant_dtype must be one of s8, s4, f8e4m3fn, got 's2'"),
        (lambda: QuantizationConfig(quantize_method="direct_cast"), "direct_cast' needs quant_dtype='f8e4m3fn'"),
        (lambda: QuantizationConfig("s4", group_size=7), "group_size must be even"),
        (
            lambda: QuantizationConfig("f8e4m3fn", activation_dtype="s8"),
            "activation_dtype='s8' needs quant_dtype='s8' or",
        ),
        (lambda: QuantizationConfig(no_quantize_list="mlp.down"), "no_quantize_list must be a list of names"),
        (lambda: KVCacheQuantizationConfig(quantize_method="direct_cast"), "direct_cast' needs quant_dtype='f8e4m3fn'"),
        (lambda: NeuronConfig(quant="s8"), "quant must be a QuantizationConfig or None, got 's8'"),
    ],
)
def test_contradictory_options(make, message):
    with pytest.raises(ConfigError, match=message):
        make()


@pytest.mark.parametrize("what", [StepKey(1, 32, 64), LoopKey(64, 8)], ids=["prompt", "loop"])
@pytest.mark.parametrize(("amp", "quant_dtype"), [("bf16", None), ("f32", "s8"), ("bf16", "s4")])
def test_programs_widen_one_matrix_at_a_time(amp, quant_dtype, what):
    quant = QuantizationConfig(quant_dtype) if quant_dtype else None
    options = CompileOptions(Buckets((64,), (32,)), amp=amp, quant=quant)
    config = GPT2Config.from_hf(dict(model_type="gpt2", n_layer=6, n_embd=512, n_head=8, vocab_size=8192))
    programs = Programs(GPT2ForSampling.family, config, options, degree=1)
    memory = get_runtime("cpu", 1).compile(what.written(programs, programs.whole)).memory()
    assert memory.temporaries < 3 * 4 * 2048 * 512  # of 6 layers' 12 · 512², three of the largest in f32
