"""The files in examples/cluster fit the commands and the container. SLURM's are run, with stand-ins for its programs.

No Docker, no Kubernetes and no SLURM runs here.
"""

import itertools
import json
import os
import re
import shlex
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from transformers_neuronx.cli import app
from transformers_neuronx.server.openapi import OPERATIONS

ROOT = Path(__file__).parents[2]
CLUSTER = ROOT / "examples" / "cluster"
TINY_KJV = ROOT / "examples" / "tiny-kjv"
# What LeaderWorkerSet sets in every container of a group.
OF_LWS = {"LWS_GROUP_SIZE", "LWS_LEADER_ADDRESS", "LWS_WORKER_INDEX"}


def options_of(command):
    shown = CliRunner().invoke(app, [command, "--help"], env=dict(COLUMNS="200")).output
    return set(re.findall(r"--[\w-]+", shown))


def used_by(words):
    return {word.partition("=")[0] for word in words if word.startswith("--")}


def value(words, option):
    """The value of an option, which stands after it or after an equals sign."""
    for word, after in zip(words, [*words[1:], ""], strict=True):
        if word.partition("=")[0] == option:
            return word.partition("=")[2] or after
    return None


def test_compose():
    services = yaml.safe_load((CLUSTER / "compose.yaml").read_text())["services"]
    commands = {name: shlex.split(service["command"]) for name, service in services.items()}
    for words in commands.values():
        assert used_by(words) <= options_of("serve")
    for name in ("alone", "first"):
        port = value(commands[name], "--port")
        assert services[name]["ports"] == [f"{port}:{port}"]
        assert f"127.0.0.1:{port}/ready" in services[name]["healthcheck"]["test"][-1]
    first, second = commands["first"], commands["second"]
    for option in ("--tp", "--nnodes", "--master-addr"):
        assert value(first, option) == value(second, option)
    assert value(first, "--master-addr") in services
    assert [name for name in commands if "two" in services[name]["profiles"]] == ["first", "second"]
    file = CLUSTER / services["alone"]["build"]["context"] / services["alone"]["build"]["dockerfile"]
    assert '/transformers-neuronx", "serve"]' in file.read_text()
    assert services["second"]["healthcheck"] == dict(disable=True)


def test_leader_and_workers():
    group, service = yaml.safe_load_all((CLUSTER / "leaderworkerset.yaml").read_text())
    template = group["spec"]["leaderWorkerTemplate"]
    assert template["restartPolicy"] == "RecreateGroupOnPodRestart"
    [leader] = template["leaderTemplate"]["spec"]["containers"]
    [workers] = template["workerTemplate"]["spec"]["containers"]
    for container in (leader, workers):
        words = container["args"]
        assert used_by(words) <= options_of("serve")
        assert set(re.findall(r"\$\((\w+)\)", " ".join(words))) <= OF_LWS
    for option in ("--tp", "--nnodes", "--master-addr"):
        assert value(leader["args"], option) == value(workers["args"], option)
    assert leader["args"][0] == workers["args"][0]
    assert value(leader["args"], "--node-rank") is None and value(workers["args"], "--node-rank")
    assert [port["containerPort"] for port in leader["ports"]] == [int(value(leader["args"], "--port"))]
    paths = {operation.path for operation in OPERATIONS}
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert leader[probe]["httpGet"]["path"] in paths
        assert leader[probe]["httpGet"]["port"] == leader["ports"][0]["name"]
    labels = template["leaderTemplate"]["metadata"]["labels"]
    assert service["spec"]["selector"].items() <= labels.items()
    assert service["spec"]["ports"][0]["targetPort"] == leader["ports"][0]["name"]


def test_ray_s_service():
    service = yaml.safe_load((CLUSTER / "rayservice.yaml").read_text())
    config = yaml.safe_load(service["spec"]["serveConfigV2"])
    [application] = config["applications"]
    module, _, name = application["import_path"].partition(":")
    documented = re.findall(r"`(\w+)`", getattr(import_module(module), name).__doc__)
    assert application["args"].keys() <= {*documented}
    [head] = service["spec"]["rayClusterConfig"]["headGroupSpec"]["template"]["spec"]["containers"]
    assert head["ports"] == [dict(name="serve", containerPort=config["http_options"]["port"])]


@pytest.fixture
def slurm(tmp_path):
    """Run a batch script as SLURM would, in a folder with prompts: with two nodes, both this machine."""
    (tmp_path / "bin").mkdir()
    stand_ins = {
        "scontrol": "echo 127.0.0.1; echo 127.0.0.1",
        "srun": 'shift; for id in 0 1; do SLURM_NODEID=$id "$@" & done; wait -n && wait -n',
        "transformers-neuronx": f'exec {sys.executable} -m transformers_neuronx "$@"',
    }
    for name, script in stand_ins.items():
        (tmp_path / "bin" / name).write_text(f"#!/bin/bash\n{script}\n")
        (tmp_path / "bin" / name).chmod(0o755)
    lines = [json.dumps(dict(prompt=f"{text} the")) + "\n" for text in ("In", "And", "For", "Of", "To")]
    (tmp_path / "prompts.jsonl").write_text("".join(lines))

    def run(script, **variables):
        path = f"{tmp_path / 'bin'}:{os.environ['PATH']}"
        environment = os.environ | dict(PATH=path, PYTHONPATH=str(ROOT)) | variables
        command = ["bash", str(CLUSTER / script), str(TINY_KJV), "prompts.jsonl"]
        ran = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
        assert ran.returncode == 0, ran.stderr
        found = [file.read_text().splitlines() for file in sorted(tmp_path.glob("results*.jsonl"))]
        return [json.loads(line)["line"] for line in itertools.chain(*found)]

    return run


@pytest.mark.slow
def test_a_job_whose_nodes_share_a_model(slurm):
    found = slurm("one-model.sbatch", SLURM_JOB_NUM_NODES="2", SLURM_JOB_NODELIST="here", SLURM_JOB_ID="7")
    assert found == [1, 2, 3, 4, 5]


@pytest.mark.slow
def test_a_job_whose_nodes_have_shards(slurm):
    slurm("shards.sbatch", SLURM_ARRAY_TASK_ID="1", SLURM_ARRAY_TASK_COUNT="2")
    assert slurm("shards.sbatch", SLURM_ARRAY_TASK_ID="2", SLURM_ARRAY_TASK_COUNT="2") == [1, 3, 5, 2, 4]
