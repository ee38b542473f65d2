"""The measured table: look-up, merging, and the file that holds it.

Seconds between two measured batch sizes are interpolated; sizes outside them are refused. A file is
written whole or not at all, and read strictly: an error names the place. `profiling` has rows
measured.
"""

import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import ClassVar, Literal

from pbjax.errors import DeviceError, FileError, InputError
from pbjax.files import STRICT, read_json, to_path, update_atomically, write_atomically
from pbjax.planning.profile_rows import CorunRow, Curve, Provenance, Row
from pbjax.planning.program_summary import ProgramSummary, StageInfo

type Clock = Literal["burst", "long run"]

# Files of version 1 were measured in samples that end before an H200 lowers its clock.
CLOCKS: Mapping[int, Clock] = {1: "burst", 2: "long run"}
REMEDY = (
    "a profile of schema_version 1 or 2 is allowed; restore the file, or delete it and "
    "measure again (`pbjax optimize --profile`)"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """A measured table with its provenance; rows are kept sorted, whatever order they come in.

    Attributes:
      provenance: Where and how it was measured.
      rows: Seconds of single stages.
      corun: Slowdowns of pairs of stages.
      clock: Whether the seconds come from a long run, as they do now, or from a burst at the
        highest clock.
    """

    provenance: Provenance
    rows: tuple[Row, ...] = ()
    corun: tuple[CorunRow, ...] = ()
    clock: Clock = "long run"
    _curves: Mapping[tuple[str, int], Curve] = field(init=False, repr=False, compare=False)
    _budgets: Mapping[str, tuple[int, ...]] = field(init=False, repr=False, compare=False)
    _pairs: Mapping[tuple[str, str], tuple[CorunRow, ...]] = field(
        init=False, repr=False, compare=False
    )

    def __post_init__(self):
        """Sorts the rows and refuses two rows of one key."""
        object.__setattr__(self, "rows", tuple(sorted(self.rows, key=_row_order)))
        object.__setattr__(self, "corun", tuple(sorted(self.corun, key=lambda row: row.key)))
        _refuse_repeats(self.rows)
        _refuse_repeats(self.corun)
        object.__setattr__(self, "_curves", _curves(self.rows))
        object.__setattr__(self, "_budgets", _budgets(self._curves))
        object.__setattr__(self, "_pairs", _pairs(self.corun))

    def curve(self, stage: StageInfo, sm_budget: int = 0) -> Curve:
        """All measured seconds of a stage at one SM budget.

        Raises:
          InputError: The stage was never measured at this budget.
        """
        curve = self._curves.get((stage.fingerprint, sm_budget))
        if curve is None:
            raise InputError(
                f"seconds(stage={stage.name!r}, sm_budget={sm_budget}): the profile has no row of "
                f"this stage (fingerprint {stage.fingerprint}); it has {self._known(sm_budget)}; "
                "measure the missing rows (`pbjax profile`, or `pbjax optimize --profile`)"
            )
        return curve

    def seconds(self, stage: StageInfo, batch_size: int, sm_budget: int = 0) -> float:
        """Device seconds of a stage, interpolated between measured batch sizes.

        Args:
          stage: The stage.
          batch_size: Rows of the sub-batch; one row costs what two cost.
          sm_budget: SMs that its kernels may fill; 0 for kernels without a budget.

        Returns:
          The measured seconds, or the line between the two neighbouring sizes.

        Raises:
          InputError: The stage was never measured, or the size is outside its measured ones.
        """
        return self.curve(stage, sm_budget).at(batch_size)

    def budgets(self, stage: StageInfo) -> tuple[int, ...]:
        """The SM budgets that a stage was measured at; 0 for none."""
        return self._budgets.get(stage.fingerprint, ())

    def corun_rows(self, stage_a: StageInfo, stage_b: StageInfo) -> tuple[CorunRow, ...]:
        """The measured rows of two stages together, each with stage_a first."""
        return self._pairs.get((stage_a.fingerprint, stage_b.fingerprint), ())

    def only(self, summary: ProgramSummary) -> "Profile":
        """The rows of a program's stages and of pairs of them."""
        wanted = {stage.fingerprint for stage in summary.stages}
        return replace(
            self,
            rows=tuple(row for row in self.rows if row.fingerprint in wanted),
            corun=tuple(row for row in self.corun if wanted.issuperset(row.fingerprints)),
        )

    def merge(self, other: "Profile") -> "Profile":
        """Merges two tables; where both have a row, the newer table's row stays.

        Args:
          other: A table of the same device kind; it counts as newer if the dates are equal.

        Returns:
          A table with the newer one's provenance, naming every jax version that rows come from; the
          other table if this one has no rows. Rows of a burst are left out where the other table is
          of a long run.

        Raises:
          DeviceError: The tables belong to different device kinds.
        """
        if not (self.rows or self.corun):
            return other
        old, new = sorted((self, other), key=lambda profile: profile.provenance.date)
        kinds = old.provenance.device_kind, new.provenance.device_kind
        if kinds[0] != kinds[1]:
            raise DeviceError(
                f"merge: one table is of {kinds[0]!r}, the other of {kinds[1]!r}; tables of one "
                "device kind are allowed; keep one file for each device"
            )
        if old.clock != new.clock:
            return new if new.clock == "long run" else old
        versions = {v for p in (old, new) for v in p.provenance.jax.split(" + ")}
        return Profile(
            provenance=replace(new.provenance, jax=" + ".join(sorted(versions))),
            rows=tuple({row.key: row for row in (*old.rows, *new.rows)}.values()),
            corun=tuple({row.key: row for row in (*old.corun, *new.corun)}.values()),
            clock=new.clock,
        )

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the table as JSON; equal tables give equal bytes, and no half file is left.

        Args:
          path: The file to write or replace; its folder is made if need be.

        Raises:
          FileError: The file cannot be written.
        """
        write_atomically(to_path("save", path), _to_json(self))

    def save_into(self, path: str | os.PathLike[str]) -> None:
        """Adds the table's rows to those that a file has by now, also of other processes.

        Args:
          path: The file to complete, or to write if it is absent.

        Raises:
          FileError: The file cannot be written, or what it holds is no table.
          DeviceError: It has become the table of another device kind.
        """
        place = to_path("save", path)
        update_atomically(
            place, lambda: _to_json(Profile.load(place).merge(self) if place.is_file() else self)
        )

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> "Profile":
        """Reads a table.

        Raises:
          FileError: The file is missing, corrupt, truncated or of a foreign schema; the message
            names the place.
        """
        file = read_json(path, _File, REMEDY)
        try:
            return cls(
                provenance=file.provenance,
                rows=file.rows,
                corun=file.corun,
                clock=CLOCKS[file.schema_version],
            )
        except InputError as error:
            raise FileError(f"load({os.fspath(path)!r}): {error}; {REMEDY}") from error

    def _known(self, sm_budget: int) -> str:
        names = sorted({row.stage for row in self.rows if row.sm_budget == sm_budget})
        return f"rows of {', '.join(names)}" if names else "no rows"


@dataclass(frozen=True, slots=True, kw_only=True)
class _File:
    """The content of a file."""

    __pydantic_config__: ClassVar[dict[str, str | bool]] = STRICT

    schema_version: Literal[1, 2]
    provenance: Provenance
    rows: tuple[Row, ...]
    corun: tuple[CorunRow, ...]


def _to_json(profile: Profile) -> str:
    def lines(rows: Iterable[Row | CorunRow]) -> str:
        return ",\n  ".join(json.dumps(asdict(row)) for row in rows)

    version = next(version for version, clock in CLOCKS.items() if clock == profile.clock)
    return (
        f'{{"schema_version": {version},\n'
        f' "provenance": {json.dumps(asdict(profile.provenance))},\n'
        f' "rows": [\n  {lines(profile.rows)}],\n'
        f' "corun": [\n  {lines(profile.corun)}]}}\n'
    )


def _row_order(row: Row) -> tuple[object, ...]:
    return row.stage, row.dtype, row.shape, row.batch_size, row.sm_budget, row.fingerprint


def _refuse_repeats(rows: Iterable[Row | CorunRow]) -> None:
    seen = {}
    for row in rows:
        if row.key in seen:
            raise InputError(
                f"Profile: two rows for {row.key} (as {seen[row.key]} and as {_names(row)}); one "
                "is allowed; drop one, or put them into two profiles and merge these"
            )
        seen[row.key] = _names(row)


def _names(row: Row | CorunRow) -> str:
    return row.stage if isinstance(row, Row) else " beside ".join(row.stages)


def _curves(rows: Iterable[Row]) -> dict[tuple[str, int], Curve]:
    points: dict[tuple[str, int], list[Row]] = {}
    for row in rows:
        points.setdefault((row.fingerprint, row.sm_budget), []).append(row)
    curves = {}
    for key, members in points.items():
        members.sort(key=lambda row: row.batch_size)
        curves[key] = Curve(
            stage=members[0].stage,
            sizes=tuple(row.batch_size for row in members),
            seconds=tuple(row.median_s for row in members),
        )
    return curves


def _budgets(curves: Iterable[tuple[str, int]]) -> dict[str, tuple[int, ...]]:
    found: dict[str, tuple[int, ...]] = {}
    for fingerprint, budget in sorted(curves):
        found[fingerprint] = (*found.get(fingerprint, ()), budget)
    return found


def _pairs(rows: Iterable[CorunRow]) -> dict[tuple[str, str], tuple[CorunRow, ...]]:
    found: dict[tuple[str, str], list[CorunRow]] = {}
    for row in rows:
        turned = CorunRow(
            stages=row.stages[::-1],
            fingerprints=row.fingerprints[::-1],
            batch_sizes=row.batch_sizes[::-1],
            sm_budgets=row.sm_budgets[::-1],
            slowdowns=row.slowdowns[::-1],
        )
        sides = (row, turned)
        if row.key[0] == row.key[1]:
            # Both sides are the same work: a difference of their slowdowns is noise.
            mean = sum(row.slowdowns) / 2
            sides = (replace(row, slowdowns=(mean, mean)),)
        for side in sides:
            found.setdefault(side.fingerprints, []).append(side)
    return {key: tuple(members) for key, members in found.items()}
