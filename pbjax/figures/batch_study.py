"""Figures of batching studies, with matplotlib: curves over batch and length, the Pareto front.

Computes nothing new. Colours and markers of phases are those of the roofline's figures.
"""

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from pbjax.figures.roofline import PHASE_STYLES, empty_figure, plain_numbers
from pbjax.roofline.batch_study import PhaseStudy, SizeChoice, SizePoint
from pbjax.roofline.result import Roofline

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def study_figure(
    studies: Sequence[PhaseStudy], report: Roofline, measured: Sequence[SizePoint] = ()
) -> "Figure":
    """Throughput, latency and the rates of dense layers and attention, over batch and length.

    Args:
      studies: Studies of the phases of one model.
      report: Any report of the model, for its name and device.
      measured: Measured points; those at another length or batch are left out.
    """
    figure = empty_figure(10.4, 9.6)
    panels = figure.subplots(3, 2)
    bottom = 0.16 if measured else 0.12
    figure.subplots_adjust(left=0.11, right=0.97, top=0.93, bottom=bottom, hspace=0.2, wspace=0.3)
    for column, (over, sizes) in enumerate((("batch_size", "by_batch"), ("seq_len", "by_seq"))):
        for study in studies:
            points = getattr(study, sizes)
            _draw_curves(panels[:, column], study, over, points)
            fixed = "seq_len" if over == "batch_size" else "batch_size"
            at = getattr(points[0], fixed)
            own = [m for m in measured if m.phase == study.phase and getattr(m, fixed) == at]
            _draw_measured(panels[:, column], study.phase, over, own)
    first = studies[0]
    heads = (
        f"over the batch, {first.by_batch[0].seq_len:,} tokens a row",
        f"over the length, batch {first.by_seq[0].batch_size:,}",
    )
    for column, head in enumerate(heads):
        panels[0, column].set_title(head, fontsize=10, loc="left")
        panels[2, column].set_xlabel(("rows of the batch", "tokens of a row")[column])
        _dress_curves(panels[:, column])
    figure.suptitle(
        f"{report.model} on {report.device.kind}, predicted"
        f"{' (lines) and measured (black)' if measured else ''}; dash-dotted: critical batch",
        x=0.11,
        ha="left",
        fontsize=11,
    )
    return figure


def _draw_curves(
    panels: "Sequence[Axes]", study: PhaseStudy, over: str, points: Sequence[SizePoint]
) -> None:
    """Throughput, seconds and rates of one phase, one below the other."""
    colour, marker, dash = PHASE_STYLES[study.phase]
    style: dict[str, Any] = {"color": colour, "marker": marker, "linestyle": dash, "markersize": 5}
    hollow = style | {"markerfacecolor": "white", "alpha": 0.9, "linewidth": 1}
    x = [getattr(point, over) for point in points]
    seconds = [1e3 * point.seconds for point in points]
    dense = [point.dense_flops_per_s / 1e12 for point in points]
    attention = [point.attention_flops_per_s / 1e12 for point in points]
    panels[0].plot(x, [point.tokens_per_s for point in points], label=study.phase, **style)
    panels[1].plot(x, seconds, label=study.phase, **style)
    panels[2].plot(x, dense, label=f"dense, {study.phase}", **style)
    panels[2].plot(x, attention, label=f"attention, {study.phase}", **hollow)
    if over == "batch_size" and 1 <= study.critical_batch <= max(x):
        for axes in panels:
            axes.axvline(study.critical_batch, color=colour, linestyle="-.", linewidth=0.9)


def _draw_measured(
    panels: "Sequence[Axes]", phase: str, over: str, points: Sequence[SizePoint]
) -> None:
    """Measured points in black with the phase's marker, hollow for attention."""
    if not points:
        return
    ordered = sorted(points, key=lambda point: getattr(point, over))
    x = [getattr(point, over) for point in ordered]
    curves: list[tuple[int, str, list[float]]] = [
        (0, phase, [point.tokens_per_s for point in ordered]),
        (1, phase, [1e3 * point.seconds for point in ordered]),
        (2, f"dense, {phase}", [point.dense_flops_per_s / 1e12 for point in ordered]),
        (2, f"attention, {phase}", [point.attention_flops_per_s / 1e12 for point in ordered]),
    ]
    for panel, name, y in curves:
        panels[panel].plot(
            x,
            y,
            marker=PHASE_STYLES[phase][1],
            color="black",
            linestyle="",
            markersize=6,
            markerfacecolor="white" if name.startswith("attention") else "black",
            zorder=5,
            label=f"{name}, measured",
        )


def _dress_curves(panels: "Sequence[Axes]") -> None:
    """Scales, units and legends of the curves."""
    from matplotlib.ticker import LogLocator

    labels = ("throughput (tokens/s)", "a call takes (ms)", "attainable rate (TFLOP/s)")
    for axes, label in zip(panels, labels, strict=True):
        axes.set(yscale="log", ylabel=label)
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_locator(LogLocator(base=2, numticks=8))
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
        axes.tick_params(axis="x", labelsize=8)
        low, high = axes.get_ylim()
        plain_numbers(axes.yaxis, high / low)
        axes.grid(which="major", color="#dddddd", linewidth=0.6)
        axes.legend(fontsize=8, loc="best")
    # Below the axes: inside it would cover some of the four curves.
    panels[-1].legend(fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.2), ncols=2)


def front_figure(
    choices: Sequence[SizeChoice], report: Roofline, measured: Sequence[SizePoint] = ()
) -> "Figure":
    """Latency against throughput: the batches that no other beats, the chosen one, the limit.

    Args:
      choices: Choices for the phases of one model.
      report: Any report of the model.
      measured: Measured points; those at another length are left out.
    """
    figure = empty_figure(5.2 * len(choices), 4.4)
    panels = figure.subplots(1, len(choices), squeeze=False)[0]
    figure.subplots_adjust(left=0.23 / len(choices), right=0.97, top=0.83, bottom=0.14, wspace=0.32)
    for axes, choice in zip(panels, choices, strict=True):
        colour, marker, dash = PHASE_STYLES[choice.chosen.phase]
        x = [1e3 * point.seconds for point in choice.front]
        y = [point.tokens_per_s for point in choice.front]
        axes.plot(x, y, color=colour, marker=marker, linestyle=dash, markersize=5)
        chosen = choice.chosen
        axes.plot(
            1e3 * chosen.seconds,
            chosen.tokens_per_s,
            marker="o",
            markersize=13,
            markerfacecolor="none",
            markeredgecolor="black",
            linestyle="",
            label=f"chosen: batch {chosen.batch_size:,}",
        )
        key = chosen.phase, chosen.seq_len
        _draw_measured_front(axes, [m for m in measured if (m.phase, m.seq_len) == key])
        if choice.latency_s is not None:
            limit = 1e3 * choice.latency_s
            named = f"limit: {limit:,.4g} ms"
            axes.axvline(limit, color="black", linestyle=":", linewidth=1.2, label=named)
        ends = [x[0], x[-1]] + ([] if choice.latency_s is None else [1e3 * choice.latency_s])
        wide = max(ends) / min(ends)
        # Leaves room for the last label.
        limits = {
            "xlim": (min(ends) / 1.4, max(ends) * max(2.2, wide**0.22)),
            "ylim": (min(y) / 2, 2 * max(y)),
        }
        for point in _named(choice, limits):
            axes.annotate(
                f"{point.batch_size:,}",
                (1e3 * point.seconds, point.tokens_per_s),
                xytext=(7, -11),
                textcoords="offset points",
                fontsize=8,
                bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.6},
            )
        axes.set(xscale="log", yscale="log", **limits)
        axes.set(xlabel="a call takes (ms)", ylabel="throughput (tokens/s)")
        plain_numbers(axes.xaxis, wide)
        plain_numbers(axes.yaxis, 4 * max(y) / min(y))
        axes.set_title(chosen.phase, fontsize=10, loc="left")
        axes.grid(which="major", color="#dddddd", linewidth=0.6)
        axes.legend(fontsize=8, loc="lower right")
    found = "predicted (lines) and measured (black)" if measured else "predicted"
    figure.suptitle(
        f"{report.model} on {report.device.kind}, {found}:\nthe Pareto front, by batch",
        x=0.23 / len(choices),
        ha="left",
        fontsize=11,
    )
    return figure


def _draw_measured_front(axes: "Axes", points: Sequence[SizePoint]) -> None:
    if not points:
        return
    axes.plot(
        [1e3 * point.seconds for point in points],
        [point.tokens_per_s for point in points],
        marker=PHASE_STYLES[points[0].phase][1],
        color="black",
        linestyle="",
        markersize=4,
        zorder=5,
        label="measured",
    )


def _named(choice: SizeChoice, limits: Mapping[str, tuple[float, float]]) -> list[SizePoint]:
    """The batches whose labels have room: the chosen one, then the others from the largest."""

    def place(point: SizePoint) -> tuple[float, float]:
        spans = [math.log(high / low) for low, high in limits.values()]
        return math.log(1e3 * point.seconds) / spans[0], math.log(point.tokens_per_s) / spans[1]

    named: list[SizePoint] = []
    for point in (choice.chosen, *reversed(choice.front)):
        gaps = [
            (abs(a - b) for a, b in zip(place(point), place(other), strict=True)) for other in named
        ]
        if all(across > 0.09 or up > 0.05 for across, up in gaps):
            named.append(point)
    return named
