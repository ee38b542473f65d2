"""Checks of a kernel's arguments that precede those of shapes: arrays and numbers.

The numbers of a launch are part of its code, so they are Python numbers, known while tracing.
"""

from collections.abc import Mapping
from operator import index
from typing import Any

import jax
import numpy as np


def whole(kernel: str, name: str, value: Any) -> int:
    """Returns a whole number of any library as a Python int.

    Args:
      kernel: The name of the public function, for messages.
      name: The name of the argument.
      value: The value of the argument.

    Raises:
      TypeError: The value is something else, such as a float, or is unknown while tracing.
    """
    try:
        if not isinstance(value, bool):
            return index(value)
    except TypeError:  # A value that is being traced raises it too.
        pass
    raise TypeError(
        f"{kernel}({name}): a {type(value).__name__}; a whole number is allowed, known while "
        "tracing; pass a Python int"
    )


def number(kernel: str, name: str, value: Any) -> float:
    """Returns a number of any library as a Python float; otherwise like `whole`."""
    try:
        if not isinstance(value, str | bytes | bytearray | bool):
            return float(value)
    except TypeError:
        pass
    raise TypeError(
        f"{kernel}({name}): a {type(value).__name__}; a number is allowed, known while tracing; "
        "pass a Python float"
    )


def check_arrays(
    kernel: str, needed: Mapping[str, object], optional: Mapping[str, object] | None = None
) -> None:
    """Raises TypeError unless the arguments are arrays; the optional ones may be None."""
    given = {name: x for name, x in (optional or {}).items() if x is not None}
    for name, x in {**needed, **given}.items():
        if not isinstance(x, jax.Array | np.ndarray):
            raise TypeError(
                f"{kernel}({name}): a {type(x).__name__}; an array is allowed; pass "
                f"jnp.asarray({name})"
            )
