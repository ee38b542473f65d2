"""Checks of arguments: numbers of any library become Python's; wrong types are refused by name."""

import math
import reprlib
from collections.abc import Mapping
from operator import index
from typing import Any

from pbjax.errors import InputError, InputTypeError

SHORT_DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}


def dtype_name(name: str) -> str:
    """Returns the whole name of a dtype that may be written short, as bf16; others as they are."""
    return SHORT_DTYPES.get(name, name)


def whole_number(asked: str, value: Any) -> int:
    """Returns a whole number.

    Args:
      asked: The call and the argument, such as "generate(seed)".
      value: The argument.

    Raises:
      InputTypeError: The value is not a whole number, such as a float or a bool.
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
      InputTypeError: The values are something else, such as one number.
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
      InputTypeError: The value is not a number, such as a text, a bool or several numbers.
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
      value: The argument.
      kinds: The types that are allowed.
      allowed: The same types in words.

    Raises:
      InputTypeError: The value has another type.
    """
    if not isinstance(value, kinds):
        raise InputTypeError(f"{asked}: {_shown(value)}; {allowed} is allowed; pass one")


def check_finite(
    asked: str, values: Mapping[str, float], remedy: str, *, zero: bool = True
) -> None:
    """Refuses values that no measurement gives.

    Args:
      asked: The object that has the values, such as "Seconds".
      values: Rates or seconds by their name.
      remedy: What to do, for the message.
      zero: Whether 0 is allowed.

    Raises:
      InputError: A value is negative, infinite or NaN; the message names it.
    """
    for name, value in values.items():
        if not (0 <= value < math.inf and (zero or value)):
            least = "0 or more" if zero else "above 0"
            raise InputError(
                f"{asked}: {name} is {value:g}; finite numbers {least} are allowed; {remedy}"
            )


def _shown(value: object) -> str:
    text = " ".join(reprlib.repr(value).split())
    return f"{text} of type {type(value).__name__}"
