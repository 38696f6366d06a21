"""Models whose devices are in worker processes: what they compute, and what happens when one is lost."""

import os
import signal
import socket
import threading
import time
from contextlib import closing
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from ports import free_port
from transformers import AutoModelForCausalLM

from transformers_neuronx import Engine, NeuronAutoModelForCausalLM, NeuronAutoModelForSeq2SeqLM
from transformers_neuronx.config import NeuronConfig, QuantizationConfig, Workers
from transformers_neuronx.errors import ConfigError, EngineError
from transformers_neuronx.huggingface.adapter import HuggingFaceGenerationModelAdapter
from transformers_neuronx.runtimes import get_runtime, remote, worker_processes
from transformers_neuronx.runtimes.crew import Answer, Crew
from transformers_neuronx.runtimes.wire import Message, Wire
from transformers_neuronx.runtimes.worker_processes import Leader, follow
from transformers_neuronx.serving.request import SamplingParams

IDS = torch.arange(3, 19).reshape(2, 8)
TWO = Workers(processes=2)
GREEDY = SamplingParams(max_tokens=40, temperature=0, ignore_eos=True)


def made(path, workers, degree=2, amp="f32", **switches):
    kind = NeuronAutoModelForSeq2SeqLM if path.name == "t5" else NeuronAutoModelForCausalLM
    config = NeuronConfig(workers=workers, **switches)
    model = kind.from_pretrained(path, n_positions=64, batch_size=2, tp_degree=degree, amp=amp, neuron_config=config)
    model.to_neuron()
    return model


@pytest.fixture(scope="module")
def gpt2(checkpoints):
    models = made(checkpoints / "gpt2", TWO), made(checkpoints / "gpt2", None)
    assert models[0].metrics.held == models[1].metrics.held  # before a test makes more programs of one
    return models


def generated(engine, prompts=((5, 6, 7),), params=GREEDY):
    return [list(handle) for handle in [engine.submit(prompt, params) for prompt in prompts]]


def process(model, rank):
    return model.decoder.runtime._leader._processes[rank]._process


def test_calls_compute_what_one_process_computes(gpt2):
    ours, alone = gpt2
    for rules in (dict(top_k=1), dict(top_k=20, seed=7)):
        assert torch.equal(ours.sample(IDS, 24, **rules), alone.sample(IDS, 24, **rules))
    assert torch.equal(ours.forward(IDS), alone.forward(IDS))
    assert "2 worker processes" in ours.decoder.runtime.description


def test_arrays_that_have_no_buffer_in_numpy(checkpoints):
    model = made(checkpoints / "gpt2", TWO, amp="bf16")
    wanted = made(checkpoints / "gpt2", None, amp="bf16").sample(IDS, 24, top_k=1)
    assert torch.equal(model.sample(IDS, 24, top_k=1), wanted)


def test_beams(gpt2):
    how = dict(attention_mask=torch.ones(1, 8), do_sample=False, max_new_tokens=6, pad_token_id=0, num_beams=2)
    ours, alone = (HuggingFaceGenerationModelAdapter(model.config, model).generate(IDS[:1], **how) for model in gpt2)
    assert torch.equal(ours, alone)


def test_an_engine_with_requests_that_come_and_go(gpt2):
    def answers(model):
        with Engine(model, rows=4) as engine:
            cut = engine.submit([9, 8, 7], GREEDY)
            next(iter(cut))
            handles = [engine.submit(range(3, 8 + extra), GREEDY) for extra in range(6)]
            cut.cancel()
            drawn = engine.submit([4, 5], SamplingParams(max_tokens=9, temperature=1.5, seed=3, logprobs=2))
            return [list(handle) for handle in (*handles, drawn)]

    assert answers(gpt2[0]) == answers(gpt2[1])


@pytest.mark.compiled_ahead
def test_an_artifact_of_workers_is_one_of_any_process(gpt2, checkpoints, tmp_path):
    made(checkpoints / "gpt2", TWO).save(tmp_path / "saved", sharded_weights=True)
    for workers in (None, TWO):
        model = made(tmp_path / "saved", workers)
        assert torch.equal(model.sample(IDS, 24, top_k=1), gpt2[1].sample(IDS, 24, top_k=1))


def test_weights_that_only_this_process_has(gpt2, checkpoints):
    model = NeuronAutoModelForCausalLM.from_pretrained(
        checkpoints / "gpt2", n_positions=64, batch_size=2, tp_degree=2, neuron_config=NeuronConfig(workers=TWO)
    )
    model.load_state_dict(AutoModelForCausalLM.from_pretrained(checkpoints / "gpt2").state_dict())
    model.to_neuron()
    assert torch.equal(model.sample(IDS, 24, top_k=1), gpt2[1].sample(IDS, 24, top_k=1))


@pytest.mark.parametrize(
    ("rank", "sent"),
    [
        (1, signal.SIGKILL),
        pytest.param(0, signal.SIGKILL, marks=pytest.mark.slow),
        pytest.param(0, signal.SIGSTOP, marks=pytest.mark.slow),
        pytest.param(1, signal.SIGSTOP, marks=pytest.mark.slow),
    ],
)
def test_a_lost_worker_fails_requests_and_is_replaced(gpt2, rank, sent):
    gpt2[0].sample(IDS, 24, top_k=1)
    with Engine(gpt2[0], rows=2) as engine:
        [wanted] = generated(engine)
        running = engine.submit([5, 6, 7], GREEDY)
        next(iter(running))
        before = process(gpt2[0], rank)
        os.kill(before.pid, sent)
        began = time.monotonic()
        with pytest.raises(EngineError, match=r"worker . is gone|rank . has not|worker . has not"):
            until_lost(engine, running)
        assert time.monotonic() - began < 12
        assert generated(engine) == [wanted]
        assert before.poll() is not None, "it is no orphan"
        # While nobody waits, nobody notices.
        engine._moved = -1e9  # it has been idle for long
        before = process(gpt2[0], rank)
        os.kill(before.pid, sent)
        before.wait(20)
        deadline = time.monotonic() + 20
        while process_is(gpt2[0], rank, before) and time.monotonic() < deadline:
            assert engine.healthy(60)
            time.sleep(0.05)
        assert generated(engine) == [wanted]
    with pytest.raises(EngineError, match="lost with the workers"):  # the model has a cache of its own
        gpt2[0].sample(IDS, 24, top_k=1)
    assert torch.equal(gpt2[0].sample(IDS, 24, top_k=1), gpt2[1].sample(IDS, 24, top_k=1))


@pytest.mark.parametrize("gone", ["worker 1 is gone", ""])
def test_a_worker_that_has_ended_explains_what_fails_on_the_others(gone):
    """Another worker's collective may fail before the leader knows that one has ended."""
    crew, failure = object.__new__(Crew), "worker 0: EngineError: connection closed by peer"
    crew.lost, crew._answers, crew._losing = "", {}, threading.Lock()
    crew._leader = SimpleNamespace(ended=lambda but=None: gone, end=lambda: None)
    failed = Answer(lambda done: None)
    failed.set_exception(EngineError(failure))
    with pytest.raises(EngineError, match=gone or "connection closed"):
        crew.answers([failed])
    assert crew.lost == gone, "what follows starts the next workers"
    crew._listen(0, SimpleNamespace(receive=lambda: Message(dict(lost=failure), [])))
    assert crew.lost == (gone or failure)


def until_lost(engine, running):
    while True:  # the first one may have ended before
        list(running)
        running = engine.submit([5, 6, 7], GREEDY)


def process_is(model, rank, before):
    """Whether a lost worker has not been replaced."""
    found = model.decoder.runtime._leader._processes
    return len(found) <= rank or found[rank]._process is before or model.decoder.runtime.lost


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "degree", "switches"),
    [
        ("llama", 2, dict(amp="bf16")), ("llama", 4, {}), ("mixtral", 2, {}), ("t5", 2, {}),
        ("mixtral", 4, dict(expert_parallel=True)),
        ("gpt2", 4, dict(quant=QuantizationConfig(quant_dtype="s8"))),
    ],
)  # fmt: skip
def test_families_quantized_weights_and_two_devices_in_a_process(checkpoints, name, degree, switches):
    ours, alone = (made(checkpoints / name, workers, degree, **switches) for workers in (TWO, None))
    for rules in (dict(top_k=1), dict(top_k=20, seed=7)):
        assert torch.equal(ours.sample(IDS, 24, **rules), alone.sample(IDS, 24, **rules))


@pytest.mark.slow
def test_a_draft_model_of_the_same_workers(checkpoints, gpt2):
    with Engine(gpt2[1], rows=2) as engine:
        wanted = generated(engine)
    with Engine(gpt2[0], rows=2, joined_tokens=256, draft=made(checkpoints / "gpt2", TWO)) as engine:
        assert generated(engine) == wanted


def test_arrays_of_every_kind_come_and_go():
    runtime = get_runtime("cpu", 2, workers=TWO)
    for array in (np.arange(6, dtype=np.int32).reshape(2, 3), np.float32(7), np.zeros(2**18, bool)):
        assert all(np.array_equal(shard, array) for shard in runtime.put([np.asarray(array)]).shards())
    own = [np.full(2, number, np.float32) for number in range(2)]
    tensor = runtime.put(own)
    assert [shard.tolist() for shard in tensor.shards()] == [[0, 0], [1, 1]]
    assert tensor.nbytes == 16 and tensor.shape == (2,)
    with pytest.raises(EngineError, match="one array or 2"):
        runtime.put(own * 2)


@pytest.mark.slow
def test_workers_that_are_lost_while_they_come_back():
    class Deadly(remote.Restorable):
        armed = False

        def restore(self):
            if self.armed:
                worker = self.runtime._leader._processes[0]._process
                worker.kill()
                worker.wait()
                while not self.runtime.lost:
                    time.sleep(0.01)
            self.runtime.tell(dict(do="let_go"))

    runtime = remote.RemoteRuntime(Workers(processes=1), "cpu", 1)
    kept, deadly = runtime.put([np.arange(3)]), Deadly(runtime)
    deadly.bring()
    deadly.armed = True
    os.kill(runtime._leader._processes[0]._process.pid, signal.SIGKILL)
    while not runtime.lost:
        time.sleep(0.01)
    with pytest.raises(EngineError, match="worker 0 is gone"):
        runtime.put([np.arange(4)])
    deadly.armed = False
    assert runtime.put([np.arange(4)]).numpy().tolist() == [0, 1, 2, 3]
    assert kept.numpy().tolist() == [0, 1, 2]
    runtime.close()


def test_what_workers_cannot_be():
    with pytest.raises(ConfigError, match="at least one"):
        Workers(processes=0)
    with pytest.raises(ConfigError, match="address and a port"):
        Workers(nodes=2)
    with pytest.raises(ConfigError, match="multiple of the 2 worker processes"):
        get_runtime("cpu", 3, workers=TWO)
    with pytest.raises(ConfigError, match="cpu or cuda"):
        get_runtime("neuron", 2, workers=TWO)


def test_a_port_that_is_taken():
    with socket.create_server(("", 0)) as taken, pytest.raises(EngineError, match="cannot listen at port"):
        Leader(Workers(nodes=2, port=taken.getsockname()[1]), "cpu", 2)


def test_a_node_that_does_not_come(monkeypatch):
    monkeypatch.setattr(worker_processes, "PATIENCE", 0.5)
    leader = Leader(Workers(nodes=2, port=free_port()), "cpu", 2)
    with pytest.raises(EngineError, match="node 1 did not come in"):
        leader.start()
    leader.dismiss()
    with pytest.raises(EngineError, match="the first node did not come to"):
        follow("127.0.0.1", free_port(), 1)


def test_a_worker_that_cannot_start_says_why(monkeypatch):
    monkeypatch.setattr(worker_processes, "MODULE", "transformers_neuronx.no_such_module")
    leader = Leader(Workers(processes=1), "cpu", 1)
    with pytest.raises(EngineError, match=r"worker 0 is gone: .+No module named"):
        leader.start()
    leader.dismiss()


def test_workers_of_another_version(monkeypatch):
    monkeypatch.setattr(remote, "__version__", "9.9")
    with pytest.raises(EngineError, match=r"workers have version .* of this package, not 9\.9"):
        remote.RemoteRuntime(Workers(processes=1), "cpu", 1)


def test_who_is_not_a_worker_is_sent_away():
    leader = Leader(Workers(processes=1), "cpu", 1)
    address = leader._listener.getsockname()
    with closing(Wire(socket.create_connection(address))) as stranger:
        stranger.send(dict(token="guessed", rank=0))
        [ours] = leader.start()
        with pytest.raises(OSError, match="closed"):
            stranger.receive()
    ours.send(dict(do="begin", number=0, answered=True))
    assert ours.receive().says["fingerprint"]["platform"] == "cpu"
    leader.end()
    leader.dismiss()
