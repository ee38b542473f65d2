"""The numeric check of a model: a forward pass in f32, against a reference if there is one."""

import json
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import jax
import numpy as np
from flax import nnx
from jaxtyping import Float, Shaped

from models.errors import CheckpointError, InputError, NumericError
from models.keymap import Family
from models.parameters import cast

# Relative to a value's standard deviation, for f32 against f64; wrong weights are far above it.
TOLERANCE = 2e-5
NUM_SAMPLES = 32
INPUT, OUTPUT = "inputs.", "outputs."


@dataclass(frozen=True, slots=True, kw_only=True)
class Reference:
    """Inputs and expected values, written by `scripts/make_reference.py`.

    Attributes:
      name: The name of the file.
      origin: The program that computed the values, e.g. "transformers 4.57.1".
      inputs: Arguments of the forward pass.
      outputs: Expected values by the names of the family's probe.
    """

    name: str
    origin: str
    inputs: dict[str, np.ndarray]
    outputs: dict[str, np.ndarray]


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputSummary:
    """A summary of one value of the fixed forward pass, short enough to be stored.

    Attributes:
      std: The standard deviation of the value.
      sample: Evenly spaced elements of the value.
    """

    std: float
    sample: list[float]


@dataclass(frozen=True, slots=True, kw_only=True)
class NumericCheck:
    """The result of the numeric check.

    Attributes:
      outputs: Summaries of the fixed forward pass.
      errors: Maximum error over standard deviation by name; None without a reference.
      reference: The name and origin of the reference; None without one.
    """

    outputs: dict[str, OutputSummary]
    errors: dict[str, float] | None
    reference: str | None

    def line(self, fingerprint: str) -> str:
        """Returns the report's last line."""
        if self.errors is None:
            return f"numeric  unchecked (no reference), outputs finite, fingerprint {fingerprint}"
        worst = max(self.errors.values())
        return f"numeric  max error {worst:.1e} x std, reference {self.reference}"


def read_reference(path: str | Path) -> Reference:
    """Reads a reference file.

    Raises:
      CheckpointError: The file is absent, no npz archive, or lacks a part.
    """
    try:
        # np.load would leave a file open that turns out to be no archive.
        with open(path, "rb") as file, np.load(file, allow_pickle=False) as archive:
            arrays = {name: archive[name] for name in archive.files}
        meta = json.loads(str(arrays.pop("meta")))
        origin = str(meta["origin"])
    except (OSError, ValueError, KeyError, TypeError, EOFError, zipfile.BadZipFile) as error:
        raise CheckpointError(
            f"{path}: not a readable reference ({error}); an npz file of make_reference.py is"
            " needed; make it again"
        ) from error
    reference = Reference(
        name=Path(path).name,
        origin=origin,
        inputs={n.removeprefix(INPUT): a for n, a in arrays.items() if n.startswith(INPUT)},
        outputs={n.removeprefix(OUTPUT): a for n, a in arrays.items() if n.startswith(OUTPUT)},
    )
    if not reference.inputs or not reference.outputs:
        raise CheckpointError(
            f"{path}: has arrays {', '.join(sorted(arrays)) or 'none'}; names begin with {INPUT!r}"
            f" and {OUTPUT!r}; make it again with make_reference.py"
        )
    return reference


def run[C, M: nnx.Module](
    family: Family[C, M], config: C, module: M, inputs: Mapping[str, np.ndarray]
) -> dict[str, Float[np.ndarray, "..."]]:
    """Returns the probe's values in f32, whatever the module's dtype, without padded positions."""
    graphdef, state = nnx.split(cast(family, config, module, "float32"))
    with jax.default_matmul_precision("highest"):
        values = jax.device_get(_probe(family.probe, graphdef, state, dict(inputs)))
    mask = family.token_mask(config, inputs)
    return {name: unpadded(value, mask) for name, value in values.items()}


@partial(jax.jit, static_argnums=(0, 1))
def _probe(probe, graphdef, state, inputs):
    return probe(nnx.merge(graphdef, state), inputs)


def unpadded(
    value: Shaped[np.ndarray, "..."], mask: Shaped[np.ndarray, "B T"] | None
) -> Shaped[np.ndarray, "..."]:
    """Drops the padded positions of a value per token; other values are returned whole."""
    if mask is None or value.ndim != 3:
        return value
    return value[mask != 0]


def errors_against[C, M: nnx.Module](
    family: Family[C, M], config: C, module: M, reference: Reference
) -> dict[str, float]:
    """Returns max |actual - expected| / std(expected) for every value of a reference.

    Raises:
      NumericError: The reference does not belong to this model.
    """
    takes = sorted(family.example(config))
    if sorted(reference.inputs) != takes:
        raise _foreign(
            reference,
            f"its inputs are {', '.join(sorted(reference.inputs))}, the model's {', '.join(takes)}",
        )
    try:
        actual = run(family, config, module, reference.inputs)
    except InputError as error:
        raise _foreign(reference, f"the model refuses its inputs ({error})") from error
    if set(actual) != set(reference.outputs):
        raise _foreign(
            reference,
            f"it has {', '.join(sorted(reference.outputs))}, the model {', '.join(sorted(actual))}",
        )
    errors = {}
    mask = family.token_mask(config, reference.inputs)
    for name, value in actual.items():
        expected = unpadded(reference.outputs[name], mask)
        if value.shape != expected.shape:
            raise _foreign(reference, f"{name} has shape {expected.shape}, not {value.shape}")
        errors[name] = float(np.max(np.abs(value - expected)) / np.std(expected))
    return errors


def check_reference[C, M: nnx.Module](
    family: Family[C, M], config: C, module: M, reference: Reference
) -> dict[str, float]:
    """Returns the errors against a reference.

    Raises:
      NumericError: One is above the tolerance or not finite.
    """
    errors = errors_against(family, config, module, reference)
    # Written so that NaN counts as too large.
    bad = [f"{name} {error:.1e}" for name, error in errors.items() if not error <= TOLERANCE]
    if bad:
        raise NumericError(
            f"{reference.name}: errors over std are {', '.join(bad)}; {TOLERANCE:.0e} is allowed;"
            " the weights are not those of the reference, or the model computes something else"
        )
    return errors


def summarise[C, M: nnx.Module](
    family: Family[C, M], config: C, module: M
) -> dict[str, OutputSummary]:
    """Runs the family's fixed example and returns short summaries of its values.

    Raises:
      NumericError: A value is not finite.
    """
    values = run(family, config, module, family.example(config))
    bad = [name for name, value in values.items() if not np.isfinite(value).all()]
    if bad:
        raise NumericError(
            f"{family.model_type} forward pass: {', '.join(bad)} not finite;"
            " finite values are needed; the weights are damaged"
        )
    return {name: _summary(value) for name, value in values.items()}


def check_summaries(
    stored: Mapping[str, OutputSummary], found: Mapping[str, OutputSummary], origin: str
) -> None:
    """Raises NumericError unless two runs of the fixed example agree."""
    for name, summary in stored.items():
        same = name in found and len(found[name].sample) == len(summary.sample)
        difference = (
            max(abs(a - b) for a, b in zip(summary.sample, found[name].sample, strict=True))
            if same
            else float("inf")
        )
        if not difference <= TOLERANCE * summary.std:
            raise NumericError(
                f"{origin}: {name} is off by {difference:.1e}; {TOLERANCE * summary.std:.1e} is"
                " allowed; convert the checkpoint again"
            )


def _summary(value: Float[np.ndarray, "..."]) -> OutputSummary:
    flat = value.ravel()
    sample = flat[np.linspace(0, flat.size - 1, NUM_SAMPLES).astype(int)]
    return OutputSummary(std=float(np.std(flat)), sample=[float(x) for x in sample])


def _foreign(reference: Reference, found: str) -> NumericError:
    return NumericError(
        f"{reference.name}: does not belong to this model, {found};"
        " a reference of the same checkpoint is needed; make one with make_reference.py"
    )
