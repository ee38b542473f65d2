"""The saved decision: how one model's batch is split on one device, and the figures behind it."""

import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import ClassVar, Literal, get_args

from pbjax.arguments import check_finite, whole_numbers
from pbjax.device import check_sm_budgets
from pbjax.errors import InputError
from pbjax.files import STRICT, read_json, write_json
from pbjax.planning.timetable import MAX_SUB_BATCHES

SCHEMA_VERSION = 2
REMEDY = "correct the plan or search again"

# Of the whole batch at once, "plain" is the model as it was given, without what fusion has found.
type Decision = Literal["split", "unsplit", "plain"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Seconds:
    """Seconds of a pass over the batch, for each way to run it; None where it was not found out.

    Attributes:
      plain: The whole batch at once by the model as it was given; None where it is the unsplit
        program.
      unsplit: The whole batch at once.
      sequential: The sub-batches one after the other, with the same kernels.
      split: The sub-batches staggered.
    """

    __pydantic_config__: ClassVar[dict[str, str | bool]] = STRICT

    plain: float | None = None
    unsplit: float | None = None
    sequential: float | None = None
    split: float | None = None

    def __post_init__(self):
        """Refuses what no clock gives."""
        check_finite("Seconds", _known(asdict(self)), REMEDY)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """How a batch is run.

    One table gives one search, and so one digest, always. Which of the searched splits stands here,
    and the decision, rest on whole programs that were measured.

    Attributes:
      model: Name of the model, for people.
      fingerprint: Hash of the traced graph, not of the weights.
      device_kind: What `jax.Device.device_kind` said.
      jax: Version of jax.
      batch_size: Rows of the batch.
      sizes: Rows of each sub-batch of the split program.
      staggers: How many stages of the block each sub-batch runs ahead.
      sm_budgets: By the name of a resource class, how many SMs the kernels of its stages may fill
        in a slot of the split program that has stages of several classes. Where a stage runs alone
        or beside its own class, and for a class that is not named, they may fill all.
      unroll: Blocks in one step of the loop.
      compiler_options: Of the split program.
      decision: Which program runs.
      reason: Why, in a sentence.
      digest: SHA-256 of what the search decided from, and of what it decided.
      predicted: From the measured table.
      measured: Of the whole programs.
      max_difference: Largest absolute difference between split and unsplit outputs.
      date: ISO 8601.
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

    def __post_init__(self):
        """Refuses sizes that are no split of the batch, and what cannot be run."""
        for name in ("sizes", "staggers"):
            whole_numbers(f"Plan({name})", getattr(self, name))
        if self.decision not in get_args(Decision.__value__):
            raise InputError(
                f"Plan(decision={self.decision!r}): no such decision; "
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
                "split has two sizes or more, and a step one block or more; correct the plan or "
                "search again"
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
        """Reads a plan; one of schema_version 1 has no SM budgets.

        Raises:
          FileError: The file is missing, corrupt, truncated or of a foreign schema; the message
            names the place.
        """
        remedy = (
            f"a plan of schema_version 1 or {SCHEMA_VERSION} is allowed; restore the file, or "
            "leave out plan= to search again"
        )
        return read_json(path, _File, remedy).plan


@dataclass(frozen=True, slots=True, kw_only=True)
class _File:
    """What a file holds."""

    __pydantic_config__: ClassVar[dict[str, str | bool]] = STRICT

    schema_version: Literal[1, 2]
    plan: Plan


def _known(figures: Mapping[str, float | None]) -> dict[str, float]:
    return {name: value for name, value in figures.items() if value is not None}
