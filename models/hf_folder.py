"""Reads a Hugging Face folder: config.json, and where its tensors lie.

Nothing here knows a model. The weights are safetensors, or pickles of PyTorch if the caller allows
them; `models.torch_file` reads nothing but tensors from these. Other formats are refused.
"""

import json
import os
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

from safetensors import SafetensorError, safe_open

from models.errors import CheckpointError, CheckpointWarning
from models.stored_tensors import TensorHeader
from models.torch_file import read_torch_headers

LFS_POINTER = b"version https://git-lfs"
FOREIGN_SUFFIXES = (".bin", ".pt", ".pth", ".msgpack", ".h5", ".ckpt", ".nemo", ".gguf")


@dataclass(frozen=True, slots=True, kw_only=True)
class Format:
    """One way in which a folder may hold its weights.

    Attributes:
      single: The name of a single file.
      suffix: The ending of every file; the index of several is `single` and ".index.json".
      headers: A function that returns the headers of a file.
    """

    single: str
    suffix: str
    headers: Callable[[Path], Iterable[TensorHeader]]

    @property
    def index(self) -> str:
        """The name of the file that maps each tensor to one of several files."""
        return f"{self.single}.index.json"


def read_json(path: Path) -> dict[str, object]:
    """Reads a JSON object; a key given twice is an error.

    Raises:
      CheckpointError: The file is absent, unreadable, no JSON, or no object.
    """
    return _parsed(path, dict, "an object")


def read_json_list(path: Path) -> list[object]:
    """Reads a JSON array, as `read_json` reads an object."""
    return _parsed(path, list, "an array")


def _parsed[T](path: Path, kind: type[T], needed: str) -> T:
    try:
        parsed = json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=_unique)
    except FileNotFoundError:
        raise CheckpointError(
            f"{path}: no such file; a checkpoint folder holds {path.name};"
            " give the folder that has it"
        ) from None
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(
            f"{path}: not readable as JSON ({error}); JSON is needed; fetch the file again"
        ) from error
    if not isinstance(parsed, kind):
        raise CheckpointError(
            f"{path}: holds a JSON {type(parsed).__name__}; {needed} is needed;"
            " fetch the file again"
        )
    return parsed


def find_folder(folder: str | os.PathLike[str]) -> Path:
    """Returns the path of a folder.

    Raises:
      CheckpointError: The folder does not exist, or the argument is no path.
    """
    try:
        path = Path(folder)
    except TypeError as error:
        raise CheckpointError(
            f"folder {folder!r}: a {type(folder).__name__}; a path is needed, as a str or a Path;"
            " give that of the checkpoint's folder"
        ) from error
    if not path.is_dir():
        found = "a file" if path.exists() else "no such folder"
        if not path.exists() and str(folder) in import_module("models.presets").PRESETS:
            found = "the name of a preset, which has sizes and no weights"
        raise CheckpointError(
            f"{path}: {found}; a local folder with config.json is needed, nothing is downloaded;"
            " give the path of the folder"
        )
    return path


def read_headers(folder: Path, *, allow_pickle: bool = False) -> dict[str, TensorHeader]:
    """Returns the header of every tensor of a folder, by key; reads no tensor.

    Args:
      folder: Holds model.safetensors, or model.safetensors.index.json and its shards.
      allow_pickle: Whether pytorch_model.bin or its index and shards are read in their absence.

    Raises:
      CheckpointError: A file is absent or corrupt, or index and shards disagree.
    """
    for form in (SAFETENSORS, PYTORCH) if allow_pickle else (SAFETENSORS,):
        if (folder / form.single).exists():
            return {header.key: header for header in _headers(form, folder / form.single)}
        if (folder / form.index).exists():
            return _Index(folder, form).headers()
    raise _no_weights(folder, allow_pickle)


def _safetensors_headers(path: Path) -> Iterable[TensorHeader]:
    try:
        with safe_open(path, "np") as handle:
            slices = {key: handle.get_slice(key) for key in handle.keys()}  # noqa: SIM118
            starts = _starts(path)
            return [
                TensorHeader(
                    key=key,
                    file=path,
                    shape=tuple(part.get_shape()),
                    dtype=part.get_dtype(),
                    start=starts[key],
                )
                for key, part in slices.items()
            ]
    except (OSError, SafetensorError) as error:
        raise CheckpointError(
            f"{path}: not readable as safetensors ({error}); a complete file is needed;"
            " fetch it again"
        ) from error


def _starts(path: Path) -> dict[str, int]:
    """Returns where each tensor begins in a file that the library has accepted."""
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(size))
    return {
        key: 8 + size + entry["data_offsets"][0]
        for key, entry in header.items()
        if key != "__metadata__"
    }


SAFETENSORS = Format(
    single="model.safetensors",
    suffix=".safetensors",
    headers=_safetensors_headers,
)
PYTORCH = Format(
    single="pytorch_model.bin",
    suffix=".bin",
    headers=read_torch_headers,
)


def _headers(form: Format, path: Path) -> Iterable[TensorHeader]:
    if _is_lfs_pointer(path):
        raise CheckpointError(
            f"{path}: a Git LFS pointer, not the weights; the file itself is needed;"
            " run git lfs pull"
        )
    return form.headers(path)


class _Index:
    """The index of a folder with several files, and the checks of both against each other."""

    def __init__(self, folder: Path, form: Format) -> None:
        self._folder, self._form = folder, form

    def headers(self) -> dict[str, TensorHeader]:
        weight_map, total_size = self._read()
        headers: dict[str, TensorHeader] = {}
        for name in sorted(set(weight_map.values())):
            if not (self._folder / name).is_file():
                raise self._error(f"file {name} is absent", "every mapped file must exist")
            mapped = {key for key, file in weight_map.items() if file == name}
            found = {header.key: header for header in _headers(self._form, self._folder / name)}
            if absent := sorted(mapped - set(found)):
                raise self._error(
                    f"{name} lacks {', '.join(absent)}", "a file must hold what maps to it"
                )
            if extra := sorted(set(found) - mapped):
                raise self._error(
                    f"{name} holds unmapped {', '.join(extra)}", "every tensor must be mapped"
                )
            headers |= found
        self._compare(headers, total_size)
        return headers

    def _compare(self, headers: Mapping[str, TensorHeader], total_size: object) -> None:
        """Warns if the index says another sum of bytes; many tools write one, or none.

        The tensors decide: each file's own header says where they lie, and has been checked.
        """
        # PyTorch stores what is tied once; its index counts it once, or with every name.
        once = {(h.file, h.start): h.num_bytes for h in headers.values()}
        sizes = sum(once.values()), sum(header.num_bytes for header in headers.values())
        if total_size is not None and total_size not in sizes:
            place = self._folder / self._form.index
            message = f"{place}: total_size is {total_size!r}; the tensors have {sizes[0]} bytes"
            warnings.warn(f"{message}, which are read", CheckpointWarning, stacklevel=2)

    def _read(self) -> tuple[dict[str, str], object]:
        index = read_json(self._folder / self._form.index)
        weight_map, metadata = index.get("weight_map"), index.get("metadata")
        if not isinstance(weight_map, dict) or not weight_map:
            raise self._error("weight_map is absent or empty", "it must map the tensors")
        for key, name in weight_map.items():
            if not isinstance(name, str) or not self._is_bare(name):
                raise self._error(f"{key} maps to {name!r}", "file names have no folder part")
        return weight_map, metadata.get("total_size") if isinstance(metadata, dict) else None

    def _is_bare(self, name: str) -> bool:
        bare = not set(name) & set("/\\\0") and name[:1] != "."
        return bare and name.endswith(self._form.suffix)

    def _error(self, found: str, allowed: str) -> CheckpointError:
        place = self._folder / self._form.index
        return CheckpointError(f"{place}: {found}; {allowed}; fetch the folder again")


def _unique(pairs: Iterable[tuple[str, object]]) -> Mapping[str, object]:
    parsed: dict[str, object] = {}
    for key, value in pairs:
        if key in parsed:
            raise ValueError(f"key {key!r} twice")
        parsed[key] = value
    return parsed


def _is_lfs_pointer(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            return file.read(len(LFS_POINTER)) == LFS_POINTER
    except OSError:
        return False


def _no_weights(folder: Path, allow_pickle: bool) -> CheckpointError:
    foreign = sorted(f.name for f in folder.iterdir() if f.suffix in FOREIGN_SUFFIXES)
    if not foreign:
        return CheckpointError(
            f"{folder}: no weights; {SAFETENSORS.single} or {SAFETENSORS.index} is needed;"
            " give the folder that has it"
        )
    recipe = (
        "AutoModel.from_pretrained(FOLDER).save_pretrained(NEW_FOLDER, safe_serialization=True)"
    )
    found = f"{folder}: weights only as {', '.join(foreign)}"
    trusted = f"where transformers is installed and the file trusted, run {recipe}"
    if allow_pickle or not any((folder / n).exists() for n in (PYTORCH.single, PYTORCH.index)):
        return CheckpointError(f"{found}; only safetensors are read; {trusted}")
    return CheckpointError(
        f"{found}; only safetensors are read, since a pickle file is a program, which PyTorch would"
        " run; allow_pickle=True (--allow-pickle) reads its tensors without running it, or"
        f" {trusted}"
    )
