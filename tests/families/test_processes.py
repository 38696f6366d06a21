"""Models over the devices of several processes compute what one process computes."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from ports import free_port
from ranks import opened

pytestmark = pytest.mark.compiled_ahead

RANKS = Path(__file__).with_name("ranks.py")
# Numbers of processes and of devices. The most devices come first: a process joins the others with as many.
RUNS = [
    (2, ["gpt2=4", "llama=2"]),
    pytest.param(2, ["mixtral=4", "t5=2", "artifact=4"], marks=pytest.mark.slow),
    pytest.param(3, ["gpt2=3", "llama=3", "mixtral=3", "t5=3"], marks=pytest.mark.slow),
    pytest.param(4, ["gpt2=4", "llama=4"], marks=pytest.mark.slow),
]


@pytest.fixture(scope="module")
def places(checkpoints):
    """Where there are checkpoints, and an artifact."""
    opened(checkpoints / "gpt2", 4, ahead=True).save(checkpoints / "artifact", sharded_weights=True)
    return checkpoints


def outcomes(directory, asked, worlds):
    """Return what a process for each of `worlds`, or one for None, prints. They run at the same time."""
    command = [sys.executable, str(RANKS), str(directory), *asked]
    started = [
        subprocess.Popen(command, env=os.environ | each, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for each in worlds
    ]
    told = []
    try:
        for process in started:
            printed, said = process.communicate(timeout=500)
            assert process.returncode == 0, said
            told.append(json.loads(printed))  # nothing else is printed
    finally:
        for process in started:
            process.kill()
    return told


@pytest.mark.parametrize(("size", "asked"), RUNS)
def test_processes_compute_what_one_does(size, asked, places):
    [alone] = outcomes(places, asked, [{}])
    where = f"{size}@127.0.0.1:{free_port()}"
    ranks = outcomes(places, asked, [dict(NEURONX_WORLD=f"{rank}/{where}") for rank in range(size)])
    for model, wanted in alone.items():
        held = [rank[model].pop("bytes") for rank in ranks]
        assert sum(held) == wanted.pop("bytes") and max(held) == min(held), "each has its share"
        assert all(rank[model].pop("unseeded") == ranks[0][model]["unseeded"] for rank in ranks[1:])
        drawn = ranks[0][model].pop("unseeded")
        assert wanted.pop("unseeded") != drawn, "draws differ in every run"
        for rank in ranks:
            assert rank[model] == wanted, model
