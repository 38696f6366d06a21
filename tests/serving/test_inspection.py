"""Facts about programs: counted by hand for small ones, compared with the engine for models."""

import json
import re
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from browser import elements_of
from transformers import CONFIG_MAPPING, AutoConfig, GPT2Config, LlamaConfig

from transformers_neuronx import hlo
from transformers_neuronx.analysis.inspection import facts_of, facts_of_artifact, facts_of_model, hlo_text, page
from transformers_neuronx.compiler import compile_py_func
from transformers_neuronx.config import KVCacheQuantizationConfig, NeuronConfig, QuantizationConfig
from transformers_neuronx.engine.keys import Segment
from transformers_neuronx.engine.rectangles import HeadKey, LoopKey, StepKey
from transformers_neuronx.engine.slots import SlotDecoder
from transformers_neuronx.errors import CheckpointError
from transformers_neuronx.gpt2.model import GPT2ForSampling
from transformers_neuronx.huggingface.auto import families, family_of
from transformers_neuronx.layers.convolution import short_convolution
from transformers_neuronx.llama.model import LlamaForSampling
from transformers_neuronx.runtimes import get_runtime, kernels
from transformers_neuronx.serving.steps import TokensKey

TINY_KJV = Path(__file__).parents[2] / "examples" / "tiny-kjv"
GPT2 = GPT2Config(vocab_size=301, n_positions=64, n_embd=48, n_layer=3, n_head=6, bos_token_id=0, eos_token_id=0)
LLAMA = LlamaConfig(
    vocab_size=301, hidden_size=64, intermediate_size=172, num_hidden_layers=3, num_attention_heads=8,
    num_key_value_heads=2, max_position_embeddings=64, bos_token_id=0, eos_token_id=0,
)  # fmt: skip
HOSTILE = '<script>alert("1")</script>'


def decoder(cls, config, **options):
    """An engine without weights or programs."""
    model = cls(config, **options)
    return model.decoder_on(get_runtime(None, model.options.tp_degree))


def slots(cls, config, **options):
    """The same, with its cache in slots."""
    model = cls(config, **options)
    runtime = get_runtime(None, model.options.tp_degree)
    return SlotDecoder(model.family, model.model_config, runtime, model.options)


def by_name(rows):
    return {row.name: row for row in rows}


def numbers(row):
    return row.count, row.flops, row.read, row.written


# Small modules, by hand.


def test_a_product():
    def product(scribe):
        a = scribe.f32[2, 3].Parameter(parameter_number=0, name="a")
        b = scribe.bf16[3, 4].Parameter(parameter_number=1, name="b")
        with scribe.scope("layer.0"):
            return hlo.dot(a, hlo.convert(b, "f32"), contract=([1], [0]))

    facts = facts_of(compile_py_func(product))
    assert [(p.name, p.shape, p.bytes, p.kind) for p in facts.parameters] == [
        ("a", "f32[2,3]", 24, "input"),
        ("b", "bf16[3,4]", 24, "input"),
    ]
    assert [(o.shape, o.bytes, o.takes) for o in facts.outputs] == [("f32[2,4]", 32, None)]
    ops = by_name(facts.ops)
    assert numbers(ops["dot"]) == (1, 2 * 2 * 3 * 4, 24 + 48, 32) and ops["dot"].products == 48
    assert numbers(ops["convert"]) == (1, 12, 24, 48)  # the operand of a product is an array in memory
    assert [row.name for row in facts.layers] == ["layer.0"] and facts.total.flops == 60
    assert facts.temporaries == 64  # the converted array, at an aligned address


def test_zeros_that_were_added_are_not_multiplied():
    def product(scribe):
        a = hlo.pad(scribe.f32[1, 8].Parameter(parameter_number=0), 0, 0, 3)
        return hlo.dot(a, scribe.f32[8, 4].Parameter(parameter_number=1), contract=([1], [0]))

    assert facts_of(compile_py_func(product)).total.products == 2 * 8 * 4


def test_a_convolution():
    def convolution(scribe):
        x = scribe.f32[1, 3, 10].Parameter(parameter_number=0)
        kernel = scribe.f32[4, 3, 5].Parameter(parameter_number=1)
        return hlo.convolution(x, kernel, [1], [(0, 0)], [1], [1])

    assert facts_of(compile_py_func(convolution)).total.products == 2 * (4 * 6) * (3 * 5)


def test_a_chain_of_elementwise_operations_is_one_loop():
    def squared_distance(scribe):
        a = scribe.f32[8, 16].Parameter(parameter_number=0)
        b = scribe.f32[16].Parameter(parameter_number=1)
        difference = a - b
        return hlo.sum(difference * difference, axes=1)

    ops = by_name(facts_of(compile_py_func(squared_distance)).ops)
    assert numbers(ops["subtract"]) == numbers(ops["multiply"]) == (1, 128, 0, 0)
    assert numbers(ops["reduce"]) == (1, 128, 512 + 64, 32)


def test_what_is_looked_up_is_what_is_read():
    def lookup(scribe):
        table = scribe.f32[1000, 16].Parameter(parameter_number=0)
        return hlo.take(table, scribe.s32[4].Parameter(parameter_number=1))

    total = facts_of(compile_py_func(lookup)).total
    assert (total.flops, total.read, total.written) == (0, 4 * 64 + 4 * 4, 4 * 64)


@pytest.mark.parametrize("with_kernels", [True, False])
def test_a_composite_is_one_operation(with_kernels):
    def body(x, weight):
        return hlo.exp(hlo.dot(x, weight, contract=([1], [0])) * 2.0)

    def program(scribe):
        x = scribe.f32[2, 3].Parameter(parameter_number=0)
        weight = scribe.f32[3, 4].Parameter(parameter_number=1)
        doubled = hlo.composite("doubled", body)
        with scribe.scope("layer.0"):
            x = hlo.dot(doubled(x, weight), weight, contract=([1], [1]))
        with scribe.scope("layer.1"):
            return doubled(x, weight)

    facts = facts_of(compile_py_func(program), kernels=with_kernels)
    assert numbers(by_name(facts.ops)["doubled"]) == (2, 2 * (48 + 8 + 8), 2 * (24 + 48), 2 * 32)
    assert [(cost.layer, cost.op, cost.flops) for cost in facts.costs] == [
        ("layer.0", "doubled", 64), ("layer.0", "dot", 48), ("layer.1", "doubled", 64),
    ]  # fmt: skip
    # No kernel runs it, so its product also needs memory; its result overwrites that.
    assert facts.temporaries == 2 * 64


def test_a_loop_counts_for_one_iteration():
    def loop(scribe):
        x = scribe.f32[4, 4].Parameter(parameter_number=0)
        weight = scribe.f32[4, 4].Parameter(parameter_number=1)

        def body(i, x):
            with scribe.scope("layer.0"):
                return [i + 1, hlo.dot(x, weight, contract=([1], [0]))]

        return hlo.while_loop(lambda i, _: i < 10, body, [hlo.constant(0, "s32"), x])[1]

    facts = facts_of(compile_py_func(loop))
    assert facts.loops == 1 and {cost.loops for cost in facts.costs} == {1}
    assert numbers(by_name(facts.ops)["dot"]) == (1, 128, 128, 64)
    assert by_name(facts.ops)["compare"].flops == 1  # the condition
    assert "for one iteration" in str(facts)


def test_of_branches_the_costliest_counts():
    def branches(scribe):
        x = scribe.f32[8].Parameter(parameter_number=0)
        return hlo.conditional(hlo.any(x > 0.0, 0), lambda x: x, lambda x: hlo.exp(x * x), x)

    ops = by_name(facts_of(compile_py_func(branches)).ops)
    assert ops["exponential"].flops == ops["multiply"].flops == ops["compare"].flops == 8


def test_a_result_in_the_memory_of_a_parameter():
    def update(scribe):
        cache = scribe.f32[1000, 16].Parameter(parameter_number=0, name="cache")
        new = scribe.f32[1, 16].Parameter(parameter_number=1, name="new")
        zero = hlo.constant(0, "s32")
        after = hlo.dynamic_update_slice(cache, new * 2.0, [zero, zero])
        after.set_alias_to(cache, must=True)
        return [new, after]

    facts = facts_of(compile_py_func(update))
    assert [p.kind for p in facts.parameters] == ["cache", "input"]
    assert [o.takes for o in facts.outputs] == [None, "cache"]
    assert facts.held == dict(weight=0, cache=64000, input=64)
    assert by_name(facts.ops)["dynamic-update-slice"].written == 64
    assert facts.temporaries == 64  # the update that is written


def test_arrays_are_there_from_first_to_last_use():
    def program(scribe):
        x = scribe.f32[64, 64].Parameter(parameter_number=0)
        first = hlo.dot(x, x, contract=([1], [0]))
        second = hlo.dot(first, x, contract=([1], [0]))
        third = hlo.dot(hlo.reshape(hlo.reshape(second, 4096), 64, 64), first, contract=([1], [0]))
        fourth = hlo.dot(third, third, contract=([1], [0]))
        return hlo.sum(fourth, [0, 1])

    # The first three are in memory together; the result is a number.
    assert facts_of(compile_py_func(program)).temporaries == 3 * 64 * 64 * 4


# Models.


@pytest.mark.parametrize("amp", ["f32", "bf16"])
@pytest.mark.parametrize("tokens", [1, 8])
@pytest.mark.parametrize("cls_config", [(GPT2ForSampling, GPT2), (LlamaForSampling, LLAMA)], ids=["gpt2", "llama"])
def test_products_of_linear_layers(cls_config, tokens, amp):
    engine, paged = slots(*cls_config, amp=amp), decoder(*cls_config, amp=amp)
    facts = facts_of(StepKey(1, tokens, 64).written(engine.programs, engine.programs.whole))
    matrices = [row for row in facts_of_model(engine).weights if len(row.whole) == 2 and row.name.endswith(".weight")]
    head = sum(np.prod(row.whole) for row in matrices if row.layers == 1)  # computed for the last token alone
    layers = sum(np.prod(row.whole) * row.layers for row in matrices) - head
    assert by_name(facts.ops)["linear"].products == 2 * (layers * tokens + head)
    of_last = [np.prod(row.whole) for row in matrices if row.layers > 1 and row.name.split(".")[-2] not in "qkv"]
    unread = (tokens - 1) * sum(of_last)
    for hidden in (True, False):  # if not, the last layer makes queries, keys and values of all tokens, and no more
        key = TokensKey(tokens, 1, 1, 1, 0, hidden)
        of_pages = by_name(facts_of(key.written(paged.programs, paged.programs.whole)).ops)
        assert of_pages["linear"].products == 2 * (layers * tokens + head - (0 if hidden else unread))
    of_all = facts_of(HeadKey(1, tokens).written(engine.programs, Segment(False, (), True)))
    assert by_name(of_all.ops)["linear"].products == 2 * head * tokens


@pytest.mark.parametrize("degree", [1, 2])
def test_weights_are_what_is_held(degree):
    model = GPT2ForSampling.from_pretrained(
        TINY_KJV, n_positions=64, tp_degree=degree, neuron_config=NeuronConfig(tokens_per_dispatch=0)
    )
    before = facts_of_model(decoder(GPT2ForSampling, model.config.to_dict(), n_positions=64, tp_degree=degree))
    model.to_neuron()
    facts, held = facts_of_model(model.decoder), model.decoder.memory_use
    token = by_name(facts.programs)["step_tokens1_sequences1_samples1"]
    assert token.held["weight"] * degree == facts.weight_bytes * degree == before.weight_bytes * degree == held.weights
    assert by_name(facts.programs)["copy"].held["cache"] * degree == facts.caches * degree == held.caches
    assert token.held["cache"] == facts.caches + model.config.vocab_size  # and which tokens the sequence has
    assert facts.weight_count == sum(np.prod(row.whole) * row.layers for row in facts.weights if row.same_as is None)
    assert {row.name: row.same_as for row in facts.weights if row.same_as} == {"head.weight": "embed"}
    assert {row.name: row.same_as for row in token.parameters if row.same_as} == {"head.weight": "embed"}
    weight = by_name(token.parameters)["layer.1.mlp.down.weight"]
    h = model.config.hidden_size
    assert (weight.whole, weight.share) == ([h, 4 * h], [h, 4 * h // degree])
    assert (weight.axis, weight.degree) == (1, degree)


def test_a_token_reads_its_weights_once_and_the_cache_as_far_as_it_looks():
    engine, paged = (make(LlamaForSampling, LLAMA, n_positions=[32, 64]) for make in (slots, decoder))
    keys = [StepKey(1, 1, width) for width in (64, 32)]
    wide, narrow = (facts_of(key.written(engine.programs, engine.programs.whole)) for key in keys)
    linear, attention = (by_name(narrow.ops)[name] for name in ("linear", "attention"))
    h, inner, kv = 64, 172, 16
    matrices = 3 * (2 * h * h + 2 * h * kv + 3 * h * inner) + 301 * h
    padded = 3 * (2 * 4 * h) + 3 * h  # 172 and 301 outputs in panels of 16
    assert matrices * 4 < linear.read < (matrices + padded * 2 + 3 * 40 * h) * 4 * 1.02
    of_cache = 3 * 2 * kv * 4
    assert by_name(wide.ops)["attention"].read - attention.read == 32 * of_cache
    assert attention.written == 3 * h * 4 + of_cache
    assert (by_name(wide.ops)["linear"], narrow.held) == (linear, wide.held)
    of_pages = by_name(facts_of(TokensKey(1, 1, 1, 1, 0).written(paged.programs, paged.programs.whole)).ops)
    assert 0 <= of_pages["paged_attention"].read - by_name(wide.ops)["attention"].read < of_cache
    assert of_pages["paged_attention"].written == attention.written


def test_states_of_sequences_are_read_and_written():
    def graph(scribe):
        sizes = (2, 1, 8), (4, 8), (9, 3, 8)
        x, weight, state = (scribe.f32[each].Parameter(parameter_number=i) for i, each in enumerate(sizes))
        table = scribe.s32[2, 5].Parameter(parameter_number=3)
        return list(short_convolution(x, weight, table, state, together=False))

    convolution = by_name(facts_of(compile_py_func(graph)).ops)["short_convolution"]
    own = 2 * 3 * 8 * 4  # of the nine places, those of two sequences
    assert convolution.read == (2 * 8 + 4 * 8 + 2 * 5) * 4 + own
    assert convolution.written == 2 * 8 * 4 + own


def test_equal_layers_are_one_row():
    facts = by_name(facts_of_model(decoder(GPT2ForSampling, GPT2, context_length_estimate=8)).programs)
    prompt = facts["step_tokens8_sequences1_samples1"]
    assert [(row.name, row.last, row.repeats) for row in prompt.layers if row.flops] == [
        ("(outside)", "", 1), ("embed", "", 1), ("layer.0", "layer.1", 2), ("layer.2", "", 1), ("head", "", 1),
    ]  # fmt: skip
    for key in ("flops", "products", "read", "written"):
        assert sum(row.repeats * getattr(row, key) for row in prompt.layers) == getattr(prompt.total, key)
        assert sum(getattr(row, key) for row in prompt.ops) == getattr(prompt.total, key)
    assert facts["step_tokens1_sequences1_samples1"].loops and not prompt.loops


def test_groups_of_layers_share_a_program():
    grouped = facts_of_model(decoder(GPT2ForSampling, GPT2, unroll=1, context_unroll=1, context_length_estimate=8))
    whole = by_name(facts_of_model(slots(GPT2ForSampling, GPT2, context_length_estimate=8)).programs)
    parts = [program for program in grouped.programs if program.name.startswith("step_rows1_active8")]
    assert [program.runs for program in parts] == [1, 3, 1]
    products = sum(program.runs * program.total.products for program in parts)
    assert products == whole["step_rows1_active8_width64"].total.products


TRUE = [
    (GPT2ForSampling, GPT2Config(n_layer=2)),
    (
        LlamaForSampling,
        LlamaConfig(
            num_hidden_layers=2, hidden_size=2048, intermediate_size=5632, num_attention_heads=32,
            num_key_value_heads=4, max_position_embeddings=2048,
        ),
    ),
]  # fmt: skip


def compared(engine, what, least, most):
    """Arguments and aliases are exact, temporaries within bounds."""
    if kernels.level() == "off":
        pytest.skip("XLA's own products take memory that is not foreseen")
    module = what.written(engine.programs, engine.programs.whole)
    facts, memory = facts_of(module), engine.runtime.compile(module).memory()
    assert sum(facts.held.values()) == memory.arguments
    assert sum(output.bytes for output in facts.outputs if output.takes) == memory.aliased
    assert least * memory.temporaries <= facts.temporaries <= most * memory.temporaries, what


SMALL = dict(n_positions=[128, 256], batch_size=2, prompt_batch_size=1)


@pytest.mark.parametrize("amp", ["f32", "bf16"])
@pytest.mark.parametrize("cls_config", TRUE, ids=["gpt2", "llama"])
@pytest.mark.few(1)
def test_memory_is_what_the_compiler_takes(cls_config, amp):
    """At the widths of published models, arguments and aliases are exact, temporaries as their docstring says."""
    bounds = {StepKey(1, 128, 128): (0.98, 1.02), StepKey(2, 1, 256): (0.6, 1.1), LoopKey(256, 8): (0.95, 1.02)}
    engine = slots(*cls_config, amp=amp, **SMALL)
    for what, limits in bounds.items():
        compared(engine, what, *limits)
    compared(decoder(*cls_config, amp=amp, **SMALL), TokensKey(128, 2, 2, 4, 0), 0.78, 1.02)


@pytest.mark.parametrize("amp", ["f32", "bf16"])
@pytest.mark.parametrize("cls_config", TRUE[:2], ids=["gpt2", "llama"])
def test_memory_of_a_short_step(cls_config, amp):
    compared(decoder(*cls_config, amp=amp, **SMALL), TokensKey(2, 2, 2, 4, 0), 0.6, 1.1)


INPUTS = {"step", "hidden", "rows", "seen", "logits", "pages", "sources", "source", "features"}
INPUTS |= {"numbers", "corners", "shares", "places", "length", "placed"}  # of images, and in steps
LACKING = dict(  # what default configurations lack, or have otherwise than layers of ours may
    gptneo=dict(attention_types=[[["global", "local"], 1]]),  # as many as layers
    qwen3vl=dict(  # its tower's default sizes are not those of its text half
        text_config=dict(num_hidden_layers=2),
        vision_config=dict(depth=2, out_hidden_size=4096, deepstack_visual_indexes=[1]),
    ),
    deepseekv2=dict(num_experts_per_tok=6, first_k_dense_replace=1),
    dots1=dict(n_routed_experts=16, n_shared_experts=1, num_experts_per_tok=4, first_k_dense_replace=1),
    glm4moe=dict(head_dim=128),
    lfm2moe=dict(layer_types=["conv", "full_attention"], num_dense_layers=1),
    granitemoehybrid=dict(layer_types=["mamba", "attention"]),
)
IN_FOLDERS = [name for name in families() if family_of(name).__module__.endswith(".model")]


@pytest.mark.parametrize(
    "family", [name if name in IN_FOLDERS else pytest.param(name, marks=pytest.mark.slow) for name in families()]
)
def test_every_family(family):
    """Every parameter is a weight, a cache or an input, also for two devices and quantized weights."""
    names = {re.sub("[^a-z0-9]", "", model_type): model_type for model_type in CONFIG_MAPPING}
    config = AutoConfig.for_model(names[family], num_hidden_layers=2, **LACKING.get(family, {}))
    switches = NeuronConfig(quant=QuantizationConfig("s8"), kv_cache_quant=KVCacheQuantizationConfig())
    context = None if family == "whisper" else 16  # its sources have one size
    options = dict(n_positions=48, context_length_estimate=context, tp_degree=2, neuron_config=switches)
    facts = facts_of_model(decoder(family_of(family), config, **options))
    for program in facts.programs:
        inputs = {parameter.name for parameter in program.parameters if parameter.kind == "input"}
        named = {name for name in inputs if not name.startswith("memory.")}
        assert named <= INPUTS
        assert program.total.products or program.name.startswith(("sample", "copy", "reorder", "redirect"))
    assert_fits(str(facts))


# As text, as JSON, as a page.


def assert_fits(text):
    assert max(map(len, text.splitlines())) <= 80


@pytest.fixture(scope="module")
def facts():
    return facts_of_model(decoder(GPT2ForSampling, GPT2, context_length_estimate=8, tp_degree=2))


def test_for_people(facts):
    text = str(facts)
    assert_fits(text)
    assert "gpt2, 102,432 parameters, f32, on each of 2 devices" in text
    assert re.search(r"layer\.0 … layer\.2 +× 3 ", text) and re.search(
        r"attn\.out\.weight +f32\[48,48\] +× 3 +axis 1 by 2 ", text
    )
    assert re.search(r"head\.weight .* = embed\n", text)
    assert str(facts.programs[0]) in text


def test_for_machines(facts):
    told = facts.as_dict()
    assert json.loads(json.dumps(told)) == told
    assert told["programs"][0] == facts.programs[0].as_dict()
    assert told["programs"][0]["total"]["flops"] == sum(cost.flops for cost in facts.programs[0].costs)


def test_the_text_of_a_module(facts):
    text = hlo_text(facts.programs[0].module)
    assert re.search(r"^  linear\S+ = .* call\(.*; calls linear\S+; .*  # layer\.2 linear linear\.py:\d+$", text, re.M)
    assert text.count("\nentry ") == 1 and len(re.findall("^  root ", text, re.M)) == text.count("{\n")


@pytest.mark.compiled_ahead
@pytest.mark.parametrize("weights", [True, False])
def test_an_artifact_says_the_same(tmp_path, weights):
    model = GPT2ForSampling.from_pretrained(TINY_KJV, n_positions=32, unroll=2)
    model.to_neuron()
    model.save(tmp_path, sharded_weights=weights)
    assert facts_of_artifact(tmp_path).as_dict() == facts_of_model(model.decoder).as_dict()
    next(tmp_path.glob("*.hlo.pb")).write_bytes(b"damaged")
    with pytest.raises(CheckpointError, match=r"\.hlo\.pb"):
        facts_of_artifact(tmp_path)


class WellFormed(HTMLParser):
    """Checks that every element is closed in order. Keeps the text of the one with the id "facts"."""

    VOID = frozenset({"meta", "input", "br"})

    def __init__(self):
        super().__init__()
        self.open, self.elements, self.facts, self.links = [], [], "", []

    def handle_starttag(self, tag, attrs):
        self.elements.append(tag)
        self.links += [value for name, value in attrs if name in ("src", "href", "action", "data", "poster")]
        if tag not in self.VOID:
            self.open.append((tag, dict(attrs).get("id")))

    def handle_endtag(self, tag):
        assert self.open.pop()[0] == tag

    def handle_data(self, data):
        if self.open and self.open[-1] == ("script", "facts"):
            self.facts += data


def parsed(text):
    parser = WellFormed()
    parser.feed(text)
    parser.close()
    assert not parser.open
    return parser


def test_the_page_is_whole(facts):
    text = page(facts)
    parser = parsed(text)
    assert json.loads(parser.facts) == facts.as_dict()
    assert parser.links == [] and not re.search(r"https?:|//\w+\.|@import|url\(", text)
    assert parser.elements.count("pre") == len(facts.programs)
    assert "pre" not in parsed(page(facts, hlo=False)).elements
    assert json.loads(parsed(page(facts.programs[0])).facts) == facts.programs[0].as_dict()


def hostile():
    """Facts in which every name is a hostile one."""

    def program(scribe):
        x = scribe.f32[4, 4].Parameter(parameter_number=0, name=HOSTILE)
        with scribe.scope(HOSTILE.replace("/", "")):
            return hlo.composite(HOSTILE, lambda x: hlo.dot(x, x, contract=([1], [0])))(x)

    module = compile_py_func(program)
    module.name = HOSTILE
    return facts_of(module)


def test_names_are_no_markup():
    text = page(hostile())
    parser = parsed(text)
    assert parser.elements.count("script") == 2 and "alert(" in parser.facts
    assert json.loads(parser.facts)["name"] == HOSTILE
    assert text.count("<script>") == 1  # the page's own


def in_browser(path, text):
    """The page's elements after its script has run."""
    (path / "page.html").write_text(text)
    return elements_of(path / "page.html", path / "profile")


def test_in_a_browser(facts, tmp_path):
    shown = in_browser(tmp_path, page(facts))
    assert 'data-ready="true"' in shown
    assert "102,432" in shown and "layer.0 × 3" in shown and "attn.out.weight" in shown
    assert all(f'<option value="{number}">{program.name}<' in shown for number, program in enumerate(facts.programs))


def test_bad_names_in_a_browser(tmp_path):
    shown = in_browser(tmp_path, page(hostile()))
    assert 'data-ready="true"' in shown
    assert shown.count("<script>") == 1 and shown.count("&lt;script&gt;alert(") >= 4
