"""The errors pbjax raises on purpose, every one a `PbjaxError`, and its warnings.

A message is one line: what was asked, what was found, what is allowed, what to do.
"""

import os
import warnings

_PACKAGE = os.path.join(os.path.dirname(__file__), "")


class PbjaxError(Exception):
    """Base of every error that pbjax raises on purpose."""


class PbjaxWarning(UserWarning):
    """Something changed a result or a cost."""


def warn(text: str) -> None:
    """Issues a warning at the caller's line, outside pbjax.

    Args:
      text: The finding, its consequence and the remedy.
    """
    warnings.warn(text, PbjaxWarning, skip_file_prefixes=(_PACKAGE,))


class InputError(PbjaxError, ValueError):
    """An argument has a wrong value, shape or dtype."""


class InputTypeError(PbjaxError, TypeError):
    """An argument has a wrong type."""


class ModelError(PbjaxError, ValueError):
    """A model keeps state or cannot be traced, or it is to be split and its batch cannot be."""


class FileError(PbjaxError, ValueError):
    """A plan or profile file is corrupt, truncated, or of a foreign schema."""


class DeviceError(PbjaxError, ValueError):
    """A device is unknown, or a plan or profile belongs to another one."""


class MemoryBudgetError(PbjaxError):
    """A program needs more device memory than there is."""


class VerificationError(PbjaxError):
    """A program's outputs differ from the model's by more than the dtype allows."""


class FusionError(VerificationError):
    """The outputs differ because of kernels that fusion put into the model."""
