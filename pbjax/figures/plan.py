"""The files of a plan: figures of its search and timetable, a trace, one page. Computes nothing.

Colours and hatches of classes are those of the roofline's figures.
"""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from pbjax.device import ResourceClass
from pbjax.errors import InputError
from pbjax.figures.html import Section, csv_text, page, write_each
from pbjax.figures.roofline import BLUE, CLASS_STYLES, VERMILLION, empty_figure, svg
from pbjax.figures.timelines import (
    MEASURED,
    PREDICTED,
    Slice,
    measured_slices,
    predicted_slices,
    save_trace,
)
from pbjax.files import write_atomically
from pbjax.planning.plan import Plan
from pbjax.planning.profile_table import Profile
from pbjax.planning.program_summary import ProgramSummary
from pbjax.planning.search import SearchResult
from pbjax.runtime.device_trace import Kernel

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Makespans that differ by no more than this share get one colour.
LEAST_RANGE = 1e-3
_DETAILS = ("class", "block", "slot", "sm_budget")


@runtime_checkable
class PlanReport(Protocol):
    """The plain data of a report of `optimize` that is drawn here: it needs no jax."""

    @property
    def model(self) -> str:
        """Name of the model."""
        ...

    @property
    def device_kind(self) -> str:
        """Kind of the device."""
        ...

    @property
    def batch_size(self) -> int:
        """Rows of the batch."""
        ...

    @property
    def summary(self) -> ProgramSummary:
        """The program."""
        ...

    @property
    def measured_summary(self) -> ProgramSummary | None:
        """The program with the classes of its measured times; None without a table."""
        ...

    @property
    def profile(self) -> Profile | None:
        """The measured table; None if nothing was searched."""
        ...

    @property
    def search(self) -> SearchResult | None:
        """The search; None if the split was given."""
        ...

    @property
    def plan(self) -> Plan:
        """The decision."""
        ...

    def to_dict(self) -> dict[str, object]:
        """The report as JSON-compatible data."""
        ...


def plan_slices(report: PlanReport) -> tuple[Slice, ...]:
    """The timetable of a report's plan, in predicted seconds.

    Raises:
      InputError: There is no measured table to predict from: the plan was loaded.
    """
    if report.profile is None:
        raise InputError(
            f"timetable of {report.model}: the plan was not searched here, so there is no table of "
            "seconds; a plan from a search is allowed; leave out --plan"
        )
    plan, summary = report.plan, report.measured_summary or report.summary
    staggers = tuple(plan.staggers) or (0,) * len(plan.sizes)
    return predicted_slices(summary, report.profile, plan.sizes, staggers, plan.sm_budgets)


def write_trace(report: PlanReport, kernels: Sequence[Kernel], path: Path) -> None:
    """Writes the plan's timetable, and the kernels of a measured call, as one Chrome trace.

    Raises:
      FileError: The file cannot be written.
      InputError: There is no measured table.
    """
    timelines = {PREDICTED: plan_slices(report)}
    if kernels:
        timelines[MEASURED] = measured_slices(kernels)
    save_trace(path, timelines)


def write_plan_figures(report: PlanReport, folder: Path) -> list[Path]:
    """Writes each figure of a report as SVG and PNG with its CSV beside it, and the report as JSON.

    Returns:
      The paths of the written files.

    Raises:
      FileError: A file cannot be written.
      InputError: matplotlib is missing, or there is no measured table.
    """
    return write_each(_figures(report), folder, report.to_dict())


def write_plan_page(report: PlanReport, path: Path) -> None:
    """Writes a report as one self-contained HTML page with its figures and data.

    Raises:
      FileError: The page cannot be written.
      InputError: matplotlib is missing, or there is no measured table.
    """
    sections = [
        Section(title=title, svg=svg(figure, name), caption=caption, csv=data, name=name)
        for name, title, figure, caption, data in _figures(report)
    ]
    sections.append(Section(title="Report", text=str(report)))
    title = f"{report.model} on {report.device_kind}: batch of {report.batch_size:,}"
    write_atomically(path, page(title, sections, report.to_dict()))


def search_figure(result: SearchResult, batch_size: int) -> "Figure":
    """The sizes that a search visited, in the triangle of all splits.

    Args:
      result: Result of a search by sliding windows.
      batch_size: Rows of the whole batch.
    """
    figure = empty_figure(8.2, 5.6)
    axes = figure.add_axes((0.1, 0.11, 0.62, 0.78))
    corners = [(0, 0), (batch_size, 0), (0, batch_size), (0, 0)]
    axes.plot(*zip(*corners, strict=True), color="black", linewidth=0.8)
    visits = [(_place(visit.split.sizes), 1e3 * visit.makespan_s) for visit in result.trajectory]
    if visits:
        places, seconds = zip(*visits, strict=True)
        for first, last in _slides(result):
            path = places[first:last]
            axes.plot(*zip(*path, strict=True), color="#999999", linewidth=0.8, zorder=1)
        low, high = min(seconds), sorted(seconds)[math.ceil(0.9 * (len(seconds) - 1))]
        drawn = axes.scatter(
            *zip(*places, strict=True),
            c=seconds,
            cmap="cividis",
            vmin=low,
            vmax=max(high, low * (1 + LEAST_RANGE)),
            s=26,
            zorder=2,
            label=f"visited: {len(set(places)):,} splits",
        )
        if high > low * (1 + LEAST_RANGE):  # else there is no colour to explain
            place = figure.add_axes((0.76, 0.11, 0.025, 0.45))
            bar = figure.colorbar(drawn, cax=place, extend="max")
            bar.set_label("predicted makespan (ms)")
        axes.plot(*places[0], "s", color=BLUE, markersize=9, fillstyle="none", label="start")
    best = result.best
    axes.plot(
        *_place(best.split.sizes),
        marker="*",
        markersize=16,
        color=VERMILLION,
        markeredgecolor="black",
        linestyle="",
        zorder=3,
        label=f"best: {' + '.join(map(str, best.split.sizes))}\n"
        f"{1e3 * best.prediction.makespan_s:.3g} ms",
    )
    margin = 0.04 * batch_size
    axes.set(xlim=(-margin, batch_size + margin), ylim=(-margin, batch_size + margin))
    axes.set_xlabel("rows of the first sub-batch")
    axes.set_ylabel("rows of the second sub-batch")
    axes.set_title(
        f"search over splits of {batch_size:,} rows; the third sub-batch has the rest",
        loc="left",
        fontsize=11,
    )
    axes.set_aspect("equal")
    axes.locator_params(integer=True)
    axes.grid(color="#dddddd", linewidth=0.6)
    axes.legend(loc="upper left", bbox_to_anchor=(1.02, 1.0), fontsize=8, frameon=False)
    return figure


def _slides(result: SearchResult) -> list[tuple[int, int]]:
    """Begin and end of each slide in the trajectory: a window never grows within one."""
    windows = [visit.window for visit in result.trajectory]
    begins = [0, *(i for i in range(1, len(windows)) if windows[i] > windows[i - 1])]
    return list(zip(begins, [*begins[1:], len(windows)], strict=True))


def _place(sizes: Sequence[int]) -> tuple[int, int]:
    return sizes[0], sizes[1] if len(sizes) > 1 else 0


def timetable_figure(slices: Sequence[Slice], title: str, blocks: int = 1) -> "Figure":
    """A timetable's beginning, a row for each sub-batch, stages by class, with SM budgets.

    Args:
      slices: Slices of the timetable.
      title: Title of the figure.
      blocks: How many blocks to show.
    """
    shown = [s for s in slices if s.details.get("block", 0) in range(blocks)]
    rows = sorted({s.row for s in shown})
    names = list(dict.fromkeys(s.name for s in shown))
    height = 1.9 + 0.75 * len(rows)
    figure = empty_figure(10.0, height)
    axes = figure.add_axes((0.17, 0.55 / height, 0.81, 1 - 1.55 / height))
    whole = max((s.end_s for s in shown), default=1.0)
    for s in shown:
        _draw_slice(axes, s, rows.index(s.row), names.index(s.name) + 1)
    axes.set_yticks(range(len(rows)), rows, fontsize=8)
    axes.set(xlim=(0, 1e3 * whole), ylim=(len(rows) - 0.45, -0.75), xlabel="predicted time (ms)")
    head = f"{title}: the first block" if len(shown) < len(slices) else title
    figure.text(0.17, 1 - 0.12 / height, head, fontsize=11, va="top")
    _legend(figure, names, 1 - 0.45 / height)
    return figure


def _draw_slice(axes: "Axes", s: Slice, place: int, number: int) -> None:
    """A bar with its stage's number above it and its SM budget in it."""
    from matplotlib import patheffects

    left, width = 1e3 * s.start_s, 1e3 * (s.end_s - s.start_s)
    colour, hatch = CLASS_STYLES[ResourceClass(str(s.details["class"]))]
    style = {"color": colour, "alpha": 0.55, "edgecolor": "black", "linewidth": 0.6}
    axes.barh(place, width, left=left, height=0.7, hatch=hatch, **style)
    axes.text(left + width / 2, place - 0.38, str(number), ha="center", va="bottom", fontsize=7)
    if "sm_budget" in s.details:
        axes.text(
            left + width / 2,
            place,
            f"{s.details['sm_budget']} SMs",
            rotation=90,
            ha="center",
            va="center",
            fontsize=7,
            path_effects=[patheffects.withStroke(linewidth=2, foreground="white")],
        )


def _legend(figure: "Figure", names: Sequence[str], top: float) -> None:
    """Classes by colour and hatch, stages by number."""
    from matplotlib.patches import Patch

    patches = [
        Patch(facecolor=colour, hatch=hatch, alpha=0.55, edgecolor="black", label=str(resource))
        for resource, (colour, hatch) in CLASS_STYLES.items()
    ]
    figure.legend(
        handles=patches, loc="upper right", ncols=3, fontsize=8, frameon=False, borderaxespad=0.6
    )
    stages = ",  ".join(f"{i} {name}" for i, name in enumerate(names, start=1))
    figure.text(0.17, top, stages, fontsize=8, va="top", color="#444444")


def _figures(report: PlanReport) -> "list[tuple[str, str, Figure, str, str]]":
    """Name, title, figure, caption and data of each."""
    slices, plan = plan_slices(report), report.plan
    sizes = " + ".join(map(str, plan.sizes))
    kept = "" if plan.decision == "split" or len(plan.sizes) == 1 else " (not kept)"
    found = [
        (
            "timetable",
            "Timetable",
            timetable_figure(slices, f"{report.model}, {sizes} rows{kept}, predicted"),
            "Stages of each sub-batch; stages above each other run at the same time.",
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
                "Positions of the windows, in order; the colour is the predicted makespan.",
                csv_text(
                    ("sizes", "makespan_s", "window"),
                    [("+".join(map(str, v.split.sizes)), v.makespan_s, v.window) for v in visits],
                ),
            )
        )
    return found
