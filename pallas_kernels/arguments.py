"""What every kernel asks of its arguments before it looks at shapes: arrays and Python's numbers.

Numbers of a launch are part of its code, so that they are Python's own and known while tracing.
"""

from collections.abc import Mapping
from operator import index
from typing import Any

import jax
import numpy as np


def whole(kernel: str, name: str, value: Any) -> int:
    """Returns a whole number of any library as Python's.

    Args:
      kernel: Name of the public function, for messages.
      name: Of the argument.
      value: What was passed.

    Raises:
      TypeError: It is something else, such as a float, or not known while tracing.
    """
    try:
        if not isinstance(value, bool):
            return index(value)
    except TypeError:  # Also that of a value which is being traced.
        pass
    raise TypeError(
        f"{kernel}({name}): a {type(value).__name__}; a whole number is allowed, known while "
        "tracing; pass a Python int"
    )


def number(kernel: str, name: str, value: Any) -> float:
    """Returns a number of any library as a float; as `whole` otherwise."""
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
