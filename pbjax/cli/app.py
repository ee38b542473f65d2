"""The command line: puts the commands together, each of which has a file of its own.

Every command imports its work when it is called, so that --help answers at once.
"""

from typing import Annotated

import typer

from pbjax.cli.calibrate import calibrate
from pbjax.cli.classify import classify
from pbjax.cli.convert import convert
from pbjax.cli.embed import embed
from pbjax.cli.exits import EPILOG, exit_codes
from pbjax.cli.generate import generate
from pbjax.cli.optimize import optimize
from pbjax.cli.profile import profile
from pbjax.cli.roofline import roofline
from pbjax.cli.search import search
from pbjax.cli.streams import command_streams
from pbjax.cli.transcribe import transcribe


class _App(typer.Typer):
    """A Typer whose output may fail."""

    def __call__(self, *args: object, **options: object) -> object:
        """Runs the command of this process."""
        with command_streams():
            return super().__call__(*args, **options)


app = _App(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)


def _print_version(wanted: bool) -> bool:
    if wanted:
        from importlib.metadata import version

        print(f"pbjax {version('pbjax')}")
        raise typer.Exit
    return wanted


@app.callback(epilog=EPILOG)
def main(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_print_version, is_eager=True, help="Print and exit."),
    ] = False,
) -> None:
    """Fast Transformer inference on one GPU: kernels, rooflines, staggered sub-batches."""


for command in (
    convert,
    optimize,
    profile,
    search,
    roofline,
    calibrate,
    generate,
    embed,
    classify,
    transcribe,
):
    app.command(epilog=EPILOG)(exit_codes()(command))
