"""The figure of the ablation: speed over the whole batch at once, a bar for each thing switched."""

from pathlib import Path

import matplotlib
from matplotlib.figure import Figure
from matplotlib.patches import Patch

# Okabe and Ito's colours, told apart by the colour-blind; hatches tell them apart in print.
GREY, BLUE, ORANGE, GREEN = "#999999", "#0072B2", "#E69F00", "#009E73"
LEGEND = {
    "one after the other": GREY,
    "one graph, all SMs": BLUE,
    "one graph, SM budgets": ORANGE,
    "one launch": GREEN,
}
LABEL = "speed over the fastest whole-batch program with the same kernels (last panel: in sequence)"
TITLES = {
    "bert": "BERT-Base, 96 x 384",
    "conformer": "Conformer-L, 32 x 512",
    "pair": "one product beside decode attention",
}


def draw(document: dict, path: Path) -> None:
    """Draws a document of bench_ablation.py as path.svg and path.png."""
    panels = {model: _bars(document["rows"], model) for model in TITLES}
    panels = {model: bars for model, bars in panels.items() if bars}
    heights = [len(bars) for bars in panels.values()]
    style = {"svg.hashsalt": path.name, "svg.fonttype": "none", "font.size": 9}
    with matplotlib.rc_context(style):
        figure = Figure(figsize=(7.2, 0.9 + 0.22 * sum(heights) + 0.5 * len(panels)))
        axes = figure.subplots(
            len(panels), 1, sharex=True, squeeze=False, gridspec_kw={"height_ratios": heights}
        )
        for axis, (model, bars) in zip(axes[:, 0], panels.items(), strict=True):
            _panel(axis, TITLES[model], bars)
        every = [value for bars in panels.values() for _, value, _ in bars]
        axes[0, 0].set_xlim(min(0.9, *every) - 0.08, max(1.15, *every) + 0.05)
        figure.supxlabel(LABEL, fontsize=9)
        marks = [Patch(color=colour, label=label) for label, colour in LEGEND.items()]
        figure.legend(handles=marks, loc="upper right", ncols=2, frameon=False, fontsize=8)
        figure.tight_layout(rect=(0, 0, 1, 1 - 0.4 / figure.get_figheight()))
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path.with_suffix(".svg"), metadata={"Date": None})
        figure.savefig(path.with_suffix(".png"), dpi=110)


def _panel(axis, title: str, bars: list[tuple[str, float, str]]) -> None:
    labels, values, colours = zip(*bars, strict=True)
    heights = range(len(bars), 0, -1)
    axis.barh(heights, [value - 1 for value in values], left=1.0, color=colours, height=0.72)
    axis.axvline(1.0, color="black", linewidth=0.8)
    for height, value in zip(heights, values, strict=True):
        side = "left" if value >= 1 else "right"
        axis.text(value, height, f" {value:.2f} ", va="center", ha=side, fontsize=8)
    axis.set_yticks(heights, labels)
    axis.tick_params(labelbottom=True)
    axis.set_title(title, loc="left", fontsize=9, fontweight="bold")
    axis.spines[["top", "right"]].set_visible(False)


def _bars(rows: list[dict], model: str) -> list[tuple[str, float, str]]:
    """(label, speed, colour): no overlap grey, overlap blue, with budgets orange, co-run green."""
    timed = [row for row in rows if row["model"] == model and "seconds" in row]
    if model == "pair":
        return [
            (row["label"], row["over_unsplit"], GREEN if "launch" in row["label"] else _pair(row))
            for row in sorted(timed, key=lambda row: row["over_unsplit"])
        ]
    chosen = {}
    for row in timed:
        if name := _name(row):
            chosen.setdefault(name, row)
    whole = min(row["seconds"] for row in timed if len(row.get("sizes", [0])) == 1)
    return [
        (name, whole / chosen[name]["seconds"], _colour(chosen[name])) for name in sorted(chosen)
    ]


def _pair(row: dict) -> str:
    return GREY if "sequence" in row["label"] else ORANGE if "+" in row["label"] else BLUE


def _colour(row: dict) -> str:
    return GREY if not row.get("overlap") else ORANGE if row["sm_budgets"] else BLUE


def _name(row: dict) -> str:
    """The name of a bar; of rows of one name the fastest, which comes first, is drawn.

    Empty for a row that is in no bar.
    """
    if "sizes" not in row:
        return "the model as it is"
    count = len(row["sizes"])
    equal = max(row["sizes"]) - min(row["sizes"]) <= 1  # as near as a batch of 32 comes in thirds
    if count == 1:
        return "whole batch, scanned"
    if not row["overlap"]:
        return f"{count} equal sub-batches, in sequence"
    parts = [f"{count} {'equal' if equal else 'unequal'} sub-batches"]
    parts.append("staggered" if any(row["staggers"]) else "in step")
    if row["sm_budgets"] and row["unroll"] > 1:
        return ""
    if row["sm_budgets"]:
        parts.append("+".join(str(sms) for sms in row["sm_budgets"].values()) + " SMs")
    if row["unroll"] > 1:
        parts.append("all unrolled" if row["unroll"] > 2 else "unroll 2")
    return ", ".join(parts)
