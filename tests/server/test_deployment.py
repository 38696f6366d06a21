"""The files in examples/serving fit the server. No nginx, systemd, Prometheus or Grafana runs here."""

import configparser
import json
import re
import shlex
from pathlib import Path
from urllib.request import urlopen

import pytest
import yaml
from typer.testing import CliRunner

from transformers_neuronx.cli import app
from transformers_neuronx.server.settings import Settings

EXAMPLES = Path(__file__).parents[2] / "examples" / "serving"
PREFIX = "transformers_neuronx_"


@pytest.fixture(scope="module")
def told(url):
    """The names of all metrics that the server tells."""
    urlopen(f"{url}/health").close()  # responses have a number once there is one
    with urlopen(f"{url}/metrics") as response:
        return set(re.findall(rf"^({PREFIX}\w+){{", response.read().decode(), re.M))


def metrics_in(text):
    return set(re.findall(rf"{PREFIX}\w+", text))


def test_the_dashboard_shows_metrics_that_there_are(told):
    text = (EXAMPLES / "grafana.json").read_text()
    panels = json.loads(text)["panels"]
    assert len({panel["title"] for panel in panels}) == len(panels) == 12
    assert metrics_in(text) <= told


def test_the_guide_names_all_metrics(told):
    guide = (EXAMPLES.parents[1] / "docs" / "guides" / "serving.md").read_text()
    _, *rows = guide.split("| metric, after")[1].split("\n\n")[0].splitlines()
    named = {PREFIX + name for row in rows for name in re.findall(r"`(\w+)[`{]", row.split("|")[1])}
    assert {re.sub("_(bucket|sum|count)$", "", name) for name in told} == named


def options_of(command):
    """The options of a command of ours that a line uses, and those that there are."""
    shown = CliRunner().invoke(app, ["serve", "--help"], env=dict(COLUMNS="200")).output
    return {word for word in shlex.split(command) if word.startswith("--")}, set(re.findall(r"--[\w-]+", shown))


def test_the_service():
    unit = configparser.ConfigParser(strict=False, interpolation=None)
    unit.optionxform = str
    unit.read(EXAMPLES / "transformers-neuronx.service")
    service = unit["Service"]
    used, known = options_of(service["ExecStart"])
    drain = int(service["ExecStart"].split("--drain ")[1].split()[0])
    assert used <= known and int(service["TimeoutStopSec"]) > drain


def test_the_container():
    lines = (EXAMPLES / "Containerfile").read_text()
    used, known = options_of(" ".join(json.loads(re.search(r"^CMD (\[.*\])$", lines, re.M)[1])))
    assert used <= known
    assert json.loads(re.search(r"^ENTRYPOINT (\[.*\])$", lines, re.M)[1])[1] == "serve"


def test_the_proxy_and_prometheus():
    proxy = (EXAMPLES / "nginx.conf").read_text()
    [size] = re.findall(r"client_max_body_size (\d+)m;", proxy)
    assert int(size) * 2**20 == Settings().most_body and "proxy_buffering off;" in proxy
    [job] = yaml.safe_load((EXAMPLES / "prometheus.yml").read_text())["scrape_configs"]
    assert job["static_configs"] == [dict(targets=["127.0.0.1:8000"])]  # and the path is /metrics, by default
