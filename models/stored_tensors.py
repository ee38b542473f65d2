"""The place of a stored tensor in a file, and its memory-mapped values.

Mapping itself reads nothing: the system loads pages on use and can drop them at any time, so that a
tensor on its way to a device takes no memory of the process.
"""

import math
from dataclasses import dataclass
from pathlib import Path

import ml_dtypes
import numpy as np
from jaxtyping import Shaped

from models.errors import CheckpointError

DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
NUMPY_DTYPES = {"F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16}
ITEM_BYTES = {
    "F64": 8,
    "I64": 8,
    "U64": 8,
    "F32": 4,
    "I32": 4,
    "U32": 4,
    "F16": 2,
    "BF16": 2,
    "I16": 2,
    "U16": 2,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorHeader:
    """The place and the type of one tensor.

    Attributes:
      key: The name of the tensor in the file.
      file: The file.
      shape: The shape.
      dtype: The dtype in safetensors' spelling, e.g. "BF16".
      start: The position of the first value in the file, in bytes.
      strides: The distance between neighbours along each axis, in values; None = contiguous.
    """

    key: str
    file: Path
    shape: tuple[int, ...]
    dtype: str
    start: int
    strides: tuple[int, ...] | None = None

    @property
    def num_bytes(self) -> int:
        """Size of the tensor's data."""
        return math.prod(self.shape) * ITEM_BYTES.get(self.dtype, 1)

    @property
    def num_spanned(self) -> int:
        """Number of values in the file from the first to the last of the tensor."""
        if self.strides is None or not math.prod(self.shape):
            return math.prod(self.shape)
        steps = zip(self.shape, self.strides, strict=True)
        return 1 + sum((size - 1) * step for size, step in steps)


def map_tensor(header: TensorHeader) -> Shaped[np.ndarray, "..."]:
    """Returns a tensor's values, mapped from its file and read when they are used.

    Raises:
      CheckpointError: The file can no longer be read.
    """
    dtype = np.dtype(NUMPY_DTYPES[header.dtype])
    if not header.num_spanned:
        return np.empty(header.shape, dtype)
    try:
        span = np.memmap(header.file, dtype, "r", header.start, (header.num_spanned,))
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"{header.file}: {header.key} cannot be read any more ({error}); the file must stay as"
            " it is while it is loaded; fetch it again"
        ) from error
    if header.strides is None:
        return np.asarray(span).reshape(header.shape)
    strides = tuple(step * dtype.itemsize for step in header.strides)
    return np.lib.stride_tricks.as_strided(span, header.shape, strides, writeable=False)
