"""Options and arguments that name a file or folder: an empty text and "-" name none.

pathlib takes the empty text for the current folder, and "-" for a file of that name.
"""

from pathlib import Path
from typing import Any

import typer


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
    if not text:
        raise typer.BadParameter(
            "it is empty; a name or a path is allowed; give one (. is the current folder)"
        )
    if text == "-":
        raise typer.BadParameter(
            "- is neither standard input nor output here; a name or a path is allowed; give "
            "/dev/stdin or /dev/stdout, or ./- for a file that is called so"
        )
    return text
