"""What a start leaves out: completing a configuration again, writing modules again, programs that no call needs."""

import dataclasses
import subprocess
import sys
import threading
import time
import types

import numpy as np
import pytest
import torch
from transformers import CONFIG_MAPPING, GPT2Config, GPT2LMHeadModel, LlamaConfig

from transformers_neuronx import Engine, SamplingParams
from transformers_neuronx.config import attributes, kept
from transformers_neuronx.engine import compile_cache
from transformers_neuronx.engine.descriptions import modules_of
from transformers_neuronx.engine.store import ProgramStore
from transformers_neuronx.gpt2.model import GPT2ForSampling
from transformers_neuronx.serving.handles import await_news

pytestmark = pytest.mark.compiled_ahead


@pytest.fixture
def directory(tmp_path, monkeypatch):
    """An empty cache."""
    monkeypatch.setenv("NEURONX_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def checkpoint(tmp_path):
    config = GPT2Config(vocab_size=64, n_positions=64, n_embd=32, n_layer=2, n_head=2, eos_token_id=0)
    GPT2LMHeadModel(config).save_pretrained(tmp_path / "checkpoint")
    return tmp_path / "checkpoint"


def model_of(checkpoint, ahead=True, **options):
    model = GPT2ForSampling.from_pretrained(checkpoint, n_positions=64, context_length_estimate=[16, 32], **options)
    model.to_neuron(ahead)
    return model


# Configurations.


@pytest.fixture
def not_imported(monkeypatch):
    """As in a process that has not imported LLaMA's configuration."""
    monkeypatch.setattr(kept, "_imported", lambda model_type: False)


def completions(monkeypatch):
    """A list of the model types that Transformers is asked to complete from now on."""
    asked, complete = [], attributes._completed
    monkeypatch.setattr(attributes, "_completed", lambda given: asked.append(given["model_type"]) or complete(given))
    return asked


GIVEN = dict(model_type="llama", hidden_size=64, rope_theta=1e4, dtype="bfloat16", num_labels=3)


def test_a_completed_configuration_is_kept(directory, not_imported, monkeypatch):
    asked = completions(monkeypatch)
    first, second = attributes.with_defaults(GIVEN), attributes.with_defaults(GIVEN)
    assert first == second == LlamaConfig.from_dict(dict(GIVEN)).to_dict() and asked == ["llama"]
    assert second["id2label"] == {0: "LABEL_0", 1: "LABEL_1", 2: "LABEL_2"}  # numbers, not the strings of JSON
    attributes.with_defaults(GIVEN | dict(hidden_size=32))
    assert asked == ["llama"] * 2
    assert len([*directory.glob("configuration-*")]) == 2


@pytest.mark.parametrize("damage", [b"", b"{'a': ", b"\xff\xfe", b"[1, 2]", b"__import__('os').abort()", b"(" * 9999])
def test_a_damaged_one_is_completed_again(directory, not_imported, monkeypatch, damage):
    whole = attributes.with_defaults(GIVEN)
    [path] = directory.glob("configuration-*")
    path.write_bytes(damage)
    assert attributes.with_defaults(GIVEN) == whole
    asked = completions(monkeypatch)
    assert attributes.with_defaults(GIVEN) == whole and not asked  # it was written again


def test_what_is_no_literal_is_not_kept(directory, not_imported, monkeypatch):
    asked = completions(monkeypatch)
    for _ in range(2):
        assert attributes.with_defaults(GIVEN | dict(rms_norm_eps=float("inf")))["rms_norm_eps"] == float("inf")
    assert len(asked) == 2 and not [*directory.glob("configuration-*")]


def test_another_version_of_transformers_is_asked_again(directory, not_imported, monkeypatch):
    attributes.with_defaults(GIVEN)
    asked = completions(monkeypatch)
    monkeypatch.setattr(kept.metadata, "version", lambda name: "99.0")
    attributes.with_defaults(GIVEN)
    assert asked == ["llama"]


def test_classes_that_a_program_registers_are_asked_again(directory, not_imported, monkeypatch):
    class Wider(LlamaConfig):
        def __init__(self, **given):
            super().__init__(**given | dict(hidden_size=96))

    assert attributes.with_defaults(GIVEN)["hidden_size"] == 64
    CONFIG_MAPPING.register("llama", Wider, exist_ok=True)
    try:
        assert attributes.with_defaults(GIVEN)["hidden_size"] == 96
    finally:
        del CONFIG_MAPPING._extra_content["llama"]
    assert attributes.with_defaults(GIVEN)["hidden_size"] == 64


def test_without_a_cache_nothing_is_kept(directory, not_imported, monkeypatch):
    monkeypatch.setenv("NEURONX_CACHE", "off")
    asked = completions(monkeypatch)
    attributes.with_defaults(GIVEN), attributes.with_defaults(GIVEN)
    assert asked == ["llama"] * 2 and not directory.exists()


def test_where_the_class_is_imported_nothing_is_kept(directory, monkeypatch):
    asked = completions(monkeypatch)
    assert "transformers.models.llama.configuration_llama" in sys.modules
    attributes.with_defaults(GIVEN), attributes.with_defaults(GIVEN)
    assert asked == ["llama"] * 2 and not [*directory.glob("configuration-*")]


def test_a_second_start_imports_no_configuration(checkpoint, directory):
    load = f"""
import sys
from transformers_neuronx.gpt2.model import GPT2ForSampling
model = GPT2ForSampling.from_pretrained({str(checkpoint)!r}, n_positions=64)
model.to_neuron()
print("transformers" in sys.modules)
"""
    said = [subprocess.run([sys.executable, "-c", load], capture_output=True, text=True, check=True) for _ in range(2)]
    assert [each.stdout.split()[-1] for each in said] == ["True", "False"]


# Modules.


def written(monkeypatch):
    """A list of the names of programs that are written from now on."""
    names, write = [], ProgramStore.written

    def noted(self, key, segment):
        names.append(key.name)
        return write(self, key, segment)

    monkeypatch.setattr(ProgramStore, "written", noted)
    return names


def test_modules_are_written_once(checkpoint, directory, monkeypatch):
    names = written(monkeypatch)
    first = model_of(checkpoint)
    once = [*names]
    again = model_of(checkpoint)
    assert sorted(names) == sorted(once) and len({*names}) == len(names) > 5
    assert again.programs == first.programs
    prompt = torch.tensor([[5, 6, 7, 8]])
    assert again.sample(prompt, 20, top_k=1).tolist() == first.sample(prompt, 20, top_k=1).tolist()
    model_of(checkpoint, amp="bf16")
    assert sorted(names) == sorted(once * 2)


def test_modules_of_an_engine_are_written_once(checkpoint, directory, monkeypatch):
    model, tokens = model_of(checkpoint, ahead=False), []
    for rows in (4, 4, 2):
        names = written(monkeypatch)
        with Engine(model, rows=rows, step_tokens=16, cache_tokens=256) as engine:
            tokens.append(engine.submit([5, 6, 7], SamplingParams(max_tokens=9, temperature=0)).result())
        tokens.append(len(names))
        monkeypatch.undo()
        monkeypatch.setenv("NEURONX_CACHE_DIR", str(directory))
    assert tokens[0] == tokens[2] == tokens[4] and tokens[1] > 5 and tokens[3] == 0
    assert tokens[5] > 0  # those of other shapes


@pytest.mark.parametrize(
    "damage", [lambda data: b"", lambda data: data[:-9], lambda data: data[:-1] + bytes([data[-1] ^ 1])]
)
def test_a_damaged_module_is_written_again(checkpoint, directory, monkeypatch, damage):
    model_of(checkpoint)
    for path in directory.glob("*.hlo"):
        path.write_bytes(damage(path.read_bytes()))
    names = written(monkeypatch)
    model_of(checkpoint)
    assert len(names) == len([*directory.glob("*.hlo")])


def test_an_entry_that_is_no_module_is_written_again(checkpoint, directory, monkeypatch, caplog):
    before = compile_cache.WrittenModules(compile_cache.cache_of_user(".hlo"), "one model")
    compile_cache.warn_once.cache_clear()
    before.cache.write(before._key("step"), lambda: b"whole, but no module")
    assert before.read("step") is None and "is no module, writing it again" in caplog.text
    assert before.read("another") is None


def test_the_code_and_the_model_tell_modules_apart(checkpoint, directory, monkeypatch):
    model = model_of(checkpoint)
    decoder, own = model.decoder, modules_of(model.decoder)
    assert modules_of(model_of(checkpoint, batch_size=2).decoder).model != own.model
    monkeypatch.setattr("transformers_neuronx.engine.descriptions._own_code", lambda: "other")
    assert modules_of(decoder).model != own.model
    graph = types.SimpleNamespace(layer=decoder.family.graph.layer)
    monkeypatch.setattr(decoder, "family", dataclasses.replace(decoder.family, graph=graph))
    assert modules_of(decoder) is None  # code outside of the package, whose changes nobody would see


# Programs that are loaded when they are needed.


def loaded(model):
    return {program.name for program in model.decoder.store.stored.values() if program.is_loaded}


def test_a_call_loads_what_it_runs(checkpoint, directory):
    model = model_of(checkpoint)
    prompt, programs = torch.tensor([[5, 6, 7]]), loaded(model)
    wanted = model.sample(prompt, 20, top_k=1).tolist()
    assert programs == loaded(model) == set(model.programs)  # those that were compiled
    again = model_of(checkpoint)
    assert again.programs == model.programs and not loaded(again) and not again.metrics.held.temporaries
    assert again.sample(prompt, 20, top_k=1).tolist() == wanted
    used = {"step_tokens1_sequences1_samples1", "step_tokens16_sequences1_samples1"}
    assert loaded(again) == used < programs
    assert again.metrics.held.temporaries == max(
        program.executable.memory().temporaries for program in again.decoder.store.stored.values() if program.is_loaded
    )


def test_an_idle_engine_loads_the_others(checkpoint, directory):
    with Engine(model_of(checkpoint, ahead=False), rows=2, step_tokens=32) as engine:
        wanted = engine.submit([5, 6, 7], SamplingParams(max_tokens=8, temperature=0)).result()
    model = model_of(checkpoint, ahead=False)
    with Engine(model, rows=2, step_tokens=32, joined_tokens=32) as engine:
        assert engine.submit([5, 6, 7], SamplingParams(max_tokens=8, temperature=0)).result() == wanted
        deadline = time.monotonic() + 60
        while loaded(model) != set(model.programs):
            assert time.monotonic() < deadline, set(model.programs) - loaded(model)
            time.sleep(0.01)
    assert not model.decoder.store.load_one()


def test_news_ends_what_an_idle_engine_does_meanwhile():
    turn, loads = threading.Condition(), []
    await_news(turn, lambda: len(loads) == 2, lambda: not loads.append("one"))
    assert len(loads) == 2
    await_news(turn, lambda: True, lambda: pytest.fail("there is something to do"))
    threading.Timer(0.05, lambda: (loads.append("news"), turn.acquire(), turn.notify(), turn.release())).start()
    await_news(turn, lambda: "news" in loads, lambda: bool(loads.append("last")))
    assert loads.count("last") == 1, "it is not asked again when it has nothing more to do"


# Programs that a call needs.


def test_programs_for_prompts_of_a_length(checkpoint):
    whole = model_of(checkpoint)
    model = model_of(checkpoint, ahead=[20])
    assert model.programs == ["step_tokens1_sequences1_samples1", "step_tokens32_sequences1_samples1"]
    ids = torch.tensor(np.random.default_rng(0).integers(1, 64, (1, 20)))
    assert model.sample(ids, 30, top_k=1).tolist() == whole.sample(ids, 30, top_k=1).tolist()
    assert len(model.programs) == 2
    assert model.sample(ids[:, :9], 30, top_k=1).tolist() == whole.sample(ids[:, :9], 30, top_k=1).tolist()
    assert len(model.programs) == 3  # another prompt brings its own


def test_long_prompts_are_fed_in_parts(checkpoint):
    model = model_of(checkpoint, ahead=[40])  # 32 and 8 tokens
    names = sorted(f"step_tokens{size}_sequences1_samples1" for size in (1, 16, 32))
    assert model.programs == names
    ids = torch.tensor(np.random.default_rng(0).integers(1, 64, (1, 40)))
    model.sample(ids, 50, top_k=1)
    assert model.programs == names


def test_steps_for_other_lengths_are_told_apart(checkpoint, directory, monkeypatch):
    """The keys of these have one name, and a cache of one form."""
    model = model_of(checkpoint, ahead=False)
    store, key = model.decoder.store, model.decoder.steps.keys[0]
    names = written(monkeypatch)
    store.compile([key, dataclasses.replace(key, pages=key.pages + 1)])
    assert names == [key.name] * 2
