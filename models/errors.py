"""The errors that `models` raises on purpose.

A message has one form: what was asked, what was found, what is allowed, what to do.
"""


class InputError(ValueError):
    """A model was called with inputs of a wrong shape, dtype or length."""

    exit_code = 2


class CheckpointError(ValueError):
    """A checkpoint cannot be read or written as asked.

    Attributes:
      exit_code: What a command line returns for it: 2 file or format, 3 unsupported configuration,
        4 keys or shapes, 5 numeric check.
    """

    exit_code = 2


class ConfigError(CheckpointError):
    """A configuration has a missing, malformed or unsupported field."""

    exit_code = 3


class KeyMismatchError(CheckpointError):
    """The tensors of a checkpoint are not exactly those that the model needs."""

    exit_code = 4


class NumericError(CheckpointError):
    """A loaded model does not compute what it should."""

    exit_code = 5


class CheckpointWarning(UserWarning):
    """A checkpoint has something that is ignored although it is not known to be harmless."""
