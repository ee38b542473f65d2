"""Fields of a checkpoint's preprocessor_config.json, for images and audio."""

import math
from collections.abc import Mapping

from pbjax.errors import InputError


def positive_number(
    settings: Mapping[str, object], field: str, default: float | int, name: str
) -> float:
    """Returns a positive field, or the default of the feature extractor's class.

    Raises:
      InputError: It is not a positive number.
    """
    value = settings.get(field, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise InputError(
            f"{name}: {field} of preprocessor_config.json is {value!r}; a positive number is "
            "needed; fetch the file again"
        )
    return float(value)


def positive_integer(settings: Mapping[str, object], field: str, default: int, name: str) -> int:
    """Returns a positive integer field, or the default of the feature extractor's class.

    Raises:
      InputError: It is not a whole number of 1 or more.
    """
    value = positive_number(settings, field, default, name)
    if not value.is_integer():
        raise InputError(
            f"{name}: {field} of preprocessor_config.json is {value!r}; a whole number is needed; "
            "fetch the file again"
        )
    return int(value)
