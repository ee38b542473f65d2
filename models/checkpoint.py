"""Loads a model or a tokenizer from a Hugging Face folder or from one of our own.

Names are matched in `models.keys`, files read in `models.hf_folder` and `models.orbax_folder`;
`models.conversion` writes.
"""

import importlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import tokenizers
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Shaped

from models import FAMILIES
from models.errors import CheckpointError, ConfigError, NumericError
from models.headers import DTYPES
from models.hf_folder import check_folder, read_headers, read_json, read_tensors
from models.keymap import Family
from models.keys import Match, match
from models.numeric import check_summaries, summarise
from models.orbax_folder import is_ours, parse_config, parse_manifest, read
from models.parameters import Parameter, canonical_dtype, cast, fill, fingerprint

Progress = Callable[[int, int], object]


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint[C, M: nnx.Module]:
    """A Hugging Face folder whose names, shapes and configuration are checked."""

    path: Path
    family: Family[C, M]
    match: Match[C]

    @property
    def num_bytes(self) -> int:
        """Size of the tensors that will be read."""
        return sum(source.header.num_bytes for source in self.match.sources)

    def stored_dtype(self) -> str:
        """Returns the one dtype of the tensors.

        Raises:
          CheckpointError: There are several.
        """
        found = sorted({DTYPES[source.header.dtype] for source in self.match.sources})
        if len(found) > 1:
            raise CheckpointError(
                f"{self.path}: tensors are of dtypes {', '.join(found)}; a model has one;"
                f" say which by dtype="
            )
        return found[0]


def load(
    folder: str | Path,
    dtype: DTypeLike | None = None,
    *,
    allow_pickle: bool = False,
    verify: bool = False,
    report: Callable[[str], object] | None = None,
    progress: Progress | None = None,
) -> nnx.Module:
    """Loads a model from a Hugging Face folder or from one that `convert` wrote.

    Tensors are read one at a time and put straight into the given dtype.

    Args:
      folder: A local folder with config.json and the weights.
      dtype: Of parameters and activations; None keeps the file's.
      allow_pickle: Whether pytorch_model.bin is read where there are no safetensors. Such a file is
        a program; its tensors are read without running it, and one that asks for more is refused.
      verify: Whether to run the fixed forward pass in f32, which must be finite and, in a folder of
        `convert`, agree with the stored outputs, as the parameters with the stored fingerprint.
      report: Receives the lines of the key report, or what our folder says of itself, and with
        verify the outcome.
      progress: Called with (bytes read, bytes in all).

    Returns:
      The model.

    Raises:
      CheckpointError: The folder is not a complete, supported, consistent checkpoint. Subclasses
        tell configuration, key and numeric faults apart.
    """
    path = Path(folder)
    check_folder(path)
    wanted = None if dtype is None else canonical_dtype(dtype, f"load({path})")
    fields = read_json(path / "config.json")
    say, step = report or _ignore, progress or _ignore
    if is_ours(fields):
        return _load_ours(path, fields, wanted, verify=verify, report=say, progress=step)
    checkpoint = open_checkpoint(path, fields, allow_pickle=allow_pickle)
    for line in checkpoint.match.report.lines():
        say(line)
    module = read_module(checkpoint, wanted or checkpoint.stored_dtype(), step)
    if verify:
        summarise(checkpoint.family, checkpoint.match.config, module)
        say("numeric  unchecked (no reference), outputs finite on the fixed input")
    return module


def load_tokenizer(folder: str | Path) -> tokenizers.Tokenizer:
    """Returns the tokenizer of a folder, with the truncation and padding that its file sets.

    Args:
      folder: Holds tokenizer.json.

    Raises:
      CheckpointError: There is none, or it is corrupt.
    """
    path = Path(folder)
    check_folder(path)
    file = path / "tokenizer.json"
    if not file.is_file():
        raise CheckpointError(
            f"{file}: no such file; only tokenizer.json is read, not vocab.txt; where transformers"
            " is installed, AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER) makes it"
        )
    try:
        return tokenizers.Tokenizer.from_str(file.read_text(encoding="utf-8"))
    except Exception as error:  # the library raises nothing narrower
        raise CheckpointError(
            f"{file}: not readable as a tokenizer ({error}); a complete file is needed;"
            " fetch it again"
        ) from error


def open_checkpoint(
    path: Path, fields: Mapping[str, object], *, allow_pickle: bool = False
) -> Checkpoint:
    """Checks a Hugging Face folder by its config.json and its tensors' headers.

    Args:
      path: The folder.
      fields: The fields of its config.json.
      allow_pickle: Whether pickles of PyTorch are read in the absence of safetensors.

    Raises:
      CheckpointError: It is not complete, supported and consistent.
    """
    family = find_family(fields, path)
    matched = match(family, fields, read_headers(path, allow_pickle=allow_pickle), str(path))
    return Checkpoint(path=path, family=family, match=matched)


def find_family(fields: Mapping[str, object], path: Path) -> Family:
    """Returns the family of a config.json.

    Raises:
      ConfigError: It names none of ours.
    """
    name = fields.get("model_type")
    if not isinstance(name, str) or name not in FAMILIES:
        found = "missing" if name is None else repr(name)
        raise ConfigError(
            f"{path}/config.json: model_type is {found}; supported are"
            f" {', '.join(map(repr, sorted(FAMILIES)))}; use such a checkpoint"
        )
    return importlib.import_module(FAMILIES[name]).FAMILY


def read_module[C, M: nnx.Module](
    checkpoint: Checkpoint[C, M], dtype: str, progress: Progress
) -> M:
    """Reads the tensors of a checked folder into a new module.

    Args:
      checkpoint: The folder.
      dtype: Of the parameters.
      progress: Called with (bytes read, bytes in all).

    Raises:
      CheckpointError: A tensor has a value that is not finite, in the file or in `dtype`.
    """
    parameters = _parameters(checkpoint, dtype, progress)
    return fill(checkpoint.family, checkpoint.match.config, dtype, parameters)


def _parameters(checkpoint: Checkpoint, dtype: str, progress: Progress) -> Iterator[Parameter]:
    leaves = {source.header.key: source.leaf for source in checkpoint.match.sources}
    headers = (source.header for source in checkpoint.match.sources)
    done, total = 0, checkpoint.num_bytes
    progress(done, total)
    for header, tensor in read_tensors(headers):
        leaf = leaves[header.key]
        value = jax.device_put(_cast(tensor, dtype, f"{header.file}: {header.key}"))
        yield Parameter(path=leaf.path, value=leaf.arrange(value))
        done += header.num_bytes
        progress(done, total)


def _cast(tensor: Shaped[np.ndarray, "..."], dtype: str, name: str) -> Shaped[np.ndarray, "..."]:
    if bad := np.count_nonzero(~np.isfinite(tensor)):
        raise CheckpointError(
            f"{name} has {bad} values that are not finite; finite values are needed;"
            " the file is damaged, fetch it again"
        )
    if tensor.dtype == jnp.dtype(dtype):
        return tensor
    with np.errstate(over="ignore"):
        result = tensor.astype(jnp.dtype(dtype))
    if bad := np.count_nonzero(~np.isfinite(result)):
        raise CheckpointError(
            f"{name} has {bad} values beyond {dtype}; finite values are needed;"
            " choose a dtype with a wider range"
        )
    return result


def _load_ours(
    path: Path,
    fields: Mapping[str, object],
    dtype: str | None,
    *,
    verify: bool,
    report: Callable[[str], object],
    progress: Progress,
) -> nnx.Module:
    manifest = parse_manifest(fields, f"{path}/config.json")
    family = find_family(fields, path)
    config = parse_config(family, manifest, f"{path}/config.json")
    report(f"config   {family.model_type}, {manifest.source_class}: {family.describe(config)}")
    report(f"params   {manifest.num_parameters:,}, {manifest.dtype}, {manifest.fingerprint}")
    total = manifest.num_parameters * jnp.dtype(manifest.dtype).itemsize
    progress(0, total)
    if not verify:
        module = read(family, config, path, manifest, dtype or manifest.dtype)
        progress(total, total)
        return module
    module = read(family, config, path, manifest, manifest.dtype)
    progress(total, total)
    if (found := fingerprint(module)) != manifest.fingerprint:
        raise NumericError(
            f"{path}: fingerprint of the parameters is {found}; config.json says"
            f" {manifest.fingerprint}; convert the checkpoint again"
        )
    check_summaries(manifest.outputs, summarise(family, config, module), str(path))
    report("numeric  parameters and outputs are those stored at conversion")
    return cast(family, config, module, dtype) if dtype else module


def _ignore(*_: object) -> None:
    pass
