"""The command line: `transformers-neuronx`, or `python -m transformers_neuronx`.

Exit status: 0 all is well; 1 it cannot be done, as a checkpoint, a file, the disk or a device is not what it must be; 2
the command is wrong, as an option or argument has a value that it cannot have, or two do not go together; 3 some lines
of the data are; 4 the answer is no; 130 Ctrl-C.
"""

from __future__ import annotations

import io
import sys
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from transformers_neuronx.cli.bench import bench
from transformers_neuronx.cli.check import check
from transformers_neuronx.cli.compile import compile_artifact
from transformers_neuronx.cli.generate import generate
from transformers_neuronx.cli.inspect import inspect
from transformers_neuronx.cli.lint import lint
from transformers_neuronx.cli.plan import plan
from transformers_neuronx.cli.run import run
from transformers_neuronx.errors import ConfigError, InputError, TransformersNeuronxError
from transformers_neuronx.version import __version__

FAILED, WRONG = 1, 2  # exit statuses


class _Commands(TyperGroup):
    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            typer.echo("stopped", err=True)
            raise typer.Exit(130) from None


app = typer.Typer(
    cls=_Commands,
    help="Large language models from Hugging Face checkpoints, compiled for fixed shapes.",
    epilog="Exit status: 0 all is well, 1 it cannot be done, 2 the command is wrong, 3 some lines of the data are, "
    "4 the answer is no, 130 Ctrl-C.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings=dict(token_normalize_func=lambda name: name.replace("_", "-")),  # --data_dir is --data-dir
)
app.command()(generate)
app.command("compile")(compile_artifact)
app.command()(run)
app.command()(inspect)
app.command()(bench)
app.command()(plan)
app.command()(check)
app.command()(lint)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"transformers-neuronx {__version__}")
        raise typer.Exit


@app.callback()
def _main(
    version: Annotated[
        bool, typer.Option("--version", help="Say the version.", callback=_version, is_eager=True)
    ] = False,
) -> None:
    """Of every command `--help` says more."""


def main() -> None:
    """Run the command that the arguments say."""
    for stream, errors in ((sys.stdin, "surrogateescape"), (sys.stdout, "backslashreplace")):
        if isinstance(stream, io.TextIOWrapper):  # what it cannot read is found later, what it cannot write is escaped
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
