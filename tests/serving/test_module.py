"""Checkpoint files: formats round-trip, reading is lazy, damage has a message, a save is all or nothing."""

import json
import os
import pkgutil
import re
import resource
import shutil
import struct
from pathlib import Path

import pytest
import torch
from huggingface_hub import constants
from huggingface_hub.utils import filter_repo_objects
from safetensors.torch import load_file, save_file
from saves import fails_at, snapshot
from transformers import GPT2Config, GPT2LMHeadModel, MixtralConfig, MixtralForCausalLM

from transformers_neuronx.errors import CheckpointError
from transformers_neuronx.weights import directories
from transformers_neuronx.weights.checkpoint import open_checkpoint, open_weights, save_pretrained_split
from transformers_neuronx.weights.directories import load_config, resolve

MEBI = 2**20


def gpt2(tied=False, **options):
    torch.manual_seed(0)
    sizes = {"n_layer": 1, "n_embd": 16, "n_head": 2, "n_positions": 8, "vocab_size": 40}
    config = GPT2Config(**sizes, bos_token_id=0, eos_token_id=0, tie_word_embeddings=tied, **options)
    return GPT2LMHeadModel(config)


@pytest.fixture(scope="module")
def state():
    """The state dict of a model that mixes dtypes, as the documented `amp_callback` makes them."""
    model = gpt2()
    model.transformer.h.to(torch.bfloat16)
    model.lm_head.to(torch.float16)
    return model.state_dict()


def save_index(state, directory, pattern, save):
    names = sorted(state)
    shards = {pattern.format(1): names[::2], pattern.format(2): names[1::2]}
    for file, held in shards.items():
        save({name: state[name] for name in held}, directory / file)
    return {"metadata": {"total_size": 0}, "weight_map": {name: file for file, held in shards.items() for name in held}}


def save_safetensors(state, directory):
    save_file(state, directory / "model.safetensors")


def save_safetensors_index(state, directory):
    index = save_index(state, directory, "model-{:05}-of-00002.safetensors", save_file)
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))


def save_split(state, directory):
    """Save as the original library did: every tensor in its own file, tied or not."""
    split = directory / "pytorch_model.bin"
    split.mkdir()
    listing = {name: f"p{idx}.{name}" for idx, name in enumerate(state)}
    (split / "key_to_filename.json").write_text(json.dumps(listing, indent=2))
    for name, tensor in state.items():
        torch.save(tensor, split / listing[name])


def save_bin(state, directory):
    torch.save(state, directory / "pytorch_model.bin")


def save_bin_index(state, directory):
    index = save_index(state, directory, "pytorch_model-{:05}-of-00002.bin", torch.save)
    (directory / "pytorch_model.bin.index.json").write_text(json.dumps(index))


WRITERS = [save_safetensors, save_safetensors_index, save_split, save_bin, save_bin_index]
every_format = pytest.mark.parametrize("write", WRITERS)


def check_same(directory, state):
    with open_checkpoint(directory) as checkpoint:
        assert checkpoint.directory == directory
        assert checkpoint.names == set(state) and list(checkpoint) == sorted(state) and len(checkpoint) == len(state)
        for name, tensor in state.items():
            assert name in checkpoint
            assert checkpoint.shape(name) == tuple(tensor.shape)
            assert checkpoint.dtype(name) == tensor.dtype
            assert torch.equal(checkpoint.read(name), tensor)


def refused(directory, *words):
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(directory)
    for word in words:
        assert str(word) in str(caught.value)


# reading


@every_format
def test_round_trip(write, state, tmp_path):
    write(state, tmp_path)
    check_same(tmp_path, state)
    check_same(resolve(str(tmp_path)), state)


def resident(directory):
    """KiB of the files below `directory` that this process has mapped and touched."""
    kib, inside = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if re.match(r"[0-9a-f]+-[0-9a-f]+ ", line):
            inside = str(directory) in line
        elif inside and line.startswith("Rss:"):
            kib += int(line.split()[1])
    return kib


@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="needs Linux's map of resident pages")
@every_format
def test_only_what_is_asked_is_read(write, tmp_path):
    write({f"w{i}": torch.ones(MEBI // 4) for i in range(8)}, tmp_path)
    checkpoint = open_checkpoint(tmp_path)
    assert resident(tmp_path) < 128  # the kernel may map a few pages around a header
    tensor = checkpoint.read("w3")
    assert tensor.sum() == MEBI // 4
    assert 1024 <= resident(tmp_path) < 1024 + 512


@every_format
def test_tensors_outlive_the_checkpoint_and_writes_stay_private(write, state, tmp_path):
    write(state, tmp_path)
    with open_checkpoint(tmp_path) as checkpoint:
        tensor = checkpoint.read("transformer.ln_f.weight")
    tensor.fill_(7)
    check_same(tmp_path, state)
    with pytest.raises(CheckpointError, match=r"cannot read 'transformer.ln_f.weight', the checkpoint was closed"):
        checkpoint.read("transformer.ln_f.weight")


def test_the_first_format_wins(tmp_path):
    writers = [write for write in WRITERS if write is not save_bin]  # has the name of the split directory
    for value, write in enumerate(writers):
        write({"w": torch.full((2,), value), "other": torch.zeros(1)}, tmp_path)
    assert open_checkpoint(tmp_path).read("w")[0] == 0
    (tmp_path / "model.safetensors").unlink()
    assert open_checkpoint(tmp_path).read("w")[0] == 1
    (tmp_path / "model.safetensors.index.json").unlink()
    assert open_checkpoint(tmp_path).read("w")[0] == 2
    shutil.rmtree(tmp_path / "pytorch_model.bin")
    assert open_checkpoint(tmp_path).read("w")[0] == 3
    save_bin({"w": torch.full((2,), 4)}, tmp_path)
    assert open_checkpoint(tmp_path).read("w")[0] == 4


def test_unknown_tensor(state, tmp_path):
    save_bin(state, tmp_path)
    with pytest.raises(CheckpointError, match=f"{tmp_path}: no tensor 'nope' among the {len(state)}"):
        open_checkpoint(tmp_path).shape("nope")


def test_dtype_that_torch_lacks(tmp_path):
    write_header(tmp_path, {"w": entry(0, 12, 16, dtype="F6_E2M3")}, body=b"\0" * 12)
    with pytest.raises(CheckpointError, match=r"cannot read 'w' \(.*\); save it in a dtype that torch has"):
        open_checkpoint(tmp_path).read("w")


# damage


def write_header(directory, header, body=b"\0" * 16, length=None):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    length = struct.pack("<Q", len(text) if length is None else length)
    (directory / "model.safetensors").write_bytes(length + text + body)


def entry(start, stop, *shape, dtype="F32"):
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, stop]}


@pytest.mark.parametrize(
    ("header", "length", "reason"),
    [
        ({"a": entry(0, 8, 2), "b": entry(12, 16, 1)}, None, "invalid offset for tensor `b`"),
        ({"a": entry(0, 8, 2), "b": entry(4, 12, 2)}, None, "invalid offset for tensor `b`"),
        ({"a": entry(0, 8, 2)}, None, "not fully covered"),
        ({"a": entry(0, 16, 2)}, None, "invalid shape"),
        ({"a": entry(0, 16, 2**62, 2**62)}, None, "overflow"),
        ({"a": entry(0, 16, 4, dtype="Q9")}, None, "unknown variant `Q9`"),
        (b'{"a": ', None, "invalid JSON"),
        (b"[]", None, "invalid type"),
        ({"a": entry(0, 16, 4)}, 2**63, "header too large"),
    ],
)
def test_safetensors_header(header, length, reason, tmp_path):
    write_header(tmp_path, header, length=length)
    refused(tmp_path, f"{tmp_path}/model.safetensors: not a whole safetensors file", reason, "download or save it")


FIRST_FILES = ["model.safetensors", "model-00001-of-00002.safetensors", "pytorch_model.bin/p0.transformer.wte.weight"]
FIRST_FILES += ["pytorch_model.bin", "pytorch_model-00002-of-00002.bin"]


@pytest.mark.parametrize("keep", [0, 4, 0.5, -1])
@pytest.mark.parametrize(("write", "file"), list(zip(WRITERS, FIRST_FILES, strict=True)))
def test_cut_short_is_found_at_open(write, file, keep, state, tmp_path):
    write(state, tmp_path)
    whole = (tmp_path / file).read_bytes()
    (tmp_path / file).write_bytes(whole[: int(keep * len(whole)) if keep == 0.5 else keep])
    reason = "not a whole safetensors file" if "safetensors" in file else "truncated, damaged, or older than torch 1.6"
    refused(tmp_path, f"{tmp_path / file}: {reason}")


LISTINGS = {
    "model.safetensors.index.json": lambda listing: json.dumps({"weight_map": listing}),
    "pytorch_model.bin.index.json": lambda listing: json.dumps({"weight_map": listing}),
    "pytorch_model.bin/key_to_filename.json": json.dumps,
}


def write_listing(directory, path, text):
    listing = directory / path
    listing.parent.mkdir(exist_ok=True)
    listing.write_bytes(text.encode(errors="surrogatepass"))
    return listing


@pytest.mark.parametrize("path", LISTINGS)
@pytest.mark.parametrize("file", ["../secret", "/etc/passwd", "sub/file", "", ".", "..", "\0", "\ud800"])
def test_listed_files_are_plain_names(path, file, tmp_path):
    listing = write_listing(tmp_path, path, LISTINGS[path]({"h.0.weight": file}))
    refused(tmp_path, f"{listing}: 'h.0.weight' is listed in {file!r}; expected a plain name next to the listing")


@pytest.mark.parametrize("path", LISTINGS)
@pytest.mark.parametrize(
    ("file", "found"),
    [
        ("gone", "nothing"),
        ("x" * 5000, "nothing"),
        ("dangling", "a dangling link"),
        ("pipe", "a special file"),
        ("folder", "a directory"),
    ],
    ids=["gone", "long", "dangling", "pipe", "folder"],
)
def test_listed_files_are_regular(path, file, found, tmp_path):
    listing = write_listing(tmp_path, path, LISTINGS[path]({"h.0.weight": file}))
    (listing.parent / "dangling").symlink_to("nowhere")
    (listing.parent / "folder").mkdir()
    os.mkfifo(listing.parent / "pipe")
    refused(tmp_path, f"{file}: expected a regular file, which {listing.name} lists for tensor 'h.0.weight'", found)


@pytest.mark.parametrize("path", LISTINGS)
@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ('{"weight_map": {"a": "f", "a": "g"}, "b": {"a": "f", "a": "g"}}', "not valid JSON ('a' occurs twice)"),
        ('{"weight_map": {"a": 1}}', "from tensor name to file name"),
        ('{"weight_map": ["a"]}', "from tensor name to file name"),
        ('{"weight_map": ', "not valid JSON"),
        ("[" * 100_000, "not valid JSON"),
        ("[]", "expected a JSON object, got list"),
        ("\ud800", "not valid JSON"),
    ],
)
def test_broken_listing(path, text, reason, tmp_path):
    refused(tmp_path, write_listing(tmp_path, path, text), reason)


@pytest.mark.parametrize("write", [save_safetensors_index, save_bin_index])
def test_tensor_missing_from_its_shard(write, state, tmp_path):
    write(state, tmp_path)
    index = next(tmp_path.glob("*.index.json"))
    content = json.loads(index.read_text())
    shard = content["weight_map"]["lm_head.weight"]
    content["weight_map"]["lm_head.extra"] = shard
    index.write_text(json.dumps(content))
    refused(tmp_path, index, f"'lm_head.extra' should be in {shard}, which does not hold it")


def test_missing_shard(state, tmp_path):
    save_safetensors_index(state, tmp_path)
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    refused(tmp_path, tmp_path / "model-00002-of-00002.safetensors", "lists for tensor 'transformer.h", "found nothing")


class Malicious:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return (Path.touch, (self.path,))


@pytest.mark.parametrize("write", [save_split, save_bin, save_bin_index])
def test_pickles_are_not_executed(write, tmp_path):
    trap = tmp_path / "executed"
    write({"w": Malicious(trap), "v": torch.zeros(1)}, tmp_path)
    refused(tmp_path, "a pickle of more than plain tensors, which will not be executed", "convert it to safetensors")
    assert not trap.exists()


@pytest.mark.parametrize(
    ("content", "options", "reason"),
    [
        ({"w": torch.zeros(1)}, {"_use_new_zipfile_serialization": False}, "older than torch 1.6"),
        ({"model": {"w": torch.zeros(1)}}, {}, "expected tensors by name, got dict at 'model'"),
        ({3: torch.zeros(1)}, {}, "expected tensors by name, got Tensor at 3"),
        (torch.zeros(1), {}, "expected a state dict, got Tensor"),
    ],
)
def test_bin_that_is_no_state_dict(content, options, reason, tmp_path):
    torch.save(content, tmp_path / "pytorch_model.bin", **options)
    refused(tmp_path, tmp_path / "pytorch_model.bin", reason)


def test_split_entries(tmp_path):
    save_split({"w": {"not": "a tensor"}}, tmp_path)
    refused(tmp_path, "p0.w: expected tensors by name, got dict at 'w'")
    listing = tmp_path / "pytorch_model.bin" / "key_to_filename.json"
    listing.write_text('{"w": "p0.w.empty_json"}')
    (tmp_path / "pytorch_model.bin" / "p0.w.empty_json").write_text('{"shape": 3}')
    refused(tmp_path, "p0.w.empty_json: expected shape, torch_dtype and init_std of a tensor")
    listing.unlink()
    wanted = "a regular file, or a directory with key_to_filename.json"
    refused(tmp_path, f"pytorch_model.bin: expected {wanted}, found a directory")


def test_weights_that_the_original_has_split(tmp_path):
    for name in ("decoder_layer_0", "DecoderLMHead"):
        save_file({"weight*0": torch.zeros(2)}, tmp_path / f"{name}.safetensors")
    refused(tmp_path, tmp_path, "weights that AWS's library has split for its devices; load the checkpoint")


def test_parameters_in_a_bin_are_plain_tensors(tmp_path):
    save_bin({"w": torch.nn.Parameter(torch.zeros(2))}, tmp_path)
    assert not open_checkpoint(tmp_path).read("w").requires_grad


# finding


def test_a_dangling_link_does_not_fall_to_the_next_format(state, tmp_path):
    save_bin(state, tmp_path)
    (tmp_path / "model.safetensors").symlink_to("blob-that-was-pruned")
    refused(tmp_path, tmp_path / "model.safetensors", "found a dangling link")


@pytest.mark.parametrize("find", [resolve, load_config, open_checkpoint])
@pytest.mark.parametrize(
    "path",
    ["./gone", "../gone", "/gone/model", "~/gone-model", "a/b/c", Path("gone"), "gone/", "a/gone/", "not a name", ""],
)
def test_no_such_directory(find, path):
    with pytest.raises(CheckpointError) as caught:
        find(path)
    told = os.path.expanduser(path) or "''"
    assert str(caught.value) == (
        f"{told}: no such directory, and not a valid hub name such as 'owner/model'; check the path"
    )


def test_a_file_is_no_directory(tmp_path):
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(CheckpointError, match=r"expected a checkpoint directory, found a file; pass the directory"):
        resolve(tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors").unlink()
    refused(tmp_path, "no checkpoint here; expected one of model.safetensors, model.safetensors.index.json")


ADAPTER = dict(peft_type="LORA", base_model_name_or_path="owner/base")


@pytest.mark.parametrize("find", [load_config, open_checkpoint])
def test_a_directory_of_an_adapter_says_what_to_do(find, tmp_path):
    (tmp_path / "adapter_config.json").write_text(json.dumps(ADAPTER))
    (tmp_path / "adapter_model.safetensors").touch()
    with pytest.raises(CheckpointError) as refused:
        find(tmp_path)
    assert str(refused.value) == (
        f"{tmp_path}: expected a model, found an adapter (adapter_config.json) for owner/base; load that model with "
        f"from_pretrained(…, adapter={str(tmp_path)!r})"
    )
    (tmp_path / "adapter_config.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"\(adapter_config.json\); load its model with"):
        find(tmp_path)


@pytest.mark.parametrize("find", [load_config, open_checkpoint, open_weights])
@pytest.mark.parametrize("name", ["tiny.Q4_1.gguf", "weights.bin"])
def test_a_file_of_gguf_is_read_as_one(find, name, tmp_path):
    path = tmp_path / name
    path.write_bytes(b"GGUF\3\0\0\0")
    with pytest.raises(CheckpointError, match=r"the number of tensors and values would end at 16, behind the end"):
        find(path)
    if path.suffix == ".gguf":
        with pytest.raises(CheckpointError, match=re.escape(f"{path}: the number of tensors")):
            find(tmp_path)


def test_what_is_beside_a_checkpoint_does_not_matter(state, tmp_path):
    save_safetensors(state, tmp_path)
    (tmp_path / "tiny.gguf").touch()
    (tmp_path / "adapter_config.json").write_text("{}")
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    assert load_config(tmp_path) == {"model_type": "gpt2"}
    check_same(tmp_path, state)


def test_home(state, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "tiny").mkdir()
    assert resolve("~/tiny") == tmp_path / "tiny"


@pytest.fixture
def hub_cache(tmp_path, monkeypatch):
    """An offline hub cache with one model, laid out as the hub client does: links into blobs."""
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    repository, commit = tmp_path / "models--owner--tiny", "0" * 40
    for folder in ("refs", "blobs", f"snapshots/{commit}"):
        (repository / folder).mkdir(parents=True)
    (repository / "refs" / "main").write_text(commit)
    return repository / "snapshots" / commit


@pytest.mark.parametrize("write", [save_safetensors, save_safetensors_index, save_bin, save_bin_index])
def test_hub_model_in_the_cache(write, state, hub_cache):
    write(state, hub_cache)
    (hub_cache / "config.json").write_text('{"model_type": "gpt2"}')
    for idx, file in enumerate(list(hub_cache.iterdir())):
        blob = hub_cache.parent.parent / "blobs" / str(idx)
        file.rename(blob)
        file.symlink_to(os.path.relpath(blob, hub_cache))
    assert load_config("owner/tiny") == {"model_type": "gpt2"}
    assert resolve("owner/tiny") == hub_cache
    with open_checkpoint("owner/tiny") as checkpoint:
        assert torch.equal(checkpoint.read("lm_head.weight"), state["lm_head.weight"])


@pytest.mark.parametrize("name", ["owner/other", "other"])
def test_hub_model_out_of_reach(name, hub_cache):
    message = f"{name!r} is neither a local directory nor a hub model that is cached or reachable"
    with pytest.raises(CheckpointError, match=message):
        resolve(name)


@pytest.mark.parametrize("safe", [True, False])
def test_pickles_are_downloaded_only_without_safetensors(safe, tmp_path, monkeypatch):
    config = {"config.json", "generation_config.json"}
    safetensors = {"model-00001-of-00001.safetensors", "model.safetensors.index.json"}
    pickles = {"pytorch_model.bin.index.json", "pytorch_model-00001-of-00001.bin"}
    others = {"README.md", "onnx/model.safetensors", "consolidated.safetensors", "tf_model.h5", "run.py"}
    offered = config | pickles | others | (safetensors if safe else set())

    def download(name, allow_patterns, ignore_patterns, cache_dir):
        for file in filter_repo_objects(offered, allow_patterns=allow_patterns, ignore_patterns=ignore_patterns):
            (tmp_path / file).touch()
        return str(tmp_path)

    monkeypatch.setattr(directories, "snapshot_download", download)
    assert {entry.name for entry in resolve("owner/model").iterdir()} == config | (safetensors if safe else pickles)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (None, "expected a regular file, found nothing"),
        ("{", "not valid JSON"),
        ("[1]", "expected a JSON object, got list"),
    ],
)
def test_broken_config(text, reason, tmp_path):
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    with pytest.raises(CheckpointError, match=f"{tmp_path / 'config.json'}: {reason}"):
        load_config(tmp_path)


# saving


def split_files(directory):
    return json.loads((directory / "pytorch_model.bin" / "key_to_filename.json").read_text())


def test_save_keeps_each_dtype(tmp_path):
    model = gpt2()
    model.transformer.h.to(torch.bfloat16)
    save_pretrained_split(model, tmp_path / "new" / "model")
    check_same(tmp_path / "new" / "model", model.state_dict())
    config = load_config(tmp_path / "new" / "model")
    assert (config["model_type"], config["architectures"], config["dtype"]) == ("gpt2", ["GPT2LMHeadModel"], "float32")
    assert model.config.architectures is None
    entries = {entry.name for entry in (tmp_path / "new" / "model").iterdir()}
    assert entries == {"config.json", "generation_config.json", "pytorch_model.bin"}


def test_tied_tensors_are_written_once(tmp_path):
    model = gpt2(tied=True)
    save_pretrained_split(model, str(tmp_path))
    check_same(tmp_path, model.state_dict())
    files = split_files(tmp_path)
    assert files["lm_head.weight"] == files["transformer.wte.weight"]
    assert re.fullmatch(r"p\d+\.lm_head\.weight|p\d+\.transformer\.wte\.weight", files["lm_head.weight"])
    assert len(list((tmp_path / "pytorch_model.bin").iterdir())) == len(set(files.values())) + 1 == len(files)


def test_files_load_as_the_original_did(tmp_path):
    model = gpt2(tied=True)
    save_pretrained_split(model, tmp_path)
    for name, file in split_files(tmp_path).items():
        loaded = torch.load(tmp_path / "pytorch_model.bin" / file, weights_only=True)
        assert type(loaded) is torch.Tensor and torch.equal(loaded, model.state_dict()[name])


@pytest.mark.parametrize("view", [lambda whole: whole[:4], lambda whole: whole[:16].T], ids=["slice", "transposed"])
def test_views_do_not_drag_their_storage(view, tmp_path):
    model = gpt2()
    model.transformer.ln_f.extra = torch.nn.Parameter(view(torch.randn(MEBI // 64, 16)))
    save_pretrained_split(model, tmp_path)
    check_same(tmp_path, model.state_dict())
    file = tmp_path / "pytorch_model.bin" / split_files(tmp_path)["transformer.ln_f.extra"]
    assert file.stat().st_size < 8192 and open_checkpoint(tmp_path).read("transformer.ln_f.extra").is_contiguous()


def test_names_are_those_of_transformers_own_checkpoints(tmp_path):
    sizes = {"hidden_size": 16, "intermediate_size": 8, "num_hidden_layers": 1, "vocab_size": 40}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "num_local_experts": 2}
    model = MixtralForCausalLM(MixtralConfig(**sizes, **heads))
    model.save_pretrained(tmp_path / "hf")
    save_pretrained_split(model, tmp_path / "split")
    check_same(tmp_path / "split", load_file(tmp_path / "hf" / "model.safetensors"))


def test_save_replaces_an_earlier_checkpoint_and_keeps_other_files(tmp_path):
    (tmp_path / "tokenizer.json").write_text("kept")
    save_bin({"old": torch.zeros(1)}, tmp_path)
    save_pretrained_split(gpt2(), tmp_path)
    (tmp_path / "pytorch_model.bin" / "stray").touch()
    model = gpt2(n_inner=8)
    save_pretrained_split(model, tmp_path)
    check_same(tmp_path, model.state_dict())
    assert load_config(tmp_path)["n_inner"] == 8
    assert not (tmp_path / "pytorch_model.bin" / "stray").exists()
    entries = {entry.name for entry in tmp_path.iterdir()}
    assert entries == {"config.json", "generation_config.json", "pytorch_model.bin", "tokenizer.json"}
    assert (tmp_path / "tokenizer.json").read_text() == "kept"


def test_a_model_may_be_saved_over_the_files_it_was_read_from(tmp_path):
    model = gpt2()
    wanted = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    save_pretrained_split(model, tmp_path)
    with open_checkpoint(tmp_path) as checkpoint:
        model.load_state_dict({name: checkpoint.read(name) for name in checkpoint}, assign=True)
    save_pretrained_split(model, tmp_path)
    check_same(tmp_path, wanted)


@pytest.mark.parametrize("write", [save_safetensors, save_safetensors_index])
def test_save_beside_safetensors_is_refused(write, state, tmp_path):
    write(state, tmp_path)
    before = snapshot(tmp_path)
    with pytest.raises(CheckpointError, match=r"model.safetensors.* would be loaded instead of the split checkpoint"):
        save_pretrained_split(gpt2(), tmp_path)
    assert snapshot(tmp_path) == before


def test_meta_tensors_cannot_be_saved(tmp_path):
    model = gpt2()
    model.transformer.ln_f.to("meta")
    with pytest.raises(CheckpointError, match=r"cannot save 'transformer.ln_f.weight': it is on the meta device"):
        save_pretrained_split(model, tmp_path / "model")
    assert not (tmp_path / "model").exists()


def fill(directory, earlier):
    if earlier != "nothing":
        directory.mkdir(parents=True)
        (directory / "tokenizer.json").write_text("kept")
    if earlier == "single file":
        save_bin({"old": torch.zeros(1)}, directory)
    if earlier == "split":
        save_pretrained_split(gpt2(), directory)


RENAMES = {"nothing": 3, "single file": 4, "split": 6}  # renames that the exchange needs; any of them may fail
STEPS = [("torch.save", 3, OSError), ("torch.save", 3, KeyboardInterrupt)]
STEPS += [("os.fsync", 0, OSError), ("os.fsync", -1, OSError)]
FAILURES = [(earlier, *step) for earlier in RENAMES for step in STEPS]
FAILURES += [(earlier, "os.rename", call, KeyboardInterrupt) for earlier in RENAMES for call in range(RENAMES[earlier])]


@pytest.mark.parametrize(("earlier", "function", "call", "error"), FAILURES)
def test_a_failed_save_leaves_what_was_there(earlier, function, call, error, tmp_path, monkeypatch):
    model = gpt2(n_inner=8)
    if call < 0:
        call += len(model.state_dict()) + len(["config", "generation_config", "listing", "tensors", "directory"])
    fill(tmp_path / "new" / "model", earlier)
    before = snapshot(tmp_path)
    monkeypatch.setattr(function, fails_at(call, pkgutil.resolve_name(function), error))
    with pytest.raises(error):
        save_pretrained_split(model, tmp_path / "new" / "model")
    assert snapshot(tmp_path) == before


def test_a_full_disk_leaves_what_was_there(tmp_path):
    save_pretrained_split(gpt2(), tmp_path)
    before = snapshot(tmp_path)
    big = gpt2()
    big.transformer.ln_f.extra = torch.nn.Parameter(torch.zeros(MEBI))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (MEBI, limits[1]))
    try:
        with pytest.raises((OSError, RuntimeError)):
            save_pretrained_split(big, tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert snapshot(tmp_path) == before
