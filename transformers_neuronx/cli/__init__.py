"""The command line: `transformers-neuronx`, or `python -m transformers_neuronx`.

Exit status: 0 success; 1 failure: a checkpoint, a file, the disk or a device cannot be used; 2 wrong usage: an option
or argument has an invalid value, or two conflict; 3 some input lines could not be used; 4 `plan`, `lint` or `check`
found a problem; 130 Ctrl-C.
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
from transformers_neuronx.cli.quantize import quantize
from transformers_neuronx.cli.run import run
from transformers_neuronx.cli.serve import serve
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
    help="Compile and run large language models from Hugging Face checkpoints.",
    epilog="Exit status: 0 success, 1 failure, 2 wrong usage, 3 some input lines could not be used, "
    "4 plan, lint or check found a problem, 130 Ctrl-C.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings=dict(token_normalize_func=lambda name: name.replace("_", "-")),  # --data_dir is --data-dir
)
app.command()(generate)
app.command("compile")(compile_artifact)
app.command()(run)
app.command()(serve)
app.command()(quantize)
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
