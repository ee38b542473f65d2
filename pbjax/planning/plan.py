"""The saved decision: how one model's batch is split on one device, and the seconds behind it."""

import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import ClassVar, Literal, get_args

from pbjax.arguments import check_finite, whole_numbers
from pbjax.device import check_sm_budgets
from pbjax.errors import InputError
from pbjax.files import STRICT, read_json, write_json
from pbjax.planning.program_summary import Layers
from pbjax.planning.timetable import MAX_SUB_BATCHES

SCHEMA_VERSION = 3
REMEDY = "correct the plan or search again"

# "plain" runs the whole batch at once by the model as it was given, without fusion's kernels.
type Decision = Literal["split", "unsplit", "plain"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Seconds:
    """Seconds of one pass over the batch by each program; None where unknown.

    Attributes:
      plain: Seconds of the model as it was given, the whole batch at once; None where that is the
        unsplit program.
      unsplit: Seconds of the whole batch at once.
      sequential: Seconds of the sub-batches one after the other, with the same kernels.
      split: Seconds of the staggered sub-batches.
    """

    __pydantic_config__: ClassVar[dict[str, str | bool]] = STRICT

    plain: float | None = None
    unsplit: float | None = None
    sequential: float | None = None
    split: float | None = None

    def __post_init__(self):
        """Refuses seconds that no clock gives."""
        check_finite("Seconds", _known(asdict(self)), REMEDY)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """How a batch is run.

    Equal tables give equal searches and so equal digests. The split that is kept and the decision
    rest on measured whole programs.

    Attributes:
      model: Name of the model, for people.
      fingerprint: Hash of the traced graph, not of the weights.
      device_kind: The device kind as `jax.Device.device_kind` said it.
      jax: Version of jax.
      batch_size: Rows of the batch.
      sizes: Rows of each sub-batch of the split program.
      staggers: How many stages of the block each sub-batch runs ahead.
      sm_budgets: SMs that the kernels of a resource class may fill in a slot with stages of several
        classes, by the name of the class. A class without a budget may fill all, and so may a
        stage that runs alone or beside its own class.
      unroll: Blocks in one step of the split program's loop.
      layers: How the whole batch runs equal layers, where it is what runs.
      compiler_options: Compiler options of the program that runs.
      decision: The program that runs.
      reason: The reason for the decision, in a sentence.
      digest: SHA-256 of the search's inputs and its decision.
      predicted: Seconds predicted from the measured table.
      measured: Measured seconds of the whole programs.
      max_difference: Largest absolute difference between split and unsplit outputs.
      date: Date in ISO 8601.
    """

    __pydantic_config__: ClassVar[dict[str, str | bool]] = STRICT

    model: str
    fingerprint: str
    device_kind: str
    jax: str
    batch_size: int
    sizes: tuple[int, ...]
    staggers: tuple[int, ...]
    unroll: int
    compiler_options: Mapping[str, str | int | bool]
    decision: Decision
    reason: str
    digest: str
    predicted: Seconds
    measured: Seconds
    max_difference: float | None
    date: str
    sm_budgets: Mapping[str, int] = field(default_factory=dict)
    layers: Layers = "as given"

    def __post_init__(self):
        """Refuses sizes that are no split of the batch, and plans that cannot be run."""
        for name in ("sizes", "staggers"):
            whole_numbers(f"Plan({name})", getattr(self, name))
        if self.decision not in get_args(Decision.__value__):
            raise InputError(
                f"Plan(decision={self.decision!r}): unknown decision; "
                f"{', '.join(get_args(Decision.__value__))} are allowed; {REMEDY}"
            )
        fits = sum(self.sizes) == self.batch_size and len(self.sizes) == len(self.staggers)
        if not fits or not 1 <= len(self.sizes) <= MAX_SUB_BATCHES or min(self.sizes) < 1:
            raise InputError(
                f"Plan(batch_size={self.batch_size}): sizes {self.sizes} with staggers "
                f"{self.staggers}; one to {MAX_SUB_BATCHES} positive sizes that add up to the "
                "batch, with as many staggers, are allowed; correct the plan or search again"
            )
        if self.unroll < 1 or (self.decision == "split" and len(self.sizes) == 1):
            raise InputError(
                f"Plan(decision={self.decision!r}): sizes {self.sizes}, unroll {self.unroll}; a "
                "split of two sizes or more and an unroll of 1 or more are allowed; correct the "
                "plan or search again"
            )
        check_finite("Plan", _known({"max_difference": self.max_difference}), REMEDY)
        check_sm_budgets(f"Plan(sizes={self.sizes})", self.sm_budgets, self.device_kind)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the plan as JSON, whole or not at all.

        Raises:
          FileError: The file cannot be written.
        """
        write_json(path, asdict(_File(schema_version=SCHEMA_VERSION, plan=self)))

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> "Plan":
        """Reads a plan.

        One of schema_version 1 has no SM budgets; one of 1 or 2 runs the whole batch as the model
        is written, and has the compiler options of its split, whichever program runs.

        Raises:
          FileError: The file is missing, corrupt, truncated or of a foreign schema; the message
            names the place.
        """
        remedy = (
            f"a plan of schema_version 1 to {SCHEMA_VERSION} is allowed; restore the file, or "
            "leave out plan= to search again"
        )
        file = read_json(path, _File, remedy)
        if file.schema_version < 3 and file.plan.decision != "split":
            return replace(file.plan, compiler_options={})
        return file.plan


@dataclass(frozen=True, slots=True, kw_only=True)
class _File:
    """The content of a file."""

    __pydantic_config__: ClassVar[dict[str, str | bool]] = STRICT

    schema_version: Literal[1, 2, 3]
    plan: Plan


def _known(values: Mapping[str, float | None]) -> dict[str, float]:
    return {name: value for name, value in values.items() if value is not None}
