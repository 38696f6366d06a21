"""`transformers-neuronx serve` in a process of its own."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

from openai import OpenAI

TINY_KJV = Path(__file__).parents[2] / "examples" / "tiny-kjv"
SERVE = [sys.executable, "-m", "transformers_neuronx", "serve", str(TINY_KJV), "--port", "0", "--n-positions", "256"]


def test_it_serves_until_it_is_told_to_stop():
    names = ["--served-model-name", "kjv", "--api-key", "secret", "--batch-size", "2"]
    process = subprocess.Popen([*SERVE, *names], stderr=subprocess.PIPE, text=True)
    try:
        lines = []
        while not (found := re.search(r"http://\S+", lines[-1] if lines else "")):
            lines.append(process.stderr.readline())
            assert lines[-1], "".join(lines)
        client = OpenAI(base_url=f"{found[0]}/v1", api_key="secret", max_retries=0)
        stream = client.completions.create(
            model="kjv", prompt="In the beginning", max_tokens=200, stream=True, extra_body=dict(ignore_eos=True)
        )
        next(iter(stream))
        process.send_signal(signal.SIGTERM)
        assert [*stream][-1].choices[0].finish_reason == "length", "what runs may end"
        assert process.wait(60) == 0
        assert "Traceback" not in process.stderr.read()
    finally:
        process.kill()
        process.stderr.close()


def test_importing_the_package_imports_no_web_server():
    script = """
import sys, transformers_neuronx.cli
assert not {"starlette", "uvicorn", "msgspec", "httptools"} & sys.modules.keys()
"""
    subprocess.run([sys.executable, "-c", script], check=True, env=os.environ)


def test_without_its_packages_it_says_what_to_install():
    script = """
import sys
sys.modules["starlette.applications"] = None
from transformers_neuronx.cli import main
main()
"""
    ran = subprocess.run([sys.executable, "-c", script, "serve", "nowhere"], capture_output=True, text=True)
    assert ran.returncode == 2 and 'pip install "transformers-neuronx[serve]"' in ran.stderr
