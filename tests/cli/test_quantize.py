"""`quantize`: checkpoints in fewer bits, and what it tells of them."""

import json
import re

import pytest
from bundled import TINY_KJV
from transformers import XGLMConfig, XGLMForCausalLM

TEXT = (TINY_KJV / "heldout.txt").read_text()
FEW = ("--sequence-length", 128, "--samples", 24)


@pytest.fixture
def texts(tmp_path):
    """Write a text to calibrate with, and another one to measure perplexity on."""
    (tmp_path / "calibration.txt").write_text(TEXT[:20_000])
    (tmp_path / "measured.txt").write_text(TEXT[50_000:62_000])


def rise(printed):
    before, after = (float(number) for number in re.search(r"perplexity +([\d.]+), now ([\d.]+)", printed).groups())
    assert f"({100 * after / before - 100:+.2f} %)"[:5] in printed
    return after / before - 1


@pytest.mark.usefixtures("texts")
def test_a_calibration_lowers_the_perplexity(command):
    measured = ("--perplexity", "measured.txt", *FEW)
    nearest, said = command("quantize", TINY_KJV, "nearest", *measured)
    assert re.fullmatch(
        r"24 matrices   W4A16, groups of 128, rounded to nearest\n"
        r"weights       2\.77 MB, now 1\.04 MB\n"
        r"perplexity    [\d.]+, now [\d.]+ \(\+[\d.]+ %\), [\d,]+ tokens\n"
        r"saved to nearest in [\d.]+ s\n",
        nearest,
    )
    gptq, _ = command("quantize", TINY_KJV, "gptq", "--calibration", "calibration.txt", *measured)
    assert "groups of 128, GPTQ with 24 windows of 128 tokens\n" in gptq and said == ""
    assert 0 < rise(gptq) < 0.8 * rise(nearest) < 0.04
    text, _ = command("generate", "gptq", "And God said unto Moses,", "--top-k", 1, "-n", 4)
    assert text.startswith("And God said unto Moses, I ")


@pytest.mark.usefixtures("texts")
def test_the_last_tenth_of_the_calibration_is_measured(command):
    how = ("--scheme", "W4A16_ASYM", "--group-size", 32, "--calibration", "calibration.txt", *FEW)
    printed, _ = command("quantize", TINY_KJV, "few", *how, "--json")
    told = json.loads(printed)
    assert told["windows"] == 24 and told["group_size"] == 32 and told["matrices"] == 24
    assert 500 < told["perplexity"]["tokens"] < 900
    assert 0.95 < told["perplexity"]["after"] / told["perplexity"]["before"] < 1.05
    assert told["bytes"] < 0.45 * told["bytes_before"]


@pytest.mark.usefixtures("texts")
def test_a_family_of_transformers_alone(command, tmp_path):
    config = XGLMConfig(
        vocab_size=1023, d_model=32, num_layers=2, attention_heads=2, max_position_embeddings=64, ffn_dim=64
    )
    XGLMForCausalLM(config).save_pretrained("xglm")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / "xglm" / name).write_bytes((TINY_KJV / name).read_bytes())
    printed, said = command("quantize", "xglm", "few", "--scheme", "W8A16", "--calibration", "calibration.txt")
    assert printed.startswith("12 matrices   W8A16, GPTQ with 86 windows of 64 tokens\n")
    assert "perplexity" not in printed and said.startswith("perplexity is not measured: ")
    _, said = command("quantize", "xglm", "other", "--perplexity", "measured.txt", status=1)
    assert "model_type 'xglm'" in said and not (tmp_path / "other").exists()


@pytest.mark.parametrize(
    ("arguments", "status", "said"),
    [
        (("few", "--scheme", "W3A16"), 2, "the scheme must be one of W8A16, W4A16, W4A16_ASYM, FP8A16, got 'W3A16'"),
        ((".",), 2, "expected a new or an empty directory, found files in it; choose another one"),
        (("few", "--group-size", 96), 2, "h.0.attn.c_attn has 128 inputs, which are no whole groups of 96; choose a"),
        (("few", "--calibration", "absent.txt"), 1, "absent.txt: expected a regular file, with text, found nothing"),
        (("few", "--calibration", "short.txt"), 2, "tokens to calibrate with, expected a window of 512 or more; take"),
        (("few", "--perplexity", "latin.txt"), 2, "latin.txt must be text in UTF-8; got \\udce9 at character 5, which"),
        (("few", "--perplexity", "empty.txt"), 2, "empty.txt: expected a text of 2 tokens or more, got 0; take a long"),
    ],
    ids=str,
)
def test_what_is_wrong_is_said_before_anything_is_written(arguments, status, said, command, tmp_path):
    (tmp_path / "short.txt").write_text("And it came to pass")
    (tmp_path / "latin.txt").write_bytes("une \xe9".encode("latin-1"))
    (tmp_path / "empty.txt").write_text("")
    printed, told = command("quantize", TINY_KJV, *arguments, status=status)
    assert printed == "" and said in told, told
    assert not (tmp_path / "few").exists()


def test_ctrl_c_leaves_nothing(command, tmp_path, monkeypatch):
    def stopped(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("transformers_neuronx.weights.quantizing.rounded", stopped)
    assert command("quantize", TINY_KJV, "few", status=130) == ("", "stopped\n")
    assert not [*tmp_path.iterdir()]
