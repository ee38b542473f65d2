"""Predicted and measured stages of a roofline side by side, and the table of measured stages."""

import os
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import ClassVar, Literal

from pbjax.errors import InputError
from pbjax.files import STRICT, read_json, write_json
from pbjax.planning.profile_rows import Provenance
from pbjax.roofline.batch_study import SizePoint, size_point
from pbjax.roofline.points import Measured, Total
from pbjax.roofline.result import Roofline
from pbjax.text_tables import table_text, wrapped

REMEDY = (
    "measured stages of schema_version 1 are allowed; measure again by `pbjax roofline --measure "
    "--save-measured FILE`"
)
# Stages below this share of the measured time cannot be distinguished from launches.
MIN_SHARE = 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class StageCheck:
    """A stage, or a group of operations in one, as predicted and as measured.

    Attributes:
      stage: The predicted stage.
      measured_s: Device seconds of a call.
      groups: The checks of its groups that are long enough.
    """

    stage: Total
    measured_s: float
    groups: "tuple[StageCheck, ...]" = ()

    @property
    def error(self) -> float:
        """Predicted over measured seconds, less 1."""
        return self.stage.seconds / self.measured_s - 1 if self.measured_s else 0.0

    @property
    def flops_per_s(self) -> float:
        """The achieved rate."""
        return self.stage.flops / self.measured_s if self.measured_s else 0.0

    @property
    def bytes_per_s(self) -> float:
        """Counted bytes over measured seconds."""
        return self.stage.traffic.total / self.measured_s if self.measured_s else 0.0

    def row(self) -> dict[str, object]:
        """The check as JSON-compatible data."""
        return {
            "stage": self.stage.name,
            "predicted_s": self.stage.seconds,
            "measured_s": self.measured_s,
            "error": self.error,
            "achieved_flops_per_s": self.flops_per_s,
            "achieved_bytes_per_s": self.bytes_per_s,
            "share_of_attainable": 1 + self.error,
            "groups": [group.row() for group in self.groups],
        }


def stage_checks(report: Roofline) -> tuple[StageCheck, ...]:
    """The measured stages of a report beside their predictions, without very short ones."""
    if report.measured is None:
        return ()
    found, groups = report.measured.stages, report.measured.groups
    least = MIN_SHARE * sum(found.values())
    return tuple(
        StageCheck(
            stage=stage,
            measured_s=found[stage.name],
            groups=tuple(
                StageCheck(stage=Total(name=point.name, points=(point,)), measured_s=seconds)
                for point in stage.points
                if (seconds := groups.get(f"{stage.name}/{point.name}", 0.0)) > least
            ),
        )
        for stage in report.stages
        if found.get(stage.name, 0.0) > least
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """Measured seconds of one call of a model.

    Attributes:
      model: Name of the model, as in its report.
      phase: Phase of the call.
      items: Rows of the batch.
      tokens: Tokens that the call takes in.
      cached: Tokens that a row's cache holds; 0 without one.
      measured: Measured seconds.
    """

    model: str
    phase: str
    items: int
    tokens: int
    cached: int
    measured: Measured


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredTable:
    """Measured calls of models on one device.

    Attributes:
      provenance: Where and how they were measured.
      rows: One row for each call.
    """

    provenance: Provenance
    rows: tuple[Row, ...]

    def find(self, report: Roofline) -> Row | None:
        """The row of the same call on the same kind of device; None if there is none."""
        key = report.model, report.phase, report.items, report.tokens, report.cached
        rows = {(r.model, r.phase, r.items, r.tokens, r.cached): r for r in self.rows}
        return rows.get(key) if self.provenance.device_kind == report.device.kind else None

    def attached(self, report: Roofline) -> Roofline:
        """The report with the measured seconds of the same call.

        Raises:
          InputError: The call was not measured on this kind of device.
        """
        row = self.find(report)
        if row is None:
            known = "; ".join(f"{r.model} {r.phase} at batch {r.items}" for r in self.rows)
            raise InputError(
                f"measured stages of {report.model}, {report.phase} at batch {report.items} on "
                f"{report.device.kind}: not in the table, which is of "
                f"{self.provenance.device_kind}; it has {known}; ask for one of these, or measure"
            )
        return replace(report, measured=row.measured)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the table as JSON.

        Raises:
          FileError: The file cannot be written.
        """
        write_json(path, {"schema_version": 1, "table": asdict(self)})

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> "MeasuredTable":
        """Reads a table that `save` wrote.

        Raises:
          FileError: The file is missing, corrupt or of a foreign schema.
        """
        return read_json(path, _File, REMEDY).table


@dataclass(frozen=True, slots=True, kw_only=True)
class _File:
    """The content of a file."""

    __pydantic_config__: ClassVar[dict[str, str | bool]] = STRICT

    schema_version: Literal[1]
    table: MeasuredTable


def measured_point(report: Roofline, batch_size: int, seq_len: int) -> SizePoint:
    """A measured call as a point of its phase's curves: device time and achieved rates.

    Args:
      report: A report with measured seconds.
      batch_size: Rows of the batch.
      seq_len: Tokens of a row; in decode those that its cache holds.
    """
    if report.measured is None:
        raise AssertionError("the report has no measured seconds")
    seconds = report.measured.device_s
    kinds = {total.name: total.flops for total in report.kinds}
    rates = {
        kind: kinds.get(kind, 0.0) / spent if spent else 0.0
        for kind, spent in report.measured.kinds.items()
    }
    return replace(
        size_point(report, batch_size, seq_len),
        seconds=seconds,
        tokens_per_s=report.tokens / seconds,
        dense_flops_per_s=rates.get("dense", 0.0),
        attention_flops_per_s=rates.get("attention", 0.0),
    )


def points_text(points: Sequence[tuple[SizePoint, SizePoint]]) -> str:
    """Predicted and measured points of curves as a table.

    Args:
      points: Pairs of a predicted and a measured point of the same size.
    """
    rows = [
        (
            p.phase,
            f"{p.batch_size:,}",
            f"{p.seq_len:,}",
            p.seconds * 1e3,
            m.seconds * 1e3,
            f"{p.seconds / m.seconds - 1:+.0%}",
            m.tokens_per_s,
            m.dense_flops_per_s / 1e12,
            m.attention_flops_per_s / 1e12,
        )
        for p, m in points
    ]
    columns = ("", "batch", "tokens", "predicted ms", "measured ms", "error", "tokens/s")
    rates = ("dense TFLOP/s", "attention TFLOP/s")
    return table_text("measured points of the curves: device time", (*columns, *rates), rows)


def checks_rows(reports: Iterable[Roofline]) -> list[dict[str, object]]:
    """The checks of several reports as JSON-compatible rows."""
    return [
        {"model": r.model, "phase": r.phase, "items": r.items, **check.row()}
        for r in reports
        for check in stage_checks(r)
    ]


def _check_row(name: str, check: StageCheck) -> tuple[object, ...]:
    return (
        name,
        check.stage.seconds * 1e3,
        check.measured_s * 1e3,
        f"{check.error:+.0%}",
        check.flops_per_s / 1e12,
        check.bytes_per_s / 1e12,
        f"{1 + check.error:.0%}",
    )


def checks_text(report: Roofline) -> str:
    """Stages as predicted and as measured, as a table of at most 100 columns.

    Args:
      report: A report with measured seconds; without them the text is empty.
    """
    measured = report.measured
    if measured is None:
        return ""
    rows = []
    for check in stage_checks(report):
        rows.append(_check_row(check.stage.name, check))
        rows += [_check_row(f"  {group.stage.name}", group) for group in check.groups]
    kernels_s = measured.device_s
    columns = (
        "stage and group",
        "predicted ms",
        "measured ms",
        "error",
        "TFLOP/s",
        "TB/s",
        "of attainable",
    )
    title = (
        f"{report.model}, {report.phase}: predicted and measured on {measured.device_kind}, device "
        f"time of {measured.calls} calls"
    )
    error = report.total.seconds / measured.seconds - 1
    lines = [
        f"a call: predicted {report.total.seconds * 1e3:,.4g} ms, measured "
        f"{measured.seconds * 1e3:,.4g} ms by the wall clock ({error:+.0%}); kernels "
        f"{kernels_s * 1e3:,.4g} ms, {measured.other_s / kernels_s:.0%} of it in no stage",
        "rates are counted FLOPs and bytes over measured seconds; a kernel of several groups "
        "counts for the group of its product, or else of its result",
    ]
    return "\n".join(
        [table_text(title, columns, rows), *(line for text in lines for line in wrapped(text))]
    )
