"""Figures of rooflines and batching studies, with matplotlib. Computes nothing new.

Colours are those of Okabe and Ito, which colour-blind readers tell apart; what a colour says, a
marker or a dash says too. Names stand in a legend beside the plot, so that none covers another.
"""

import io
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from pbjax.device import ResourceClass
from pbjax.errors import InputError
from pbjax.roofline_batching import Choice, PhaseStudy, SizePoint
from pbjax.roofline_points import Roofline, Total

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

BLUE, VERMILLION, GREEN, ORANGE, SKY, PURPLE = (
    *("#0072B2", "#D55E00", "#009E73", "#E69F00", "#56B4E9", "#CC79A7"),
)
_PHASES = {
    "prefill": (BLUE, "o", "-"),
    "decode": (VERMILLION, "s", "--"),
    "forward": (BLUE, "o", "-"),
}
CLASS_STYLES = {
    ResourceClass.TENSOR: (BLUE, ""),
    ResourceClass.CUDA: (ORANGE, "///"),
    ResourceClass.MEMORY: (VERMILLION, "..."),
}
_COLOURS = (BLUE, VERMILLION, GREEN, ORANGE, SKY, PURPLE, "#000000")
_MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
# Stages below this share of the time are left out of the plots, not of the tables.
MIN_SHARE = 0.005


def roofline_figure(reports: Sequence[Roofline]) -> "Figure":
    """Every stage of the reports as a point under the roofs of their device.

    Args:
      reports: Of one model on one device, such as prefill and decode.
    """
    figure = empty_figure(9.6, 5.2)
    axes = figure.add_axes((0.08, 0.11, 0.57, 0.79))
    device, dtype = reports[0].device, reports[0].dtype
    peak, bandwidth = device.contraction_flops_per_s(dtype), device.memory_bytes_per_s
    shown = [(r, s) for r in reports for s in _shown(r)]
    low = min(0.5, *(s.intensity for _, s in shown)) / 1.5
    high = max(4 * peak / bandwidth, *(s.intensity for _, s in shown)) * 1.5
    _draw_roofs(axes, reports[0], (low, high))
    for report in reports:
        _draw_groups(axes, report, (low, high))
    _draw_stages(axes, shown)
    floor = low * bandwidth / 1e12
    axes.set(xscale="log", yscale="log", xlim=(low, high), ylim=(floor, 2 * peak / 1e12))
    _plain(axes.xaxis, high / low)
    _plain(axes.yaxis, peak / 1e12 / floor)
    axes.set_xlabel("arithmetic intensity (FLOP/byte)")
    axes.set_ylabel("attainable rate (TFLOP/s)")
    axes.set_title(f"{reports[0].model} on {device.kind}, predicted", loc="left", fontsize=11)
    axes.grid(which="major", color="#dddddd", linewidth=0.6)
    axes.legend(
        loc="upper left", bbox_to_anchor=(1.02, 1.0), fontsize=8, frameon=False, labelspacing=0.8
    )
    return figure


def _draw_roofs(axes: "Axes", report: Roofline, span: tuple[float, float]) -> None:
    """The two peaks over the bandwidth, and the ridge point, from one intensity to another."""
    (low, high), device, dtype = span, report.device, report.dtype
    peak, bandwidth = device.contraction_flops_per_s(dtype), device.memory_bytes_per_s
    for rate, dash, name in (
        (peak, "-", f"{dtype}, tensor cores: {peak / 1e12:,.4g} TFLOP/s"),
        (device.cuda_flops_per_s, ":", f"other: {device.cuda_flops_per_s / 1e12:,.4g} TFLOP/s"),
    ):
        ridge = rate / bandwidth
        line = [low, ridge, high], [low * bandwidth / 1e12, rate / 1e12, rate / 1e12]
        axes.plot(*line, color="black", linestyle=dash, linewidth=1.3, label=name)
    axes.axvline(peak / bandwidth, color="grey", linewidth=0.8, linestyle="-.")
    axes.annotate(
        f"ridge {peak / bandwidth:.0f} FLOP/byte",
        (peak / bandwidth, 0.02),
        xycoords=("data", "axes fraction"),
        xytext=(-4, 0),
        textcoords="offset points",
        rotation=90,
        ha="right",
        va="bottom",
        color="grey",
        fontsize=8,
    )


def _draw_groups(axes: "Axes", report: Roofline, span: tuple[float, float]) -> None:
    low, high = span
    groups = [Total(name=p.name, points=(p,)) for p in report.points]
    groups = [g for g in groups if low <= g.intensity <= high]
    axes.plot(
        [group.intensity for group in groups],
        [group.attainable_flops_per_s / 1e12 for group in groups],
        marker="x" if report.phase == "decode" else "+",
        markersize=5,
        color="#777777",
        linestyle="",
        label=f"{report.phase}: groups of operations",
    )


def _draw_stages(axes: "Axes", shown: Sequence[tuple[Roofline, Total]]) -> None:
    names = list(dict.fromkeys(stage.name for _, stage in shown))
    for report, stage in shown:
        place = names.index(stage.name)
        decode = report.phase == "decode"
        colour = _COLOURS[place % len(_COLOURS)]
        axes.plot(
            stage.intensity,
            stage.attainable_flops_per_s / 1e12,
            marker=_MARKERS[place % len(_MARKERS)],
            markersize=max(5.0, 12 - 1.3 * place),  # so that equal stages are both seen
            markerfacecolor="white" if decode else colour,
            markeredgecolor=colour,
            markeredgewidth=2,
            linestyle="",
            label=f"{report.phase}: {stage.name}, {stage.seconds * 1e3:,.3g} ms "
            f"({stage.seconds / report.total.seconds:.0%})",
        )


def shares_figure(reports: Sequence[Roofline]) -> "Figure":
    """Where the time goes: each stage by class, one bar a phase.

    Args:
      reports: Of one model on one device.
    """
    figure = empty_figure(9.6, 1.5 + 0.34 * sum(len(_shown(report)) for report in reports))
    axes = figure.add_axes((0.24, 0.24, 0.7, 0.62))
    rows = [(report, stage) for report in reports for stage in _shown(report)]
    for place, (report, stage) in enumerate(rows):
        left = 0.0
        for resource, (colour, hatch) in CLASS_STYLES.items():
            spent = sum((p.seconds for p in stage.points if p.resource == resource), 0.0)
            width = 100 * spent / report.total.seconds
            first = place == 0
            axes.barh(
                place,
                width,
                left=left,
                color=colour,
                hatch=hatch,
                edgecolor="white",
                linewidth=0.5,
                label=str(resource) if first else None,
            )
            left += width
        axes.text(left + 1, place, f"{stage.seconds * 1e3:,.3g} ms", va="center", fontsize=8)
    axes.set_yticks(range(len(rows)), [f"{r.phase}: {s.name}" for r, s in rows], fontsize=8)
    axes.invert_yaxis()
    axes.set(xlim=(0, 112), xlabel="share of the phase's time (%)")
    axes.set_title(
        f"{reports[0].model} on {reports[0].device.kind}, predicted", loc="left", fontsize=11
    )
    axes.legend(loc="lower right", fontsize=8, title="bound by", title_fontsize=8)
    return figure


def study_figure(studies: Sequence[PhaseStudy], report: Roofline) -> "Figure":
    """Throughput, latency and the rates of dense layers and attention, over batch and length.

    Args:
      studies: Of the phases of one model.
      report: Any report of it, for its name and device.
    """
    figure = empty_figure(10.4, 9.6)
    panels = figure.subplots(3, 2)
    figure.subplots_adjust(left=0.11, right=0.97, top=0.93, bottom=0.12, hspace=0.2, wspace=0.3)
    for column, (over, sizes) in enumerate((("batch_size", "by_batch"), ("seq_len", "by_seq"))):
        for study in studies:
            _draw_curves(panels[:, column], study, over, getattr(study, sizes))
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
        f"{report.model} on {report.device.kind}, predicted; dash-dotted: critical batch",
        x=0.11,
        ha="left",
        fontsize=11,
    )
    return figure


def _draw_curves(
    panels: "Sequence[Axes]", study: PhaseStudy, over: str, points: Sequence[SizePoint]
) -> None:
    """Throughput, seconds and rates of one phase, one below the other."""
    colour, marker, dash = _PHASES[study.phase]
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


def _dress_curves(panels: "Sequence[Axes]") -> None:
    """Scales, units and legends of what `_draw_curves` drew."""
    from matplotlib.ticker import LogLocator

    labels = ("throughput (tokens/s)", "a call takes (ms)", "attainable rate (TFLOP/s)")
    for axes, label in zip(panels, labels, strict=True):
        axes.set(yscale="log", ylabel=label)
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_locator(LogLocator(base=2, numticks=8))
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
        axes.tick_params(axis="x", labelsize=8)
        low, high = axes.get_ylim()
        _plain(axes.yaxis, high / low)
        axes.grid(which="major", color="#dddddd", linewidth=0.6)
        axes.legend(fontsize=8, loc="best")
    # Of four curves some would be under it.
    panels[-1].legend(fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.2), ncols=2)


def front_figure(choices: Sequence[Choice], report: Roofline) -> "Figure":
    """Latency against throughput: the batches that no other beats, and the chosen one.

    Args:
      choices: Of the phases of one model.
      report: Any report of it.
    """
    figure = empty_figure(5.2 * len(choices), 4.4)
    panels = figure.subplots(1, len(choices), squeeze=False)[0]
    figure.subplots_adjust(left=0.23 / len(choices), right=0.97, top=0.83, bottom=0.14, wspace=0.32)
    for axes, choice in zip(panels, choices, strict=True):
        colour, marker, dash = _PHASES[choice.chosen.phase]
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
        limits = {"xlim": (x[0] / 1.4, 2.2 * x[-1]), "ylim": (min(y) / 2, 2 * max(y))}
        for point in _named(choice, limits):
            axes.annotate(
                f"{point.batch_size:,}",
                (1e3 * point.seconds, point.tokens_per_s),
                xytext=(7, -11),
                textcoords="offset points",
                fontsize=8,
            )
        axes.set(xscale="log", yscale="log", **limits)
        axes.set(xlabel="a call takes (ms)", ylabel="throughput (tokens/s)")
        _plain(axes.xaxis, x[-1] / x[0])
        _plain(axes.yaxis, 4 * max(y) / min(y))
        axes.set_title(chosen.phase, fontsize=10, loc="left")
        axes.grid(which="major", color="#dddddd", linewidth=0.6)
        axes.legend(fontsize=8, loc="lower right")
    figure.suptitle(
        f"{report.model} on {report.device.kind}, predicted: the Pareto front, by batch",
        x=0.23 / len(choices),
        ha="left",
        fontsize=11,
    )
    return figure


def _named(choice: Choice, limits: Mapping[str, tuple[float, float]]) -> list[SizePoint]:
    """The batches whose names have room: the chosen one, then the largest."""

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


def png(figure: "Figure") -> bytes:
    """A figure as the bytes of a PNG file."""
    data = io.BytesIO()
    figure.savefig(data, format="png", dpi=150)
    return data.getvalue()


def svg(figure: "Figure", name: str) -> str:
    """A figure as the text of an SVG document, the same for the same figure.

    Args:
      figure: Any figure.
      name: Makes its identifiers differ from those of other figures of a page.
    """
    import matplotlib

    text = io.StringIO()
    with matplotlib.rc_context({"svg.hashsalt": name}):
        figure.savefig(text, format="svg", metadata={"Date": None})
    return text.getvalue()


def _shown(report: Roofline) -> list[Total]:
    whole = report.total.seconds
    return [s for s in report.stages if s.seconds >= MIN_SHARE * whole and s.intensity > 0]


def _plain(axis: Any, ratio: float) -> None:
    """Has a logarithmic axis that spans this ratio write its numbers out."""
    from matplotlib.ticker import LogLocator, NullFormatter

    subs = (1.0,) if ratio > 300 else (1.0, 2.0, 5.0)
    axis.set_major_locator(LogLocator(base=10, subs=subs, numticks=20))
    axis.set_major_formatter(lambda value, _: f"{value:,.4g}" if value < 1000 else f"{value:,.0f}")
    axis.set_minor_formatter(NullFormatter())


def empty_figure(width: float, height: float) -> "Figure":
    """A white figure of this many inches.

    Raises:
      InputError: matplotlib is missing.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise InputError(
            "figures: matplotlib is not installed; it is an optional dependency; install it by "
            "pip install 'pbjax[figures]'"
        ) from error
    return Figure(figsize=(width, height), facecolor="white")
