"""Reads tensors of a PyTorch file (.bin), a zip archive since PyTorch 1.6, without PyTorch.

The archive holds a pickle, which `models.pickle_reader` reads without running it, and one
uncompressed file for every storage, whose bytes are read in place, one tensor at a time.
"""

import zipfile
from collections.abc import Hashable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import ml_dtypes
import numpy as np
from jaxtyping import Shaped, UInt8

from models.errors import CheckpointError
from models.headers import ITEM_BYTES, TensorHeader
from models.pickle_reader import Storage, read_state_dict

NUMPY_DTYPES = {"F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16}
PROGRAM = "/data.pkl"
# Of a state dict's pickle, some hundred bytes a tensor; far above any real one.
MAX_PROGRAM_BYTES = 2**26
PICKLE_START = b"\x80"
LOCAL_HEADER, LOCAL_HEADER_BYTES = b"PK\x03\x04", 30


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchHeader(TensorHeader):
    """Where one tensor lies in a PyTorch file.

    Attributes:
      start: Position in the file of its first value, in bytes.
      strides: How many values further the next one along each axis lies.
    """

    start: int
    strides: tuple[int, ...]

    @property
    def place(self) -> Hashable:
        """What two tensors share that are stored but once."""
        return self.file, self.start


def read_torch_headers(path: Path) -> list[TorchHeader]:
    """Returns the header of every tensor of a file; runs nothing and reads no tensor.

    Raises:
      CheckpointError: The file is of the older format, truncated or damaged, or its pickle asks for
        anything but tensors.
    """
    try:
        with path.open("rb") as file:
            if file.read(1) == PICKLE_START:
                raise _legacy(path)
            with zipfile.ZipFile(file) as archive:
                return _Archive(path, archive).headers()
    except (OSError, EOFError, zipfile.BadZipFile, NotImplementedError) as error:
        raise _damaged(path, str(error)) from error


def read_torch_tensors(
    path: Path, headers: Iterable[TensorHeader]
) -> Iterator[tuple[TensorHeader, Shaped[np.ndarray, "..."]]]:
    """Yields each tensor with its header, one at a time.

    Raises:
      CheckpointError: The file can no longer be read.
    """
    for header in headers:
        assert isinstance(header, TorchHeader), "a header of another format"
        dtype = np.dtype(NUMPY_DTYPES[header.dtype])
        strides = tuple(step * dtype.itemsize for step in header.strides)
        if not header.num_bytes:
            yield header, np.empty(header.shape, dtype)
            continue
        last = sum((n - 1) * step for n, step in zip(header.shape, header.strides, strict=True))
        span = _bytes(path, header.start, (last + 1) * dtype.itemsize).view(dtype)
        view = np.lib.stride_tricks.as_strided(span, header.shape, strides, writeable=False)
        yield header, np.ascontiguousarray(view)


class _Archive:
    """The table of contents of one file, checked."""

    def __init__(self, path: Path, archive: zipfile.ZipFile) -> None:
        self._path = path
        infos = archive.infolist()
        self._entries = {info.filename: info for info in infos}
        programs = [name for name in self._entries if name.endswith(PROGRAM)]
        if len(self._entries) != len(infos) or len(programs) != 1:
            raise _damaged(path, "it is no archive with one data.pkl and no name twice")
        self._folder = programs[0].removesuffix(PROGRAM)
        self._starts: dict[Storage, int] = {}

    def headers(self) -> list[TorchHeader]:
        order = f"{self._folder}/byteorder"
        if order in self._entries and self._read(order, 16) != b"little":
            raise _damaged(self._path, "its byte order is not little-endian")
        program = self._read(self._folder + PROGRAM, MAX_PROGRAM_BYTES)
        return [
            TorchHeader(
                key=key,
                file=self._path,
                shape=tensor.shape,
                dtype=tensor.storage.dtype,
                strides=tensor.strides,
                start=self._start(tensor.storage) + tensor.offset * _item_bytes(tensor.storage),
            )
            for key, tensor in read_state_dict(program, str(self._path)).items()
        ]

    def _start(self, storage: Storage) -> int:
        """Returns where a storage's bytes begin; many tensors may share one."""
        if storage not in self._starts:
            name = f"{self._folder}/data/{storage.key}"
            if name not in self._entries:
                raise _damaged(self._path, f"storage {name} is absent")
            wanted, found = (
                storage.num_values * _item_bytes(storage),
                self._entries[name].file_size,
            )
            if found != wanted:
                raise _damaged(self._path, f"storage {name} has {found} bytes, not {wanted}")
            self._starts[storage] = self._place(name)
        return self._starts[storage]

    def _read(self, name: str, at_most: int) -> bytes:
        size = self._entries[name].file_size
        if size > at_most:
            raise _damaged(self._path, f"{name} has {size} bytes, more than {at_most}")
        return _bytes(self._path, self._place(name), size).tobytes()

    def _place(self, name: str) -> int:
        entry = self._entries[name]
        plain = entry.compress_type == zipfile.ZIP_STORED and not entry.flag_bits & 1
        if not plain or entry.compress_size != entry.file_size:
            raise _damaged(self._path, f"{name} is compressed or encrypted")
        header = _bytes(self._path, entry.header_offset, LOCAL_HEADER_BYTES).tobytes()
        if not header.startswith(LOCAL_HEADER):
            raise _damaged(self._path, f"{name} does not begin where the archive says")
        lengths = int.from_bytes(header[26:28], "little") + int.from_bytes(header[28:30], "little")
        start = entry.header_offset + LOCAL_HEADER_BYTES + lengths
        if start + entry.file_size > self._path.stat().st_size:
            raise _damaged(self._path, f"{name} ends after the file")
        return start


def _item_bytes(storage: Storage) -> int:
    return ITEM_BYTES.get(storage.dtype, 1)


def _bytes(path: Path, start: int, count: int) -> UInt8[np.ndarray, " bytes"]:
    try:
        found = np.fromfile(path, np.uint8, count, offset=start)
    except OSError as error:
        raise _damaged(path, str(error)) from error
    if len(found) != count:
        raise _damaged(path, f"it ends at {start + len(found)}, not at {start + count}")
    return found


def _damaged(path: Path, found: str) -> CheckpointError:
    return CheckpointError(
        f"{path}: not readable as a PyTorch file ({found}); a complete zip archive that torch.save"
        " wrote is needed; fetch it again"
    )


def _legacy(path: Path) -> CheckpointError:
    recipe = f"torch.save(torch.load({path.name!r}, weights_only=True), {path.name!r})"
    return CheckpointError(
        f"{path}: a bare pickle, the format of PyTorch before 1.6; only its zip archives are read;"
        f" where torch is installed and the file trusted, run {recipe}"
    )
