"""The measured table of a model on this device: found, checked, and completed by measuring."""

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from pathlib import Path

import jax
from jaxtyping import Array

from pbjax.analysis import Analysis
from pbjax.classify import relabel
from pbjax.device import Device
from pbjax.errors import DeviceError, InputError
from pbjax.outline import Outline
from pbjax.phases import Phases
from pbjax.profiling import (
    PairTiming,
    Profile,
    StageInfo,
    fill,
    fill_corun,
    find_profile,
    grid,
    usable_rows,
)
from pbjax.provenance import provenance_here
from pbjax.timing import StageTimer


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurements:
    """A table that every split of the batch can be predicted from.

    Attributes:
      profile: The table.
      outline: The program with its stages in the classes that their measured time is nearest to.
      rows_measured: How many of its rows are new.
      warning: What differs between where its old rows were measured and here; empty if nothing.
    """

    profile: Profile
    outline: Outline
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
      DeviceError: The table is of another device kind; its seconds say nothing here, and writing
        to its file would lose them.
    """
    path = None if profile is None or isinstance(profile, Profile) else Path(profile)
    timer = StageTimer(analysis.program_at, analysis.weights, leaves, analysis.batch.axes)
    save = None if path is None else lambda table: table.save(path)
    batch_size = analysis.batch.batch_size
    with phases.phase("profile") as report:
        known = profile if isinstance(profile, Profile) else _read(analysis, path)
        command = f"pbjax.optimize({analysis.model.name}, batch of {batch_size})"
        here = Profile(provenance=provenance_here(analysis.device.kind, command))
        warning = _check(analysis, known) if known else ""
        start = known.merge(here) if known else here
        table = fill(start, analysis.outline, grid(batch_size), timer, progress=report, on_row=save)
    outline = relabelled(analysis.outline, table, batch_size, analysis.device)
    third = max(batch_size // 3, 1)
    with phases.phase("profile pairs") as report:
        complete = fill_corun(
            table,
            _pairs(outline),
            [(third, third)],
            lambda a, m, b, n: PairTiming(slowdowns=timer.pair(a, b, m)),
            progress=report,
            on_row=save,
        )
    old = len(start.rows) + len(start.corun)
    return Measurements(
        profile=complete,
        outline=outline,
        rows_measured=len(complete.rows) + len(complete.corun) - old,
        warning=warning,
    )


def _read(analysis: Analysis, path: Path | None) -> Profile | None:
    """The table in a file that may not exist yet; without a file, the one that ships."""
    if path is None:
        try:
            path = find_profile(analysis.device.slug, analysis.model.name.lower())
        except InputError:  # a lambda, say: no file can have its name, so none ships
            return None
    return Profile.load(path) if path is not None and path.exists() else None


def _check(analysis: Analysis, known: Profile) -> str:
    kind = known.provenance.device_kind
    if kind != analysis.device.kind:
        raise DeviceError(
            f"optimize(profile=...): the table is of {kind!r}; this device is "
            f"{analysis.device.kind!r}; seconds of another device say nothing here; name another "
            "file, which is written then"
        )
    return usable_rows(known, kind, jax.__version__).warning or ""


def relabelled(outline: Outline, profile: Profile, batch_size: int, device: Device) -> Outline:
    """The outline with every stage in the class that its measured time says.

    Args:
      outline: Stages labelled by their predicted time.
      profile: What was measured of them.
      batch_size: The rows at which the measured time is compared with the bounds.
      device: Whose bounds.
    """

    def measured(stage: StageInfo | None) -> StageInfo | None:
        if stage is None:
            return None
        seconds = profile.seconds(stage, batch_size)
        return replace(stage, resource=relabel(stage, seconds, batch_size, device))

    return replace(
        outline,
        prologue=measured(outline.prologue),
        block=tuple(stage for stage in map(measured, outline.block) if stage is not None),
        epilogue=measured(outline.epilogue),
    )


def _pairs(outline: Outline) -> list[tuple[StageInfo, StageInfo]]:
    """Stages of different classes: those that may gain by running side by side."""
    unique = {stage.fingerprint: stage for stage in outline.block}
    return [(a, b) for a, b in combinations(unique.values(), 2) if a.resource != b.resource]
