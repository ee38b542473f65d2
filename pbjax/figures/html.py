"""One page that holds a whole roofline report: figures, tables and data. Needs no network.

Computes nothing new; the data of every figure stands beside it as CSV, and all of it as JSON.
"""

import base64
import csv
import html
import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pbjax.roofline.points import Total
from pbjax.roofline.result import Roofline

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
      caption: What the figure shows.
      csv: The figure's data; empty for none.
      name: Of the file that the data is saved as, without its suffix.
    """

    title: str
    text: str = ""
    svg: str = ""
    caption: str = ""
    csv: str = ""
    name: str = "data"


def page(title: str, sections: Sequence[Section], document: Mapping[str, object]) -> str:
    """The page.

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
    """Every group of operations as one line."""
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
    """Rows as CSV with a head."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(columns)
    writer.writerows(rows)
    return text.getvalue()


def _section(section: Section) -> str:
    parts = [f"<h2>{html.escape(section.title)}</h2>"]
    if section.svg:
        # What stands before the element is of a file of its own.
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
