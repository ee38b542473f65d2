"""What a command prints goes to streams that can fail: a full disk, a closed pipe, few letters.

Results that cannot be written end the command by a line and an exit code; messages that cannot be
written do not end it. A letter that the encoding lacks is printed as its escape.
"""

import errno
import io
import os
import sys
from collections.abc import Generator
from contextlib import contextmanager, suppress
from typing import TextIO

# 128 and the number of SIGPIPE, as of any program that such a pipe ends.
PIPE_CLOSED = 141


class OutputError(Exception):
    """Results cannot be written to standard output; no OSError, which click takes for its own.

    Attributes:
      exit_code: The exit code of the command; its message is empty if nobody reads any more.
    """

    def __init__(self, error: OSError) -> None:
        """Takes the reason."""
        closed = error.errno == errno.EPIPE
        self.exit_code = PIPE_CLOSED if closed else 2
        found = (
            f"standard output: {error.strerror}; a place with room is needed; free the disk or"
            " redirect it elsewhere"
        )
        super().__init__("" if closed else found)


@contextmanager
def command_streams() -> Generator[None]:
    """Has the standard streams fail as said above; for a whole process."""
    sys.stdout, sys.stderr = _Results.on(sys.stdout), _Messages.on(sys.stderr)
    try:
        try:
            yield
        finally:
            sys.stdout.flush()
    except OutputError as error:
        if str(error):
            print(f"error: {error}", file=sys.stderr)
        sys.exit(error.exit_code)


class _Stream(io.TextIOWrapper):
    """A stream with every letter, and with a rule for what cannot be written."""

    @classmethod
    def on(cls, stream: TextIO | None) -> TextIO:
        """The stream in place of one of Python's, which is None if the descriptor is closed."""
        if not isinstance(stream, io.TextIOWrapper):
            return stream or open(os.devnull, "w", encoding="utf-8")
        return cls(
            stream.buffer,
            encoding=stream.encoding,
            errors="backslashreplace" if stream.errors == "strict" else stream.errors,
            line_buffering=stream.line_buffering,
        )

    def write(self, text: str, /) -> int:
        """Writes text."""
        try:
            return super().write(text)
        except OSError as error:
            return self.fail(error)

    def flush(self) -> None:
        """Writes what is kept back."""
        try:
            super().flush()
        except OSError as error:
            self.fail(error)

    def fail(self, error: OSError) -> int:
        """Has all further text vanish: it would fail again when Python ends."""
        with suppress(OSError), open(os.devnull, "w") as nothing:
            os.dup2(nothing.fileno(), self.fileno())
        return 0


class _Messages(_Stream):
    """Standard error."""


class _Results(_Stream):
    """Standard output."""

    def fail(self, error: OSError) -> int:
        """Ends the command."""
        super().fail(error)
        raise OutputError(error) from error
