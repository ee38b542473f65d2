"""`pbjax profile` and `pbjax search`: tables and plans from the command line, without a GPU."""

import json
import shutil
from dataclasses import replace
from functools import cache
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

import jax
import pytest
from typer.testing import CliRunner

from pbjax.cli.app import app
from pbjax.device import find_device
from pbjax.errors import FileError
from pbjax.planning.memory import predicted_bytes
from pbjax.planning.plan import Plan
from pbjax.planning.profiling import Profile, find_profile, find_profiles
from pbjax.planning.search import SearchOptions, search
from pbjax.tuning.offline_plan import plan_of
from pbjax.tuning.preset_model import ForwardPass
from tests.fakes import FakeTimer

DATA = Path(__file__).parents[1] / "data"
H200 = find_device("nvidia-h200")
SHIPPED = {path.stem: path for path in find_profiles(H200.slug)}


PROFILE = ("profile", "--model", "bert-base", "--batch", 2, "--out", "bert-base.json")


@pytest.fixture(autouse=True, scope="module")
def _taken_apart_once():
    """Commands that ask about the same pass of a model share its analysis."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ForwardPass, "in_shapes", cache(ForwardPass.in_shapes))
        yield


def run(*arguments):
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def printed(*arguments):
    result = run(*arguments)
    assert result.exit_code == 0, result.stderr
    return result.stdout


def refused(code, *arguments):
    result = run(*arguments)
    assert result.exit_code == code
    assert result.stdout == ""
    line = result.stderr.splitlines()[-1]
    assert line.startswith("error: ")
    assert line.count(";") >= 2
    return line


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A BERT of two layers, known by its configuration alone."""
    path = tmp_path_factory.mktemp("model") / "small"
    path.mkdir()
    shutil.copyfile(DATA / "bert" / "config.json", path / "config.json")
    return path


@pytest.fixture(scope="module")
def measured(folder):
    """A table of it, of seconds that were not measured."""
    path = folder.parent / "table.json"
    sizes = ("--batch", 6, "--seq", 12, "--dtype", "float32")
    with pytest.MonkeyPatch.context() as patch:
        FakeTimer().install(patch)
        printed("profile", "--model", folder, *sizes, "--out", path)
    return path


@pytest.fixture
def table(measured, tmp_path, monkeypatch):
    FakeTimer().install(monkeypatch)
    return shutil.copyfile(measured, tmp_path / "table.json")


def asked(folder, table, *, batch=6, seq=12, device="cpu"):
    sizes = ("--batch", batch, "--seq", seq, "--dtype", "float32")
    return ("search", "--device", device, "--model", folder, *sizes, "--profile", table)


# From the tables that ship


def test_plan_for_an_h200_is_the_same_every_time(tmp_path):
    paths = [tmp_path / f"{i}.json" for i in (1, 2)]
    asked = ("--device", "nvidia-h200", "--model", "bert-base", "--batch", 96)
    text = printed("search", *asked, "--save-plan", paths[0])
    document = json.loads(printed("search", *asked, "--json", "--save-plan", paths[1]))
    for words in ("plan: ", "why: splitting into", "unsplit", "in sequence", "searched in"):
        assert words in text
    first, plan = (replace(Plan.load(path), date="") for path in paths)
    assert first == plan
    assert plan.digest == document["plan"]["digest"]
    assert len(plan.digest) == 64
    assert all(sum(each["sizes"]) == 96 for each in document["candidates"])
    assert plan.device_kind == "NVIDIA H200"
    assert plan.batch_size == sum(plan.sizes) == 96
    assert plan.measured.unsplit is None
    assert 0 < plan.predicted.split <= plan.predicted.sequential


def stages_of(name, batch_size):
    """The stages of a few layers of a preset, as an H200 would be given them."""
    presets = import_module("models.presets")
    asked = ForwardPass(model=name, batch_size=batch_size)
    with presets.traced_for(H200.kind, H200.num_sms):
        shape = presets.find_shape(name, "bfloat16", 2).without_head().calling_kernels()
        call = shape.call("forward", batch_size, asked.length)
        return import_module("pbjax.program.analysis").analyse(
            call.function, call.inputs, device=H200
        )


@pytest.mark.parametrize("name", SHIPPED)
def test_shipped_table_knows_every_stage_of_its_model(name):
    """If not, the model or a kernel has changed: measure again with scripts/profile_models.py."""
    table = Profile.load(SHIPPED[name])
    largest = max(row.batch_size for row in table.rows)
    summary = stages_of(name, largest).summary
    known = {row.fingerprint for row in table.rows}
    assert {stage.fingerprint for stage in summary.stages} == known
    assert len({row.stage for row in table.rows if row.sm_budget}) == len(summary.block)
    first, again = (search(summary, table, largest) for _ in range(2))
    assert first.digest == again.digest
    assert first.best == again.best
    for candidate in first.by_count.values():
        assert candidate.split.batch_size == largest


def test_tables_of_the_h200_ship():
    decoders = {"gpt2-xl", "bloom-7b1", "llama3-8b"}
    assert {"bert-base", "vit-base", "conformer-l", *decoders} <= set(SHIPPED)
    for path in SHIPPED.values():
        table = Profile.load(path)
        provenance = table.provenance
        assert table.clock == "long run"
        assert provenance.device_kind == "NVIDIA H200"
        assert provenance.command.startswith("pbjax profile --device nvidia_h200 --model ")
        assert path.stat().st_size < 50_000


# From a table that is given


def test_profile_writes_a_table_that_search_reads(folder, table):
    text = printed(*asked(folder, table), "--exhaustive")
    assert "exhaustive" in text
    document = json.loads(printed(*asked(folder, table), "--exhaustive", "--json"))
    best = min(each["predicted_s"] for each in document["candidates"])
    assert document["exhaustive"]["predicted_s"] == pytest.approx(best)


def test_profile_writes_nowhere_unless_told_where(folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = run("profile", "--model", folder, "--batch", 6)
    assert result.exit_code == 2
    assert "Missing option '--out'" in result.stderr
    assert not list(tmp_path.iterdir())


def test_profile_says_where_it_wrote_and_what_makes_the_table_again(folder, tmp_path, monkeypatch):
    FakeTimer().install(monkeypatch)
    path = tmp_path / "mine.json"
    sizes = ("--batch", 6, "--seq", 12, "--dtype", "float32")
    text = printed("profile", "--model", folder, *sizes, "--out", path)
    assert f"\nwritten: {path}\nagain: pbjax profile --device cpu " in text
    assert text.endswith(f" --out {path}\n")
    assert Profile.load(path).provenance.command.endswith(" --out mine.json")


def test_profile_measures_what_is_missing_and_says_so(folder, table, tmp_path):
    options = ("--model", folder, "--seq", 12, "--dtype", "float32", "--out", table, "--json")
    again = json.loads(printed("profile", *options, "--batch", 6))
    assert again["measured"] == 0
    more = json.loads(printed("profile", *options, "--batch", 9))
    assert more["measured"] > 0
    assert more["rows"] > again["rows"]
    assert "--dtype float32" in Profile.load(table).provenance.command
    printed(*asked(folder, table, batch=9))


def test_plan_is_written_for_the_model_that_was_asked_about(folder, table, tmp_path):
    printed(*asked(folder, table), "--save-plan", tmp_path / "plan.json")
    plan = Plan.load(tmp_path / "plan.json")
    analysis = ForwardPass(model=str(folder), batch_size=6, seq_len=12, dtype="float32").in_shapes(
        find_device("cpu")
    )
    assert plan.fingerprint == analysis.fingerprint
    assert plan.batch_size == 6


def test_split_that_gains_less_than_the_tables_noise_is_not_planned(folder, table):
    asked = ForwardPass(model=str(folder), batch_size=6, seq_len=12, dtype="float32")
    analysis, measured = asked.in_shapes(find_device("cpu")), Profile.load(table)
    cheap = {2: 1e-3, 3: 1e-3, 4: 2.5e-3, 6: 2.5e-3}
    rows = [replace(row, median_s=cheap[row.batch_size], spread_s=1e-5) for row in measured.rows]
    quiet = replace(measured, rows=tuple(rows), corun=())
    noisy = replace(quiet, rows=tuple(replace(row, spread_s=1e-3) for row in rows))
    plans = [
        plan_of(analysis, analysis.summary, each, search(analysis.summary, each, 6))
        for each in (quiet, noisy)
    ]
    assert [plan.decision for plan in plans] == ["split", "unsplit"]
    assert plans[0].sizes == plans[1].sizes == (3, 3)
    assert "inside the noise" in plans[1].reason


def test_split_is_planned_where_the_unsplit_batch_does_not_fit(folder, table):
    asked = ForwardPass(model=str(folder), batch_size=6, seq_len=12, dtype="float32")
    analysis, measured = asked.in_shapes(find_device("cpu")), Profile.load(table)
    summary = replace(analysis.summary, stacked_weight_bytes=0)
    limit = predicted_bytes(summary, (2, 2, 2), (0, 0, 0))
    assert limit < predicted_bytes(summary, (6,), (0,))
    found = search(summary, measured, 6, SearchOptions(memory_limit_bytes=limit))
    plan = plan_of(analysis, summary, measured, found)
    assert plan.decision == "split"
    assert plan.reason.startswith("the unsplit batch does not fit the device; splitting into ")
    assert plan.predicted.unsplit > 0


# Refusals


def test_model_without_a_table_is_told_which_there_are():
    line = refused(2, "search", "--device", "nvidia-h200", "--model", "gpt2-medium", "--batch", 4)
    assert "bert-base" in line
    assert "pbjax profile" in line


def test_unknown_device_and_model_are_refused(folder, table):
    line = refused(2, *asked(folder, table, device="abacus"))
    assert "pbjax search --device abacus: no figures of such a device; nvidia-h200, " in line
    assert "pbjax.Device" not in line
    assert "bert-base" in refused(2, *asked("bert-huge", table))


@pytest.mark.parametrize("words", ["abacus", "a100"])
def test_profile_on_a_device_that_no_one_word_names_is_refused(words):
    line = refused(2, *PROFILE, "--device", words)
    assert f"pbjax profile --device {words}: " in line
    assert "nvidia-a100-sxm4-40gb" in line


def test_profile_on_a_machine_without_figures_is_refused_with_those_there_are(monkeypatch):
    monkeypatch.setattr(jax, "devices", lambda: [SimpleNamespace(device_kind="Abacus 9")])
    line = refused(1, *PROFILE)
    assert "pbjax profile: the first device of JAX is 'Abacus 9'" in line
    assert "nvidia-h200" in line


def test_table_of_another_device_is_refused(folder, table):
    assert "'cpu'" in refused(1, *asked(folder, table, device="nvidia-h200"))


def test_batch_beyond_the_table_is_refused_with_what_to_run(folder, table):
    line = refused(2, *asked(folder, table, batch=7))
    assert "reaches 6 rows" in line
    assert line.endswith("--batch 7 --seq 12 --dtype float32 --out small.json")


def test_batch_at_which_the_model_is_cut_otherwise_takes_the_tables_stages():
    result = run("search", "--device", "h200", "--model", "bert-base", "--batch", 48, "--json")
    assert result.exit_code == 0
    assert "cut into stages as at a batch of 96" in result.stderr
    assert sum(json.loads(result.stdout)["plan"]["sizes"]) == 48


def test_other_length_than_the_table_is_refused_with_what_to_run(folder, table):
    line = refused(2, *asked(folder, table, seq=10))
    assert "in float32 at a length of 10 its stages" in line
    assert "float32 rows of 12 x 32" in line
    assert "--seq 10" in line


def test_a_dtype_that_was_not_measured_is_refused_with_what_the_table_is_of(folder, table):
    line = refused(2, *asked(folder, table), "--dtype", "bfloat16")
    assert "in bfloat16 at a length of 12 its stages" in line
    assert "which is of float32 rows of 12 x 32" in line


def test_a_model_that_there_is_not_is_unknown_and_one_without_a_table_is_known():
    options = ("--device", "h200", "--batch", 8)
    line = refused(2, "search", "--model", "foo", *options)
    assert "foo: no such folder or preset; presets are bert-base," in line
    line = refused(2, "search", "--model", "bert-large", *options)
    assert "no table of this model ships for this device; there are tables of bert-base," in line


def test_missing_and_corrupt_tables_are_refused(folder, tmp_path):
    assert "none.json" in refused(2, *asked(folder, tmp_path / "none.json"))
    (tmp_path / "half.json").write_text('{"schema_version": 1, "rows"')
    assert "half.json" in refused(2, *asked(folder, tmp_path / "half.json"))


def test_profile_on_another_device_than_was_meant_is_refused(folder, tmp_path):
    options = ("--model", folder, "--batch", 2, "--seq", 12, "--out", tmp_path / "t.json")
    line = refused(1, "profile", *options, "--device", "nvidia-h200")
    assert "'cpu'" in line
    assert not (tmp_path / "t.json").exists()


def test_benchmark_results_are_no_tables():
    assert find_profile(H200.slug, "bench_models") is not None
    assert "bench_models" not in SHIPPED


def test_places_that_cannot_be_written_are_refused_before_the_work(
    folder, table, tmp_path, monkeypatch
):
    (tmp_path / "file").write_text("")
    place = tmp_path / "file" / "in.json"
    work = "pbjax.tuning.preset_model.ForwardPass"
    for method in ("filled", "in_shapes"):
        monkeypatch.setattr(f"{work}.{method}", lambda *_: pytest.fail("it began"))
    assert str(place) in refused(2, *asked(folder, table), "--save-plan", place)
    assert str(place) in refused(2, "profile", "--model", folder, "--batch", 2, "--out", place)


def test_a_complete_table_is_used_where_it_cannot_be_written(folder, measured, monkeypatch):
    def refuse(*_, **__):
        raise FileError("read only")

    FakeTimer().install(monkeypatch)
    monkeypatch.setattr("pbjax.tuning.measured_table.check_writable", refuse)
    sizes = ("--model", folder, "--seq", 12, "--dtype", "float32", "--out", measured)
    text = printed("profile", *sizes, "--batch", 6)
    assert "0 of them new" in text
    assert f"complete already: {measured}\n" in text
    assert "read only" in run("profile", *sizes, "--batch", 8).stderr
