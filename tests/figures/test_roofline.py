"""Figures and the page: every name is legible, nothing is fetched, missing matplotlib is said."""

import csv
import io
import itertools
import json
import sys
import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from functools import cache
from html.parser import HTMLParser

import pytest
from typer.testing import CliRunner

from pbjax.cli.app import app
from pbjax.device import find_device
from pbjax.errors import FileError, InputError
from pbjax.figures.batch_study import front_figure, study_figure
from pbjax.figures.html import Findings, points_csv, write_figures, write_page
from pbjax.figures.roofline import (
    png,
    roofline_figure,
    shares_figure,
    svg,
)
from pbjax.roofline.batch_study import choose_point, study_phase
from pbjax.roofline.points import Measured
from pbjax.roofline.report import roofline_report
from tests.shapes import few_layers

A100 = find_device("a100-sxm4-80gb")
MODEL = few_layers("gpt2")


@cache
def report_at(phase, batch, seq):
    call = MODEL.call(phase, batch, seq)
    return roofline_report(
        call.function,
        *call.inputs,
        device=A100,
        cache=call.cache,
        name="gpt2",
        phase=phase,
        items=batch,
        tokens=call.tokens,
    )


@cache
def reports():
    return tuple(report_at(phase, 8, 256) for phase in ("prefill", "decode"))


@cache
def curves():
    studies = [
        study_phase(report_at, r.phase, batch_size=8, seq_len=256, max_seq_len=1024)
        for r in reports()
    ]
    return tuple((study, choose_point(study.by_batch)) for study in studies)


FIGURES = {
    "roofline": lambda: roofline_figure(reports()),
    "shares": lambda: shares_figure(reports()),
    "study": lambda: study_figure([study for study, _ in curves()], reports()[0]),
    "study and measured": lambda: study_figure(
        [study for study, _ in curves()],
        reports()[0],
        [point for study, _ in curves() for point in study.by_batch[::2]],
    ),
    "front": lambda: front_figure([choice for _, choice in curves()], reports()[0]),
    "front and limit": lambda: front_figure(
        [choose_point(study.by_batch, latency_s=0.02) for study, _ in curves()],
        reports()[0],
        [point for study, _ in curves() for point in study.by_batch[::2]],
    ),
}


def texts(figure):
    """Every text that is drawn, with its place in pixels."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.text import Text

    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    renderer = canvas.get_renderer()
    for axes in figure.axes:
        drawn = axes.get_window_extent(renderer)
        # Labels of ticks beyond the axes exist but are not drawn.
        hidden = [
            text
            for labels, low, high, side in (
                (axes.get_xticklabels(which="both"), drawn.x0, drawn.x1, 0),
                (axes.get_yticklabels(which="both"), drawn.y0, drawn.y1, 1),
            )
            for text in labels
            if not low - 2
            <= text.get_window_extent(renderer).get_points()[:, side].mean()
            <= high + 2
        ]
        for text in axes.findobj(Text):
            if text.get_text() and text.get_visible() and text not in hidden:
                yield text.get_text(), text.get_window_extent(renderer)


@pytest.mark.parametrize("name", FIGURES)
def test_no_text_covers_another_or_leaves_the_figure(name):
    figure = FIGURES[name]()
    drawn = list(texts(figure))
    assert len(drawn) > 8
    for (a, one), (b, other) in itertools.combinations(drawn, 2):
        overlap = min(one.x1, other.x1) > max(one.x0, other.x0) and min(one.y1, other.y1) > max(
            one.y0, other.y0
        )
        assert not overlap, (a, b)
    width, height = figure.get_size_inches() * figure.dpi
    for text, box in drawn:
        assert box.x0 >= 0, text
        assert box.y0 >= 0, text
        assert box.x1 <= width, text
        assert box.y1 <= height, text


@pytest.mark.parametrize(
    ("name", "units"),
    [
        ("roofline", ("FLOP/byte", "TFLOP/s")),
        ("shares", ("(%)", "ms")),
        ("study", ("(tokens/s)", "(ms)", "(TFLOP/s)")),
        ("front", ("(tokens/s)", "(ms)")),
    ],
)
def test_axes_have_units(name, units):
    written = " ".join(text for text, _ in texts(FIGURES[name]()))
    for unit in units:
        assert unit in written


def test_every_stage_of_weight_is_a_point_of_the_roofline():
    figure = roofline_figure(reports())
    labels = figure.axes[0].get_legend_handles_labels()[1]
    for report in reports():
        for stage in report.stages:
            if stage.seconds >= 0.01 * report.total.seconds and stage.intensity > 0:
                assert any(label.startswith(f"{report.phase}: {stage.name},") for label in labels)


def test_a_front_shows_its_limit_and_names_stay_inside_the_axes():
    figure = FIGURES["front and limit"]()
    for axes in figure.axes:
        labels = axes.get_legend_handles_labels()[1]
        assert "measured" in labels
        assert "limit: 20 ms" in labels
        (line,) = [line for line in axes.lines if line.get_label() == "limit: 20 ms"]
        assert list(line.get_xdata()) == [20, 20]
    for name in ("front", "front and limit"):
        figure = FIGURES[name]()
        assert list(texts(figure))
        for axes in figure.axes:
            edge = axes.get_window_extent().x1
            assert all(note.get_window_extent().x1 < edge - 2 for note in axes.texts)


def test_files_are_what_they_say():
    figure = FIGURES["roofline"]()
    assert png(figure)[:8] == b"\x89PNG\r\n\x1a\n"
    text = svg(figure, "roofline")
    assert ElementTree.fromstring(text).tag.endswith("svg")
    assert text == svg(FIGURES["roofline"](), "roofline")


def test_csv_has_every_group():
    rows = list(csv.DictReader(io.StringIO(points_csv(reports()))))
    assert len(rows) == sum(len(report.points) for report in reports())
    flops = sum(float(row["flops"]) for row in rows)
    assert flops == pytest.approx(sum(report.total.flops for report in reports()))
    assert {row["measured_seconds"] for row in rows} == {""}


def test_csv_has_achieved_rates_of_what_was_measured():
    report = reports()[0]
    point = max(report.points, key=lambda point: point.flops)
    measured = Measured(
        device_kind=A100.kind,
        seconds=1e-3,
        stages={},
        kinds={},
        other_s=0.0,
        calls=1,
        groups={f"{point.stage}/{point.name}": 2 * point.seconds},
    )
    rows = csv.DictReader(io.StringIO(points_csv([replace(report, measured=measured)])))
    (row,) = [row for row in rows if row["measured_seconds"]]
    assert row["group"] == point.name
    half = float(row["attainable_flops_per_s"]) / 2
    assert float(row["achieved_flops_per_s"]) == pytest.approx(half)


class Links(HTMLParser):
    def __init__(self):
        super().__init__()
        self.found, self.tags, self.data, self.inside = [], [], "", None
        self.files = []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.inside = tag
        self.found += [v for k, v in attrs if k in ("href", "src", "xlink:href")]
        self.files += [v for k, v in attrs if k == "download"]

    def handle_data(self, data):
        if self.inside == "script":
            self.data += data


def findings(**changes):
    given = {
        "reports": reports(),
        "curves": curves(),
        "texts": {"prefill": "a < b & c"},
        "document": {"reports": [report.to_dict() for report in reports()], "odd": "</script>"},
    }
    return Findings(**(given | changes))


def test_the_page_fetches_nothing_and_holds_all_data(tmp_path):
    write_page(findings(), tmp_path / "report.html")
    parser = Links()
    parser.feed((tmp_path / "report.html").read_text())
    assert parser.found
    assert all(link.startswith(("data:", "#")) for link in parser.found)
    assert parser.tags.count("svg") == 4
    files = ("roofline.csv", "shares.csv", "study.csv", "front.csv", "report.json")
    assert parser.files == list(files)
    assert not {"img", "link", "iframe"} & set(parser.tags)
    data = json.loads(parser.data.strip().split("\n<")[0])
    assert data["reports"][1]["phase"] == "decode"
    assert "a &lt; b &amp; c" in (tmp_path / "report.html").read_text()


def test_figures_are_written_with_their_data(tmp_path):
    written = write_figures(findings(curves=()), tmp_path / "new")
    assert [path.name for path in written] == [
        *("roofline.svg", "roofline.png", "roofline.csv"),
        *("shares.svg", "shares.png", "shares.csv"),
        "report.json",
    ]
    assert all(path.stat().st_size > 500 for path in written[:-1])
    assert json.loads(written[-1].read_text()) == dict(findings().document)


def test_a_place_that_cannot_be_written_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    for write in (write_page, write_figures):
        with pytest.raises(FileError):
            write(findings(curves=()), tmp_path / "file" / "below")


def test_missing_matplotlib_is_said_with_the_way_out(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(InputError, match=r"pip install 'pbjax\[figures\]'"):
        write_page(findings(), tmp_path / "report.html")
    assert not list(tmp_path.iterdir())


def test_command_line_names_what_it_writes(tmp_path):
    arguments = ["roofline", "minilm", "--device", "h200", "--seq", "16", "--json"]
    arguments += ["--html", str(tmp_path / "a.html"), "--figures", str(tmp_path / "figures")]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0
    assert json.loads(result.stdout)["reports"][0]["phase"] == "forward"
    assert "a.html" in result.stderr
    assert (tmp_path / "figures" / "roofline.png").exists()
