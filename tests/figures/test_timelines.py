"""Timelines: predicted timetables, measured kernels, traces that Perfetto opens, their figures."""

import dataclasses
import json
import math
import re
from itertools import pairwise
from typing import Literal, TypedDict

import jax.numpy as jnp
import pytest
from hypothesis import given
from pydantic import ConfigDict, TypeAdapter, with_config

import pbjax
from pbjax.errors import FileError, InputError
from pbjax.figures.plan import (
    plan_slices,
    search_figure,
    timetable_figure,
    write_plan_figures,
    write_plan_page,
    write_trace,
)
from pbjax.figures.roofline import svg
from pbjax.figures.timelines import (
    MEASURED,
    PREDICTED,
    Slice,
    chrome_trace,
    measured_slices,
    predicted_slices,
    save_trace,
)
from pbjax.planning.profiling import Profile, ProgramSummary
from pbjax.planning.search import search
from pbjax.planning.throughput import Evaluator, evaluate
from pbjax.planning.timetable import Split, timetable
from pbjax.runtime.device_trace import Kernel
from tests.fakes import FakeTimer
from tests.planning.test_throughput import PROVENANCE, build, cases, row, stage


@given(cases())
def test_slots_add_up_to_the_makespan(case):
    summary, profile = build(case)
    evaluator = Evaluator(summary, profile)
    slots = timetable(summary, case["staggers"]).slots()
    total = sum(evaluator.slot_seconds(case["split"], slot) for slot in slots if slot)
    expected = evaluator.makespan(case["split"], case["staggers"])
    assert total == pytest.approx(expected, rel=1e-9, abs=1e-12)


@given(cases())
def test_every_stage_runs_once_in_order_and_the_last_ends_with_the_makespan(case):
    summary, profile = build(case)
    sizes, staggers = case["split"], case["staggers"]
    slices = predicted_slices(summary, profile, sizes, staggers)
    each = len(case["names"]) * case["num_blocks"] + len(case["ends"])
    assert len(slices) == each * len(sizes)
    makespan = evaluate(summary, profile, Split(sizes=sizes), staggers).makespan_s
    assert max(s.end_s for s in slices) <= makespan * (1 + 1e-9) + 1e-9
    assert all(s.start_s >= 0 for s in slices)
    for name in {s.row for s in slices}:
        own = sorted((s for s in slices if s.row == name), key=lambda s: s.details["slot"])
        assert [s.details["block"] for s in own] == sorted(s.details["block"] for s in own)


def test_stages_that_save_time_together_are_drawn_above_each_other():
    summary, profile = build(
        {
            "names": ["s0", "s1"],
            "ends": [],
            "times": {name: [4.0] * 5 for name in ("s0", "s1")},
            "pairs": {(("s0", "s1"), (8, 8)): (1.25, 1.25)},
            "num_blocks": 2,
        }
    )
    slices = predicted_slices(summary, profile, (8, 8), (1, 0))
    beside = [
        (a, b)
        for a, b in pairwise(sorted(slices, key=lambda s: s.start_s))
        if a.end_s - b.start_s > 1e-9
    ]
    assert beside
    assert all(a.end_s - b.start_s == pytest.approx(3.0) for a, b in beside)


@with_config(ConfigDict(extra="forbid", strict=True))
class Meta(TypedDict):
    name: Literal["process_name", "thread_name", "thread_sort_index"]
    ph: Literal["M"]
    pid: int
    tid: int
    args: dict[str, str | int]


@with_config(ConfigDict(extra="forbid", strict=True))
class Complete(TypedDict):
    name: str
    cat: str
    ph: Literal["X"]
    pid: int
    tid: int
    ts: float
    dur: float
    args: dict[str, str | int]


@with_config(ConfigDict(extra="forbid", strict=True))
class Trace(TypedDict):
    displayTimeUnit: Literal["ms", "ns"]
    traceEvents: list[Meta | Complete]


KERNELS = (
    Kernel(name="pbjax_gemm", start_s=5.0, end_s=5.5),
    Kernel(name="loop_add_fusion", start_s=5.25, end_s=5.75),
)
SLICES = (
    Slice(
        row="sub-batch 1: 8 rows",
        name="mlp",
        start_s=0.0,
        end_s=2e-3,
        details={"class": "TENSOR", "sm_budget": 92},
    ),
)


def test_a_trace_follows_the_format_and_has_both_on_one_axis(tmp_path):
    path = tmp_path / "trace.json"
    save_trace(path, {PREDICTED: SLICES, MEASURED: measured_slices(KERNELS)})
    trace = TypeAdapter(Trace).validate_python(json.loads(path.read_text()))
    events = [e for e in trace["traceEvents"] if e["ph"] == "X"]
    names = {
        (e["name"], e["pid"], e["tid"]): e["args"]["name"]
        for e in trace["traceEvents"]
        if e["ph"] == "M" and "name" in e["args"]
    }
    processes = {names["process_name", pid, 0]: pid for pid in (1, 2)}
    assert set(processes) == {PREDICTED, MEASURED}
    for pid in processes.values():
        assert min(e["ts"] for e in events if e["pid"] == pid) == 0
    assert all(("thread_name", e["pid"], e["tid"]) in names for e in events)
    (mlp,) = [e for e in events if e["name"] == "mlp"]
    assert mlp["dur"] == pytest.approx(2000.0)
    assert mlp["args"] == {"class": "TENSOR", "sm_budget": 92}


def test_measured_kernels_stand_in_two_rows():
    rows = [s.row for s in measured_slices(KERNELS)]
    assert rows == ["Tensor-Core kernels", "other kernels"]
    assert measured_slices(()) == ()


def test_a_trace_that_cannot_be_written_is_an_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(FileError):
        save_trace(tmp_path / "file" / "trace.json", {PREDICTED: SLICES})


def test_a_trace_of_nothing_is_a_trace():
    trace = TypeAdapter(Trace).validate_python(chrome_trace({PREDICTED: ()}))
    assert [e["ph"] for e in trace["traceEvents"]] == ["M"]


def outline_and_profile():
    return build(
        {
            "names": ["s0", "s1", "s2"],
            "ends": ["prologue"],
            "times": {
                name: [(i + 1) * (1 + n / 10 + math.sin(n)) for n in (2, 3, 8, 20, 60)]
                for i, name in enumerate(("s0", "s1", "s2", "prologue"))
            },
            "pairs": {},
            "num_blocks": 3,
        }
    )


def test_the_search_is_drawn_over_its_triangle():
    summary, profile = outline_and_profile()
    found = search(summary, profile, 60)
    drawing = svg(search_figure(found, 60), "search")
    assert "rows of the first sub-batch" in drawing
    assert "predicted makespan (ms)" in drawing


def test_a_search_that_saw_one_makespan_has_no_scale_of_colours():
    summary, profile = outline_and_profile()
    found = search(summary, profile, 60)
    visits = tuple(dataclasses.replace(visit, makespan_s=2.0) for visit in found.trajectory)
    drawing = svg(search_figure(dataclasses.replace(found, trajectory=visits), 60), "search")
    assert "rows of the first sub-batch" in drawing
    assert "predicted makespan (ms)" not in drawing


def test_budgets_stand_in_the_timetable():
    slices = [
        Slice(
            row="sub-batch 1: 8 rows",
            name="mlp",
            start_s=0.0,
            end_s=1.0,
            details={"class": "TENSOR", "block": 0, "sm_budget": 92},
        ),
        Slice(
            row="sub-batch 2: 8 rows",
            name="norm",
            start_s=0.0,
            end_s=1.0,
            details={"class": "MEMORY", "block": 0, "sm_budget": 40},
        ),
    ]
    figure = timetable_figure(slices, "a model")
    texts = {text.get_text() for axes in figure.axes for text in axes.texts}
    assert {"92 SMs", "40 SMs", "1", "2"} <= texts


@pytest.fixture
def report(monkeypatch):
    FakeTimer().install(monkeypatch)

    def model(x):
        for _ in range(4):
            x = jnp.tanh(x @ jnp.eye(4)) + x
        return x

    return pbjax.optimize(model, jnp.ones((8, 4))).report()


def test_a_report_becomes_a_trace_figures_and_a_page(report, tmp_path):
    write_trace(report, KERNELS, tmp_path / "trace.json")
    trace = TypeAdapter(Trace).validate_python(json.loads((tmp_path / "trace.json").read_text()))
    assert {e["pid"] for e in trace["traceEvents"]} == {1, 2}
    written = write_plan_figures(report, tmp_path)
    assert {"timetable.svg", "timetable.png", "timetable.csv"} <= {path.name for path in written}
    assert all(path.stat().st_size for path in written)
    write_plan_page(report, tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text()
    assert "<svg" in page
    loaded = re.findall(r'(?:src|href)="([^"]*)"', page)
    assert all(link.startswith(("data:", "#")) for link in loaded)


def test_a_plan_without_a_table_has_no_timetable(report):
    with pytest.raises(InputError, match="leave out --plan"):
        plan_slices(dataclasses.replace(report, profile=None))


def test_a_program_of_one_stage_and_one_sub_batch_is_a_row():
    single = stage("s0")
    summary = ProgramSummary(prologue=None, block=(single,), epilogue=None, num_blocks=2)
    profile = Profile(provenance=PROVENANCE, rows=(row(single, 8, 0.5),))
    slices = predicted_slices(summary, profile, (8,), (0,))
    assert [(s.start_s, s.end_s) for s in slices] == [(0.0, 0.5), (0.5, 1.0)]
