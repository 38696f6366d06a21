"""The switches and names of the original library behave as docs/compatibility.md says."""

import dataclasses
import logging
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer

from transformers_neuronx import config, env
from transformers_neuronx.compiler import compile_py_func
from transformers_neuronx.config import (
    ContinuousBatchingConfig,
    GenerationConfig,
    KVCacheQuantizationConfig,
    NeuronConfig,
    QuantizationConfig,
    constants,
    switches,
)
from transformers_neuronx.config.sparse_attention import SlidingWindowAttnConfig, SparseAttnConfig
from transformers_neuronx.engine.rules import Rules
from transformers_neuronx.errors import ConfigError, GraphError, InputError
from transformers_neuronx.gpt2.model import GPT2ForSampling
from transformers_neuronx.original import dtypes, sampling_functions as sampling
from transformers_neuronx.original.stopping_criteria import MaxTimeCriteria, StoppingCriteria, StoppingCriteriaList
from transformers_neuronx.original.utils import batch_tokenize

ROOT = Path(__file__).parents[2]
TINY_KJV = ROOT / "examples" / "tiny-kjv"
GUIDE = (ROOT / "docs" / "compatibility.md").read_text()
# A value other than the default, for switches that are not booleans.
OTHER = {
    "runtime": "cpu",
    "workers": config.Workers(2),
    "on_device_generation": GenerationConfig(),
    "continuous_batching": ContinuousBatchingConfig(2),
    "padding_side": "right",
    "compilation_worker_count": 1,
    "quant": QuantizationConfig(),
    "kv_cache_quant": KVCacheQuantizationConfig(),
    "quant_dtype": "f8e4m3fn",
    "dequant_dtype": "f32",
    "quantize_method": "direct_cast",
    "no_quantize_list": ("mlp.down",),
    "group_size": 16,
    "stored": {"attn.q.weight": {"s8/32, f16": [0]}},
    "activation_dtype": "s8",
    "sparse_attn": SparseAttnConfig("window", True, SlidingWindowAttnConfig(8)),
    "cast_logits_dtype": "bfloat16",
    "group_query_attention": constants.GQA.REPLICATED_HEADS,
    "attention_layout": constants.LAYOUT_BSH,
    "collectives_layout": constants.Layout.BSH,
    "cache_layout": constants.LAYOUT_BSH,
    "all_reduce_dtype": "bfloat16",
    "sequence_parallel_norm_threshold": 4096,
    "mlp_in_weight_tiling_permute_order": [0, 1, 2, 3],
    "mlp_out_weight_tiling_permute_order": (2, 3, 1, 0),
    "max_num_seqs": 2,
    "batch_size_for_shared_caches": 2,
    "max_model_len": 64,
    "block_size": 16,
    "num_blocks": 8,
    "max_length": 64,
    "top_k": [1, 5],
    "top_p": [0.5, 1],
    "top_p_min_tokens": [1, 1],
    "global_top_k": 64,
    "eos_token_id": [2, 3],
    "temperature": [0.0, 0.7],
}


def table(heading):
    """Read a table of the guide: its first column, without backticks, and the second."""
    section = re.search(rf"^## `?{heading}`?\n(.*?)(?=^## |\Z)", GUIDE, re.S | re.M)[1]
    return re.findall(r"^\| `(.+?)` \| (.+?) \|", section, re.M)


def rows(*names):
    return [(name, *row) for name in names for row in table(f"transformers_neuronx.config.{name}")]


CLASSES = [
    "NeuronConfig", "ContinuousBatchingConfig", "GenerationConfig", "QuantizationConfig", "KVCacheQuantizationConfig",
]  # fmt: skip
# Other switches that a value other than the default needs.
NEEDED = {
    ("ContinuousBatchingConfig", "enable_chunked_prefill"): dict(optimized_paged_attention=True),
    ("QuantizationConfig", "quantize_method"): dict(quant_dtype="f8e4m3fn"),
    ("KVCacheQuantizationConfig", "quantize_method"): dict(quant_dtype="f8e4m3fn"),
}


@pytest.mark.parametrize("name", CLASSES)
def test_the_guide_has_every_switch_once(name):
    assert sorted(row for row, _ in table(f"transformers_neuronx.config.{name}")) == sorted(
        f.name for f in dataclasses.fields(getattr(config, name))
    )


@pytest.mark.parametrize(("name", "switch", "verdict"), rows(*CLASSES))
def test_switches_do_what_the_guide_says(name, switch, verdict):
    cls = getattr(config, name)
    [field] = [f for f in dataclasses.fields(cls) if f.name == switch]
    other = OTHER.get(switch, not field.default)
    needed = {"max_num_seqs": 2} if name == "ContinuousBatchingConfig" else {}
    needed |= NEEDED.get((name, switch), {})
    cls(**needed | {switch: field.default} if field.default is not None else needed)
    if verdict == "refused":
        with pytest.raises(ConfigError, match=f"^{switch} must be {field.default}: .+, got"):
            cls(**needed, **{switch: other})
    else:
        assert verdict in ("works", "no effect")
        assert (verdict == "no effect") == ("idle" in field.metadata)
        assert getattr(cls(**needed | {switch: other}), switch) == other


@pytest.mark.parametrize(("name", "verdict"), table("Saving and loading"))
def test_methods_are_there_as_the_guide_says(name, verdict):
    assert callable(getattr(GPT2ForSampling, name)) and verdict == "works"


def test_the_guide_has_every_variable_of_the_environment():
    variables = [value for value in vars(env).values() if isinstance(value, env.Variable)]
    assert table("Environment") == [(each.name, f"`{each.default}`" if each.default else "none") for each in variables]


@pytest.mark.parametrize(
    ("cls", "options", "message"),
    [
        (NeuronConfig, dict(padding_side="up"), "padding_side must be one of left, right, got 'up'"),
        (NeuronConfig, dict(attention_layout="SBH"), "attention_layout must be one of HSB, BSH, got 'SBH'"),
        (NeuronConfig, dict(group_query_attention="x"), "query_attention must be one of shard-over-heads, .* None"),
        (NeuronConfig, dict(fuse_qkv="yes"), "fuse_qkv must be one of False, True, got 'yes'"),
        (NeuronConfig, dict(all_reduce_dtype="f32"), "all_reduce_dtype must be one of float32, .* or None, got 'f32'"),
        (NeuronConfig, dict(compilation_worker_count=0), "worker_count must be .* at least 1, or None, got 0"),
        (NeuronConfig, dict(mlp_in_weight_tiling_permute_order=[0, 1, 3, 2]), "must be an order .* has 2 before 3"),
        (NeuronConfig, dict(mlp_out_weight_tiling_permute_order=None), "must be an order of the axes .*, got None"),
        (NeuronConfig, dict(on_device_generation={}), "generation must be a GenerationConfig or None, got {}"),
        (NeuronConfig, dict(continuous_batching=4), "must be a ContinuousBatchingConfig or None, got 4"),
        (
            NeuronConfig,
            dict(on_device_generation=GenerationConfig(), output_all_logits=True),
            "output_all_logits needs logits, but on_device_generation returns tokens",
        ),
        (ContinuousBatchingConfig, {}, "needs max_num_seqs, or batch_size_for_shared_caches .* None and None"),
        (
            ContinuousBatchingConfig,
            dict(max_num_seqs=2, batch_size_for_shared_caches=3),
            "needs max_num_seqs, .* 2 and 3",
        ),
        (ContinuousBatchingConfig, dict(max_num_seqs=0), "max_num_seqs must be a whole number of at least 1, .* got 0"),
        (GenerationConfig, dict(top_k=-1), "top_k must be a whole number of at least 0, or a list of .* None, got -1"),
        (GenerationConfig, dict(top_k=[5, 0.5]), r"top_k must be .*, got \[5, 0.5\]"),
        (GenerationConfig, dict(top_p=0), r"top_p must be a number in \(0, 1\], or a list of them, got 0"),
        (GenerationConfig, dict(temperature=[1, -1]), r"temperature must be a number of at least 0, .* got \[1, -1\]"),
        (GenerationConfig, dict(top_p_min_tokens=2), "top_p_min_tokens must be one of 0, 1, or a list of them, got 2"),
    ],
)
def test_values_are_checked_when_a_configuration_is_made(cls, options, message):
    with pytest.raises(ConfigError, match=message):
        cls(**options)


def test_continuous_batching_pads_on_the_right():
    made = NeuronConfig(continuous_batching=ContinuousBatchingConfig(max_num_seqs=2))
    assert made.padding_side == "right"
    assert made.continuous_batching.batch_size_for_shared_caches == 2


def test_values_are_checked_when_they_are_assigned_and_refused_ones_change_nothing():
    made = NeuronConfig()
    made.quant = QuantizationConfig(quant_dtype="s8")
    made.on_device_generation = GenerationConfig()
    for name, bad, message in (
        ("quant", 8, "^quant must be a QuantizationConfig or None, got 8"),
        ("output_all_logits", True, "output_all_logits needs logits"),
    ):
        before = getattr(made, name)
        with pytest.raises(ConfigError, match=message):
            setattr(made, name, bad)
        assert getattr(made, name) == before
    made.continuous_batching = ContinuousBatchingConfig(max_num_seqs=2)
    assert made.padding_side == "right"
    made.continuous_batching.batch_size_for_shared_caches = 3
    assert made.continuous_batching.max_num_seqs == 3
    with pytest.warns(UserWarning, match=r"NeuronConfig has no such arguments, .*: quantt \(did you mean quant\?\)"):
        made.quantt = None


def test_older_and_unknown_names_are_taken_with_a_warning():
    assert NeuronConfig(use_2d_cache_ids=True).padding_side == "right"
    assert NeuronConfig(lhs_aligned=False).padding_side == "left"
    with pytest.warns(
        UserWarning, match=r"no effect: grouped_query_attention \(did you mean group_query_attention\?\)"
    ):
        NeuronConfig(grouped_query_attention=constants.GQA.SHARD_OVER_HEADS)


def test_a_switch_without_effect_is_mentioned_once(caplog, monkeypatch):
    monkeypatch.setattr(switches, "_MENTIONED", set())
    tiles = [1, 2, 0, 3]
    with caplog.at_level(logging.WARNING):
        NeuronConfig(attention_layout="HSB", mlp_in_weight_tiling_permute_order=tiles)  # the defaults
        assert caplog.messages == []
        NeuronConfig(fuse_qkv=True, attention_layout="BSH")
        NeuronConfig(fuse_qkv=True, attention_layout="BSH")
        assert len(caplog.messages) == 1
        assert caplog.messages[0].endswith("change nothing here: attention_layout, fuse_qkv.")
        NeuronConfig(fuse_qkv=True, fuse_mlp=True)
        assert caplog.messages[1].endswith("change nothing here: fuse_mlp.")


@pytest.mark.parametrize(
    ("made", "expected"),
    [
        (dict(top_k=5), dict(top_k=1)),
        (dict(top_k=5, do_sample=True), dict(top_k=5, seed=None)),
        (dict(top_k=5, dynamic=True), dict(top_k=5)),
        (dict(top_k=None, do_sample=True), dict(top_k=0)),
        (dict(top_k=[0, 5, 300], do_sample=True, global_top_k=256), dict(top_k=[256, 5, 256])),
        (dict(top_k=5, do_sample=True, temperature=[0, 0.5]), dict(top_k=[1, 5], temperature=[1, 0.5])),
        (dict(deterministic=True), dict(seed=0)),
        (dict(temperature=None, top_p=0.5), dict(temperature=1, top_p=0.5)),
    ],
    ids=str,
)
def test_rules_of_a_generation_configuration(made, expected):
    rules = GenerationConfig(**made).rules()
    for name, value in expected.items():
        assert value is rules[name] if value is None else np.array_equal(rules[name], value)


def test_importing_the_package_is_cheap_and_its_names_come_when_asked_for():
    program = (
        "import sys, transformers_neuronx; assert 'torch' not in sys.modules;"
        "from transformers_neuronx import GQA, NeuronAutoModelForCausalLM, hlo; print(hlo.__name__)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout == "transformers_neuronx.hlo\n"


def test_element_types_by_their_names():
    def graph(scribe):
        return dtypes.to_pyhlo_type(scribe, "bfloat16")[2].Parameter(parameter_number=0)

    assert "bf16" in str(compile_py_func(graph)) or "BF16" in str(compile_py_func(graph))
    assert dtypes.to_torch_dtype("bf16") == torch.bfloat16
    assert dtypes.to_amp(torch.float16) == "f16"
    with pytest.raises(GraphError, match="unknown element type 'float32'"):
        dtypes.to_torch_dtype("float32")
    with pytest.raises(ConfigError, match=r"dtype must be one of torch.float32, .*, got torch.int8"):
        dtypes.to_amp(torch.int8)


class TestTokensChosenOnTheHost:
    SCORES = torch.tensor([[1.0, 4.0, 2.0, 3.0], [9.0, 0.0, 0.0, 0.0]])

    def test_greedy_by_default(self):
        assert sampling.select_tokens(self.SCORES).tolist() == [[1], [0]]

    def test_the_largest_in_order(self):
        values, ids = sampling.top_k_top_p_filtering(self.SCORES, top_k=3, top_p=None)
        assert values[0].tolist() == [4, 3, 2]
        assert ids[0].tolist() == [1, 3, 2]

    def test_the_fewest_that_reach_a_probability(self):
        # of 4, 3, 2, 1 the shares are 0.644, 0.237, 0.087 and 0.032
        for top_p, least, kept in ((0.6, 1, 1), (0.7, 1, 2), (0.9, 1, 3), (1.0, 1, 4), (0.6, 2, 2)):
            values, _ = sampling.top_k_top_p_filtering(self.SCORES, None, top_p, least)
            assert values[0].isfinite().sum() == kept
            assert values[1].isfinite().sum() == (4 if top_p == 1 else least)

    def test_draws_follow_the_probabilities(self):
        torch.manual_seed(0)
        drawn = sampling.select_tokens(self.SCORES[:1].repeat(4000, 1), top_k=2, temperature=0.5)
        assert set(drawn[:, 0].tolist()) == {1, 3}
        assert abs((drawn == 1).float().mean() - 0.881) < 0.02  # 1 / (1 + exp(-2))

    @pytest.mark.parametrize("bad", [dict(top_k=0), dict(top_k=1.5), dict(top_p=0.0), dict(temperature=0)], ids=str)
    def test_rules_that_are_none_are_refused(self, bad):
        with pytest.raises(InputError, match=f"^{next(iter(bad))} must be"):
            sampling.select_tokens(self.SCORES, **bad)


def test_the_program_of_the_guide_runs(monkeypatch):
    monkeypatch.chdir(ROOT)
    [program] = re.findall(r"^```python\n(.*?)^```", GUIDE, re.S | re.M)
    exec(program, {})


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(TINY_KJV)


@pytest.fixture(scope="module")
def model():
    made = GenerationConfig(eos_token_id=17, do_sample=True, top_k=5, deterministic=True)
    options = dict(n_positions=64, batch_size=2, context_length_estimate=16)
    model = GPT2ForSampling.from_pretrained(
        TINY_KJV, **options, neuron_config=NeuronConfig(on_device_generation=made, compilation_worker_count=1)
    )
    model.to_neuron()
    return model


def test_a_batch_is_tokenized_with_padding_on_the_left(tokenizer):
    texts = ["In the beginning God created", "Amen"]
    ids, start_ids = batch_tokenize(tokenizer, texts)
    assert tokenizer.pad_token == tokenizer.eos_token
    assert start_ids.tolist() == [0, ids.shape[1] - len(tokenizer(texts[1]).input_ids)]
    assert tokenizer.batch_decode(ids, skip_special_tokens=True) == texts
    assert batch_tokenize(tokenizer, texts[:1])[1] is None


class TestTokensChosenOnTheDevice:
    PROMPT = torch.tensor([[5, 6, 7], [8, 9, 10]])

    def test_a_loop_over_forward_and_sample_choose_the_same(self, model):
        tokens, start_ids = [self.PROMPT], torch.tensor([0, 1])
        tokens.append(model(self.PROMPT, None, start_ids))
        for column in range(3, 12):
            tokens.append(model(tokens[-1], torch.tensor([column]), start_ids))
        looped = torch.cat(tokens, 1)
        assert torch.equal(model.sample(self.PROMPT, 13, start_ids=start_ids, eos_token_override=-1), looped)
        same = model.sample(self.PROMPT, 13, start_ids=start_ids, top_k=1, eos_token_override=-1)
        assert torch.equal(same, looped), "as in the original, the configuration's rules outweigh arguments"
        greedy = model.sample(self.PROMPT, 13, start_ids=start_ids, rules=Rules(1), eos_token_override=-1)
        assert not torch.equal(greedy, looped)
        assert torch.equal(sampling.sample_greedy(model, self.PROMPT, start_ids, 13), greedy)

    def test_logits_are_there_for_who_asks(self, model):
        every, last = (model(self.PROMPT, output_all_logits=asked) for asked in (True, False))
        assert every.shape == (2, 3, 1023)
        torch.testing.assert_close(every[:, -1], last)

    def test_a_row_ends_where_the_configuration_says(self, model):
        free = model.sample(self.PROMPT, 40, eos_token_override=-1)
        end = free[0, 9].item()
        got = sampling.sample_tokens(
            model,
            self.PROMPT,
            sequence_length=40,
            config=GenerationConfig(eos_token_id=end, do_sample=True, top_k=5, deterministic=True),
        )
        first = (free[0, 3:] == end).nonzero()[0, 0] + 3
        assert torch.equal(got[0, : first + 1], free[0, : first + 1])
        assert (got[0, first:] == end).all()

    def test_the_functions_that_sample(self, model):
        start_ids = torch.tensor([0, 1])
        greedy = sampling.sample_greedy(model, self.PROMPT, start_ids, 20)
        for function in (sampling.simple_sample, sampling.sample_llama):
            assert torch.equal(function(model, self.PROMPT, start_ids, 20, eos_token_id=-1, top_k=1), greedy)
        tokens, scores = sampling.simple_sample(model, self.PROMPT, None, 5, top_k=1, output_scores=True)
        assert torch.equal(scores[1].argmax(1), tokens[:, 4])

    def test_stopping_criteria_of_either_kind(self, model):
        class LongEnough(StoppingCriteria):  # returns a boolean, as the original's did
            def __call__(self, input_ids, scores, **kwargs):
                return input_ids.shape[1] >= 9

        criteria = StoppingCriteriaList([MaxTimeCriteria(3600), LongEnough()])
        assert model.sample(self.PROMPT, 40, eos_token_override=-1, stopping_criteria_list=criteria).shape == (2, 9)


def test_log_softmax_comes_with_the_logits(model, monkeypatch):
    monkeypatch.setattr(model, "switches", NeuronConfig(log_softmax_scores=True))
    logits, scores = model([[5, 6, 7]])
    torch.testing.assert_close(scores.exp().sum(1), torch.ones(1))
    torch.testing.assert_close(scores, logits.log_softmax(1))
