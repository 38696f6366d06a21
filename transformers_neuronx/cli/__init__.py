"""The command line: `transformers-neuronx`, or `python -m transformers_neuronx`.

Exit status: 0 success; 1 failure: a checkpoint, a file, the disk or a device cannot be used; 2 wrong usage: an option
or argument has an invalid value, or two conflict; 3 some input lines could not be used; 4 `plan`, `lint` or `check`
found a problem; 130 Ctrl-C.
"""

from __future__ import annotations

import importlib
import io
import sys
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from transformers_neuronx.errors import ConfigError, InputError, TransformersNeuronxError
from transformers_neuronx.version import __version__

FAILED, WRONG = 1, 2  # exit statuses
COMMANDS = dict(
    generate="Complete a prompt, or chat.",
    compile="Compile a checkpoint and save the artifact.",
    run="Complete the prompts of a file.",
    serve="Answer requests over HTTP, with OpenAI's interface.",
    quantize="Write a checkpoint in fewer bits, for this and other programs.",
    inspect="Show what the programs of a model contain and cost.",
    bench="Measure time to first token, latency and throughput.",
    plan="Show whether a model fits, where, and how fast it can be.",
    check="Compare a model with Transformers, or with another model.",
    lint="Show what Neuron's compiler would refuse.",
)  # each is a function of its name, in a file of its name


class _Command(TyperCommand):
    """A command that is imported once it is called: most need PyTorch, which takes a second."""

    def make_context(self, info_name: Any, args: list[str], parent: Any = None, **extra: Any) -> Any:
        return self._imported().make_context(info_name, args, parent, **extra)

    def _imported(self) -> Any:
        assert self.name is not None
        file = importlib.import_module(f"{__name__}.{self.name}")
        alone = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
        alone.command(self.name)(getattr(file, self.name))
        return typer.main.get_command(alone)


class _Commands(TyperGroup):
    def __init__(self, **options: Any) -> None:
        commands = {name: _Command(name, help=text) for name, text in COMMANDS.items()}
        super().__init__(**options | dict(commands=commands))

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            typer.echo("stopped", err=True)
            raise typer.Exit(130) from None


app = typer.Typer(
    cls=_Commands,
    help="Compile and run large language models from Hugging Face checkpoints.",
    epilog="Exit status: 0 success, 1 failure, 2 wrong usage, 3 some input lines could not be used, "
    "4 plan, lint or check found a problem, 130 Ctrl-C.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings=dict(token_normalize_func=lambda name: name.replace("_", "-")),  # --data_dir is --data-dir
)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"transformers-neuronx {__version__}")
        raise typer.Exit


@app.callback()
def _main(
    version: Annotated[
        bool, typer.Option("--version", help="Show the version and exit.", callback=_version, is_eager=True)
    ] = False,
) -> None:
    """Handle options that come before the command."""


def main() -> None:
    """Run the command given by the arguments."""
    for stream, errors in ((sys.stdin, "surrogateescape"), (sys.stdout, "backslashreplace")):
        if isinstance(stream, io.TextIOWrapper):  # bad input is reported later, bad output is escaped
            stream.reconfigure(errors=errors)
    try:
        app()
    except (TransformersNeuronxError, OSError) as error:
        told = f"{error.filename}: {error.strerror}" if isinstance(error, OSError) and error.filename else error
        typer.echo(f"error: {told}", err=True)
        sys.exit(WRONG if isinstance(error, ConfigError | InputError) else FAILED)
    except MemoryError as error:
        typer.echo(f"error: not enough memory{f': {error}' if str(error) else ''}", err=True)
        sys.exit(FAILED)
