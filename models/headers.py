"""What is known of a stored tensor before it is read."""

import math
from collections.abc import Hashable
from dataclasses import dataclass
from pathlib import Path

DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
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
    """Where one tensor lies and what it is.

    Attributes:
      key: Its name in the file.
      file: The file.
      shape: Its shape.
      dtype: Its dtype in safetensors' spelling, e.g. "BF16".
    """

    key: str
    file: Path
    shape: tuple[int, ...]
    dtype: str

    @property
    def place(self) -> Hashable:
        """What two tensors share that are stored but once."""
        return self.file, self.key

    @property
    def num_bytes(self) -> int:
        """Size of the tensor's data."""
        return math.prod(self.shape) * ITEM_BYTES.get(self.dtype, 1)
