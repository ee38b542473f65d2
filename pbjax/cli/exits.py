"""How a command ends: its exit code, and one line on stderr for every error and warning."""

import sys
import warnings
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import typer

from pbjax.device import check_platforms
from pbjax.errors import DeviceError, FileError, InputError, PbjaxError, VerificationError

EPILOG = (
    "Results go to stdout, progress and warnings to stderr. Exit codes: 0 done; 1 a model, plan or"
    " device that cannot be used; 2 a wrong argument or file; 3 an unsupported configuration;"
    " 4 tensors that do not fit; 5 outputs that are not the model's; 130 interrupted;"
    " 141 nobody reads the output."
)


@contextmanager
def exit_codes() -> Generator[None]:
    """Turns warnings, and errors that are raised on purpose, into a line on stderr and a code."""
    try:
        with warnings.catch_warnings():
            warnings.showwarning = _show_warning
            yield
    except typer.Exit:
        raise
    except KeyboardInterrupt as interrupt:
        print("; ".join(["interrupted", *map(str, interrupt.args)]), file=sys.stderr)
        raise typer.Exit(130) from None
    except Exception as error:
        code = _exit_code(error)
        if code is None:
            _blame_platforms(error)
            raise
        if str(error):  # nothing is said of a pipe that is closed
            print(f"error: {error}", file=sys.stderr)
        raise typer.Exit(code) from error


class FileByFile:
    """Has a command go on with the other files where one fails.

    Each failure is a line on stderr at once; the exit code at the end is that of the first.
    """

    def __init__(self) -> None:
        """Starts without a failure."""
        self.failed: list[dict[str, str]] = []
        self._code = 0

    @contextmanager
    def file(self, path: Path, kind: type[Exception] = Exception) -> Generator[None]:
        """Notes an error that is raised on purpose, in place of ending the command by it.

        Args:
          path: The file.
          kind: Errors that concern the file alone; others end the command.
        """
        try:
            yield
        except kind as error:
            code = _exit_code(error)
            if code is None:
                raise
            message = str(error) if str(path) in str(error) else f"{path}: {error}"
            print(f"error: {message}", file=sys.stderr)
            self.failed.append({"file": str(path), "error": message})
            self._code = self._code or code

    def in_document(self) -> dict[str, list[dict[str, str]]]:
        """What a JSON document says of the failures: nothing if there were none."""
        return {"failed": self.failed} if self.failed else {}

    def finish(self) -> None:
        """Ends the command with the exit code of the first failure, if there was one."""
        if self._code:
            raise typer.Exit(self._code)


@contextmanager
def interrupted_with(kept: str) -> Generator[None]:
    """Says what becomes of the work where the user ends it.

    Args:
      kept: What is kept; nothing is said if it is empty.
    """
    try:
        yield
    except KeyboardInterrupt as interrupt:
        interrupt.args = (kept,) if kept else ()
        raise


def _show_warning(message: Warning | str, *_: object, **__: object) -> None:
    print(f"warning: {message}", file=sys.stderr)


def _blame_platforms(error: Exception) -> None:
    """Ends a command by a line if JAX has none of the platforms that it was asked for."""
    try:
        check_platforms()
    except DeviceError as missing:
        found = str(missing)
    else:
        if not str(error).startswith("Unable to initialize backend"):
            return
        found = " ".join(str(error).split())
    print(f"error: {found}", file=sys.stderr)
    raise typer.Exit(1) from error


def _exit_code(error: Exception) -> int | None:
    if isinstance(error, VerificationError):
        return 5
    if isinstance(error, InputError | FileError):
        return 2
    return 1 if isinstance(error, PbjaxError) else getattr(error, "exit_code", None)
