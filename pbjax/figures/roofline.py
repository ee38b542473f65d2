"""Figures of rooflines, with matplotlib. Computes nothing new.

The colours are those of Okabe and Ito, which colour-blind readers can distinguish; a marker or dash
repeats the meaning of each. Names stand in a legend beside the plot, so that none covers another.
"""

import io
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from pbjax.device import ResourceClass
from pbjax.errors import InputError
from pbjax.roofline.measured_table import stage_checks
from pbjax.roofline.points import Total
from pbjax.roofline.result import Roofline

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

BLUE, VERMILLION, GREEN, ORANGE, SKY, PURPLE = (
    *("#0072B2", "#D55E00", "#009E73", "#E69F00", "#56B4E9", "#CC79A7"),
)
PHASE_STYLES = {
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
      reports: Reports of one model on one device, such as prefill and decode.
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
    _draw_achieved(axes, reports)
    floor = low * bandwidth / 1e12
    axes.set(xscale="log", yscale="log", xlim=(low, high), ylim=(floor, 2 * peak / 1e12))
    plain_numbers(axes.xaxis, high / low)
    plain_numbers(axes.yaxis, peak / 1e12 / floor)
    axes.set_xlabel("arithmetic intensity (FLOP/byte)")
    axes.set_ylabel("attainable rate (TFLOP/s)")
    found = "predicted and measured" if any(r.measured for r in reports) else "predicted"
    axes.set_title(f"{reports[0].model} on {device.kind}, {found}", loc="left", fontsize=11)
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


def _draw_achieved(axes: "Axes", reports: Sequence[Roofline]) -> None:
    """The measured rates of stages."""
    checks = [check for report in reports for check in stage_checks(report)]
    if checks:
        axes.plot(
            [check.stage.intensity for check in checks],
            [check.flops_per_s / 1e12 for check in checks],
            marker="*",
            markersize=9,
            color="black",
            linestyle="",
            zorder=5,
            label="measured rates of stages",
        )


def shares_figure(reports: Sequence[Roofline]) -> "Figure":
    """The time of each stage by class, one bar for each phase.

    Args:
      reports: Reports of one model on one device.
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


def png(figure: "Figure") -> bytes:
    """A figure as the bytes of a PNG file."""
    data = io.BytesIO()
    figure.savefig(data, format="png", dpi=150)
    return data.getvalue()


def svg(figure: "Figure", name: str) -> str:
    """A figure as the text of an SVG document, the same for the same figure.

    Args:
      figure: Any figure.
      name: A name that is unique on its page: the figure's identifiers come from it.
    """
    import matplotlib

    text = io.StringIO()
    with matplotlib.rc_context({"svg.hashsalt": name}):
        figure.savefig(text, format="svg", metadata={"Date": None})
    return text.getvalue()


def _shown(report: Roofline) -> list[Total]:
    whole = report.total.seconds
    return [s for s in report.stages if s.seconds >= MIN_SHARE * whole and s.intensity > 0]


def plain_numbers(axis: Any, ratio: float) -> None:
    """Makes a logarithmic axis that spans this ratio write plain numbers, without powers."""
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
