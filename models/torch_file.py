"""Finds the tensors of a PyTorch file (.bin), a zip archive since PyTorch 1.6, without PyTorch.

The archive holds a pickle, which `models.pickle_reader` reads without running it, and one
uncompressed file for every storage, with the values of tensors as they are in memory.
"""

import zipfile
from pathlib import Path

import numpy as np
from jaxtyping import UInt8

from models.errors import CheckpointError
from models.pickle_reader import Storage, read_state_dict
from models.stored_tensors import ITEM_BYTES, TensorHeader

PROGRAM = "/data.pkl"
# The limit of a state dict's pickle, which has some hundred bytes a tensor; far above real ones.
MAX_PROGRAM_BYTES = 2**26
PICKLE_START = b"\x80"
LOCAL_HEADER, LOCAL_HEADER_BYTES = b"PK\x03\x04", 30


def read_torch_headers(path: Path) -> list[TensorHeader]:
    """Returns the header of every tensor of a file; runs nothing and reads no tensor.

    Raises:
      CheckpointError: The file has the older format, is truncated or damaged, or its pickle asks
        for anything but tensors.
    """
    try:
        with path.open("rb") as file:
            if file.read(1) == PICKLE_START:
                raise _legacy(path)
            with zipfile.ZipFile(file) as archive:
                return _Archive(path, archive).headers()
    except (OSError, EOFError, zipfile.BadZipFile, NotImplementedError) as error:
        raise _damaged(path, str(error)) from error


class _Archive:
    """The checked table of contents of one file."""

    def __init__(self, path: Path, archive: zipfile.ZipFile) -> None:
        self._path = path
        infos = archive.infolist()
        self._entries = {info.filename: info for info in infos}
        programs = [name for name in self._entries if name.endswith(PROGRAM)]
        if len(self._entries) != len(infos) or len(programs) != 1:
            raise _damaged(path, "it is no archive with one data.pkl and no name twice")
        self._folder = programs[0].removesuffix(PROGRAM)
        self._starts: dict[Storage, int] = {}

    def headers(self) -> list[TensorHeader]:
        order = f"{self._folder}/byteorder"
        if order in self._entries and self._read(order, 16) != b"little":
            raise _damaged(self._path, "its byte order is not little-endian")
        program = self._read(self._folder + PROGRAM, MAX_PROGRAM_BYTES)
        return [
            TensorHeader(
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
