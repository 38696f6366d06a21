"""Commands are imported once they are called."""

import importlib
import inspect
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from transformers_neuronx.cli import COMMANDS, app


@pytest.mark.parametrize("name", COMMANDS)
def test_the_list_of_commands_says_what_each_says_of_itself(name):
    own = getattr(importlib.import_module(f"transformers_neuronx.cli.{name}"), name)
    assert inspect.getdoc(own).splitlines()[0] == COMMANDS[name]
    said = CliRunner().invoke(app, [name, "--help"])
    assert said.exit_code == 0 and COMMANDS[name].split(",")[0] in said.output and "--help" in said.output


@pytest.mark.parametrize("arguments", [["--version"], ["--help"], ["no-such-command"], []])
def test_what_needs_no_command_imports_none(arguments):
    call = f"""
import sys
from transformers_neuronx.cli import main
sys.argv[1:] = {arguments!r}
try:
    main()
finally:
    assert not {{"torch", "transformers", "jaxlib", "numpy"}} & {{*sys.modules}}
"""
    said = subprocess.run([sys.executable, "-c", call], capture_output=True, text=True)
    assert said.returncode == (0 if arguments in (["--version"], ["--help"]) else 2) and "Assertion" not in said.stderr
