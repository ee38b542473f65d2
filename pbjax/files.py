"""Files: written whole or not at all, read strictly, and checked to be writable beforehand."""

import json
import os
import sys
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from pbjax.errors import FileError, InputError, InputTypeError, warn

# The `__pydantic_config__` of every class that is read: no unknown field, no NaN, no infinity.
STRICT: Final[dict[str, str | bool]] = {"extra": "forbid", "allow_inf_nan": False}
# What an option that reads a file takes "-" for.
STDIN: Final = Path("/dev/stdin")


def read_bytes(path: Path) -> bytes:
    """Reads a file, or standard input for `STDIN`, which no terminal or test need have as a file.

    Raises:
      OSError: It cannot be read.
    """
    return sys.stdin.buffer.read() if path == STDIN else path.read_bytes()


def write_atomically(path: Path, content: str | bytes) -> None:
    """Writes a file through a scratch file beside it; makes its folder if need be.

    Devices and pipes are written directly, since a scratch file would replace them. A symbolic
    link stays, and the file that it leads to is replaced.

    Raises:
      FileError: The file cannot be written; nothing is left behind.
    """
    path = path if _is_device(path) else Path(os.path.realpath(path))
    scratch = _scratch(path)
    data = content.encode("utf-8") if isinstance(content, str) else content
    try:
        if _is_device(path):
            with path.open("ab") as stream:  # /dev/stdout may be a file's
                stream.write(data)
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        scratch.write_bytes(data)
        scratch.replace(path)
    except OSError as error:
        raise _unwritable(path, error) from error
    finally:
        with suppress(OSError):  # there is no scratch file, or its folder is not one
            scratch.unlink()


def update_atomically(path: Path, content: Callable[[], str]) -> None:
    """Replaces a file by text that is made of what it holds, while no other process does so.

    Args:
      path: The file, which may be absent.
      content: Reads the file and returns its new text.

    Raises:
      FileError: The file cannot be written; it is as it was.
    """
    with _alone(Path(os.path.realpath(path))):
        write_atomically(path, content())


@contextmanager
def _alone(path: Path) -> Generator[None]:
    """Waits until no other process or thread updates a file of the same folder."""
    import fcntl

    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        folder = os.open(path.parent, os.O_RDONLY)  # a lock on the folder leaves no file behind
    except OSError as error:
        raise _unwritable(path, error) from error
    try:
        try:
            fcntl.flock(folder, fcntl.LOCK_EX)
        except OSError as error:  # some network file systems have no locks
            warn(
                f"{path.parent} cannot be locked ({error.strerror}): of two runs that write "
                f"{path.name} at once, one may lose its rows; give each a file of its own"
            )
        yield
    finally:
        os.close(folder)


def check_writable(option: str, path: Path | None, *, folder: bool = False) -> None:
    """Refuses a path that cannot be written, before the work whose result goes there.

    Existing files are left as they are.

    Args:
      option: The option that gave the path, for the message.
      path: The path; None for none.
      folder: Whether it is a folder for several files.

    Raises:
      FileError: Nothing can be written there.
    """
    if path is None:
        return
    if _is_device(path) and not folder and os.access(path, os.W_OK):
        return
    is_folder = os.path.isdir(path) and not folder  # Path.is_dir raises where a name is too long
    found = "Is a directory" if is_folder else _tried(_scratch(path / "file" if folder else path))
    if found:
        kind = "a folder that" if folder else "a file in a folder that"
        raise FileError(
            f"{option} {path}: {found}; {kind} can be written is allowed; choose another path"
        )


def check_named(text: str) -> None:
    """Refuses two texts of a command line that nobody means as a path.

    pathlib reads the empty text as the current folder, and "-" as a file of that name.

    Raises:
      InputError: The text is empty, or "-".
    """
    if not text:
        raise InputError(
            "it is empty; a name or a path is allowed; give one (. is the current folder)"
        )
    if text == "-":
        raise InputError(
            "- is neither standard input nor output here; a name or a path is allowed; give "
            "/dev/stdin or /dev/stdout, or ./- for a file of that name"
        )


def _tried(scratch: Path) -> str:
    """The reason why a file cannot be written; empty if it can. Nothing is left behind."""
    made = [place for place in scratch.parents if not os.path.exists(place)]
    try:
        scratch.parent.mkdir(parents=True, exist_ok=True)
        scratch.touch()
    except OSError as error:
        return error.strerror or str(error)
    finally:
        for remove in (scratch.unlink, *(place.rmdir for place in made)):
            with suppress(OSError):  # it was never made
                remove()
    return ""


def _unwritable(path: Path, error: OSError) -> FileError:
    return FileError(
        f"save({str(path)!r}): {error.strerror or error}; a file in a folder that can be "
        "written is allowed; choose another path or free the disk"
    )


def _is_device(path: Path) -> bool:
    if path.parent == Path("/dev"):
        return True
    return os.path.exists(path) and not (os.path.isfile(path) or os.path.isdir(path))


def _scratch(path: Path) -> Path:
    """The scratch file beside a file; inside a path that has no name, such as "/"."""
    name = f".{path.name}.{os.getpid()}.{threading.get_native_id()}.tmp"
    return path.with_name(name) if path.name else path / name


def to_path(asked: str, path: object) -> Path:
    """The path of a file that a caller names.

    Raises:
      InputTypeError: The argument is not a path.
    """
    if not isinstance(path, str | os.PathLike):
        raise InputTypeError(
            f"{asked}(path): a {type(path).__name__}; the path of a file is allowed; pass a text "
            "or a pathlib.Path"
        )
    return Path(path)


def write_json(path: str | os.PathLike[str], document: object) -> None:
    """Writes plain data as JSON, by `write_atomically`."""
    write_atomically(to_path("save", path), json.dumps(document, indent=1) + "\n")


def read_json[T](path: str | os.PathLike[str], kind: type[T], remedy: str) -> T:
    """Reads a file into a dataclass; unknown, missing, mistyped and infinite fields are refused.

    Args:
      path: The file.
      kind: The dataclass of the whole file, with `STRICT` as its `__pydantic_config__`.
      remedy: What is allowed and what to do, for the message.

    Raises:
      FileError: The file is missing, corrupt, truncated or of a foreign schema; the message names
        the place.
      InputTypeError: The argument is not a path.
    """
    from pydantic import TypeAdapter, ValidationError

    place = to_path("load", path)
    try:
        return TypeAdapter(kind).validate_json(place.read_bytes(), strict=True)
    except OSError as error:
        found = error.strerror or str(error)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        field = ".".join(str(part) for part in first["loc"])
        reason = first["msg"].removeprefix("Value error, ")
        found = f"{field}: {reason}" if field else reason
    except InputError as error:
        found = str(error)
    raise FileError(f"load({str(place)!r}): {found}; {remedy}")
