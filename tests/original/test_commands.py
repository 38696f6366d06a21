"""The original's commands and helpers, run."""

import json
import sys

import pytest
import torch
from transformers import AutoTokenizer, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, OPTConfig

from transformers_neuronx import bucket, compiler, utils
from transformers_neuronx.errors import CheckpointError, InputError
from transformers_neuronx.gpt2.model import GPT2ForSampling
from transformers_neuronx.llama.model import LlamaForSampling
from transformers_neuronx.module import save_pretrained_split
from transformers_neuronx.original import demos, random_checkpoints, snapshots
from transformers_neuronx.pyhlo import hlo_pb2
from transformers_neuronx.testing.data import batch_all_lengths, batch_full_lengths, batch_varying_lengths
from transformers_neuronx.testing.validation import validate
from transformers_neuronx.weights.checkpoint import open_checkpoint

TINY_KJV, VOCABULARY = "examples/tiny-kjv", 1023


def run(monkeypatch, command, *arguments):
    monkeypatch.setattr(sys, "argv", ["command", *map(str, arguments)])
    command()


def test_gpt2_demo_saves_and_runs(monkeypatch, tmp_path, capsys):
    run(monkeypatch, demos.gpt2_main, "--model_name", TINY_KJV, "save", tmp_path / "split")
    assert (tmp_path / "split" / "pytorch_model.bin" / "key_to_filename.json").exists()
    capsys.readouterr()
    sizes = ("--batch_size", 2, "--n_positions", 24, "--tp_degree", 1)
    more = ("--print_latency", "--quantize", "--device", "cpu")
    run(monkeypatch, demos.gpt2_main, "--model_name", TINY_KJV, "run", tmp_path / "split", *sizes, *more)
    out, err = capsys.readouterr()
    lines = out.splitlines()
    assert sum(line.endswith(" ms") for line in lines) == 24 - len(
        AutoTokenizer.from_pretrained(TINY_KJV)(demos.PROMPT).input_ids
    )
    assert sum(line.startswith(demos.PROMPT) for line in lines) >= 2  # what is drawn after it may say it again
    assert "these have no effect here: --device cpu" in err


@pytest.mark.parametrize(
    ("options", "shown"),
    [
        ("--prompt_len 5 --simple_sample --benchmark --kv_cache_quant --batch_size 2", "tokens"),
        ("--prompt And --max_new_tokens 4 --do_sample --quant --context_length_estimate 8", "And"),
        ("--prompt_len 5 --beam 2 --batch_size 1 --max_length 9 --num_return_sequences 2", "tensor"),
    ],
)
def test_generation_demo(options, shown, monkeypatch, capsys):
    sizes = ("--n_positions", 24, "--tp_degree", 1)
    run(monkeypatch, demos.generation_main, "gpt2", "run", TINY_KJV, *sizes, *options.split())
    assert shown in capsys.readouterr().out


def test_random_checkpoints_of_sizes_alone(monkeypatch, tmp_path):
    config = OPTConfig(vocab_size=90, hidden_size=16, ffn_dim=24, num_hidden_layers=2, num_attention_heads=2)
    config.save_pretrained(tmp_path / "config")
    for folder, options in (("full", ()), ("empty", ("--empty",))):
        run(monkeypatch, random_checkpoints.opt_main, tmp_path / "config" / "config.json", tmp_path / folder, *options)
    full, empty = (open_checkpoint(tmp_path / folder) for folder in ("full", "empty"))
    assert {name: full.shape(name) for name in full} == {name: empty.shape(name) for name in empty}
    name = "model.decoder.layers.1.fc1.weight"
    assert torch.equal(empty.read(name), empty.read(name)) and 0.01 < empty.read(name).std() < 0.03
    assert not empty.read("model.decoder.layers.1.fc1.bias").any()
    path = (
        tmp_path
        / "empty"
        / "pytorch_model.bin"
        / json.loads((tmp_path / "empty" / "pytorch_model.bin" / "key_to_filename.json").read_text())[name]
    )
    for bad in ({}, dict(shape=[2, -1], torch_dtype="float32"), dict(shape=[2], torch_dtype="nonsense")):
        path.write_text(json.dumps(bad))
        with pytest.raises(CheckpointError, match="expected shape, torch_dtype and init_std"):
            open_checkpoint(tmp_path / "empty")


def test_a_converted_checkpoint_has_more_layers(monkeypatch, tmp_path, capsys):
    config = LlamaConfig(
        vocab_size=90, hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2
    )
    save_pretrained_split(LlamaForCausalLM(config), tmp_path / "one")
    run(monkeypatch, random_checkpoints.ckpt_converter, tmp_path / "one", tmp_path / "five", 5, "--init_std", 0.02)
    assert "5 layers" in capsys.readouterr().out
    model = LlamaForSampling.from_pretrained(tmp_path / "five", n_positions=32)
    model.to_neuron()
    assert model.model_config.n_layer == 5 and model([[1, 2, 3]]).isfinite().all()
    (tmp_path / "one" / "pytorch_model.bin" / "key_to_filename.json").write_text("{}")
    with pytest.raises(CheckpointError, match="no tensors of a first layer"):
        random_checkpoints.convert(tmp_path / "one", tmp_path / "none", 2)


def doubled(scribe):
    x = scribe.f32[2, 3].Parameter(parameter_number=0)
    n = scribe.s32[3].Parameter(parameter_number=1)
    return [scribe.f32[2, 3].Add(x, x), n]


def test_tensors_that_fit_a_module():
    module = compiler.compile_py_func(doubled)
    zeros, drawn = compiler.gen_zero_inputs(module), compiler.gen_randn_inputs(module, std=1.0, int_func=torch.ones)
    assert [(t.shape, t.dtype) for t in zeros] == [((2, 3), torch.float32), ((3,), torch.int32)]
    assert drawn[0].std() > 0 and drawn[1].tolist() == [1, 1, 1]
    assert compiler.gen_randn_inputs(module, treat_as_int=[0])[0].eq(0).all()
    assert compiler.gen_zero_input(module, 1).shape == (3,) and compiler.gen_zero_output(module, 0).shape == (2, 3)
    assert compiler.get_total_input_tensors_size(module) == 36
    assert compiler.find_input_names(module) == ["input0", "input1"]
    assert compiler.find_output_names(module) == ["output0", "output1"]
    assert (
        compiler.get_hash_module(module, None) != compiler.get_hash_module(module, "-O1")
        and len(compiler.hlo2metaneff(module).input_tensors) == 2
    )
    convert = compiler.DataTypeConverter()
    number = convert.torch2hlo(torch.bfloat16)
    assert (convert.hlo2torch(number), convert.torch2name(torch.bfloat16)) == (torch.bfloat16, "bf16")
    assert compiler.primitive2name(number) == "bf16" and "--model-type=transformer" in compiler.get_compiler_flags()


def test_a_snapshot_holds_module_and_arguments(monkeypatch, tmp_path):
    module = compiler.compile_py_func(doubled)
    compiler.dump_proto(module, tmp_path / "module.pb")
    compiler.dump_proto_str(module, tmp_path / "module.txt")
    run(monkeypatch, snapshots.main_randn, tmp_path / "module.pb", tmp_path / "snapshot.pb", "--int", "ones")
    fields = list(fields_of((tmp_path / "snapshot.pb").read_bytes()))
    assert [number for number, _ in fields] == [1, 2, 2]
    [(number, content)] = fields_of(fields[0][1])
    assert number == 1 and hlo_pb2.HloModuleProto.FromString(content) == module
    literals = [hlo_pb2.LiteralProto.FromString(content) for _, content in fields[1:]]
    assert len(literals[0].f32s) == 6 and list(literals[1].s32s) == [1, 1, 1]
    assert "doubled" in (tmp_path / "module.txt").read_text()


def fields_of(data):
    """Read the fields of bytes of a message, as protobuf's format has them."""
    at = 0
    while at < len(data):
        number, size, shift = data[at] >> 3, 0, 0
        at += 1
        while True:
            size |= (data[at] & 127) << shift
            at, shift, more = at + 1, shift + 7, data[at] & 128
            if not more:
                break
        yield number, data[at : at + size]
        at += size


def test_sizes():
    assert bucket.token_sizes(300) == [128, 256, 300] and bucket.token_sizes([9, 3]) == [3, 9]
    assert bucket.context_sizes(None, [128, 300]) == [64, 150] and bucket.context_sizes(0) == []
    assert bucket.context_sizes(7) == [7] and bucket.context_sizes([5, 2]) == [2, 5]
    assert bucket.batch_sizes(3) == [3] and bucket.batch_sizes([4, 1]) == [1, 4]
    assert [bucket.find([4, 8], n) for n in (1, 4, 5, 9)] == [4, 4, 8, 8] and bucket.find([], 3) is None
    assert utils.power_of_two_bucket_sizes(128, 128) == [128] and utils.get_closest_pow2_bucket_size(129) == 128
    assert utils.round_up_to_divisor(9, 4) == 12 and utils.get_pad_size(9, 4) == 3
    assert utils.parse_amp("f32-u8-bf16") == ("f32", "u8", "bf16") and utils.parse_amp("bf16") == ("bf16", None, None)
    assert utils.pad(torch.ones(2, 3), [0, 1], [3, 3]).tolist() == [[1, 1, 1], [1, 1, 1], [0, 0, 0]]
    assert utils.pad(torch.ones(1, 2), 1, 3, left=True).tolist() == [[0, 1, 1]] and utils.pad_sizes([4], 0, 2) is None
    assert utils.pad_interleaved(torch.tensor([1, 2, 3]), 0, 9, 1, 2).tolist() == [1, 0, 0, 2, 0, 0, 3, 0, 0]
    utils.maybe_override_attributes(holder := type("Holder", (), {"a": 1, "b": 2})(), dict(a=5, b=None))
    assert (holder.a, holder.b) == (5, 2)
    with pytest.raises(KeyError, match="no attribute 'c'"):
        utils.maybe_override_attributes(holder, dict(c=1))


@pytest.mark.parametrize(
    "batch",
    [batch_all_lengths(VOCABULARY, 4), batch_varying_lengths(VOCABULARY, 3, 6), batch_full_lengths(VOCABULARY, 2, 5)],
)
@pytest.mark.few(1)
def test_validation_finds_the_same_tokens(batch):
    reference = GPT2LMHeadModel.from_pretrained(TINY_KJV).eval()
    model = GPT2ForSampling.from_pretrained(TINY_KJV, batch_size=len(batch[0]), n_positions=32)
    validate(reference, model, reference.config, batch, 12)


def test_loops_on_the_host_take_any_model():
    from transformers_neuronx.sampling import (
        filter_ngrams,
        sample_loop,
        sample_loop_llama,
        validate_no_repeat_ngram_size,
    )

    def model(ids, cache_ids, start_ids):
        return torch.nn.functional.one_hot((ids[:, -1] + 1) % 9, 9) * 30.0

    ids, seen = torch.tensor([[3], [6]]), []
    out, scores = sample_loop(model, ids, None, model(ids, None, None), 6, eos_token_id=8, top_k=2, output_scores=True)
    assert out.tolist() == [[3, 4, 5, 6, 7, 8], [6, 7, 8, 8, 8, 8]] and len(scores) == 5
    stop = lambda ids, _: seen.append(ids.shape) or len(seen) == 2  # noqa: E731
    out = sample_loop_llama(model, ids, None, model(ids, None, None), 6, -1, 3, 0.9, 0.5, stopping_criteria_list=stop)
    assert out.shape == (2, 3)
    filtered = filter_ngrams(2, torch.tensor([[1, 2, 1]]), torch.zeros(1, 9), 3)
    assert filtered.isinf().nonzero().tolist() == [[0, 2]]
    with pytest.raises(InputError, match="no_repeat_ngram_size must be a whole number above 0, got 0"):
        validate_no_repeat_ngram_size(0)
