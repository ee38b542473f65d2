"""Figures, tables and the page of a roofline report, put together and written. Computes nothing."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from pbjax.errors import FileError
from pbjax.figures.batch_study import front_figure, study_figure
from pbjax.figures.html import Section, csv_text, page, points_csv
from pbjax.figures.roofline import png, roofline_figure, shares_figure, svg
from pbjax.files import write_atomically
from pbjax.roofline.batch_study import PhaseStudy, SizeChoice, SizePoint
from pbjax.roofline.result import Roofline

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True, slots=True, kw_only=True)
class Findings:
    """All that was asked of one model on one device.

    Attributes:
      reports: One a phase.
      curves: Study and choice of each phase; empty if none was asked for.
      measured: Points that were measured, for the same curves.
      texts: Everything as text, by heading.
      document: Everything as JSON-compatible data.
    """

    reports: tuple[Roofline, ...]
    curves: tuple[tuple[PhaseStudy, SizeChoice], ...]
    measured: tuple[SizePoint, ...] = ()
    texts: Mapping[str, str]
    document: Mapping[str, object]


def write_page(findings: Findings, path: Path) -> None:
    """Writes one self-contained HTML page.

    Raises:
      FileError: It cannot be written.
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
      What was written.

    Raises:
      FileError: Something cannot be written.
      InputError: matplotlib is missing.
    """
    return write_each(_figures(findings), folder, findings.document)


def write_each(
    figures: "Sequence[tuple[str, str, Figure, str, str]]",
    folder: Path,
    document: Mapping[str, object],
) -> list[Path]:
    """Writes figures, of which name, title, figure, caption and data are given, as `write_figures`.

    Args:
      figures: The figures.
      folder: Where to.
      document: All data, JSON-compatible.

    Returns:
      What was written.

    Raises:
      FileError: Something cannot be written.
    """
    written = []
    for name, _, figure, _, data in figures:
        write_atomically(folder / f"{name}.svg", svg(figure, name))
        write_atomically(folder / f"{name}.csv", data)
        _write_image(folder / f"{name}.png", png(figure))
        written += [folder / f"{name}.{suffix}" for suffix in ("svg", "png", "csv")]
    write_atomically(folder / "report.json", json.dumps(document, indent=1))
    return [*written, folder / "report.json"]


def _figures(findings: Findings) -> "list[tuple[str, str, Figure, str, str]]":
    """Name, title, figure, caption and data of each."""
    reports = findings.reports
    found = [
        (
            "roofline",
            "Roofline",
            roofline_figure(reports),
            "Every stage under the roofs of the device; hollow markers are of decode.",
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
            f"{path}: cannot be written ({error}); a writable place with room is needed; choose "
            "another folder"
        ) from error
