"""The lines of a user's source that operations and errors come from, for messages."""

import contextlib
import functools
from collections.abc import Iterable
from pathlib import Path
from traceback import walk_tb

import jax
import jaxtyping
from jax.extend.core import JaxprEqn

import pallas_kernels

# Frames that are no line of the user's model, decorators among them; a model may lie in any folder,
# one named jax or pbjax among them.
_PBJAX = Path(__file__).parents[1]
_LIBRARIES = (*(Path(m.__file__ or "").parent for m in (jax, jaxtyping, pallas_kernels)), _PBJAX)
_DECORATORS = (contextlib.__file__, functools.__file__)
_NOT_USERS = ("<", *(f"{folder}/" for folder in _LIBRARIES), *_DECORATORS)
_FLAX = ("/flax/nnx/", "/flax/linen/", "/flax/core/")


def traced_line(equations: Iterable[JaxprEqn]) -> str:
    """The line of the first equation that has one outside of jax, flax and pbjax, as file:line.

    Args:
      equations: An equation, then the calls and loops around it from inside out. What a library
        has jitted is traced once for all callers, and so has no line of theirs.
    """
    for equation in equations:
        traceback = equation.source_info.traceback
        frames = traceback.frames if traceback else []
        if line := _first_line((frame.file_name, frame.line_num) for frame in frames):
            return line
    return "inside a library, on no known line"


def raising_line(error: BaseException) -> str:
    """The innermost line outside of jax, flax and pbjax that an error went through.

    Empty if it went through none.
    """
    frames = [(frame.f_code.co_filename, line) for frame, line in walk_tb(error.__traceback__)]
    return _first_line(reversed(frames))


def _first_line(frames: Iterable[tuple[str, int]]) -> str:
    for path, line in frames:
        if not path.startswith(_NOT_USERS) and not any(part in path for part in _FLAX):
            return f"{path.rsplit('/', 1)[-1]}:{line}"
    return ""
