"""What callers pass: numbers of any library as Python's own; another type is refused by name."""

import math
import reprlib
from collections.abc import Mapping
from operator import index
from typing import Any

from pbjax.errors import InputError, InputTypeError


def whole_number(asked: str, value: Any) -> int:
    """Returns a whole number.

    Args:
      asked: The call and the argument, such as "generate(seed)".
      value: What was passed.

    Raises:
      InputTypeError: It is something else, such as a float or a bool.
    """
    try:
        if not isinstance(value, bool):
            return index(value)
    except TypeError:
        pass
    raise InputTypeError(f"{asked}: {_shown(value)}; a whole number is allowed; pass an int")


def whole_numbers(asked: str, values: Any) -> list[int]:
    """Returns the whole numbers of a list, a tuple, a set or an array.

    Raises:
      InputTypeError: They are something else, such as one number.
    """
    try:
        if not isinstance(values, str | bytes):
            return [whole_number(asked, value) for value in values]
    except TypeError as error:
        if isinstance(error, InputTypeError):
            raise
    raise InputTypeError(
        f"{asked}: {_shown(values)}; several whole numbers are allowed; pass a list of them"
    )


def number(asked: str, value: Any) -> float:
    """Returns a number as a float.

    Raises:
      InputTypeError: It is something else, such as a text, a bool or several numbers.
    """
    try:
        if not isinstance(value, str | bytes | bytearray | bool):
            return float(value)
    except (TypeError, ValueError):
        pass
    raise InputTypeError(f"{asked}: {_shown(value)}; a number is allowed; pass a float")


def check_type(asked: str, value: object, kinds: tuple[type, ...], allowed: str) -> None:
    """Refuses a value of another type.

    Args:
      asked: The call and the argument, such as "optimize(device)".
      value: What was passed.
      kinds: Types that it may have.
      allowed: What these are, in words.

    Raises:
      InputTypeError: It has another one.
    """
    if not isinstance(value, kinds):
        raise InputTypeError(f"{asked}: {_shown(value)}; {allowed} is allowed; pass such")


def check_finite(
    asked: str, figures: Mapping[str, float], remedy: str, *, zero: bool = True
) -> None:
    """Refuses what no measurement gives.

    Args:
      asked: What has the figures, such as "Seconds".
      figures: Rates or seconds by their name.
      remedy: What to do, for the message.
      zero: Whether 0 is allowed.

    Raises:
      InputError: One is negative, infinite or NaN; the message names it.
    """
    for name, value in figures.items():
        if not (0 <= value < math.inf and (zero or value)):
            least = "0 or more" if zero else "above 0"
            raise InputError(
                f"{asked}: {name} is {value:g}; finite numbers {least} are allowed; {remedy}"
            )


def _shown(value: object) -> str:
    text = " ".join(reprlib.repr(value).split())
    return f"{text} of type {type(value).__name__}"
