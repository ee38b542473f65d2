"""Our own checkpoint folder: a config.json with its contents, Orbax parameters, the tokenizer."""

import dataclasses
import gc
import inspect
import json
import logging
import math
import os
import re
import shutil
import sys
import time
import uuid
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import jax
import jax.numpy as jnp
import orbax.checkpoint
from flax import nnx
from pydantic import TypeAdapter, ValidationError

from models.errors import CheckpointError, ConfigError, KeyMismatchError
from models.keymap import Family, abstract_parameters
from models.numeric import OutputSummary
from models.parameters import Parameter, canonical_dtype, fill, parameters_of

FORMAT = "pbjax"
CONFIG, PARAMETERS, TOKENIZER = "config.json", "parameters", "tokenizer.json"
GROUP_BYTES = 2**28
# Room for the files beside the parameters, and the size of Orbax's files.
ROOM, LARGEST_FILE = 2**20, 2**31


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """The config.json of our folder.

    Attributes:
      format: The mark of our folders, absent in Hugging Face's.
      format_version: The version of this schema.
      model_type: The name of the family.
      config: The fields of the configuration.
      dtype: The dtype of the stored parameters.
      num_parameters: The number of values in all parameters.
      fingerprint: The SHA-256 of the parameters as stored.
      outputs: Summaries of the fixed forward pass in f32 on the parameters.
      source_class: The class that saved the original.
    """

    format: Literal["pbjax"]
    format_version: Literal[1]
    model_type: str
    config: dict[str, int | float | bool | str | tuple[int, ...] | tuple[float, ...]]
    dtype: str
    num_parameters: int
    fingerprint: str
    outputs: dict[str, OutputSummary]
    source_class: str


def is_ours(fields: Mapping[str, object]) -> bool:
    """Whether the fields of a config.json are those of our format."""
    return "format" in fields


def parse_manifest(fields: Mapping[str, object], origin: str) -> Manifest:
    """Checks the fields of our config.json.

    Raises:
      ConfigError: One is missing, unknown or malformed.
    """
    manifest = _parse(Manifest, fields, origin)
    canonical_dtype(manifest.dtype, origin)
    return manifest


def parse_config[C, M: nnx.Module](family: Family[C, M], manifest: Manifest, origin: str) -> C:
    """Returns the model's configuration from a manifest.

    Raises:
      ConfigError: A field is missing, unknown or malformed.
    """
    return _parse(family.config, manifest.config, f"{origin}: config")


@contextmanager
def new_folder(target: Path) -> Generator[Path]:
    """Yields a folder to write into; it becomes the target at the end, or vanishes on failure.

    Raises:
      CheckpointError: The target exists, or its parent does not.
    """
    check_target(target)
    partial = target.parent / f".{target.name}.{uuid.uuid4().hex[:8]}.partial"
    try:
        partial.mkdir()
        yield partial
        check_target(target)
        partial.rename(target)
    except OSError as error:
        raise CheckpointError(
            f"{target}: cannot be written ({error.strerror or error}); a writable place with room"
            " is needed; free the disk or choose another folder"
        ) from error
    finally:
        _remove(partial)


def _remove(folder: Path) -> None:
    """Removes a folder for good: threads that still write there would make it again."""
    for _ in range(20):
        if not folder.exists():
            return
        shutil.rmtree(folder, ignore_errors=True)
        time.sleep(0.1)


def check_room(target: Path, num_bytes: int) -> None:
    """Raises CheckpointError if so many bytes of parameters cannot be written at a path."""
    import resource

    needed = num_bytes + ROOM
    free = shutil.disk_usage(target.parent).free
    limit, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
    found = ""
    if free < needed:
        found = f"{free:,} bytes of its disk are free"
    elif limit != resource.RLIM_INFINITY and limit < min(num_bytes, LARGEST_FILE):
        found = f"a file may have {limit:,} bytes (ulimit -f)"
    if found:
        raise CheckpointError(
            f"{target}: {found}; {needed:,} are needed; make room or choose another folder"
        )


def check_target(target: Path) -> None:
    """Raises CheckpointError unless a folder can be made at the path."""
    if target.exists() or target.is_symlink():
        raise CheckpointError(
            f"{target}: exists already; nothing is overwritten; remove it or choose another folder"
        )
    if not target.parent.is_dir():
        raise CheckpointError(
            f"{target}: its parent is no folder; an existing one is needed; make {target.parent}"
        )


def write(folder: Path, manifest: Manifest, module: nnx.Module) -> None:
    """Writes parameters and config.json into an existing empty folder.

    Raises:
      OSError: They cannot be written.
    """
    tree = {parameter.path: parameter.value for parameter in parameters_of(module)}
    if reason := _save((folder / PARAMETERS).absolute(), tree):
        raise OSError(reason)
    text = json.dumps(dataclasses.asdict(manifest), indent=1, allow_nan=False)
    (folder / CONFIG).write_text(text + "\n", encoding="utf-8")


def _save(place: Path, tree: Mapping[str, jax.Array]) -> str:
    """Writes parameters by Orbax; returns why it failed, and nothing if it did not."""
    with _Noise(place) as noise:
        try:
            with orbax.checkpoint.StandardCheckpointer() as checkpointer:
                checkpointer.save(place, tree)
        except Exception as error:  # what TensorStore raises is a bare ValueError
            noise.stays, reason = True, _reason(error)
        else:
            return ""
    # The error holds what is unfinished in other threads; it is gone here, and so may they be.
    gc.collect()
    return reason


class _Noise(logging.Filter):
    """Drops what Orbax's threads log and print of a write that has failed, and is raised as well.

    Some of it comes when Python ends, so that after a failure this stays in place.
    """

    def __init__(self, place: Path) -> None:
        super().__init__()
        self.stays = False
        self._place = str(place)
        self._logs = [logging.getLogger(name) for name in ("absl", "asyncio")]

    def __enter__(self) -> "_Noise":
        for log in self._logs:
            log.addFilter(self)
        self._hook, sys.unraisablehook = sys.unraisablehook, self._unraisable
        return self

    def __exit__(self, *_: object) -> None:
        if not self.stays:
            sys.unraisablehook = self._hook
            for log in self._logs:
                log.removeFilter(self)

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether a record is about anything but this write."""
        text = f"{record.getMessage()} {record.exc_info}"
        return self._place not in text and "OSError" not in text and "[Errno " not in text

    def _unraisable(self, found) -> None:
        if str(found.exc_value) != "Event loop is closed":
            self._hook(found)


def _reason(error: Exception) -> str:
    """Returns the system's reason of an error of TensorStore, or the start of its text."""
    text = " ".join(str(error).split())
    code = re.search(r"os_error_code='(\d+)'", text)
    return os.strerror(int(code[1])) if code else text[:200]


def read[C, M: nnx.Module](
    family: Family[C, M],
    config: C,
    folder: Path,
    manifest: Manifest,
    dtype: str,
    *,
    progress: Callable[[int, int], object],
) -> M:
    """Reads a module from our folder, straight into a dtype.

    Args:
      family: The family of the model.
      config: The configuration.
      folder: The folder.
      manifest: The config.json of the folder.
      dtype: The dtype of the module.
      progress: Called with (bytes read, bytes in all).

    Raises:
      CheckpointError: The parameters are absent, damaged, or beyond the range of the dtype.
    """
    parameters = read_part(family, config, folder, manifest, dtype, progress=progress)
    return fill(family, config, dtype, parameters)


def read_part[C, M: nnx.Module](
    family: Family[C, M],
    config: C,
    folder: Path,
    manifest: Manifest,
    dtype: str,
    *,
    progress: Callable[[int, int], object],
    wanted: Callable[[str], bool] = lambda path: True,
) -> Iterator[Parameter]:
    """Yields the parameters whose paths are wanted; the others are not read.

    Groups of up to `GROUP_BYTES` are read at a time, so that the host memory used for reading does
    not grow with the model.

    Args:
      family: The family of the model.
      config: The configuration.
      folder: The folder.
      manifest: The config.json of the folder.
      dtype: The dtype of the parameters.
      progress: Called with (bytes read, bytes in all).
      wanted: Whether the parameter of a path is wanted.

    Raises:
      CheckpointError: The parameters are absent, damaged, or beyond the range of the dtype.
    """
    sharding = jax.sharding.SingleDeviceSharding(_default_device())
    shapes = abstract_parameters(nnx.eval_shape(lambda: family.build(config, dtype)))
    place = (folder / PARAMETERS).absolute()
    item_bytes = jnp.dtype(manifest.dtype).itemsize
    sizes = {path: item_bytes * math.prod(s) for path, s in shapes.items() if wanted(path)}
    done, total = 0, sum(sizes.values())
    progress(done, total)
    with _readable(place), orbax.checkpoint.PyTreeCheckpointer() as checkpointer:
        tree = checkpointer.metadata(place).item_metadata.tree
        _check_structure({path: tuple(m.shape) for path, m in tree.items()}, shapes, place)
    for group in _groups(sizes):
        tree = {p: jax.ShapeDtypeStruct(shapes[p], dtype, sharding=sharding) for p in group}
        with _readable(place), orbax.checkpoint.PyTreeCheckpointer() as checkpointer:
            values = checkpointer.restore(
                place,
                args=orbax.checkpoint.args.PyTreeRestore(
                    item=tree,
                    restore_args=orbax.checkpoint.checkpoint_utils.construct_restore_args(tree),
                    partial_restore=True,
                ),
            )
        if dtype != manifest.dtype:
            _check_finite(values, folder, dtype)
        yield from (Parameter(path=path, value=values.pop(path)) for path in group)
        done += sum(sizes[path] for path in group)
        progress(done, total)


@contextmanager
def _readable(place: Path) -> Generator[None]:
    try:
        yield
    except CheckpointError:
        raise
    except Exception as error:  # a failed read inside Orbax is a bare Exception
        raise CheckpointError(
            f"{place}: not readable ({' '.join(str(error).split())[:200]});"
            " a complete Orbax checkpoint is needed; convert it again"
        ) from error


def _groups(sizes: Mapping[str, int]) -> Iterator[list[str]]:
    group: list[str] = []
    for path, size in sizes.items():
        if group and sum(sizes[p] for p in group) + size > GROUP_BYTES:
            yield group
            group = []
        group.append(path)
    if group:
        yield group


def folder_bytes(folder: Path) -> int:
    """Returns the size of all files below a folder."""
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


def _parse[T](kind: type[T], fields: Mapping[str, object], origin: str) -> T:
    unknown = sorted(set(fields) - set(inspect.signature(kind).parameters))
    if unknown:
        raise ConfigError(
            f"{origin}: unknown fields {', '.join(unknown)}; this version does not know them;"
            " convert the checkpoint again"
        )
    try:
        return TypeAdapter(kind).validate_json(json.dumps(dict(fields)), strict=True)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"])) or "value"
        raise ConfigError(
            f"{origin}: {place}: {first['msg']}; a file of pbjax convert is needed;"
            " convert the checkpoint again"
        ) from error


def _check_structure(
    found: Mapping[str, tuple[int, ...]], wanted: Mapping[str, tuple[int, ...]], place: Path
) -> None:
    shared = sorted(set(found) & set(wanted))
    faults = [
        *(f"{path} is missing" for path in sorted(set(wanted) - set(found))),
        *(f"{path} is unexpected" for path in sorted(set(found) - set(wanted))),
        *(f"{p} is {found[p]}, not {wanted[p]}" for p in shared if found[p] != wanted[p]),
    ]
    if faults:
        raise KeyMismatchError(
            f"{place}: {', '.join(faults)}; the parameters must be those of config.json;"
            " convert the checkpoint again"
        )


def _check_finite(values: Mapping[str, jax.Array], folder: Path, dtype: str) -> None:
    for path, value in values.items():
        if not bool(jnp.isfinite(value).all()):
            raise CheckpointError(
                f"{folder}: {path} has values beyond {dtype}; finite values are needed;"
                " choose a dtype with a wider range"
            )


def _default_device() -> jax.Device:
    return jnp.zeros(()).devices().pop()
