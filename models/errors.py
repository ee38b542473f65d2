"""The errors that `models` raises on purpose.

Every message has four parts: what was asked, what was found, what is allowed, what to do.
"""


class InputError(ValueError):
    """A model was called with inputs of a wrong shape, dtype or length."""

    exit_code = 2


class CheckpointError(ValueError):
    """A checkpoint cannot be read or written as asked.

    Attributes:
      exit_code: The exit code of a command line: 2 file or format, 3 unsupported configuration, 4
        keys or shapes, 5 numeric check.
    """

    exit_code = 2


class ConfigError(CheckpointError):
    """A configuration has a missing, malformed or unsupported field."""

    exit_code = 3


class KeyMismatchError(CheckpointError):
    """The tensors of a checkpoint are not exactly those that the model needs."""

    exit_code = 4


class NumericError(CheckpointError):
    """A loaded model does not compute the expected values."""

    exit_code = 5


class CheckpointWarning(UserWarning):
    """A checkpoint holds a field that is ignored although it may matter."""
