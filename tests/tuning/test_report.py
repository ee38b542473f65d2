"""Reports: text that a person can read, and data that JSON can hold."""

import json
from dataclasses import replace

import pytest

import pbjax
from pbjax.device import find_device
from pbjax.planning.profiling import Profile
from pbjax.planning.timetable import timetable
from pbjax.program.analysis import analyse
from pbjax.runtime.measured_programs import WIDTH, MeasuredProgram, programs_section
from pbjax.runtime.phases import Phase
from pbjax.tuning.report import SplitTimetable
from pbjax.tuning.report_text import timetable_section
from tests.fakes import FakeTimer, fake_measure
from tests.networks import NETWORKS, tokens


@pytest.fixture(scope="module")
def report():
    with pytest.MonkeyPatch.context() as monkeypatch:
        FakeTimer().install(monkeypatch)
        seconds = {"unsplit": 2e-3, "split": 1e-3, "sequential": 3e-3}
        monkeypatch.setattr("pbjax.tuning.autotune.measure", fake_measure(seconds))
        return pbjax.optimize(NETWORKS["no_repetition"](1).model, *tokens(6)).report()


def test_dict_is_json(report):
    document = report.to_dict()
    assert json.loads(json.dumps(document)).keys() == document.keys()


def test_dict_holds_the_figures(report):
    document = json.loads(json.dumps(report.to_dict()))
    assert document["batch_size"] == 6
    assert document["device_kind"] == report.device_kind
    assert sum(share["operations"] for share in document["classes"]) > 0
    assert [stage["name"] for stage in document["stages"]] == [
        stage.name for stage in report.summary.stages
    ]
    assert document["programs"][0]["name"] == "unsplit"
    assert document["programs"][0]["measured_s"] == 2e-3
    assert document["search"]["evaluations"] == report.search.evaluations
    assert document["plan"]["measured"]["unsplit"] == 2e-3
    assert set(document["phases"]) == {phase.name for phase in report.phases}


def test_text_has_a_section_for_each_step_in_order(report):
    titles = ("model, batch", "stages", "profile", "search", "timetable", "programs", "phases")
    places = [str(report).index(title) for title in titles]
    assert places == sorted(places)
    assert str(report).splitlines()[-1].startswith("decision: split: ")


def test_no_table_is_wider_than_the_page(report):
    sentences = ("phases:", "largest", "decision:")
    lines = [line for line in str(report).splitlines() if not line.startswith(sentences)]
    assert len(lines) > 30
    assert max(map(len, lines)) <= WIDTH


def test_class_shares_add_up_to_the_whole(report):
    lines = str(report).split("\n\n")[0].splitlines() + str(report).split("\n\n")[1].splitlines()
    rows = [
        line.split() for line in lines if line.split()[:1] in ([["TENSOR"], ["CUDA"], ["MEMORY"]])
    ]
    for column in (2, 3, 4):
        assert sum(float(row[column].rstrip("%")) for row in rows) == pytest.approx(100, abs=0.2)


def test_programs_are_listed_with_their_throughput(report):
    text = str(report)
    assert "3,000.0" in text  # 6 rows in 2 ms
    assert "6,000.0" in text  # 6 rows in 1 ms
    assert "sequential" in text


def test_figures_of_a_plan_that_was_given_are_said_to_be_its_own(report):
    measured = replace(report.plan, date="2026-11-01", max_difference=0.5)
    *_, difference, decision = str(replace(report, programs=(), plan=measured)).splitlines()
    origin = ", by a plan of 2026-11-01, not measured again"
    assert difference.endswith(f"5.00e-01{origin}")
    assert decision.startswith(f"decision: split{origin}: ")


def test_warnings_stand_before_the_decision(report):
    text = str(replace(report, warnings=("something differs",)))
    assert "\nwarning: something differs\n" in text


def test_what_was_not_done_is_left_out(report):
    text = str(replace(report, profile=None, search=None, timetables=(), programs=()))
    for title in ("profile:", "search:", "timetable:", "programs:"):
        assert f"\n{title}" not in text
    assert "decision: " in text
    document = replace(report, profile=None, search=None, measured_summary=None).to_dict()
    assert json.loads(json.dumps(document))["search"] is None


def test_unknown_primitives_are_named(report):
    text = str(replace(report, unknown=("mystery",)))
    assert "cost unknown, counted by bytes: mystery" in text


def test_phases_are_summed(report):
    phases = (Phase(name="compile", seconds=1.5), Phase(name="measure", seconds=0.5))
    assert "phases: 2.0 s: compile 1.5, measure 0.5" in str(replace(report, phases=phases))


def test_program_that_was_not_predicted_has_a_dash(report):
    program = MeasuredProgram(
        name="split",
        sizes=(3, 3),
        staggers=(0, 1),
        predicted_s=None,
        measured_s=0.5,
        spread_s=0.0,
        temporary_bytes=0,
        weight_bytes=0,
        compile_s=0.0,
    )
    times, _, _ = programs_section((program,), report.batch_size).partition("\n\nmemory")
    row = times.splitlines()[-1]
    assert row.split()[:4] == ["split", "3+3", "-", "500"]


def test_timetable_shows_every_stage_of_every_sub_batch(report):
    network = NETWORKS["nnx_loop"](4)
    device = find_device("cpu", num_cores=2)
    summary = analyse(network.model, tokens(6), device=device).summary
    staggered = replace(
        report,
        summary=summary,
        timetables=(SplitTimetable(sizes=(3, 2, 1), timetable=timetable(summary, (0, 1, 2))),),
        plan=replace(report.plan, sizes=(3, 2, 1), staggers=(0, 1, 2)),
    )
    head, _, *rows = timetable_section(staggered).splitlines()
    assert head.startswith("timetable:")
    assert [row.split(",")[0] for row in rows] == ["3 rows", "2 rows", "1 row"]
    for row, stagger in zip(rows, (0, 1, 2), strict=True):
        _, cells = row.split(" ahead", 1)
        fill, steady, drain = (part.split() for part in cells.split("|"))
        num_stages = len(summary.block)
        assert len([c for c in steady if c != "."]) == num_stages
        assert [c for c in steady if c.endswith("'")] == [f"{chr(65 + i)}'" for i in range(stagger)]
        assert len([c for c in fill if c != "."]) == stagger + (summary.prologue is not None)
        end = summary.epilogue is not None
        assert len([c for c in drain if c != "."]) == num_stages - stagger + end
        assert ("<" in fill) == (summary.prologue is not None)
        assert (">" in drain) == end


def test_profile_of_the_report_is_the_table(report, tmp_path):
    report.profile.save(tmp_path / "t.json")
    assert Profile.load(tmp_path / "t.json") == report.profile
