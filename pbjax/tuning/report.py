"""What `optimize` found out, as plain data. Its text is made in `report_text`."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass

from pbjax.fusion import FusionReport
from pbjax.graph.classify import ClassShare, class_shares
from pbjax.planning.plan import Plan
from pbjax.planning.profiling import Profile
from pbjax.planning.program_summary import ProgramSummary
from pbjax.planning.search import SearchResult
from pbjax.planning.timetable import Timetable, timetable
from pbjax.program.analysis import Analysis
from pbjax.runtime.measured_programs import MeasuredProgram
from pbjax.runtime.phases import Phase
from pbjax.tuning.autotune import Tuned
from pbjax.tuning.report_text import report_text
from pbjax.tuning.shortlist import Shortlist


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitTimetable:
    """A split with its timetable."""

    sizes: tuple[int, ...]
    timetable: Timetable


@dataclass(frozen=True, slots=True, kw_only=True)
class StateReport:
    """The state of a step, and the kernels that can overlap in it.

    Attributes:
      state_bytes: Bytes of the state.
      compute_kernels: Operations of a sub-batch that can share a launch with a memory kernel.
      memory_kernels: Operations of a sub-batch that can run beside a compute kernel.
      overlapped_fraction: Share of the memory kernels' seconds that runs beside compute kernels in
        the interleaved program; 0 if there is none.
    """

    state_bytes: int
    compute_kernels: int
    memory_kernels: int
    overlapped_fraction: float

    def __str__(self) -> str:
        """The state and what can overlap, in two lines."""
        return f"state: {self.state_bytes / 1e6:,.1f} MB\n{self._overlap()}"

    def _overlap(self) -> str:
        if self.compute_kernels and self.memory_kernels:
            return (
                f"{self.compute_kernels} compute kernels and {self.memory_kernels} memory kernels; "
                f"{self.overlapped_fraction:.0%} of the memory kernels' time is overlapped"
            )
        found = {"compute": self.compute_kernels, "memory": self.memory_kernels}
        lacking = " and no ".join(name for name, count in found.items() if not count)
        return (
            f"nothing can overlap: no {lacking} kernels; the matrix products and the decode "
            "attention of models.with_kernels on a Hopper GPU are such"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """Everything that `optimize` found out.

    Attributes:
      model: Name of the model.
      device_kind: Kind of the device.
      batch_size: Rows of the batch.
      classes: Operations by resource class.
      unknown: Primitives whose cost is not known; they count by their bytes.
      operations_per_block: Operations of one repetition.
      scanned: Whether the model was a scan already.
      summary: The stages.
      measured_summary: The stages in the classes that their measured time says; None without one.
      profile: The measured table; None if nothing was searched.
      rows_measured: How many rows of it were measured in this call.
      search: The search; None if the split was given.
      timetables: Timetables of the staggered programs, that of the plan first.
      programs: Programs that were compiled and timed.
      plan: The decision.
      phases: Seconds of the phases.
      warnings: Things that changed a result or a cost.
      fusion: The kernels that fusion put in place.
      state: The state of a step; None for a function without state.
    """

    model: str
    device_kind: str
    batch_size: int
    classes: tuple[ClassShare, ...]
    unknown: tuple[str, ...]
    operations_per_block: int
    scanned: bool
    summary: ProgramSummary
    measured_summary: ProgramSummary | None
    profile: Profile | None
    rows_measured: int
    search: SearchResult | None
    timetables: tuple[SplitTimetable, ...]
    programs: tuple[MeasuredProgram, ...]
    plan: Plan
    phases: tuple[Phase, ...]
    warnings: tuple[str, ...]
    fusion: FusionReport
    state: StateReport | None = None

    def to_dict(self) -> dict[str, object]:
        """The report as JSON-compatible data, without the search's trajectory."""
        return {
            "model": self.model,
            "device_kind": self.device_kind,
            "batch_size": self.batch_size,
            "classes": [asdict(share) for share in self.classes],
            "unknown_primitives": list(self.unknown),
            "stages": [asdict(stage) for stage in self.summary.stages],
            "measured_classes": {
                stage.name: stage.resource
                for stage in (self.measured_summary or self.summary).stages
            },
            "num_blocks": self.summary.num_blocks,
            "rows_measured": self.rows_measured,
            "search": _search_dict(self.search),
            "programs": [asdict(program) for program in self.programs],
            "plan": asdict(self.plan),
            "phases": {phase.name: phase.seconds for phase in self.phases},
            "warnings": list(self.warnings),
            "fusion": self.fusion.to_dict(),
            "state": asdict(self.state) if self.state else None,
        }

    def __str__(self) -> str:
        """All sections that there is something to say in."""
        return report_text(self)


def _search_dict(result: SearchResult | None) -> dict[str, object] | None:
    if result is None:
        return None
    return {
        "policy": result.policy,
        "evaluations": result.evaluations,
        "seconds": result.seconds,
        "digest": result.digest,
        "best": asdict(result.best),
        "runner_up": asdict(result.runner_up) if result.runner_up else None,
    }


def _timetables(
    analysis: Analysis, plan: Plan, programs: Sequence[MeasuredProgram]
) -> tuple[SplitTimetable, ...]:
    """The timetable of the plan's split, then those of other staggered programs."""
    staggered = [(p.sizes, p.staggers) for p in programs if any(p.staggers)]
    splits = dict.fromkeys([(plan.sizes, plan.staggers), *staggered])
    return tuple(
        SplitTimetable(sizes=sizes, timetable=timetable(analysis.summary, staggers))
        for sizes, staggers in splits
        if len(sizes) > 1
    )


def report_of(
    analysis: Analysis,
    shortlist: Shortlist,
    tuned: Tuned,
    phases: Sequence[Phase],
    state: StateReport | None = None,
) -> Report:
    """The report of a decision.

    Args:
      analysis: The function.
      shortlist: The programs that were worth building.
      tuned: The outcome of tuning.
      phases: Seconds of the phases.
      state: The state of a step.
    """
    measurements, plan = shortlist.measurements, tuned.plan
    operations = zip(analysis.graph.operations, analysis.labels, strict=True)
    return Report(
        model=analysis.model.name,
        device_kind=analysis.device.kind,
        batch_size=shortlist.batch_size,
        classes=class_shares(analysis.labels),
        unknown=tuple(sorted(o.primitive for o, label in operations if not label.cost.known)),
        operations_per_block=len(analysis.program.block.operations),
        scanned=analysis.scanned,
        summary=analysis.summary,
        profile=measurements.profile if measurements else None,
        measured_summary=measurements.relabelled if measurements else None,
        rows_measured=measurements.rows_measured if measurements else 0,
        search=shortlist.search,
        # The sub-batches of a step have no slots.
        timetables=() if state else _timetables(analysis, plan, tuned.programs),
        programs=tuned.programs,
        plan=plan,
        phases=tuple(phases),
        warnings=(*shortlist.warnings, *tuned.warnings),
        fusion=analysis.fusion,
        state=state,
    )
