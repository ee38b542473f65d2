"""Options and arguments that name a file or folder: an empty text and "-" name none."""

from pathlib import Path
from typing import Any

import typer

from pbjax.errors import InputError
from pbjax.files import check_named


def path_option(*names: str, help: str) -> Any:
    """What `typer.Option` is for another type.

    Args:
      *names: The option's name, where it is not the parameter's.
      help: What it is for.
    """
    return typer.Option(*names, help=help, parser=to_path)


def path_argument(*, help: str) -> Any:
    """What `typer.Argument` is for another type.

    Args:
      help: What it is for.
    """
    return typer.Argument(help=help, parser=to_path)


def to_path(text: str) -> Path:
    """The path that was given.

    Raises:
      typer.BadParameter: It is empty, or "-".
    """
    return Path(to_source(text))


def to_source(text: str) -> str:
    """The path or name that was given, as it was written.

    Raises:
      typer.BadParameter: It is empty, or "-".
    """
    try:
        check_named(text)
    except InputError as error:
        raise typer.BadParameter(str(error)) from error
    return text
