"""Writes PyTorch files without PyTorch: sound ones, and such as no torch.save would write."""

import io
import pickle
import sys
import types
import zipfile
from collections import OrderedDict
from contextlib import contextmanager
from dataclasses import dataclass, field

import ml_dtypes
import numpy as np

STORAGES = {
    np.dtype(np.float32): "FloatStorage",
    np.dtype(np.float16): "HalfStorage",
    np.dtype(ml_dtypes.bfloat16): "BFloat16Storage",
    np.dtype(np.float64): "DoubleStorage",
    np.dtype(np.int64): "LongStorage",
    np.dtype(np.bool_): "BoolStorage",
}


@dataclass
class View:
    """A tensor on a part of a storage; by default on all of it."""

    storage: np.ndarray
    offset: int = 0
    shape: tuple = None
    strides: tuple = None
    num_values: int = None
    key: str = None

    def __reduce__(self):
        whole = np.ascontiguousarray(self.storage)
        steps = tuple(step // whole.itemsize for step in whole.strides)
        shape = whole.shape if self.shape is None else self.shape
        strides = steps if self.strides is None else self.strides
        stored = Storage(self.storage, self.num_values, self.key)
        rebuild = sys.modules["torch._utils"]._rebuild_tensor_v2
        return rebuild, (stored, self.offset, shape, strides, False, OrderedDict())


@dataclass
class Storage:
    array: np.ndarray
    num_values: int = None
    key: str = None


@dataclass
class Raw:
    """An object whose pickle is a call of a function, whatever it is."""

    function: object
    arguments: tuple = ()
    more: tuple = field(default=())

    def __reduce__(self):
        return (self.function, self.arguments, *self.more)


class _Pickler(pickle.Pickler):
    def __init__(self, file, protocol):
        super().__init__(file, protocol)
        self.arrays = {}

    def persistent_id(self, value):
        if not isinstance(value, Storage):
            return None
        array = value.array
        number = next((k for k, a in self.arrays.items() if a is array), str(len(self.arrays)))
        self.arrays[number] = array
        kind = getattr(sys.modules["torch"], STORAGES[array.dtype])
        count = array.size if value.num_values is None else value.num_values
        return ("storage", kind, value.key or number, "cpu", count)


@contextmanager
def _names():
    """The names that the files hold, as pickle wants them: importable."""
    torch, utils = types.ModuleType("torch"), types.ModuleType("torch._utils")
    for name in STORAGES.values():
        setattr(torch, name, type(name, (), {"__module__": "torch"}))

    def _rebuild_tensor_v2():
        """Never called."""

    _rebuild_tensor_v2.__module__ = "torch._utils"
    _rebuild_tensor_v2.__qualname__ = "_rebuild_tensor_v2"
    utils._rebuild_tensor_v2 = _rebuild_tensor_v2
    sys.modules |= {"torch": torch, "torch._utils": utils}
    try:
        yield
    finally:
        del sys.modules["torch"], sys.modules["torch._utils"]


def dump(value, protocol=2):
    """The pickle of a value with arrays or Views as tensors, and the storages it needs."""
    if isinstance(value, dict):
        value = OrderedDict(
            (k, View(v) if isinstance(v, np.ndarray) else v) for k, v in value.items()
        )
    with _names():
        file = io.BytesIO()
        pickler = _Pickler(file, protocol)
        pickler.dump(value)
        return file.getvalue(), {k: a.tobytes() for k, a in pickler.arrays.items()}


def save(path, value, *, protocol=2, **changes):
    """Writes a value as torch.save does."""
    program, storages = dump(value, protocol)
    write(path, program, storages, **changes)


def write(path, program, storages, *, order=b"little", compression=zipfile.ZIP_STORED, more=()):
    """Writes an archive around a pickle."""
    with zipfile.ZipFile(path, "w", compression) as archive:
        archive.writestr("archive/data.pkl", program)
        archive.writestr("archive/byteorder", order)
        for key, data in storages.items():
            archive.writestr(f"archive/data/{key}", data)
        archive.writestr("archive/version", b"3\n")
        for name in more:
            archive.writestr(name, b"")
