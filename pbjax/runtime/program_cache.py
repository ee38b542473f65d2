"""Keeps compiled programs on disk by JAX's own cache, so that a second start compiles nothing.

JAX finds a program by its text, options, device and versions, and keeps the choices of XLA's
autotuning beside it. This module sets its folder, has it keep even programs that compile quickly,
and records the verified ones.
"""

import hashlib
import json
import math
import os
import warnings
import zlib
from contextlib import suppress
from pathlib import Path

import jax
import jaxlib

from pbjax.errors import FileError, PbjaxWarning
from pbjax.files import write_atomically

VARIABLE = "PBJAX_CACHE_DIR"
OFF = "off"
# Folder of the choices of XLA's autotuning; XLA's help says that it must exist.
_AUTOTUNED = "xla_gpu_per_fusion_autotune_cache_dir"
# Folder of the records of verified programs, in JAX's folder.
_VERIFIED = "pbjax_verified"
# Sizes and times of the compiled programs that were read and found whole.
_CHECKED = "pbjax_checked.json"
_SUFFIX = "-cache"  # of the files of compiled programs
_ZSTD = b"\x28\xb5\x2f\xfd"


def keep_programs() -> str | None:
    """Makes JAX keep compiled programs from now on, unless its user has configured that.

    The folder is $PBJAX_CACHE_DIR, where "off" means none; by default, on a GPU, pbjax in the
    user's cache folder. On a CPU nothing is kept by default: such a program may not run on another
    CPU, and XLA writes a page of warnings where it is in doubt. A user's setting of JAX's
    compilation cache is never changed.

    Returns:
      The folder of JAX's cache, or its address; None if there is none.

    Raises:
      FileError: $PBJAX_CACHE_DIR names a folder that cannot be made, or an address.
    """
    config = jax.config
    if not config.jax_enable_compilation_cache:  # pyrefly: ignore[missing-attribute]
        return None
    chosen = config.jax_compilation_cache_dir  # pyrefly: ignore[missing-attribute]
    if chosen is not None:
        return chosen
    folder = _folder()
    if folder is None:
        return None
    remove_damaged(folder)
    config.update("jax_compilation_cache_dir", str(folder))
    config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    return str(folder)


def _folder() -> Path | None:
    named = os.environ.get(VARIABLE, "")
    if named.lower() == OFF or (not named and jax.default_backend() != "gpu"):
        return None
    if "://" in named:
        raise FileError(
            f"{VARIABLE}={named}: an address; a folder of this machine, where XLA's autotuning "
            f"writes too, or {OFF}, is allowed; give an address to JAX itself by "
            "JAX_COMPILATION_CACHE_DIR"
        )
    caches = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    folder = Path(named or f"{caches}/pbjax").expanduser().absolute()
    try:
        # The programs in it will be run: only the user may write there.
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        (folder / _AUTOTUNED).mkdir(mode=0o700, exist_ok=True)
    except OSError as error:
        if named:
            raise FileError(
                f"{VARIABLE}={named}: it cannot be made ({error.strerror}); a folder that can be "
                f"written, or {OFF}, is allowed; name another"
            ) from error
        text = (
            f"{folder} cannot be made ({error.strerror}): compiled programs are not kept; set "
            f"{VARIABLE} to another folder, or to {OFF}"
        )
        warnings.warn(text, PbjaxWarning, stacklevel=3)
        return None
    return folder


def remove_damaged(folder: Path) -> None:
    """Removes compiled programs that cannot be read, such as those of a full disk.

    JAX warns of such a file at every start and never replaces it; without it, the next compilation
    writes it anew. A file is read once; after that its size and time tell that it is the same.

    Args:
      folder: The folder of JAX's cache.
    """
    record = folder / _CHECKED
    before = _checked(record)
    found = {}
    for path in folder.glob(f"*{_SUFFIX}"):
        try:
            status = path.stat()
            state = [status.st_size, status.st_mtime_ns]
            if before.get(path.name) != state and not _is_readable(path.read_bytes()):
                path.unlink()
                continue
        except OSError:  # another process removes it too, or it may not be read
            continue
        found[path.name] = state
    if found != before:
        with suppress(OSError, FileError):
            write_atomically(record, json.dumps(found))


def _checked(record: Path) -> dict[str, object]:
    try:
        found = json.loads(record.read_text())
    except (OSError, ValueError):  # absent or damaged: all files are read again
        return {}
    return found if isinstance(found, dict) else {}


def _is_readable(compressed: bytes) -> bool:
    """Whether a compressed program is whole; zlib keeps a checksum. JAX may use zstd, unlike us."""
    if compressed.startswith(_ZSTD):
        return True
    try:
        zlib.decompress(compressed)
    except zlib.error:
        return False
    return True


def program_key(lowered: jax.stages.Lowered, *more: object) -> str:
    """A key of a lowered program, if programs are kept.

    Args:
      lowered: The program.
      *more: Other values that distinguish programs, such as compiler options, by their texts.

    Returns:
      64 hex digits; an empty text if no programs are kept.
    """
    if not _keeps():
        return ""
    client = jax.devices()[0].client
    versions = (jax.__version__, jaxlib.__version__, client.platform_version)
    device = jax.devices()[0].device_kind
    digest = hashlib.sha256(repr((versions, device, more)).encode())
    digest.update(lowered.as_text().encode())
    return digest.hexdigest()


def verified_difference(key: str) -> float | None:
    """The largest difference found when a program was verified; None if it never was."""
    if not key:
        return None
    try:
        record = json.loads(_record(key).read_text())
        difference = float(record["difference"])
    except (OSError, ValueError, KeyError, TypeError):  # absent or damaged: it is verified again
        return None
    return difference if 0.0 <= difference < math.inf else None


def note_verified(key: str, difference: float) -> None:
    """Records that a program was verified, if compiled programs are kept."""
    if not key:
        return
    path = _record(key)
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_atomically(path, json.dumps({"difference": difference}))
    except (OSError, FileError) as error:
        warnings.warn(f"verified programs are not kept: {error}", PbjaxWarning, stacklevel=2)


def _keeps() -> bool:
    """Whether JAX keeps programs in a folder of this machine."""
    enabled = jax.config.jax_enable_compilation_cache  # pyrefly: ignore[missing-attribute]
    folder = jax.config.jax_compilation_cache_dir  # pyrefly: ignore[missing-attribute]
    return enabled and folder is not None and "://" not in folder


def _record(key: str) -> Path:
    folder = jax.config.jax_compilation_cache_dir  # pyrefly: ignore[missing-attribute]
    return Path(folder) / _VERIFIED / f"{key}.json"
