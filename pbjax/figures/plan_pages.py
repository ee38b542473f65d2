"""Figures, traces and one page of what `optimize` found, written to files. Computes nothing."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from pbjax.errors import InputError
from pbjax.figures.html import Section, csv_text, page
from pbjax.figures.pages import write_each
from pbjax.figures.plan import search_figure, timetable_figure
from pbjax.figures.roofline import svg
from pbjax.figures.timelines import (
    MEASURED,
    PREDICTED,
    Slice,
    measured_slices,
    predicted_slices,
    save_trace,
)
from pbjax.files import write_atomically
from pbjax.runtime.device_trace import Kernel
from pbjax.tuning.report import Report

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def plan_slices(report: Report) -> tuple[Slice, ...]:
    """The timetable of a report's plan, in predicted seconds.

    Raises:
      InputError: Nothing was measured to predict from: the plan was loaded.
    """
    if report.profile is None:
        raise InputError(
            f"timetable of {report.model}: the plan was not searched here, so there is no table of "
            "seconds; a plan from a search is allowed; leave out --plan"
        )
    plan, summary = report.plan, report.measured_summary or report.summary
    staggers = tuple(plan.staggers) or (0,) * len(plan.sizes)
    return predicted_slices(summary, report.profile, plan.sizes, staggers, plan.sm_budgets)


def write_trace(report: Report, kernels: Sequence[Kernel], path: Path) -> None:
    """Writes the plan's timetable, and the kernels of a measured call, as one Chrome trace.

    Raises:
      FileError: The file cannot be written.
      InputError: As `plan_slices`.
    """
    timelines = {PREDICTED: plan_slices(report)}
    if kernels:
        timelines[MEASURED] = measured_slices(kernels)
    save_trace(path, timelines)


def write_plan_figures(report: Report, folder: Path) -> list[Path]:
    """Writes each figure of a report as SVG and PNG with its CSV beside it, and the report as JSON.

    Returns:
      What was written.

    Raises:
      FileError: Something cannot be written.
      InputError: matplotlib is missing, or as `plan_slices`.
    """
    return write_each(_figures(report), folder, report.to_dict())


def write_plan_page(report: Report, path: Path) -> None:
    """Writes a report as one self-contained HTML page with its figures and data.

    Raises:
      FileError: It cannot be written.
      InputError: matplotlib is missing, or as `plan_slices`.
    """
    sections = [
        Section(title=title, svg=svg(figure, name), caption=caption, csv=data, name=name)
        for name, title, figure, caption, data in _figures(report)
    ]
    sections.append(Section(title="Report", text=str(report)))
    title = f"{report.model} on {report.device_kind}: batch of {report.batch_size:,}"
    write_atomically(path, page(title, sections, report.to_dict()))


def _figures(report: Report) -> "list[tuple[str, str, Figure, str, str]]":
    """Name, title, figure, caption and data of each."""
    slices, plan = plan_slices(report), report.plan
    sizes = " + ".join(map(str, plan.sizes))
    kept = "" if plan.decision == "split" or len(plan.sizes) == 1 else " (not kept)"
    found = [
        (
            "timetable",
            "Timetable",
            timetable_figure(slices, f"{report.model}, {sizes} rows{kept}, predicted"),
            "Stages of each sub-batch; what stands above each other runs side by side.",
            csv_text(
                ("row", "stage", "start_s", "end_s", "class", "block", "slot", "sm_budget"),
                [
                    (s.row, s.name, s.start_s, s.end_s, *(s.details.get(k, "") for k in _DETAILS))
                    for s in slices
                ],
            ),
        )
    ]
    if report.search is not None and report.search.trajectory:
        visits = report.search.trajectory
        found.append(
            (
                "search",
                "Search",
                search_figure(report.search, report.batch_size),
                "Where the windows stood, in order; the colour is the predicted makespan.",
                csv_text(
                    ("sizes", "makespan_s", "window"),
                    [("+".join(map(str, v.split.sizes)), v.makespan_s, v.window) for v in visits],
                ),
            )
        )
    return found


_DETAILS = ("class", "block", "slot", "sm_budget")
