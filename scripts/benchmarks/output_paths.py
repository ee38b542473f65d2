"""Types of arguments that name what a script writes: refused before its work, not after."""

import argparse
from pathlib import Path

from pbjax.errors import FileError, InputError
from pbjax.files import check_named, check_writable


def new_file(text: str) -> Path:
    """A file that can be written."""
    return _checked(text, folder=False)


def new_folder(text: str) -> Path:
    """A folder that can be made, or written into."""
    return _checked(text, folder=True)


def _checked(text: str, *, folder: bool) -> Path:
    path = Path(text)
    try:
        check_named(text)
        check_writable("write", path, folder=folder)
    except (FileError, InputError) as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    return path
