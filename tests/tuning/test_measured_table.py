"""The table of a model: found, checked, completed; only stages that may overlap are paired."""

from dataclasses import replace

import pytest

from pbjax.device import ResourceClass, find_device
from pbjax.errors import DeviceError, FileError, InputError, PbjaxWarning
from pbjax.planning.profiling import Profile, find_profiles, grid
from pbjax.program.analysis import analyse
from pbjax.runtime.phases import Phases
from pbjax.tuning.measured_table import measured_table, relabelled
from tests.fakes import FakeTimer
from tests.networks import NETWORKS, tokens

DEVICE = find_device("cpu", num_cores=2)


@pytest.fixture(scope="module")
def analysis():
    return analyse(NETWORKS["function_loop"](3).model, tokens(6), device=DEVICE)


@pytest.fixture
def timer(monkeypatch):
    return FakeTimer().install(monkeypatch)


def test_every_stage_is_measured_at_every_size_of_the_grid(analysis, timer):
    table = measured_table(analysis, tokens(6), None, Phases())
    wanted = {(stage.fingerprint, size) for stage in analysis.summary.stages for size in grid(6)}
    assert set(timer.stages) == wanted
    assert {(row.fingerprint, row.batch_size) for row in table.profile.rows} == wanted
    assert table.rows_measured == len(timer.stages) + len(timer.pairs)
    assert table.warning == ""


def test_pairs_are_of_different_classes_at_a_third_and_half_of_the_batch(analysis, timer):
    table = measured_table(analysis, tokens(6), None, Phases())
    classes = {stage.fingerprint: stage.resource for stage in table.summary.block}
    for first, second, size in timer.pairs:
        assert classes[first] != classes[second]
        assert size in (2, 3)


def test_table_says_where_it_was_measured(analysis, timer):
    provenance = measured_table(analysis, tokens(6), None, Phases()).profile.provenance
    assert provenance.device_kind == "cpu"
    assert analysis.model.name in provenance.command
    assert provenance.date


def test_file_grows_with_every_row(analysis, monkeypatch, tmp_path):
    for limit in (1, 2):
        FakeTimer(limit=1).install(monkeypatch)
        with pytest.raises(KeyboardInterrupt):
            measured_table(analysis, tokens(6), tmp_path / "t.json", Phases())
        assert len(Profile.load(tmp_path / "t.json").rows) == limit


def test_complete_file_is_not_written_again(analysis, timer, tmp_path):
    path = tmp_path / "t.json"
    measured_table(analysis, tokens(6), path, Phases())
    path.chmod(0o400)
    before = path.stat().st_mtime_ns
    assert measured_table(analysis, tokens(6), str(path), Phases()).rows_measured == 0
    assert path.stat().st_mtime_ns == before


def test_file_that_cannot_be_written_is_refused(analysis, timer, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(FileError, match=r"profile .*t\.json: "):
        measured_table(analysis, tokens(6), tmp_path / "file" / "t.json", Phases())


def test_table_of_another_device_is_refused(analysis, timer):
    table = measured_table(analysis, tokens(6), None, Phases()).profile
    foreign = replace(table, provenance=replace(table.provenance, device_kind="NVIDIA H200"))
    with pytest.raises(DeviceError, match="NVIDIA H200") as error:
        measured_table(analysis, tokens(6), foreign, Phases())
    assert str(error.value).count(";") >= 2


def test_file_of_bursts_is_refused_and_kept(analysis, timer, tmp_path):
    path = tmp_path / "t.json"
    measured_table(analysis, tokens(6), path, Phases())
    replace(Profile.load(path), clock="burst").save(path)
    before = path.read_bytes()
    with pytest.raises(InputError, match="its seconds are of bursts") as error:
        measured_table(analysis, tokens(6), path, Phases())
    assert str(error.value).count(";") >= 2
    assert path.read_bytes() == before
    with pytest.warns(PbjaxWarning, match="its seconds are of bursts"):
        found = measured_table(analysis, tokens(6), Profile.load(path), Phases())
    assert found.profile.clock == "long run"
    assert "its seconds are of bursts" in found.warning


def test_shipped_table_is_used_where_there_is_one(analysis, timer, monkeypatch, tmp_path):
    path = tmp_path / "cpu" / "model.json"
    measured_table(analysis, tokens(6), path, Phases())
    monkeypatch.setattr(
        "pbjax.tuning.measured_table.find_profiles", lambda slug: find_profiles(slug, [tmp_path])
    )
    before = path.read_bytes()
    timer.stages.clear()
    assert measured_table(analysis, tokens(6), None, Phases()).rows_measured == 0
    measured_table(analysis, tokens(6), tmp_path / "own.json", Phases())
    assert timer.stages
    assert path.read_bytes() == before


def test_measured_classes_change_labels_and_nothing_else(analysis, timer):
    table = measured_table(analysis, tokens(6), None, Phases()).profile
    found = relabelled(analysis.summary, table, 6, DEVICE)
    assert found.num_blocks == analysis.summary.num_blocks
    for old, new in zip(analysis.summary.stages, found.stages, strict=True):
        assert replace(new, resource=old.resource) == old
        assert new.resource in ResourceClass


def test_progress_counts_rows_of_both_phases(analysis, timer):
    seen = []
    measured_table(analysis, tokens(6), None, Phases(lambda *state: seen.append(state)))
    rows = [(done, total) for name, done, total, _ in seen if name == "profile"]
    assert (len(timer.stages), len(timer.stages)) in rows
    assert any("at batch size" in item for *_, item in seen)
