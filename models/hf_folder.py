"""Reads a Hugging Face folder: config.json, the tensors' headers, then one tensor at a time.

Nothing here knows a model. Pickle formats are refused: such a file is a program.
"""

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import ml_dtypes  # noqa: F401  numpy has no bfloat16 of its own, and safetensors asks numpy
import numpy as np
from jaxtyping import Shaped
from safetensors import SafetensorError, safe_open

from models.errors import CheckpointError

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
ITEM_BYTES = {"F64": 8, "I64": 8, "U64": 8, "F32": 4, "I32": 4, "U32": 4, "F16": 2, "BF16": 2}
LFS_POINTER = b"version https://git-lfs"
FOREIGN_SUFFIXES = (".bin", ".pt", ".pth", ".msgpack", ".h5", ".ckpt", ".nemo", ".gguf")


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorHeader:
    """Where one tensor lies and what it is.

    Attributes:
      key: Its name in the file.
      file: The safetensors file.
      shape: Its shape.
      dtype: Its dtype in safetensors' spelling, e.g. "BF16".
    """

    key: str
    file: Path
    shape: tuple[int, ...]
    dtype: str

    @property
    def num_bytes(self) -> int:
        """Size of the tensor's data."""
        return math.prod(self.shape) * ITEM_BYTES.get(self.dtype, 1)


def read_json(path: Path) -> dict[str, object]:
    """Reads a JSON object; a key given twice is an error.

    Raises:
      CheckpointError: The file is absent, unreadable, no JSON, or no object.
    """
    try:
        parsed = json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=_unique)
    except FileNotFoundError:
        raise CheckpointError(
            f"{path}: no such file; a checkpoint folder holds {path.name};"
            " give the folder that has it"
        ) from None
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(
            f"{path}: not readable as JSON ({error}); a JSON object is needed; fetch the file again"
        ) from error
    if not isinstance(parsed, dict):
        raise CheckpointError(
            f"{path}: holds a JSON {type(parsed).__name__}; an object is needed;"
            " fetch the file again"
        )
    return parsed


def check_folder(path: Path) -> None:
    """Raises CheckpointError unless the path is a folder."""
    if not path.is_dir():
        found = "a file" if path.exists() else "no such folder"
        raise CheckpointError(
            f"{path}: {found}; a local folder with config.json is needed, nothing is downloaded;"
            " give the path of the folder"
        )


def read_headers(folder: Path) -> dict[str, TensorHeader]:
    """Returns the header of every tensor of a folder, by key; reads no tensor.

    Args:
      folder: Holds model.safetensors, or model.safetensors.index.json and its shards.

    Raises:
      CheckpointError: There is no such file, one is corrupt, or index and shards disagree.
    """
    if (folder / SINGLE).exists():
        return {header.key: header for header in _file_headers(folder / SINGLE)}
    if (folder / INDEX).exists():
        return _sharded_headers(folder)
    raise _no_safetensors(folder)


def read_tensors(
    headers: Iterable[TensorHeader],
) -> Iterator[tuple[TensorHeader, Shaped[np.ndarray, "..."]]]:
    """Yields each tensor with its header, one at a time, file by file in the given order.

    Raises:
      CheckpointError: A file can no longer be read.
    """
    by_file: dict[Path, list[TensorHeader]] = {}
    for header in headers:
        by_file.setdefault(header.file, []).append(header)
    for file, wanted in by_file.items():
        try:
            with safe_open(file, "np") as handle:
                for header in wanted:
                    yield header, handle.get_tensor(header.key)
        except (OSError, SafetensorError) as error:
            raise _unreadable(file, error) from error


def _file_headers(path: Path) -> list[TensorHeader]:
    try:
        with safe_open(path, "np") as handle:
            slices = {key: handle.get_slice(key) for key in handle.keys()}  # noqa: SIM118
            return [
                TensorHeader(
                    key=key, file=path, shape=tuple(part.get_shape()), dtype=part.get_dtype()
                )
                for key, part in slices.items()
            ]
    except (OSError, SafetensorError) as error:
        raise _unreadable(path, error) from error


def _sharded_headers(folder: Path) -> dict[str, TensorHeader]:
    weight_map, total_size = _read_index(folder / INDEX)
    headers: dict[str, TensorHeader] = {}
    for name in sorted(set(weight_map.values())):
        if not (folder / name).is_file():
            raise _index_error(folder, f"file {name} is absent", "every mapped file must exist")
        mapped = {key for key, file in weight_map.items() if file == name}
        found = {header.key: header for header in _file_headers(folder / name)}
        if absent := sorted(mapped - set(found)):
            raise _index_error(
                folder, f"{name} lacks {', '.join(absent)}", "a file must hold what maps to it"
            )
        if extra := sorted(set(found) - mapped):
            raise _index_error(
                folder, f"{name} holds unmapped {', '.join(extra)}", "every tensor must be mapped"
            )
        headers |= found
    size = sum(header.num_bytes for header in headers.values())
    if size != total_size:
        raise _index_error(
            folder, f"tensors have {size} bytes, total_size is {total_size}", "both must agree"
        )
    return headers


def _read_index(path: Path) -> tuple[dict[str, str], int]:
    index = read_json(path)
    weight_map, metadata = index.get("weight_map"), index.get("metadata")
    if not isinstance(weight_map, dict) or not weight_map:
        raise _index_error(path.parent, "weight_map is absent or empty", "it must map the tensors")
    for key, name in weight_map.items():
        if not isinstance(name, str) or not _is_bare(name):
            raise _index_error(
                path.parent, f"{key} maps to {name!r}", "file names have no folder part"
            )
    total_size = metadata.get("total_size") if isinstance(metadata, dict) else None
    if not isinstance(total_size, int):
        raise _index_error(path.parent, "metadata.total_size is absent", "it must be a number")
    return weight_map, total_size


def _is_bare(name: str) -> bool:
    return name.endswith(".safetensors") and not set(name) & set("/\\\0") and name[0] != "."


def _unique(pairs: Iterable[tuple[str, object]]) -> Mapping[str, object]:
    parsed: dict[str, object] = {}
    for key, value in pairs:
        if key in parsed:
            raise ValueError(f"key {key!r} twice")
        parsed[key] = value
    return parsed


def _index_error(folder: Path, found: str, allowed: str) -> CheckpointError:
    return CheckpointError(f"{folder / INDEX}: {found}; {allowed}; fetch the folder again")


def _unreadable(path: Path, error: Exception) -> CheckpointError:
    if _is_lfs_pointer(path):
        return CheckpointError(
            f"{path}: a Git LFS pointer, not the weights; the file itself is needed;"
            " run git lfs pull"
        )
    return CheckpointError(
        f"{path}: not readable as safetensors ({error}); a complete file is needed; fetch it again"
    )


def _is_lfs_pointer(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            return file.read(len(LFS_POINTER)) == LFS_POINTER
    except OSError:
        return False


def _no_safetensors(folder: Path) -> CheckpointError:
    foreign = sorted(f.name for f in folder.iterdir() if f.suffix in FOREIGN_SUFFIXES)
    if not foreign:
        return CheckpointError(
            f"{folder}: no weights; {SINGLE} or {INDEX} is needed; give the folder that has it"
        )
    recipe = (
        "AutoModel.from_pretrained(FOLDER).save_pretrained(NEW_FOLDER, safe_serialization=True)"
    )
    return CheckpointError(
        f"{folder}: weights only as {', '.join(foreign)}; only safetensors are read, since a pickle"
        f" file is a program; where transformers is installed and the file trusted, run {recipe}"
    )
