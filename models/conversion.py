"""Converts a Hugging Face folder into our own format; a failure leaves no folder behind."""

import dataclasses
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from models.checkpoint import Checkpoint, Progress, open_checkpoint, read_module
from models.companions import check_companions, copy_companions
from models.errors import CheckpointError
from models.hf_folder import find_folder, read_json
from models.keys import KeyReport
from models.numeric import NumericCheck, Reference, check_reference, read_reference, summarise
from models.orbax_folder import (
    CONFIG,
    Manifest,
    check_room,
    check_target,
    folder_bytes,
    is_ours,
    new_folder,
    write,
)
from models.parameters import canonical_dtype, fingerprint


@dataclass(frozen=True, slots=True, kw_only=True)
class ConversionReport:
    """The report of a conversion.

    Attributes:
      source: The Hugging Face folder.
      target: The folder that was written.
      dtype: The dtype of the stored parameters.
      keys: The correspondence of tensors and parameters.
      numeric: The result of the forward pass.
      fingerprint: The SHA-256 of the stored parameters.
      read_bytes: The size of the tensors that were read.
      written_bytes: The size of the new folder.
      seconds: The wall time of the whole conversion.
      warnings: What will not work with the new folder, and why.
    """

    source: Path
    target: Path
    dtype: str
    keys: KeyReport
    numeric: NumericCheck
    fingerprint: str
    read_bytes: int
    written_bytes: int
    seconds: float
    warnings: tuple[str, ...] = ()

    def lines(self) -> list[str]:
        """Returns the four lines of the check, one about the new folder, and the warnings."""
        written = (
            f"written  {self.target}: {self.dtype}, {self.read_bytes:,} bytes read,"
            f" {self.written_bytes:,} written, {self.seconds:.1f} s"
        )
        warnings = [f"warning  {text}" for text in self.warnings]
        return [*self.keys.lines(), self.numeric.line(self.fingerprint), written, *warnings]

    def as_dict(self) -> dict[str, object]:
        """Returns the report as plain data for JSON."""
        plain = dataclasses.asdict(self)
        return plain | {"source": str(self.source), "target": str(self.target)}


def convert(
    source: str | Path,
    target: str | Path,
    dtype: DTypeLike | None = None,
    *,
    allow_pickle: bool = False,
    reference: str | Path | None = None,
    report: Callable[[str], object] = print,
    progress: Progress | None = None,
) -> ConversionReport:
    """Writes a Hugging Face folder as a checked Orbax checkpoint.

    Args:
      source: A local Hugging Face folder.
      target: The new folder; it appears only when everything has succeeded.
      dtype: The dtype of the stored parameters; None keeps the file's.
      allow_pickle: Whether pytorch_model.bin is read in the absence of safetensors, as by `load`.
      reference: An npz file of `scripts/make_reference.py`. The weights are compared with it in
        f32, before any rounding to `dtype`.
      report: Receives the report line by line.
      progress: Called with (bytes done, bytes in all); reading and writing both count.

    Returns:
      The report.

    Raises:
      CheckpointError: As for `load`; also when the target exists, the disk has no room, a file
        beside the weights such as tokenizer.json is broken, or the numeric check fails.
    """
    start_s = time.perf_counter()
    target = Path(target)
    check_target(target)
    expected = None if reference is None else read_reference(reference)
    wanted = None if dtype is None else canonical_dtype(dtype, f"convert({source})")
    checkpoint = _open(find_folder(source), allow_pickle)
    warnings = check_companions(
        checkpoint.path, checkpoint.family.model_type, allow_pickle=allow_pickle
    )
    stored = wanted or checkpoint.stored_dtype()
    written = checkpoint.match.report.num_expected * jnp.dtype(stored).itemsize
    check_room(target, written)
    total = checkpoint.num_bytes + written
    step = progress or _ignore
    module = read_module(checkpoint, stored, lambda done, _: step(done, total))
    numeric = _check(checkpoint, module, stored, expected)
    manifest = _manifest(checkpoint, module, stored, numeric)
    written_bytes = _write(checkpoint, module, manifest, target, allow_pickle)
    step(total, total)
    result = ConversionReport(
        source=checkpoint.path,
        target=target,
        dtype=stored,
        keys=checkpoint.match.report,
        numeric=numeric,
        fingerprint=manifest.fingerprint,
        read_bytes=checkpoint.num_bytes,
        written_bytes=written_bytes,
        seconds=time.perf_counter() - start_s,
        warnings=warnings,
    )
    for line in result.lines():
        report(line)
    return result


def _open(path: Path, allow_pickle: bool) -> Checkpoint:
    fields = read_json(path / CONFIG)
    if is_ours(fields):
        raise CheckpointError(
            f"convert({path}): the folder is converted already; a Hugging Face folder is needed;"
            " load this one as it is"
        )
    return open_checkpoint(path, fields, allow_pickle=allow_pickle)


def _check[C, M: nnx.Module](
    checkpoint: Checkpoint[C, M], module: M, dtype: str, reference: Reference | None
) -> NumericCheck:
    family, config = checkpoint.family, checkpoint.match.config
    outputs = summarise(family, config, module)
    if reference is None:
        return NumericCheck(outputs=outputs, errors=None, reference=None)
    # Rounding to 16 bits would hide a small fault in the names or the model.
    exact = module if dtype == "float32" else read_module(checkpoint, "float32", _ignore)
    errors = check_reference(family, config, exact, reference)
    name = f"{reference.name} ({reference.origin})"
    return NumericCheck(outputs=outputs, errors=errors, reference=name)


def _manifest[C, M: nnx.Module](
    checkpoint: Checkpoint[C, M], module: M, dtype: str, numeric: NumericCheck
) -> Manifest:
    keys, config = checkpoint.match.report, checkpoint.match.config
    return Manifest(
        format="pbjax",
        format_version=1,
        model_type=checkpoint.family.model_type,
        config={name: getattr(config, name) for name in checkpoint.family.field_names()},
        dtype=dtype,
        num_parameters=keys.num_expected,
        fingerprint=fingerprint(module),
        outputs=numeric.outputs,
        source_class=keys.source_class,
    )


def _write(
    checkpoint: Checkpoint,
    module: nnx.Module,
    manifest: Manifest,
    target: Path,
    allow_pickle: bool,
) -> int:
    with new_folder(target) as folder:
        write(folder, manifest, module)
        copy_companions(checkpoint.path, folder, allow_pickle=allow_pickle)
        return folder_bytes(folder)


def _ignore(*_: object) -> None:
    pass
