"""A report as text: a section for each step, in the order of the pipeline. Computes nothing new."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

from pbjax.planning.program_summary import StageInfo
from pbjax.planning.search import Candidate
from pbjax.planning.timetable import PROLOGUE, Slot, Timetable
from pbjax.runtime.measured_programs import joined, milliseconds, programs_section, table
from pbjax.runtime.phases import Phase

if TYPE_CHECKING:
    from pbjax.tuning.report import Report, SplitTimetable


def report_text(report: "Report") -> str:
    """All sections that there is something to say in."""
    sections = (
        classes_section(report),
        str(report.state or ""),
        str(report.fusion),
        stages_section(report),
        profile_section(report),
        search_section(report),
        timetable_section(report),
        programs_section(report.programs, report.batch_size),
        phases_section(report.phases),
        decision_section(report),
    )
    return "\n\n".join(section for section in sections if section)


def classes_section(report: "Report") -> str:
    """Operations by resource class with their shares."""
    totals = [sum(getattr(share, key) for share in report.classes) for key in _SHARED]
    rows = []
    for share in report.classes:
        values = [getattr(share, key) for key in _SHARED]
        shares = [
            f"{value / total:.1%}" if total else "-"
            for value, total in zip(values, totals, strict=True)
        ]
        rows.append((share.resource, share.operations, *shares))
    text = table(
        f"{report.model}, batch {report.batch_size}, on {report.device_kind}",
        ("class", "operations", "FLOPs", "bytes", "predicted time"),
        rows,
    )
    total = f"all: {totals[0] / 1e9:,.1f} GFLOP, {totals[1] / 1e9:,.2f} GB unfused"
    if report.unknown:
        total += f"; cost unknown, counted by bytes: {', '.join(report.unknown)}"
    return f"{text}\n{total}"


def stages_section(report: "Report") -> str:
    """Prologue, block and epilogue with their stages."""
    block = report.summary.block
    measured = report.measured_summary or report.summary
    chains = [(o.prologue, *o.block, o.epilogue) for o in (report.summary, measured)]
    letters = ["-", *(_letter(i) for i in range(len(block))), "-"]
    rows = [
        _stage_row(letter, stage, other)
        for letter, stage, other in zip(letters, *chains, strict=True)
        if stage is not None and other is not None
    ]
    how = "one scan" if report.scanned else "equal runs of operations"
    repeated = f"{report.summary.num_blocks} x a block of {report.operations_per_block} operations"
    title = f"stages: {repeated} in {len(block)} stages ({how})"
    if report.summary.num_blocks == 1:
        title = f"stages: nothing repeats; one block of {report.operations_per_block} operations"
    return table(title, ("", "stage", "class", "input", "MFLOP/row", "kB/row", "weights MB"), rows)


def profile_section(report: "Report") -> str:
    """Seconds of each different stage by batch size."""
    if report.profile is None:
        return ""
    curves = [(stage, report.profile.curve(stage)) for stage in report.summary.stages]
    sizes = sorted({size for _, curve in curves for size in curve.sizes})
    rows = [
        (stage.name, *(milliseconds(curve.at(s)) if s in curve.sizes else "-" for s in sizes))
        for stage, curve in curves
    ]
    title = (
        f"profile: ms by batch size; {report.rows_measured} rows measured now; unique stages "
        f"{len(curves)} of {report.summary.num_stages_total}"
    )
    return table(title, ("stage", *map(str, sizes)), rows)


def search_section(report: "Report") -> str:
    """The candidates that the search tried and chose."""
    result = report.search
    if result is None:
        return ""
    rows = [("best", result.best), ("runner-up", result.runner_up)]
    rows += [(f"best of {n}", candidate) for n, candidate in sorted(result.by_count.items())]
    title = (
        f"search: {result.evaluations:,} evaluations in {result.seconds:.3f} s ({result.policy})"
    )
    if result.dropped:
        title += f"; {result.dropped:,} dropped for memory"
    columns = ("", "split", "staggers", "ms", "items/s", "balance", "bubbles")
    legend = (
        "balance: shortest over longest sub-batch; bubbles: share of the time in which the busiest "
        "class\nidles; all predicted from the profile"
    )
    return f"{table(title, columns, [_candidate_row(n, c) for n, c in rows if c])}\n{legend}"


def timetable_section(report: "Report") -> str:
    """Which stage of which sub-batch runs in which slot, as text."""
    if not report.timetables:
        return ""
    letters = ", ".join(f"{_letter(i)} {s.name}" for i, s in enumerate(report.summary.block))
    legend = f"timetable: < prologue, {letters}, > epilogue; ' = of the next block"
    return "\n".join([legend, *(line for t in report.timetables for line in _timeline(t, report))])


def _timeline(split: "SplitTimetable", report: "Report") -> list[str]:
    timetable = split.timetable
    parts = [
        ("fill", timetable.fill),
        (f"{timetable.num_blocks - 1} x", timetable.steady),
        ("drain", timetable.drain),
    ]
    if timetable.num_blocks == 1:
        del parts[1]
    lines = []
    for j, stagger in enumerate(timetable.staggers):
        cells = [" ".join(_cell(slot, j, timetable) for slot in slots) for _, slots in parts]
        rows = "1 row" if split.sizes[j] == 1 else f"{split.sizes[j]} rows"
        lines.append((f"{rows}, {stagger} ahead", " | ".join(cells)))
    title = f"{joined(split.sizes)}{_standing(split, report)}"
    width = max(len(title), *(len(label) for label, _ in lines))
    heads = [name.center(3 * len(slots) - 1) for name, slots in parts]
    return [
        f"{title:{width}}  {' | '.join(heads)}".rstrip(),
        *(f"{label:{width}}  {cells}".rstrip() for label, cells in lines),
    ]


def _standing(split: "SplitTimetable", report: "Report") -> str:
    """Why a timetable is shown."""
    plan, timetable = report.plan, split.timetable
    if (split.sizes, timetable.staggers) != (plan.sizes, plan.staggers):
        return ", measured too"
    return ", runs" if plan.decision == "split" else ", fastest split, not kept"


def phases_section(phases: Sequence[Phase]) -> str:
    """Seconds of the phases of `optimize`."""
    total = sum(phase.seconds for phase in phases)
    parts = ", ".join(f"{phase.name} {phase.seconds:.1f}" for phase in phases)
    return f"phases: {total:.1f} s: {parts}"


def decision_section(report: "Report") -> str:
    """Which program runs, and why."""
    plan = report.plan
    lines = [f"warning: {warning}" for warning in report.warnings]
    # A plan that was given brings figures of its own day; nothing was timed now.
    given = not report.programs and any(asdict(plan.measured).values())
    origin = f", by a plan of {plan.date}, not measured again" if given else ""
    if plan.max_difference is not None:
        difference = f"{plan.max_difference:.2e}{origin}"
        lines.append(f"largest difference from the outputs of the model as given: {difference}")
    lines.append(f"decision: {plan.decision}{origin}: {plan.reason}")
    return "\n".join(lines)


_SHARED = ("flops", "bytes", "seconds")


def _stage_row(letter: str, stage: StageInfo, measured: StageInfo) -> tuple[object, ...]:
    moved = "" if measured.resource == stage.resource else f" -> {measured.resource}"
    return (
        letter,
        stage.name,
        f"{stage.resource}{moved}",
        f"{stage.dtype}{list(stage.shape)}",
        f"{stage.flops_per_row / 1e6:,.2f}",
        f"{stage.bytes_per_row / 1e3:,.1f}",
        f"{stage.weight_bytes / 1e6:,.2f}",
    )


def _candidate_row(name: str, candidate: Candidate) -> tuple[object, ...]:
    prediction = candidate.prediction
    return (
        name,
        joined(candidate.split.sizes),
        ", ".join(map(str, candidate.staggers)),
        milliseconds(prediction.makespan_s),
        f"{prediction.items_per_s:,.1f}",
        f"{prediction.balance:.2f}",
        f"{prediction.bubble_fraction:.0%}",
    )


def _letter(index: int) -> str:
    return chr(ord("A") + index) if index < 26 else str(index)


def _cell(slot: Slot, sub_batch: int, timetable: Timetable) -> str:
    for task in slot:
        if task.sub_batch == sub_batch:
            if task.stage == PROLOGUE:
                return "< "
            if task.stage == timetable.num_stages:
                return "> "
            ahead = slot in timetable.steady and task.block == 1
            return _letter(task.stage) + ("'" if ahead else " ")
    return ". "
