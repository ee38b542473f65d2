"""Loads a model or a tokenizer from a Hugging Face folder or from one of our own.

Names are matched in `models.keys`, files read in `models.hf_folder` and `models.orbax_folder`;
`models.conversion` writes.
"""

import importlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import tokenizers
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Shaped

from models import FAMILIES
from models.errors import CheckpointError, ConfigError, NumericError
from models.hf_folder import find_folder, read_headers, read_json
from models.keymap import Family, arrange
from models.keys import Match, Source, match
from models.numeric import check_summaries, summarise
from models.orbax_folder import is_ours, parse_config, parse_manifest, read, read_part
from models.parameters import Parameter, canonical_dtype, cast, fill, fingerprint
from models.stored_tensors import DTYPES, map_tensor

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
          CheckpointError: The tensors have several dtypes.
        """
        found = sorted({DTYPES[source.header.dtype] for source in self.match.sources})
        if len(found) > 1:
            raise CheckpointError(
                f"{self.path}: tensors are of dtypes {', '.join(found)}; a model has one;"
                f" choose it by dtype="
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
      dtype: The dtype of parameters and activations; None keeps the file's.
      allow_pickle: Whether pytorch_model.bin is read in the absence of safetensors. Such a file is
        a program; its tensors are read without running it, and a file that asks for more is
        refused.
      verify: Whether to run the fixed forward pass in f32. Its values must be finite. In a folder
        of `convert` they must agree with the stored outputs, and the parameters with the stored
        fingerprint, a SHA-256 of all weights (about 1.3 s a GB on one core). Without verify, bytes
        of such a folder that were damaged into other finite numbers are not noticed.
      report: Receives the lines of the key report, or the description of our folder, and with
        verify the outcome.
      progress: Called with (bytes read, bytes in all).

    Returns:
      The model.

    Raises:
      CheckpointError: The folder is not a complete, supported, consistent checkpoint. Subclasses
        distinguish configuration, key and numeric faults.
    """
    path = find_folder(folder)
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


def load_parameters(
    folder: str | Path,
    prefix: str,
    dtype: DTypeLike | None = None,
    *,
    allow_pickle: bool = False,
    progress: Progress | None = None,
) -> dict[str, Shaped[Array, "..."]]:
    """Loads the parameters of a part of a model; the rest of the folder is checked but not read.

    Args:
      folder: See `load`.
      prefix: Dotted path of the part in the module, e.g. "layers.3" or "embeddings.word".
      dtype: The dtype of the parameters; None keeps the file's.
      allow_pickle: See `load`.
      progress: Called with (bytes read, bytes in all).

    Returns:
      The parameters by their dotted paths in the module.

    Raises:
      CheckpointError: See `load`; also if the module has no such part.
    """
    path = find_folder(folder)
    wanted = None if dtype is None else canonical_dtype(dtype, f"load_parameters({path})")
    fields, step = read_json(path / "config.json"), progress or _ignore

    def within(name: str) -> bool:
        return f"{name}.".startswith(f"{prefix}.")

    if is_ours(fields):
        manifest = parse_manifest(fields, f"{path}/config.json")
        family = find_family(fields, path)
        config = parse_config(family, manifest, f"{path}/config.json")
        stored = wanted or manifest.dtype
        found = read_part(family, config, path, manifest, stored, progress=step, wanted=within)
    else:
        checkpoint = open_checkpoint(path, fields, allow_pickle=allow_pickle)
        sources = tuple(s for s in checkpoint.match.sources if within(s.leaf.path))
        part = replace(checkpoint, match=replace(checkpoint.match, sources=sources))
        found = _parameters(part, wanted or checkpoint.stored_dtype(), step)
    if parameters := {parameter.path: parameter.value for parameter in found}:
        return parameters
    raise CheckpointError(
        f"load_parameters({path}): no parameter lies below {prefix!r}; paths are those of the"
        ' module, such as "layers.0"; choose one of them'
    )


def load_tokenizer(folder: str | Path) -> tokenizers.Tokenizer:
    """Returns the tokenizer of a folder, with the truncation and padding that its file sets.

    Args:
      folder: A folder with tokenizer.json.

    Raises:
      CheckpointError: The file is absent or corrupt.
    """
    path = find_folder(folder)
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
      CheckpointError: The folder is not complete, supported and consistent.
    """
    family = find_family(fields, path)
    matched = match(family, fields, read_headers(path, allow_pickle=allow_pickle), str(path))
    return Checkpoint(path=path, family=family, match=matched)


def find_family(fields: Mapping[str, object], path: Path) -> Family:
    """Returns the family of a config.json.

    Raises:
      ConfigError: The family is unknown.
    """
    name = fields.get("model_type")
    if not isinstance(name, str) or name not in FAMILIES:
        found = "missing" if name is None else repr(name)
        raise ConfigError(
            f"{path}/config.json: model_type is {found}; supported are"
            f" {', '.join(map(repr, sorted(FAMILIES)))}; use a checkpoint of one of these"
        )
    return importlib.import_module(FAMILIES[name]).FAMILY


def read_module[C, M: nnx.Module](
    checkpoint: Checkpoint[C, M], dtype: str, progress: Progress
) -> M:
    """Reads the tensors of a checked folder into a new module.

    Args:
      checkpoint: The folder.
      dtype: The dtype of the parameters.
      progress: Called with (bytes read, bytes in all).

    Raises:
      CheckpointError: A tensor has a value that is not finite, in the file or in `dtype`.
    """
    parameters = _parameters(checkpoint, dtype, progress)
    return fill(checkpoint.family, checkpoint.match.config, dtype, parameters)


def _parameters(checkpoint: Checkpoint, dtype: str, progress: Progress) -> Iterator[Parameter]:
    done, total = 0, checkpoint.num_bytes
    progress(done, total)
    # File by file and from front to back: sequential reads are the fastest.
    sources = checkpoint.match.sources
    for source in sorted(sources, key=lambda s: (s.header.file, s.header.start)):
        yield Parameter(path=source.leaf.path, value=_read(source, dtype))
        done += source.header.num_bytes
        progress(done, total)


def _read(source: Source, dtype: str) -> Shaped[Array, "..."]:
    """Brings one tensor from its file to the device, into the module's layout and dtype."""
    header, leaf = source.header, source.leaf
    name = f"{header.file}: {header.key}"
    # A copy: a tensor stored in the module's layout could otherwise stay a view of the file.
    stored = jax.device_put(map_tensor(header), may_alias=False)
    value, num_bad, num_beyond = _place(stored, leaf.permutation, leaf.num_unit_axes, dtype)
    # Reading the counts waits for the copy, so that one tensor at a time is in flight.
    if num_bad:
        raise CheckpointError(
            f"{name} has {num_bad} values that are not finite; finite values are needed;"
            " the file is damaged, fetch it again"
        )
    if num_beyond:
        raise CheckpointError(
            f"{name} has {num_beyond} values beyond {dtype}; finite values are needed;"
            " choose a dtype with a wider range"
        )
    return value


@partial(jax.jit, static_argnums=(1, 2, 3))
def _place(stored, permutation, num_unit_axes, dtype):
    """Returns the parameter, and how many values are not finite before and after the cast."""
    value = arrange(stored.astype(dtype), permutation, num_unit_axes)
    num_bad, num_beyond = (jnp.sum(~jnp.isfinite(x), dtype=jnp.int32) for x in (stored, value))
    return value, num_bad, num_beyond


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
    stored = manifest.dtype if verify else dtype or manifest.dtype
    module = read(family, config, path, manifest, stored, progress=progress)
    if not verify:
        return module
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
