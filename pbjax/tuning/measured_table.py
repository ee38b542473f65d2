"""The measured table of a model on this device: found, checked, and completed by measuring."""

import math
import os
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from pathlib import Path

import jax
from jaxtyping import Array

from pallas_kernels.operation import PRIMITIVE as KERNEL
from pallas_kernels.relaunch import can_relaunch
from pbjax.device import Device, ResourceClass
from pbjax.errors import DeviceError, InputError, warn
from pbjax.files import check_writable
from pbjax.graph.classify import FLOPS_PER_OPERATION
from pbjax.planning.profile_grid import paired_runs, single_runs
from pbjax.planning.profiling import (
    PairTimer,
    Profile,
    Run,
    StageInfo,
    Timer,
    fill,
    fill_corun,
    find_profiles,
    missing_pairs,
    missing_runs,
    usable_rows,
)
from pbjax.planning.program_summary import ProgramSummary
from pbjax.program.analysis import PROBE_SIZE, Analysis
from pbjax.runtime.phases import Phases
from pbjax.runtime.provenance import provenance_here
from pbjax.runtime.stage_timing import StageTimer


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurements:
    """A table that every split of the batch can be predicted from.

    Attributes:
      profile: The table.
      summary: The program with its stages in the classes that their predicted time says: these
        are what budgets go by, and what is searched.
      relabelled: The same with the classes that their measured time is nearest to.
      rows_measured: How many of its rows are new.
      warning: What differs between where its old rows were measured and here; empty if nothing.
    """

    profile: Profile
    summary: ProgramSummary
    relabelled: ProgramSummary
    rows_measured: int
    warning: str


def measured_table(
    analysis: Analysis,
    leaves: Sequence[Array],
    profile: Profile | str | os.PathLike[str] | None,
    phases: Phases,
    command: str = "",
) -> Measurements:
    """Completes the table of a model.

    Args:
      analysis: The model.
      leaves: Leaves of the example inputs, which the stages are fed with.
      profile: A table; or a file, which is read if it exists and written after every row; or None
        for what the tables that ship with pbjax have of the model's stages.
      phases: Clocks the measuring.
      command: What to run to measure again, for the table; the call of `optimize` if empty.

    Returns:
      The table with all rows that the batch needs.

    Raises:
      FileError: The file is corrupt, or rows are missing and it cannot be written.
      DeviceError: The table is of another device kind; its seconds say nothing here, and writing
        to its file would lose them.
      InputError: The file has seconds of bursts, which it would lose as well.
    """
    return prepare_table(analysis, leaves, profile, phases, command).measure(phases)


def prepare_table(
    analysis: Analysis,
    leaves: Sequence[Array],
    profile: Profile | str | os.PathLike[str] | None,
    phases: Phases,
    command: str = "",
    *,
    sizes: Collection[int] | None = None,
) -> "PreparedTable":
    """Compiles what `measured_table` measures, with its arguments, and raises what it does.

    Args:
      analysis: As there, like all but the last.
      leaves: See there.
      profile: See there.
      phases: See there.
      command: See there.
      sizes: Sub-batches to measure of those that the batch needs, the batch among them; None for
        all. Tables of several processes, each with some of the sizes, are one when merged.
    """
    path = None if profile is None or isinstance(profile, Profile) else Path(profile)
    known = profile if isinstance(profile, Profile) else _read(analysis, path)
    command = command or (
        f"pbjax.optimize({analysis.model.name}, batch of {analysis.batch.batch_size})"
    )
    here = Profile(provenance=provenance_here(analysis.device.kind, command))
    warning = _check(analysis, known, path) if known else ""
    start = known.merge(here) if known else here
    timer = StageTimer(analysis.program_at, analysis.weights, leaves, analysis.batch.axes)
    wanted = analysis.batch.batch_size, analysis.device.num_sms, _takers(analysis)
    runs = missing_runs(start, single_runs(analysis.summary, *wanted))
    pairs = missing_pairs(start, paired_runs(analysis.summary, *wanted))
    if sizes is not None:
        runs = tuple(run for run in runs if run.size in sizes)
        pairs = tuple(pair for pair in pairs if all(run.size in sizes for run in pair))
    if runs or pairs:
        check_writable("profile", path)
    with phases.phase("compile stages") as report:
        timer.prepare([*((run,) for run in runs), *pairs], report)
    return PreparedTable(
        analysis=analysis,
        start=start,
        runs=runs,
        pairs=pairs,
        timer=timer,
        pair_timer=timer.pair,
        path=path,
        warning=warning,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedTable:
    """A table whose missing rows are compiled: nothing compiles beside a measurement.

    Attributes:
      analysis: The model.
      start: The known rows.
      runs: Stages to measure alone.
      pairs: Stages to measure side by side.
      timer: Times a stage, which is compiled.
      pair_timer: Times two.
      path: File that is completed after every row; None to keep the table in memory.
      warning: See `Measurements`.
    """

    analysis: Analysis
    start: Profile
    runs: tuple[Run, ...]
    pairs: tuple[tuple[Run, Run], ...]
    timer: Timer
    pair_timer: PairTimer
    path: Path | None
    warning: str

    def measure(self, phases: Phases) -> Measurements:
        """Measures what is missing; the device should run nothing else."""
        path, start, analysis = self.path, self.start, self.analysis
        save = None if path is None else lambda table: table.save_into(path)
        with phases.phase("profile") as report:
            table = fill(start, self.runs, self.timer, progress=report, on_row=save)
        with phases.phase("profile pairs") as report:
            table = fill_corun(table, self.pairs, self.pair_timer, progress=report, on_row=save)
        size, device = analysis.batch.batch_size, analysis.device
        return Measurements(
            profile=table,
            summary=analysis.summary,
            relabelled=relabelled(analysis.summary, table, size, device),
            rows_measured=len(table.rows) + len(table.corun) - len(start.rows) - len(start.corun),
            warning=self.warning,
        )


def _takers(analysis: Analysis) -> set[str]:
    """Fingerprints of the stages with kernels that take an SM budget."""
    stages = zip(analysis.program_at(PROBE_SIZE).stages, analysis.summary.block, strict=True)
    return {
        info.fingerprint
        for stage, info in stages
        if any(o.primitive == KERNEL and can_relaunch(o.params) for o in stage.operations)
    }


def _read(analysis: Analysis, path: Path | None) -> Profile | None:
    """The table in a file that may not exist yet; without a file, what ships of these stages."""
    if path is not None:
        return Profile.load(path) if path.exists() else None
    shipped = [Profile.load(each) for each in find_profiles(analysis.device.slug)]
    parts = [part for each in shipped if (part := each.only(analysis.summary)).rows]
    return reduce(Profile.merge, parts) if parts else None


def _check(analysis: Analysis, known: Profile, path: Path | None) -> str:
    kind = known.provenance.device_kind
    if kind != analysis.device.kind:
        raise DeviceError(
            f"optimize(profile=...): the table is of {kind!r}; this device is "
            f"{analysis.device.kind!r}; seconds of another device say nothing here; name another "
            "file, which is written then"
        )
    if path is not None and known.clock == "burst":
        raise InputError(
            f"optimize(profile={str(path)!r}): its seconds are of bursts; those of a long run are "
            "measured now, and the two do not mix; name another file, which is written then, or "
            "delete this one"
        )
    warning = usable_rows(known, kind, jax.__version__).warning
    if warning:
        warn(warning)
    return warning or ""


def relabelled(
    summary: ProgramSummary, profile: Profile, batch_size: int, device: Device
) -> ProgramSummary:
    """The program with every stage in the class that its measured time is nearest to.

    Args:
      summary: Stages labelled by their predicted time.
      profile: Their measured rows.
      batch_size: The rows at which the measured time is compared with the bounds.
      device: The device whose peak rates give the bounds.
    """

    def measured(stage: StageInfo | None) -> StageInfo | None:
        if stage is None:
            return None
        seconds = profile.seconds(stage, batch_size)
        return replace(stage, resource=_measured_class(stage, seconds, batch_size, device))

    return replace(
        summary,
        prologue=measured(summary.prologue),
        block=tuple(stage for stage in map(measured, summary.block) if stage is not None),
        epilogue=measured(summary.epilogue),
    )


def _measured_class(
    stage: StageInfo, seconds: float, batch_size: int, device: Device
) -> ResourceClass:
    """The class whose bound a stage's measured time is nearest to, as a ratio.

    The bounds are those of the stage as one: its contractions at the peak rate of its dtype, its
    other arithmetic at the vector rate, and the bytes it reads and writes at the peak bandwidth.

    Args:
      stage: The stage.
      seconds: Its measured seconds.
      batch_size: At this many rows.
      device: The device that it was measured on.
    """
    other = stage.flops_per_row - stage.contraction_flops_per_row
    moved = batch_size * stage.bytes_per_row + stage.weight_bytes
    rate = device.contraction_flops_per_s(stage.dtype)
    bounds = {
        ResourceClass.TENSOR: batch_size * stage.contraction_flops_per_row / rate,
        ResourceClass.CUDA: batch_size * other * FLOPS_PER_OPERATION / device.cuda_flops_per_s,
        ResourceClass.MEMORY: moved / device.memory_bytes_per_s,
    }
    positive = {resource: bound for resource, bound in bounds.items() if bound > 0}
    if not positive or seconds <= 0:
        return stage.resource
    return min(positive, key=lambda resource: abs(math.log(seconds / positive[resource])))
