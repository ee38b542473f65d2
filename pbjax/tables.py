"""The measured table of a model on this device: found, checked, and completed by measuring."""

import datetime
import os
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path

import jax
from jaxtyping import Array

from pbjax.analysis import Analysis
from pbjax.phases import Phases
from pbjax.profiling import (
    PairTiming,
    Profile,
    Provenance,
    StageInfo,
    fill,
    fill_corun,
    find_profile,
    grid,
    usable_rows,
)
from pbjax.timing import StageTimer


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurements:
    """A table that every split of the batch can be predicted from.

    Attributes:
      profile: The table.
      rows_measured: How many of its rows are new.
      warning: What differs between where its old rows were measured and here; empty if nothing.
    """

    profile: Profile
    rows_measured: int
    warning: str


def measured_table(
    analysis: Analysis,
    leaves: Sequence[Array],
    profile: Profile | str | os.PathLike[str] | None,
    phases: Phases,
) -> Measurements:
    """Completes the table of a model.

    Args:
      analysis: The model.
      leaves: Leaves of the example inputs, which the stages are fed with.
      profile: A table; or a file, which is read if it exists and written after every row; or None
        for the table that ships with pbjax, if there is one.
      phases: Clocks the measuring.

    Returns:
      The table with all rows that the batch needs.

    Raises:
      FileError: The file is corrupt.
    """
    known, path = _known(analysis, profile)
    usable = usable_rows(known, analysis.device.kind, jax.__version__)
    timer = StageTimer(analysis.program_at, analysis.weights, leaves, analysis.batch.axes)
    save = path and (lambda table: table.save(path))
    batch_size = analysis.batch.batch_size
    with phases.phase("profile") as report:
        table = fill(
            usable.profile, analysis.outline, grid(batch_size), timer, progress=report, on_row=save
        )
    third = max(batch_size // 3, 1)
    with phases.phase("profile pairs") as report:
        complete = fill_corun(
            table,
            _pairs(analysis),
            [(third, third)],
            lambda a, m, b, n: PairTiming(slowdowns=timer.pair(a, b, m)),
            progress=report,
            on_row=save,
        )
    old = len(usable.profile.rows) + len(usable.profile.corun)
    return Measurements(
        profile=complete,
        rows_measured=len(complete.rows) + len(complete.corun) - old,
        warning=usable.warning or "",
    )


def _known(
    analysis: Analysis, profile: Profile | str | os.PathLike[str] | None
) -> tuple[Profile, Path | None]:
    if isinstance(profile, Profile):
        return profile, None
    path = None if profile is None else Path(profile)
    shipped = find_profile(analysis.device.slug, analysis.model.name.lower())
    source = path if path is not None and path.exists() else shipped if path is None else None
    return (Profile.load(source) if source else Profile(provenance=_provenance(analysis))), path


def _provenance(analysis: Analysis) -> Provenance:
    return Provenance(
        device_kind=analysis.device.kind,
        driver="",
        jax=jax.__version__,
        commit="",
        date=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        clock_mhz=0,
        power_limit_w=0,
        command=f"pbjax.optimize({analysis.model.name}, batch of {analysis.batch.batch_size})",
    )


def _pairs(analysis: Analysis) -> list[tuple[StageInfo, StageInfo]]:
    """Stages of different classes: those that may gain by running side by side."""
    unique = {stage.fingerprint: stage for stage in analysis.outline.block}
    return [(a, b) for a, b in combinations(unique.values(), 2) if a.resource != b.resource]
