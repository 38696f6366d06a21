"""Tokenizers as `AutoTokenizer` makes them, without what it imports for that."""

import json
import shutil
import subprocess
import sys

import gguf
import pytest
import transformers
from bundled import TINY_KJV
from gguf_files import write_gguf
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from transformers_neuronx.huggingface.tokenizers import tokenizer_in, tokenizer_of_gguf

VERSION = tuple(int(part) for part in transformers.__version__.split(".")[:2])
TEXTS = ("In the beginning God created", "  two  spaces\n\tand a line", "Ünïcode ✓ <|endoftext|> 12345", "")


def same(own, theirs):
    """Whether two tokenizers are the same, by all that they say of themselves and by what they do."""
    facts = [
        (type(each), str(each), each.backend_tokenizer.to_str(), each.chat_template, each.init_kwargs)
        for each in (own, theirs)
    ]
    assert facts[0] == facts[1]
    for text in TEXTS:
        ids = own(text).input_ids
        assert ids == theirs(text).input_ids and own.decode(ids) == theirs.decode(ids)
    return True


def changed(path, **values):
    """Change a JSON file; None removes a value."""
    content = json.loads(path.read_text()) | values
    path.write_text(json.dumps({name: value for name, value in content.items() if value is not None}))


@pytest.fixture
def directory(tmp_path):
    for path in TINY_KJV.glob("*.json"):
        shutil.copy(path, tmp_path)
    return tmp_path


@pytest.mark.parametrize("model_type", ["gpt2", "llama", "qwen2", "opt", "mistral", "gpt_neox", "deepseek_v3"])
@pytest.mark.parametrize("kind", ["GPT2Tokenizer", "GPT2TokenizerFast", "TokenizersBackend", "Qwen2Tokenizer", None])
def test_a_directory(directory, model_type, kind):
    changed(directory / "tokenizer_config.json", tokenizer_class=kind)
    (directory / "config.json").write_text(json.dumps(dict(model_type=model_type)))
    assert same(tokenizer_in(directory), AutoTokenizer.from_pretrained(directory))


def test_a_directory_without_configurations(directory):
    (directory / "config.json").write_text(json.dumps(dict(model_type="of_someone")))
    assert same(tokenizer_in(directory), AutoTokenizer.from_pretrained(directory))
    (directory / "tokenizer_config.json").unlink()
    (directory / "config.json").write_text(json.dumps(dict(model_type="gpt2")))
    assert same(tokenizer_in(directory), AutoTokenizer.from_pretrained(directory))


def with_tokens(path, model_type, **more):
    """Write a GGUF file of a model that has the tokens of the bundled checkpoint."""
    given = dict(vocab_size=1023, hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2)
    given |= dict(n_embd=64, n_layer=1, n_head=2) if model_type == "gpt2" else dict(num_key_value_heads=2)
    given |= dict(bos_token_id=1022, eos_token_id=1022, pad_token_id=None)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **given | more))
    bundled = json.loads((TINY_KJV / "tokenizer.json").read_text())["model"]
    tokens = [*sorted(bundled["vocab"], key=bundled["vocab"].get), "<|endoftext|>"]

    def change(writer):
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre("default")
        writer.add_token_list(tokens)
        writer.add_token_types([gguf.TokenType.NORMAL] * 1022 + [gguf.TokenType.CONTROL])
        writer.add_token_merges([each if isinstance(each, str) else " ".join(each) for each in bundled["merges"]])
        writer.add_chat_template("{{ messages[0]['content'] }}")

    write_gguf(path, model, change=change)
    return path


@pytest.mark.parametrize("model_type", ["gpt2", "llama", "qwen2", "qwen3", "mistral"])
def test_a_gguf_file(tmp_path, model_type):
    path = with_tokens(tmp_path / "model.gguf", model_type)
    own = tokenizer_of_gguf(path)
    assert same(own, AutoTokenizer.from_pretrained(tmp_path, gguf_file=path.name))
    assert own(TEXTS[0]).input_ids == AutoTokenizer.from_pretrained(TINY_KJV)(TEXTS[0]).input_ids


@pytest.mark.parametrize("model_type", ["lfm2", "olmo2", "qwen3_5_text", "qwen3_5_moe_text", "qwen3_next", "seed_oss"])
def test_a_gguf_file_whose_model_transformers_may_not_read(tmp_path, model_type):
    kinds = dict(layer_types=["full_attention"]) if model_type.startswith(("qwen3_5", "qwen3_next")) else {}
    own = tokenizer_of_gguf(with_tokens(tmp_path / "model.gguf", model_type, **kinds))
    assert own(TEXTS[0]).input_ids == AutoTokenizer.from_pretrained(TINY_KJV)(TEXTS[0]).input_ids
    assert own.decode(own(TEXTS[0]).input_ids) == TEXTS[0]


def test_a_gguf_file_beside_a_configuration_of_its_tokenizer(tmp_path):
    path = with_tokens(tmp_path / "model.gguf", "llama")
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(dict(tokenizer_class="GPT2Tokenizer")))
    assert same(tokenizer_of_gguf(path), AutoTokenizer.from_pretrained(tmp_path, gguf_file=path.name))


@pytest.mark.skipif(VERSION < (5, 23), reason="older versions of Transformers import it for any tokenizer")
def test_the_compiler_of_torch_is_not_imported(directory):
    call = f"""
import sys
from pathlib import Path
from transformers_neuronx.huggingface.tokenizers import tokenizer_in
tokenizer_in(Path({str(directory)!r}))
assert not {{"torch._dynamo", "torch.distributed.tensor"}} & {{*sys.modules}}
"""
    subprocess.run([sys.executable, "-c", call], check=True)
