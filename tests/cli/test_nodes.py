"""Commands whose model is in worker processes, on one host or on two, and runs in shards."""

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from bundled import ROOT, TINY_KJV
from ports import free_port

PROMPTS = ["In the beginning", "And God said", "The LORD is my", "Blessed are the", "And it came to pass"]


@pytest.fixture
def prompts(tmp_path):
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(dict(prompt=text)) + "\n" for text in PROMPTS))
    return tmp_path / "prompts.jsonl"


def results(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_shards_have_what_one_run_has(command, prompts, tmp_path):
    asked = ["run", TINY_KJV, "--data-dir", prompts, "--top-k", 20, "--seed", 5, "--output"]
    command(*asked, tmp_path / "all.jsonl")
    for shard in ("1/2", "2/2"):
        command(*asked, tmp_path / f"{shard[0]}.jsonl", "--shard", shard)
    found = [record for shard in (1, 2) for record in results(tmp_path / f"{shard}.jsonl")]
    assert [record["line"] for record in found] == [1, 3, 5, 2, 4]
    assert sorted(found, key=lambda record: record["line"]) == results(tmp_path / "all.jsonl")
    assert "other settings: shard" in command(*asked, tmp_path / "1.jsonl", "--shard", "2/2", status=2)[1]
    for wrong in ("0/2", "3/2", "1", "1/0"):
        assert "--shard must be i/n" in command(*asked, tmp_path / "x.jsonl", "--shard", wrong, status=2)[1]


def node(folder, port, rank, *more):
    arguments = ["run", TINY_KJV, "--data-dir", "prompts.jsonl", "--tp", "2", "--nnodes", "2", "--node-rank", rank]
    arguments += ["--master-addr", "127.0.0.1", "--master-port", port, *more]
    return subprocess.Popen(
        [sys.executable, "-m", "transformers_neuronx", *map(str, arguments)], cwd=folder, text=True,
        env=os.environ | dict(PYTHONPATH=str(ROOT)), stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip


def test_two_nodes_compute_what_one_process_computes(command, prompts, tmp_path):
    command("run", TINY_KJV, "--data-dir", prompts, "--tp", 2, "--output", tmp_path / "alone.jsonl")
    port = free_port()
    nodes = [node(tmp_path, port, 1), node(tmp_path, port, 0)]
    try:
        said = [each.communicate(timeout=300)[1] for each in nodes]
        assert [each.returncode for each in nodes] == [0, 0], said
        assert f"host 1 of 2: runs workers for 127.0.0.1:{port}" in said[0]
        assert results(tmp_path / "predictions.jsonl") == results(tmp_path / "alone.jsonl")
    finally:
        for each in nodes:
            each.kill()
            each.communicate()


@pytest.mark.slow
def test_a_node_with_another_checkpoint(prompts, tmp_path):
    """Both find `here` in their own folder."""
    import torch
    from safetensors.torch import load_file, save_file

    for rank in (0, 1):
        shutil.copytree(TINY_KJV, tmp_path / str(rank) / "here")
        (tmp_path / str(rank) / "prompts.jsonl").write_text(prompts.read_text())
    path = tmp_path / "1" / "here" / "model.safetensors"
    tensors = load_file(path)
    name = next(name for name in tensors if "ln_f" in name)
    tensors[name] = tensors[name] + torch.ones_like(tensors[name])
    save_file(tensors, path)
    port = free_port()
    nodes = [node(tmp_path / str(rank), port, rank, "--checkpoint-name", "here") for rank in (0, 1)]
    try:
        _, said = nodes[0].communicate(timeout=300)
        assert nodes[0].returncode == 1
        assert "worker 1 has another checkpoint than worker 0: 1 tensors differ" in said
    finally:
        for each in nodes:
            each.kill()
            each.communicate()


@pytest.mark.slow
def test_workers_end_with_the_process_that_leads(prompts, tmp_path):
    command = [sys.executable, "-m", "transformers_neuronx", "run", str(TINY_KJV), "--data-dir", str(prompts)]
    command += ["--tp", "2", "--processes", "--max-tokens-to-generate", "200"]
    leader = subprocess.Popen(command, cwd=tmp_path, env=os.environ | dict(PYTHONPATH=str(ROOT)))
    try:
        while len(workers := children(leader.pid)) < 2:
            assert leader.poll() is None
        os.kill(leader.pid, signal.SIGKILL)
        leader.wait()
        while any(os.path.exists(f"/proc/{worker}") for worker in workers):
            pass  # the time limit of tests is the only one
    finally:
        leader.kill()


def children(pid):
    """The worker processes that a process has started."""
    try:
        found = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        return [child for child in found if "models.worker" in Path(f"/proc/{child}/cmdline").read_text()]
    except OSError:
        return []


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--processes"], "--processes needs --tp"),
        (["--nnodes", 2], "--nnodes needs --master-addr"),
        (["--node-rank", 1], "--node-rank 1 needs --nnodes"),
        (["--nnodes", 2, "--master-addr", "a", "--node-rank", 2], "--node-rank must be below --nnodes 2"),
        (["--nnodes", 2, "--master-addr", "a", "--tp", 3], "--tp must be a multiple of --nnodes 2"),
    ],
)
def test_options_that_contradict_each_other(command, options, said):
    assert said in command("serve", TINY_KJV, *options, status=2)[1]
