"""Reads the pickle of a PyTorch state dict without running it.

A pickle is a program: under the standard reader it can call anything that Python can import. Here
`pickletools` reads its opcodes, and only the opcodes of a state dict of tensors are carried out,
one by one, on plain data. Names in the program are looked up in the one table below, whose entries
are ours: nothing is imported, no attribute is read or set, and only strings and numbers are hashed,
compared or printed. Everything else is refused by name.
"""

import pickletools
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod

from models.errors import CheckpointError

# The dtype of each storage type, in safetensors' spelling.
STORAGES = {
    "torch DoubleStorage": "F64",
    "torch FloatStorage": "F32",
    "torch HalfStorage": "F16",
    "torch BFloat16Storage": "BF16",
    "torch LongStorage": "I64",
    "torch IntStorage": "I32",
    "torch ShortStorage": "I16",
    "torch CharStorage": "I8",
    "torch ByteStorage": "U8",
    "torch BoolStorage": "BOOL",
}
CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}
NUMBERS_AND_TEXTS = frozenset(
    [
        "BININT",
        "BININT1",
        "BININT2",
        "LONG1",
        "BINFLOAT",
        "BINUNICODE",
        "SHORT_BINUNICODE",
        "BINUNICODE8",
    ]
)
PUTS = frozenset({"BINPUT", "LONG_BINPUT"})
GETS = frozenset({"BINGET", "LONG_BINGET"})
MAX_AXES = 64
TUPLES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}


@dataclass(frozen=True, slots=True)
class Global:
    """An allowed name that the program asked for, as "module name"."""

    name: str


@dataclass(frozen=True, slots=True)
class Storage:
    """A run of values: a file of the archive, whose name holds the key."""

    dtype: str
    key: str
    num_values: int


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A view that lies within a storage; offset and strides are in values."""

    storage: Storage
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


class _Malformed(Exception):
    """A malformed program; the message says what is wrong."""


def read_state_dict(program: bytes, origin: str) -> dict[str, StoredTensor]:
    """Returns the tensors of a pickled state dict by name.

    Args:
      program: The pickle, e.g. data.pkl of a PyTorch archive.
      origin: The file, for messages.

    Raises:
      CheckpointError: The program asks for anything but tensors, or is damaged.
    """
    try:
        found = _run(program, origin)
    except CheckpointError:
        raise
    except (_Malformed, ValueError, IndexError, KeyError, DeprecationWarning) as error:
        raise CheckpointError(
            f"{origin}: not readable as a pickled state dict ({error}); a complete file that"
            " torch.save wrote is needed; fetch it again"
        ) from error
    if not isinstance(found, dict):
        raise _no_state_dict(origin, f"its pickle holds {_kind(found)}")
    for name, value in found.items():
        if not isinstance(value, StoredTensor):
            raise _no_state_dict(origin, f"{name!r:.100} in its pickle is {_kind(value)}")
    return {name: value for name, value in found.items() if isinstance(value, StoredTensor)}


def _run(program: bytes, origin: str) -> object:
    machine = _Machine(origin)
    with warnings.catch_warnings():
        # Python warns about a backslash that escapes nothing; no name of torch has one.
        warnings.simplefilter("error", DeprecationWarning)
        for opcode, argument, _ in pickletools.genops(program):
            if opcode.name == "STOP":
                return machine.pop()
            machine.step(opcode.name, argument)
    raise _Malformed("it has no end")


class _Machine:
    """The stack, the marks and the memo of a pickle's program."""

    def __init__(self, origin: str) -> None:
        self._origin = origin
        self._stack: list[object] = []
        self._marked: list[list[object]] = []
        self._memo: dict[int, object] = {}
        self._actions: dict[str, Callable[[], object]] = {
            "PROTO": lambda: None,
            "FRAME": lambda: None,
            "MARK": self._mark,
            "EMPTY_DICT": lambda: self._stack.append({}),
            "EMPTY_LIST": lambda: self._stack.append([]),
            "EMPTY_TUPLE": lambda: self._stack.append(()),
            "TUPLE": self._tuple,
            "APPEND": lambda: self._extend([self.pop()]),
            "APPENDS": lambda: self._extend(self._since_mark()),
            "SETITEM": self._set_item,
            "SETITEMS": lambda: self._set_items(self._since_mark()),
            "MEMOIZE": lambda: self._memo.update({len(self._memo): self._stack[-1]}),
            "STACK_GLOBAL": self._stack_global,
            "BINPERSID": self._storage,
            "REDUCE": self._call,
            "BUILD": self._build,
        }

    def step(self, name: str, argument: object) -> None:
        """Carries out one opcode, or refuses it."""
        if name in self._actions:
            self._actions[name]()
        elif name in CONSTANTS:
            self._stack.append(CONSTANTS[name])
        elif name in NUMBERS_AND_TEXTS and isinstance(argument, int | float | str):
            self._stack.append(argument)
        elif name in TUPLES:
            count = TUPLES[name]
            items = [self.pop() for _ in range(count)]
            self._stack.append(tuple(reversed(items)))
        elif name in PUTS and isinstance(argument, int):
            self._memo[argument] = self._stack[-1]
        elif name in GETS and isinstance(argument, int):
            self._stack.append(self._memo[argument])
        elif name in ("GLOBAL", "INST"):
            self._global(str(argument))
        else:
            raise self._refused(f"opcode {name}")

    def pop(self) -> object:
        """Takes the last value off the stack."""
        if not self._stack:
            raise _Malformed("its stack is empty")
        return self._stack.pop()

    def _mark(self) -> None:
        self._marked.append(self._stack)
        self._stack = []

    def _since_mark(self) -> list[object]:
        if not self._marked:
            raise _Malformed("it has no mark")
        items, self._stack = self._stack, self._marked.pop()
        return items

    def _tuple(self) -> None:
        items = tuple(self._since_mark())
        self._stack.append(items)

    def _extend(self, items: Sequence[object]) -> None:
        target = self._stack[-1]
        if not isinstance(target, list):
            raise _Malformed(f"it appends to {_kind(target)}")
        target.extend(items)

    def _set_item(self) -> None:
        value, key = self.pop(), self.pop()
        self._set_items([key, value])

    def _set_items(self, items: Sequence[object]) -> None:
        target = self._stack[-1]
        if not isinstance(target, dict):
            raise _Malformed(f"it sets an item of {_kind(target)}")
        for key, value in zip(items[::2], items[1::2], strict=True):
            if not isinstance(key, str):
                raise _Malformed(f"a key is {_kind(key)}")
            target[key] = value

    def _stack_global(self) -> None:
        name, module = self.pop(), self.pop()
        if not isinstance(name, str) or not isinstance(module, str):
            raise _Malformed("it asks for a name that is no text")
        self._global(f"{module} {name}")

    def _global(self, name: str) -> None:
        if name not in STORAGES and name not in _CALLS:
            raise self._refused(name.replace(" ", "."))
        self._stack.append(Global(name))

    def _storage(self) -> None:
        match self.pop():
            case ("storage", Global() as kind, str(key), str(), count) if kind.name in STORAGES:
                if not (key.isascii() and key.isdecimal()):
                    raise _Malformed(f"a storage is called {key!r:.100}, no number")
                self._stack.append(Storage(STORAGES[kind.name], key, *_counts((count,))))
            case other:
                raise _Malformed(f"a storage is {_kind(other)} of other parts")

    def _call(self) -> None:
        arguments, function = self.pop(), self.pop()
        if not isinstance(function, Global) or function.name not in _CALLS:
            raise self._refused(f"a call of {_kind(function)}")
        if not isinstance(arguments, tuple):
            raise _Malformed(f"arguments are {_kind(arguments)}")
        self._stack.append(_CALLS[function.name](arguments))

    def _build(self) -> None:
        # PyTorch stores module versions beside a state dict; they are not needed.
        state = self.pop()
        if not isinstance(self._stack[-1], dict) or not isinstance(state, dict):
            raise self._refused(f"a state for {_kind(self._stack[-1])}")

    def _refused(self, what: str) -> CheckpointError:
        return CheckpointError(
            f"{self._origin}: its pickle asks for {what:.100}; only tensors are loaded, and"
            " nothing was run; do not open the file with a program that runs pickles"
        )


def _ordered_dict(arguments: tuple[object, ...]) -> dict[str, object]:
    if arguments:
        raise _Malformed("an OrderedDict has arguments")
    return {}


def _tensor(arguments: tuple[object, ...]) -> StoredTensor:
    match arguments:
        case (Storage() as storage, offset, shape, strides, bool(), dict()):
            pass
        case (Storage() as storage, offset, shape, strides, bool(), dict(), None):
            pass
        case _:
            raise _Malformed("a tensor has other arguments than a storage, a place and a shape")
    sizes, steps = _counts(shape), _counts(strides)
    (start,) = _counts((offset,))
    if len(sizes) != len(steps):
        raise _Malformed(f"a tensor has {len(sizes)} axes and {len(steps)} strides")
    last = start + sum((size - 1) * step for size, step in zip(sizes, steps, strict=True))
    if prod(sizes) > storage.num_values or (prod(sizes) and last >= storage.num_values):
        raise _Malformed(
            f"a tensor of shape {list(sizes)} ends outside of its storage of {storage.num_values}"
        )
    return StoredTensor(storage, start, sizes, steps)


def _parameter(arguments: tuple[object, ...]) -> StoredTensor:
    match arguments:
        case (StoredTensor() as tensor, bool(), dict()):
            return tensor
    raise _Malformed("a Parameter is made of something else than a tensor")


def _counts(values: object) -> tuple[int, ...]:
    if not isinstance(values, tuple):
        raise _Malformed(f"a shape is {_kind(values)}")
    counts = [value for value in values if type(value) is int and 0 <= value < 2**63]
    if len(counts) != len(values) or len(values) > MAX_AXES:
        raise _Malformed("a shape has other parts than a few whole numbers from 0 on")
    return tuple(counts)


_CALLS: Mapping[str, Callable[[tuple[object, ...]], object]] = {
    "collections OrderedDict": _ordered_dict,
    "torch._utils _rebuild_tensor_v2": _tensor,
    "torch._utils _rebuild_parameter": _parameter,
}


def _no_state_dict(origin: str, found: str) -> CheckpointError:
    return CheckpointError(
        f"{origin}: {found}; a state dict, tensors by name, is needed; where torch is installed"
        " and the file trusted, save model.state_dict() alone"
    )


def _kind(value: object) -> str:
    return value.name.replace(" ", ".") if isinstance(value, Global) else type(value).__name__
