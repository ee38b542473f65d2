"""Rows of the measured table: one stage alone, two stages together, and their provenance."""

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

from pbjax.arguments import check_finite
from pbjax.device import ResourceClass
from pbjax.errors import InputError
from pbjax.planning.program_summary import StageInfo

SMALLEST_SIZE = 2


def measured_size(batch_size: int) -> int:
    """The batch size that a sub-batch is run and measured at.

    JAX programs specialise on axes of size one, so one row runs padded to two.
    """
    if batch_size < 1:
        raise InputError(
            f"batch size {batch_size}: not a number of rows; 1 or more is allowed; "
            "leave empty sub-batches out"
        )
    return max(batch_size, SMALLEST_SIZE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Provenance:
    """Where and how a table was measured.

    Attributes:
      device_kind: The device kind as `jax.Device.device_kind` says it.
      driver: Version of the driver; empty on a CPU.
      jax: Version of jax; several, joined by " + ", if the rows come from several.
      commit: Commit of this project that measured.
      date: Date in ISO 8601; the newer of two tables wins when they are merged.
      clock_mhz: Clock during the measurement; 0 where it cannot be read.
      power_limit_w: Power limit; 0 where it cannot be read.
      command: The command that measures again.
    """

    device_kind: str
    driver: str
    jax: str
    commit: str
    date: str
    clock_mhz: int
    power_limit_w: int
    command: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """Device seconds of one stage at one batch size.

    Attributes:
      stage: Name of the stage in the model where it was measured; its fingerprint identifies it.
      fingerprint: The stage's fingerprint.
      resource: The stage's resource class.
      dtype: Dtype of the stage's main input.
      batch_size: Rows of the sub-batch.
      shape: Shape of the stage's main input without the batch axis.
      sm_budget: SMs that its kernels may fill; 0 for kernels without a budget.
      median_s: Median device seconds.
      spread_s: Distance of the quartiles, in seconds.
      samples: How many runs were timed.
    """

    stage: str
    fingerprint: str
    resource: ResourceClass
    dtype: str
    batch_size: int
    shape: tuple[int, ...]
    sm_budget: int
    median_s: float
    spread_s: float
    samples: int

    def __post_init__(self):
        """Refuses sizes and seconds that no measurement gives."""
        if self.batch_size < 1 or self.sm_budget < 0:
            raise InputError(
                f"Row(stage={self.stage!r}): batch_size {self.batch_size}, sm_budget "
                f"{self.sm_budget}; sizes from 1 and budgets from 0 are allowed; measure the row "
                "again"
            )
        seconds = {"median_s": self.median_s, "spread_s": self.spread_s}
        check_finite(f"Row(stage={self.stage!r})", seconds, "measure the row again")

    @classmethod
    def of(
        cls,
        stage: StageInfo,
        batch_size: int,
        median_s: float,
        sm_budget: int = 0,
        *,
        spread_s: float = 0.0,
        samples: int = 1,
    ) -> "Row":
        """The row of a stage; the arguments are named as the attributes."""
        return cls(
            stage=stage.name,
            fingerprint=stage.fingerprint,
            resource=stage.resource,
            dtype=stage.dtype,
            batch_size=batch_size,
            shape=stage.shape,
            sm_budget=sm_budget,
            median_s=median_s,
            spread_s=spread_s,
            samples=samples,
        )

    @property
    def key(self) -> tuple[str, int, int]:
        """The key by which rows are looked up and merged."""
        return self.fingerprint, self.sm_budget, self.batch_size


@dataclass(frozen=True, slots=True, kw_only=True)
class CorunRow:
    """How much two stages slow each other down when they share the device.

    Attributes:
      stages: Names of the two stages.
      fingerprints: Fingerprints of the two stages.
      batch_sizes: Rows of each.
      sm_budgets: SMs that each may fill; 0 for no budget.
      slowdowns: Seconds of each beside the other over its seconds alone.
    """

    stages: tuple[str, str]
    fingerprints: tuple[str, str]
    batch_sizes: tuple[int, int]
    sm_budgets: tuple[int, int]
    slowdowns: tuple[float, float]

    def __post_init__(self):
        """Refuses sizes and slowdowns that no measurement gives."""
        if min(self.batch_sizes) < 1 or min(self.sm_budgets) < 0:
            raise InputError(
                f"CorunRow(stages={self.stages}): batch_sizes {self.batch_sizes}, sm_budgets "
                f"{self.sm_budgets}; sizes from 1 and budgets from 0 are allowed; measure the pair "
                "again"
            )
        slowdowns = {f"slowdowns[{i}]": value for i, value in enumerate(self.slowdowns)}
        asked = f"CorunRow(stages={self.stages})"
        check_finite(asked, slowdowns, "measure the pair again", zero=False)

    @classmethod
    def of(
        cls,
        stages: tuple[StageInfo, StageInfo],
        batch_sizes: tuple[int, int],
        slowdowns: tuple[float, float],
        sm_budgets: tuple[int, int] = (0, 0),
    ) -> "CorunRow":
        """The row of two stages; the arguments are named as the attributes."""
        a, b = stages
        return cls(
            stages=(a.name, b.name),
            fingerprints=(a.fingerprint, b.fingerprint),
            batch_sizes=batch_sizes,
            sm_budgets=sm_budgets,
            slowdowns=slowdowns,
        )

    @property
    def key(self) -> tuple[tuple[str, int, int], ...]:
        """The key by which rows are merged; the order of the two stages does not matter."""
        sides = zip(self.fingerprints, self.sm_budgets, self.batch_sizes, strict=True)
        return tuple(sorted(sides))


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """Seconds of one stage over the batch size, linear between the measured sizes."""

    stage: str
    sizes: tuple[int, ...]
    seconds: tuple[float, ...]

    def at(self, batch_size: int) -> float:
        """Seconds at a batch size; one row costs what two cost.

        Raises:
          InputError: The size is smaller or larger than every measured one.
        """
        size = measured_size(batch_size)
        high = bisect_left(self.sizes, size)
        if high < len(self.sizes) and self.sizes[high] == size:
            return self.seconds[high]
        if high in (0, len(self.sizes)):
            raise InputError(
                f"seconds(stage={self.stage!r}, batch_size={batch_size}): outside the measured "
                f"sizes; sizes from {self.sizes[0]} to {self.sizes[-1]} are allowed; measure "
                f"batch size {size} (`pbjax profile`, or `pbjax optimize --profile`)"
            )
        low = high - 1
        share = (size - self.sizes[low]) / (self.sizes[high] - self.sizes[low])
        return self.seconds[low] + share * (self.seconds[high] - self.seconds[low])


def nearest(batch_sizes: Sequence[tuple[int, int]], size_a: int, size_b: int) -> int:
    """The index of the pair of batch sizes that is nearest in ratio; the first of several."""
    log_a, log_b = math.log(size_a), math.log(size_b)
    # Squares, not sums: a row in the same order is then nearer than the same row turned round.
    distances = [(log_a - math.log(a)) ** 2 + (log_b - math.log(b)) ** 2 for a, b in batch_sizes]
    return distances.index(min(distances))
