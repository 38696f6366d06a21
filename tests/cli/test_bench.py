"""`bench`: one line per size or load, and the same numbers as text, as JSON and in a figure."""

import json
import sys

import pytest
from bundled import TINY_KJV
from transformers import T5Config, T5ForConditionalGeneration

from transformers_neuronx.models.sampling import ForSampling
from transformers_neuronx.serving.engine import Engine

SIZES = ("-b", 1, "-b", 2, "--prompt", 5, "--prompt", 20, "--new", 6, "--rounds", 2)


def test_a_line_for_each_size(command, tmp_path):
    printed, _ = command("bench", TINY_KJV, *SIZES)
    heading, *lines = printed.splitlines()
    assert heading.split("  ") == [
        "batch", "prompt", "new", "first ms", "token p50 ms", "token p99 ms", "tokens per second"
    ]  # fmt: skip
    assert [line.split()[:3] for line in lines] == [
        ["1", "5", "6"],
        ["1", "20", "6"],
        ["2", "5", "6"],
        ["2", "20", "6"],
    ]
    assert max(map(len, printed.splitlines())) <= 80


def test_for_programs_and_drawn(command, tmp_path):
    printed, _ = command("bench", TINY_KJV, *SIZES, "--json", "--plot", "speed.svg")
    results = json.loads(printed)
    assert [(result["batch"], result["prompt"]) for result in results] == [(1, 5), (1, 20), (2, 5), (2, 20)]
    assert all(0 < result["token_p50_ms"] <= result["token_p99_ms"] and result["first_ms"] > 0 for result in results)
    drawn = (tmp_path / "speed.svg").read_text()
    assert "</svg>" in drawn and drawn.count('id="axes_') == 2


def test_without_matplotlib_nothing_is_measured(command, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    printed, said = command("bench", TINY_KJV, *SIZES, "--plot", "speed.svg", status=1)
    assert printed == "" and 'pip install "transformers-neuronx[plot]"' in said


@pytest.mark.parametrize("option", ["--prompt", "--new"])
def test_more_than_the_model_takes(command, option):
    _, said = command("bench", TINY_KJV, option, 5000, status=2)
    assert "is the longest sequence this model takes" in said


LOAD = ("--requests", 6, "--concurrency", 1, "--concurrency", 3, "--prompt", 5, "--prompt", 20, "--new", 6)


def test_requests_of_an_engine(command):
    printed, _ = command("bench", TINY_KJV, *LOAD)
    heading, *lines = printed.splitlines()
    assert " ".join(heading.split()) == "concurrency prompt new TTFT p50 ms p99 ms ITL p50 ms p99 ms tokens/s"
    assert [line.split()[:3] for line in lines] == [
        ["1", "5", "6"],
        ["1", "20", "6"],
        ["3", "5", "6"],
        ["3", "20", "6"],
    ]
    assert max(map(len, printed.splitlines())) <= 80


def test_figures_of_requests_agree(command, tmp_path, monkeypatch):
    running, submit = [], Engine.submit

    def counted(self, prompt, params):
        handle = submit(self, prompt, params)
        running.append((len(prompt), sum(other.finish_reason is None for other in self._handles.values())))
        return handle

    monkeypatch.setattr(Engine, "submit", counted)
    printed, _ = command("bench", TINY_KJV, *LOAD, "--json", "--plot", "load.svg")
    results = json.loads(printed)
    assert [(result["concurrency"], result["prompt"]) for result in results] == [(1, 5), (1, 20), (3, 5), (3, 20)]
    for result in results:
        assert result["requests"] == result["new"] == 6
        assert result["tokens_per_second"] * result["seconds"] == pytest.approx(36)
        assert 0 < result["ttft_p50_ms"] <= result["ttft_p99_ms"] and 0 < result["itl_p50_ms"] <= result["itl_p99_ms"]
        assert result["ttft_p99_ms"] + result["itl_p50_ms"] <= result["seconds"] * 1e3
    assert [length for length, _ in running] == [5] * 7 + [20] * 7 + [5] * 7 + [20] * 7
    at_once = [count for _, count in running]
    assert max(at_once[:14]) == 1 and max(at_once[14:]) == 3
    drawn = (tmp_path / "load.svg").read_text()
    assert "</svg>" in drawn and drawn.count('id="axes_') == 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--concurrency", 4), "--concurrency 4 needs --requests, the number of requests to send"),
        (("--requests", 4, "--concurrency", 5), "--concurrency must be at most --requests 4, got 5"),
        (("--requests", 4, "-b", 2), "--batch-size 2 does not go with --requests"),
        (("--requests", 4, "--rounds", 3), "--rounds 3 does not go with --requests"),
        (("--requests", 4, "--new", 5000), "is the longest sequence this model takes"),
    ],
)
def test_options_that_do_not_go_together(command, monkeypatch, options, message):
    monkeypatch.setattr(ForSampling, "to_neuron", None)
    printed, said = command("bench", TINY_KJV, *options, status=2)
    assert printed == "" and said.startswith("error: ") and message in said


def test_requests_of_a_model_with_an_encoder(command, tmp_path):
    sizes = dict(vocab_size=99, d_model=16, d_kv=4, d_ff=32, num_layers=1, num_heads=4)
    T5ForConditionalGeneration(T5Config(**sizes, decoder_start_token_id=0)).save_pretrained(tmp_path / "t5")
    printed, _ = command("bench", "t5", "--requests", 2, "--prompt", 7, "--new", 3, "--json")
    assert [result["requests"] for result in json.loads(printed)] == [2]
