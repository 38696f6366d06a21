"""Adapters by request: each request gets the tokens that the model gives with its adapter merged."""

import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from lora_files import HIDDEN, RANK, write_adapter

from transformers_neuronx import Engine, SamplingParams
from transformers_neuronx.config import NeuronConfig, QuantizationConfig, Workers
from transformers_neuronx.engine.store import ProgramStore
from transformers_neuronx.errors import CheckpointError, ConfigError, EngineError, InputError
from transformers_neuronx.gpt2.model import GPT2ForSampling
from transformers_neuronx.serving.guesses import PromptLookup

TINY_KJV = Path(__file__).parents[2] / "examples" / "tiny-kjv"


def loaded(adapter=None, **options):
    options = dict(n_positions=256, context_length_estimate=64) | options
    model = GPT2ForSampling.from_pretrained(TINY_KJV, **dict(adapter=adapter) if adapter else {}, **options)
    model.to_neuron()
    return model


@pytest.fixture(scope="module")
def model():
    return loaded()


@pytest.fixture(scope="module")
def directories(tmp_path_factory):
    where = tmp_path_factory.mktemp("adapters")
    return {f"adapter-{seed}": write_adapter(where / f"{seed}", seed) for seed in range(16)}


@pytest.fixture(scope="module")
def merged(model, directories):
    """`merged(name)`: the model with an adapter in its weights, made once."""
    made = {None: model}

    def of(name):
        if name not in made:
            made[name] = loaded(directories[name])
        return made[name]

    return of


def prompt(number):
    draw = np.random.default_rng(number)
    return draw.integers(3, 1000, 1 + draw.integers(40)).tolist()


def greedy(name=None, count=8, **params):
    return SamplingParams(max_tokens=count, temperature=0, ignore_eos=True, adapter=name, **params)


def alone(model, *prompts, count=8):
    """What a model answers to prompts, one by one."""
    with Engine(model, rows=1, step_tokens=64, adjustments=False) as engine:
        return [engine.submit(ids, greedy(count=count)).result() for ids in prompts]


@pytest.fixture(scope="module")
def engine(model, directories):
    """An engine with two places for adapters, and all of them by name."""
    how = dict(rows=4, step_tokens=32, cache_tokens=2048, adjustments=False)
    with Engine(model, max_loras=2, max_lora_rank=RANK, **how) as engine:
        for name, directory in directories.items():
            engine.load_adapter(name, directory)
        yield engine


@pytest.fixture(scope="module")
def large(model, directories):
    """An engine with places for sixteen adapters, and for all that requests can ask for."""
    with Engine(model, rows=8, step_tokens=64, max_loras=16, max_lora_rank=8) as engine:
        for name, directory in directories.items():
            engine.load_adapter(name, directory)
        yield engine


def test_two_places_serve_many_adapters(engine, model, merged):
    """Adapters are exchanged as requests come and go. Nothing is compiled for that."""
    names = [[None, "adapter-0", "adapter-1", "adapter-2", "adapter-3"][number % 5] for number in range(20)]
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(ProgramStore, "compile", lambda *_, **__: pytest.fail("a program was missing"))
        handles = [engine.submit(prompt(number), greedy(name)) for number, name in enumerate(names)]
        got = [handle.result() for handle in handles]
    assert sum(each.place is not None for each in engine.scheduler.adapters.known.values()) == 2
    assert got == [engine.submit(prompt(n), greedy(name)).result() for n, name in enumerate(names)], "one by one"
    plain = [engine.submit(prompt(number), greedy()).result() for number in range(len(names))]
    assert sum(one != other for one, other in zip(got, plain, strict=True)) > 12, "adapters change most answers"
    for name in (None, "adapter-1"):
        mine = [number for number, own in enumerate(names) if own == name]
        assert [got[number] for number in mine] == alone(merged(name), *map(prompt, mine))


@pytest.mark.slow
def test_sixteen_adapters_in_one_batch(large, merged, directories):
    """Requests of all adapters, and of none, come at once. Each gets the tokens of its merged model."""
    names = [None, *directories] * 3
    handles = [large.submit(prompt(number), greedy(name)) for number, name in enumerate(names)]
    got = [handle.result() for handle in handles]
    for name in (None, *directories):
        mine = [number for number, own in enumerate(names) if own == name]
        assert [got[number] for number in mine] == alone(merged(name), *map(prompt, mine)), name


def test_adapters_come_and_go_while_others_run(engine, directories):
    """One is loaded, used and unloaded again and again, while requests of another run. A name gets other weights."""
    wanted = {name: engine.submit(prompt(2), greedy(name)).result() for name in directories}
    long, running, stop = engine.submit(prompt(1), greedy("adapter-1", 30)).result(), [], threading.Event()

    def submits():
        while not stop.is_set():
            running.append(engine.submit(prompt(1), greedy("adapter-1", 30)).result())

    thread = threading.Thread(target=submits)
    thread.start()
    try:
        for turn in range(12):
            name = f"adapter-{turn % 5 + 2}"
            engine.load_adapter("comes", directories[name])
            handle = engine.submit(prompt(2), greedy("comes"))
            engine.unload_adapter("comes")
            assert handle.result() == wanted[name], "a request keeps what it began with"
    finally:
        stop.set()
        thread.join()
    assert len(running) > 2 and all(tokens == long for tokens in running)
    assert engine.adapters == sorted(directories)


def test_cached_prompts_are_those_of_the_same_adapter(engine, directories):
    """A prompt is found again by requests of its adapter alone, also if another one has the name later."""
    ids = np.random.default_rng(3).integers(3, 1000, 150).tolist()
    names = (None, "adapter-0", "adapter-1", "new")
    engine.load_adapter("new", directories["adapter-4"])

    def cached(name):
        handle = engine.submit(ids, greedy(name, 2))
        handle.result()
        return handle.usage.cached_tokens

    assert [cached(name) for name in names] == [0, 0, 0, 0]
    assert all(cached(name) > 60 for name in names)
    engine.unload_adapter("new")
    engine.load_adapter("new", directories["adapter-5"])
    assert cached("new") == 0
    engine.unload_adapter("new")


@pytest.mark.slow
def test_draft_tokens_are_verified_with_the_adapter(model, merged, directories):
    sizes = dict(rows=2, step_tokens=64, joined_tokens=64)
    with Engine(model, max_loras=1, draft=PromptLookup(), adjustments=False, **sizes) as engine:
        engine.load_adapter("one", directories["adapter-1"])
        ids = prompt(4) * 2
        assert [engine.submit(ids, greedy("one", 24)).result()] == alone(merged("adapter-1"), ids, count=24)


@pytest.mark.slow
def test_worker_processes_have_adapters(directories):
    """Devices of other processes get their parts of an adapter."""
    found = []
    for workers in (None, Workers(2)):
        model = loaded(tp_degree=2, neuron_config=NeuronConfig(workers=workers))
        with Engine(model, rows=2, step_tokens=16, max_loras=1, max_lora_rank=RANK, adjustments=False) as engine:
            engine.load_adapter("one", directories["adapter-1"])
            found.append([engine.submit(prompt(8), greedy(name)).result() for name in (None, "one")])
    assert found[0] == found[1] and found[0][0] != found[0][1]


@pytest.mark.slow
def test_few_bits_stay_and_the_adapter_is_added(directories):
    """The model's matrices are in 8 bits, and are those that it has without adapters."""
    switches = NeuronConfig(quant=QuantizationConfig("s8"))
    model = loaded(neuron_config=switches)
    with Engine(model, rows=4, step_tokens=32, max_loras=1, adjustments=False) as engine:
        engine.load_adapter("one", directories["adapter-3"])
        both = [engine.submit(prompt(5), greedy(name, 16)) for name in (None, "one")]
        plain, adapted = (handle.result() for handle in both)
    assert [plain] == alone(model, prompt(5), count=16) and plain != adapted


@pytest.mark.slow
def test_embeddings_with_an_adapter(large, merged):
    ids = prompt(6)

    def vector(engine, name=None):
        handle = engine.embed(ids, "mean", adapter=name)
        handle.result()
        return handle.embedding

    with Engine(merged("adapter-1"), rows=1, step_tokens=64) as other:
        wanted = vector(other)
    got, plain = (vector(large, name) for name in ("adapter-1", None))
    assert np.abs(got - wanted).max() < 1e-5 * np.abs(wanted).max() < np.abs(plain - wanted).max()


def test_after_an_error_adapters_come_to_the_devices_again(engine):
    wanted = engine.submit(prompt(7), greedy("adapter-1")).result()
    steps = engine._loop.steps
    start, steps.start = steps.start, lambda packed: 1 / 0
    with pytest.raises(EngineError):
        engine.submit(prompt(7), greedy("adapter-1")).result()
    steps.start = start
    assert engine.submit(prompt(7), greedy("adapter-1")).result() == wanted


def test_what_is_refused_is_said(model, engine, directories, tmp_path):
    with pytest.raises(InputError, match=r"there is no adapter 'x'; this engine has: adapter-0, "):
        engine.submit([5], greedy("x"))
    with pytest.raises(InputError, match="there is an adapter 'adapter-0' already: unload it first"):
        engine.load_adapter("adapter-0", directories["adapter-0"])
    with pytest.raises(InputError, match="there is no adapter 'x'"):
        engine.unload_adapter("x")

    def refused(said, name, **what):
        with pytest.raises(CheckpointError, match=said):
            engine.load_adapter("new", write_adapter(tmp_path / name, 0, **what))

    refused("has rank 9, and at most 4 fits: raise max_lora_rank", "high", rank=9)
    head = {"base_model.model.lm_head.weight": torch.zeros(1024, HIDDEN)}
    refused(r"cannot have whole weights of 'lm_head.weight': merge it, with from_pretrained", "head", more=head)
    start = "base_model.model.transformer.h.1.attn.c_proj"
    magnitude = {f"{start}.lora_magnitude_vector": torch.ones(HIDDEN)}
    refused(r"cannot have DoRA of 'transformer.h.1.attn.c_proj.weight'", "dora", more=magnitude)
    wide = {f"{start}.lora_B.weight": torch.zeros(HIDDEN + 1, RANK)}
    refused(
        r"the adapter of transformer.h.1.attn.c_proj.weight is for \[129, 128\], not \[128, 128\]", "wide", more=wide
    )
    embedding = {f"base_model.model.transformer.wte.lora_embedding_{part}": torch.zeros(sizes)
                 for part, sizes in dict(A=(RANK, 1024), B=(HIDDEN, RANK)).items()}  # fmt: skip
    refused("changes 'transformer.wte.weight', which cannot differ by request", "embedding", more=embedding)
    with pytest.raises(CheckpointError, match=r"adapter_model\.safetensors: expected a regular file"):
        engine.load_adapter("new", tmp_path)
    assert "new" not in engine.adapters
    no_places = r"made without places for adapters: Engine\(model, max_loras=…\)"
    with (
        Engine(model, rows=1, step_tokens=16, adjustments=False) as without,
        pytest.raises(InputError, match=no_places),
    ):
        without.load_adapter("one", directories["adapter-0"])
    for wrong in (dict(max_loras=-1), dict(max_loras=1, max_lora_rank=0)):
        with pytest.raises(ConfigError, match="max_loras must be at least 0, and max_lora_rank at least 1"):
            Engine(model, **wrong)
