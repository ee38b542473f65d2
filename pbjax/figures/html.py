"""The files of a roofline report: figures with their data, and one page that holds everything.

Computes nothing new. The page needs no network: the data of every figure stands in it as CSV, and
all of it as JSON.
"""

import base64
import csv
import html
import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from pbjax.errors import FileError
from pbjax.figures.batch_study import front_figure, study_figure
from pbjax.figures.roofline import png, roofline_figure, shares_figure, svg
from pbjax.files import write_atomically
from pbjax.roofline.batch_study import PhaseStudy, SizeChoice, SizePoint
from pbjax.roofline.points import Total
from pbjax.roofline.result import Roofline

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #1a1a1a; margin: 2rem auto; max-width: 68rem;
       padding: 0 1rem; background: white; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.15rem; margin-top: 2.2rem; }
pre { font: 12px/1.35 ui-monospace, monospace; overflow-x: auto; background: #f6f6f6;
      padding: 0.8rem; }
figure { margin: 1rem 0; } figure svg { max-width: 100%; height: auto; }
figcaption { color: #555; font-size: 0.9rem; }
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """A part of the page.

    Attributes:
      title: Its heading.
      text: A report or table as text; empty for none.
      svg: A figure as an SVG document; empty for none.
      caption: Caption of the figure.
      csv: The figure's data as CSV; empty for none.
      name: Name of the file that the data is saved as, without its suffix.
    """

    title: str
    text: str = ""
    svg: str = ""
    caption: str = ""
    csv: str = ""
    name: str = "data"


@dataclass(frozen=True, slots=True, kw_only=True)
class Findings:
    """All results about one model on one device.

    Attributes:
      reports: One report for each phase.
      curves: Study and choice of each phase; empty if none was asked for.
      measured: Measured points of the same curves.
      texts: All results as text, by heading.
      document: All results as JSON-compatible data.
    """

    reports: tuple[Roofline, ...]
    curves: tuple[tuple[PhaseStudy, SizeChoice], ...]
    measured: tuple[SizePoint, ...] = ()
    texts: Mapping[str, str]
    document: Mapping[str, object]


def write_page(findings: Findings, path: Path) -> None:
    """Writes one self-contained HTML page.

    Raises:
      FileError: The page cannot be written.
      InputError: matplotlib is missing.
    """
    first = findings.reports[0]
    figures = _figures(findings)
    sections = [
        Section(title=title, svg=svg(figure, name), caption=caption, csv=data, name=name)
        for name, title, figure, caption, data in figures
    ]
    sections += [Section(title=title, text=text) for title, text in findings.texts.items()]
    title = f"{first.model} on {first.device.kind}: roofline"
    write_atomically(path, page(title, sections, findings.document))


def write_figures(findings: Findings, folder: Path) -> list[Path]:
    """Writes each figure as SVG and PNG with its data as CSV beside it, and all data as JSON.

    Returns:
      The paths of the written files.

    Raises:
      FileError: A file cannot be written.
      InputError: matplotlib is missing.
    """
    return write_each(_figures(findings), folder, findings.document)


def write_each(
    figures: "Sequence[tuple[str, str, Figure, str, str]]",
    folder: Path,
    document: Mapping[str, object],
) -> list[Path]:
    """Writes figures with their data as CSV, and all data as JSON.

    Args:
      figures: Name, title, figure, caption and CSV of each.
      folder: The folder to write to.
      document: All data, JSON-compatible.

    Returns:
      The paths of the written files.

    Raises:
      FileError: A file cannot be written.
    """
    written = []
    for name, _, figure, _, data in figures:
        write_atomically(folder / f"{name}.svg", svg(figure, name))
        write_atomically(folder / f"{name}.csv", data)
        _write_image(folder / f"{name}.png", png(figure))
        written += [folder / f"{name}.{suffix}" for suffix in ("svg", "png", "csv")]
    write_atomically(folder / "report.json", json.dumps(document, indent=1))
    return [*written, folder / "report.json"]


def page(title: str, sections: Sequence[Section], document: Mapping[str, object]) -> str:
    """A page as HTML.

    Args:
      title: Its heading.
      sections: Its parts, in order.
      document: All data, JSON-compatible.
    """
    body = "\n".join(_section(section) for section in sections)
    # Inside a script element only an end tag can end the data.
    data = json.dumps(document, indent=1).replace("</", "<\\/")
    return (
        f'<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f"<title>{html.escape(title)}</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n"
        f"<h1>{html.escape(title)}</h1>\n{body}\n"
        f"<p>{_link('report.json', 'application/json', json.dumps(document, indent=1))}</p>\n"
        f'<script type="application/json" id="data">{data}</script>\n</body>\n</html>\n'
    )


def points_csv(reports: Sequence[Roofline]) -> str:
    """Every group of operations as one line of CSV."""
    columns = (
        *("phase", "stage", "group", "kind", "repeats", "dtype", "flops"),
        *("weight_bytes", "activation_bytes", "kv_cache_bytes", "intensity_flop_per_byte"),
        *("class", "bound", "attainable_flops_per_s", "seconds"),
        *("measured_seconds", "achieved_flops_per_s"),
    )
    rows = []
    for report in reports:
        for p in report.points:
            measured_s = report.measured_s(p)
            achieved = p.flops / measured_s if measured_s else None
            total = Total(name=p.name, points=(p,))
            moved = p.traffic.weights, p.traffic.activations, p.traffic.kv_cache
            bound = total.intensity, p.resource, total.bound, total.attainable_flops_per_s
            group = report.phase, p.stage, p.name, p.kind, p.repeats, p.dtype, p.flops
            rows.append((*group, *moved, *bound, p.seconds, measured_s, achieved))
    return csv_text(columns, rows)


def csv_text(columns: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Rows as CSV with a header."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(columns)
    writer.writerows(rows)
    return text.getvalue()


def _figures(findings: Findings) -> "list[tuple[str, str, Figure, str, str]]":
    """Name, title, figure, caption and data of each."""
    reports = findings.reports
    found = [
        (
            "roofline",
            "Roofline",
            roofline_figure(reports),
            "Every stage under the roofs of the device; hollow markers belong to decode.",
            points_csv(reports),
        ),
        (
            "shares",
            "Where the time goes",
            shares_figure(reports),
            "Each stage by what bounds its operations.",
            points_csv(reports),
        ),
    ]
    if findings.curves:
        studies = [study for study, _ in findings.curves]
        choices = [choice for _, choice in findings.curves]
        found += [
            (
                "study",
                "Over batch and length",
                study_figure(studies, reports[0], findings.measured),
                "Throughput, latency, and the rates that dense layers and attention can reach.",
                _curve_csv(
                    [p for s in studies for p in (*s.by_batch, *s.by_seq)], findings.measured
                ),
            ),
            (
                "front",
                "Latency and throughput",
                front_figure(choices, reports[0], findings.measured),
                "Batches that no other beats in both.",
                _curve_csv(
                    [point for choice in choices for point in choice.front], findings.measured
                ),
            ),
        ]
    return found


def _curve_csv(predicted: Sequence[SizePoint], measured: Sequence[SizePoint] = ()) -> str:
    rows = [{"source": "predicted", **asdict(point)} for point in predicted]
    rows += [{"source": "measured", **asdict(point)} for point in measured]
    return csv_text(list(rows[0]), [list(row.values()) for row in rows])


def _write_image(path: Path, data: bytes) -> None:
    try:
        path.write_bytes(data)
    except OSError as error:
        raise FileError(
            f"{path}: cannot be written ({error}); a writable folder with free space is needed; "
            "choose another folder"
        ) from error


def _section(section: Section) -> str:
    parts = [f"<h2>{html.escape(section.title)}</h2>"]
    if section.svg:
        # An SVG file has a prologue before the element, which a page must not contain.
        drawing = section.svg[section.svg.index("<svg") :]
        link = _link(f"{section.name}.csv", "text/csv", section.csv) if section.csv else ""
        caption = f"<figcaption>{html.escape(section.caption)} {link}</figcaption>"
        parts.append(f"<figure>{drawing}{caption}</figure>")
    if section.text:
        parts.append(f"<pre>{html.escape(section.text)}</pre>")
    return "\n".join(parts)


def _link(name: str, kind: str, text: str) -> str:
    data = base64.b64encode(text.encode()).decode()
    return f'<a download="{name}" href="data:{kind};base64,{data}">{name}</a>'
