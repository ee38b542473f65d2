"""`optimize` with saved plans and measured tables: what is measured, reused and refused."""

import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import jax
import pytest
from flax import nnx
from jax.experimental.compilation_cache import compilation_cache

import pbjax
from pallas_kernels.testing import assert_close
from pbjax import errors
from pbjax.device import find_device
from pbjax.planning.plan import Plan
from pbjax.planning.profiling import Profile
from pbjax.program.analysis import analyse
from pbjax.runtime.phases import Phases
from pbjax.tuning import calls
from pbjax.tuning.measured_table import measured_table
from pbjax.tuning.shortlist import best_splits, search_within

from .fakes import FakeTimer, fake_measure
from .jobs import check_house_form, check_outputs, run, scan, small
from .networks import NETWORKS, tokens


@pytest.fixture(scope="module")
def halves():
    """A job split into two halves, of which tests look at the plan."""
    with pytest.MonkeyPatch.context() as patch:
        FakeTimer().install(patch)
        return run(small(), 6, split=(3, 3))


@pytest.fixture(scope="module")
def pair():
    """A job of two rows, of which tests look at the table."""
    with pytest.MonkeyPatch.context() as patch:
        FakeTimer().install(patch)
        return run(small(), 2, split=(1, 1))


def test_repeated_layers_are_measured_once(timer):
    run(NETWORKS["function_loop"](2), 6, split=(3, 3))
    few = list(timer.stages)
    timer.stages.clear()
    run(NETWORKS["function_loop"](8), 6, split=(3, 3))
    assert timer.stages == few
    assert len(set(few)) == len(few)


def test_saved_plan_runs_without_any_measurement(timer, monkeypatch, tmp_path):
    network = small()
    first = run(network, 6, split=(4, 2))
    first.plan.save(tmp_path / "plan.json")
    timer.stages.clear()
    timer.pairs.clear()

    def never(*_):
        raise AssertionError("a plan of this device decides without timing")

    monkeypatch.setattr("pbjax.tuning.autotune.measure", never)
    again = run(network, 6, plan=tmp_path / "plan.json")
    assert again.plan == first.plan
    assert not timer.stages
    assert not timer.pairs
    check_outputs(again, network, 6)
    assert str(again.report()).count("profile:") == 0


def test_plan_is_verified_once_where_programs_are_kept(timer, monkeypatch, tmp_path):
    built = []
    lower = calls.CallWorkload.lower
    monkeypatch.setattr(
        calls.CallWorkload,
        "lower",
        lambda self, spec: built.append(spec.name) or lower(self, spec),
    )
    plan = run(small(), 6, split=(4, 2)).plan
    jax.config.update("jax_compilation_cache_dir", str(tmp_path))
    try:
        starts = []
        for _ in range(2):
            del built[:]
            again = run(small(), 6, plan=plan)
            phases = {phase.name for phase in again.report().phases}
            starts.append((list(built), "verify" in phases))
            check_outputs(again, small(), 6)
    finally:
        jax.config.update("jax_compilation_cache_dir", None)
        compilation_cache.reset_cache()
    assert starts == [(["split", "unsplit"], True), (["split"], False)]


def test_plan_that_decided_for_the_unsplit_program_runs_that(timer, monkeypatch):
    network = small()
    seconds = {"unsplit": 1e-3, "split": 2e-3, "sequential": 2e-3}
    monkeypatch.setattr("pbjax.tuning.autotune.measure", fake_measure(seconds))
    plan = run(network, 6).plan
    assert plan.decision == "unsplit"
    assert len(plan.sizes) > 1
    again = run(network, 6, plan=plan)
    assert again.plan == plan
    assert not again.report().programs


def test_unroll_of_a_plan_is_kept(timer, monkeypatch):
    unrolls = []
    lower = calls.CallWorkload.lower

    def spy(self, spec):
        unrolls.extend([] if spec.is_whole else [spec.unroll])
        return lower(self, spec)

    monkeypatch.setattr(calls.CallWorkload, "lower", spy)
    plan = run(scan(4), 6, split=(3, 3), unroll=2).plan
    assert plan.unroll == 2
    del unrolls[:]
    assert run(scan(4), 6, plan=plan).plan.unroll == 2
    assert set(unrolls) == {2}


def test_plan_for_another_model_is_refused(timer):
    plan = run(scan(2), 6, split=(3, 3)).plan
    with pytest.raises(errors.ModelError, match=plan.fingerprint) as error:
        run(scan(3), 6, plan=plan)
    check_house_form(error)


def test_plan_for_another_batch_is_refused(timer, halves):
    plan = halves.plan
    with pytest.raises(errors.InputError, match="6 rows; the example has 7") as error:
        run(small(), 7, plan=plan)
    check_house_form(error)


def test_plan_fits_other_weights_of_the_same_model(timer):
    plan = run(NETWORKS["nnx_scan"](2), 6, split=(3, 3)).plan
    other = nnx_scan_of_other_weights()
    fast = pbjax.optimize(other, *tokens(6), plan=plan)
    assert_close(fast(*tokens(6)), other(*tokens(6)), reduction=12, roundings=20)


def nnx_scan_of_other_weights():
    from .networks import NnxScan

    return NnxScan(2, nnx.Rngs(99))


@pytest.mark.parametrize(("field", "value"), [("device_kind", "NVIDIA H200"), ("jax", "0.1.0")])
def test_plan_from_elsewhere_is_measured_again_and_says_so(timer, monkeypatch, field, value):
    network = small()
    plan = replace(run(network, 6, split=(4, 2)).plan, **{field: value})
    timer.stages.clear()
    seconds = {"unsplit": 1e-3, "split": 2e-3, "sequential": 2e-3}
    monkeypatch.setattr("pbjax.tuning.autotune.measure", fake_measure(seconds))
    with pytest.warns(errors.PbjaxWarning) as caught:
        again = run(network, 6, plan=plan)
    (warned,) = caught
    # It is of the caller's line, or here of what checks types around it, not of one of ours.
    assert Path(pbjax.__file__).parent not in Path(warned.filename).parents
    assert again.plan.sizes == (4, 2)
    assert again.plan.decision == "unsplit"
    assert getattr(again.plan, field) != value
    assert not timer.stages
    (warning,) = again.report().warnings
    assert warning == str(warned.message)
    assert f"optimize(plan=...): {field} {value!r} in the plan" in warning
    assert warning.count(";") == 2
    assert f"warning: {warning}" in str(again.report())


def test_plan_whose_staggers_do_not_fit_is_refused(timer, halves):
    plan = replace(halves.plan, staggers=(0, 99))
    with pytest.raises(errors.InputError, match="99") as error:
        run(small(), 6, plan=plan)
    check_house_form(error)


def test_plan_and_split_together_are_refused(timer, halves):
    with pytest.raises(errors.InputError, match="leave out the other") as error:
        run(small(), 6, plan=halves.plan, split=(2, 4))
    check_house_form(error)


def test_profile_file_is_made_and_used_again(timer, tmp_path):
    path = tmp_path / "new" / "table.json"
    first = run(small(), 6, split=(3, 3), profile=path)
    assert first.report().rows_measured == len(timer.stages) + len(timer.pairs) > 0
    assert Profile.load(path).rows == first.report().profile.rows
    timer.stages.clear()
    timer.pairs.clear()
    again = run(small(), 6, split=(3, 3), profile=path)
    assert not timer.stages
    assert not timer.pairs
    assert again.report().rows_measured == 0


def test_profile_of_another_device_is_refused_and_not_overwritten(timer, halves, tmp_path):
    path = tmp_path / "table.json"
    halves.report().profile.save(path)
    path.write_text(
        path.read_text().replace('"device_kind": "cpu"', '"device_kind": "NVIDIA H200"')
    )
    before = path.read_bytes()
    with pytest.raises(errors.DeviceError, match="NVIDIA H200") as error:
        run(small(), 6, split=(3, 3), profile=path)
    check_house_form(error)
    assert path.read_bytes() == before
    assert not timer.stages


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: "",
        lambda text: "{",
        lambda text: "[]",
        lambda text: text[: len(text) // 2],
        lambda text: text[:-5],
        lambda text: re.sub(r'"schema_version": \d', '"schema_version": 9', text),
        lambda text: text.replace('"median_s": ', '"median_s": -'),
        lambda text: text.replace('"rows"', '"lines"'),
        lambda text: "\udcff" + text,
    ],
    ids=["empty", "brace", "list", "half", "tail", "schema", "negative", "renamed", "no UTF-8"],
)
def test_damaged_profile_is_refused_and_left_alone(timer, pair, tmp_path, damage):
    path = tmp_path / "table.json"
    pair.report().profile.save(path)
    path.write_bytes(damage(path.read_text()).encode(errors="surrogateescape"))
    before = path.read_bytes()
    with pytest.raises(errors.FileError, match="load") as error:
        run(small(), 2, split=(1, 1), profile=path)
    assert "\n" not in str(error.value)
    assert str(error.value).count(";") >= 2
    assert path.read_bytes() == before
    assert not timer.stages


def test_interrupt_keeps_rows_and_only_missing_ones_are_measured_afterwards(monkeypatch, tmp_path):
    path = tmp_path / "table.json"
    stopped = FakeTimer(limit=4).install(monkeypatch)
    with pytest.raises(KeyboardInterrupt):
        run(small(), 6, split=(3, 3), profile=path)
    assert len(Profile.load(path).rows) == 4
    resumed = FakeTimer().install(monkeypatch)
    fast = run(small(), 6, split=(3, 3), profile=path)
    assert not set(resumed.stages) & set(stopped.stages)
    assert len(fast.report().profile.rows) == len(stopped.stages) + len(resumed.stages)
    assert [file.name for file in tmp_path.iterdir()] == ["table.json"]


def test_rows_of_another_jax_are_used_with_a_warning(timer, pair, tmp_path):
    path = tmp_path / "table.json"
    pair.report().profile.save(path)
    path.write_text(path.read_text().replace(f'"jax": "{jax.__version__}"', '"jax": "0.1.0"'))
    with pytest.warns(errors.PbjaxWarning, match=r"jax differs \(0.1.0 in the profile, "):
        fast = run(small(), 2, split=(1, 1), profile=path)
    assert not timer.stages
    assert any("0.1.0" in warning for warning in fast.report().warnings)


def test_profile_object_is_completed_and_not_changed(timer, pair):
    table = pair.report().profile
    rows = table.rows
    larger = run(small(), 6, split=(3, 3), profile=table).report().profile
    assert table.rows == rows
    assert set(rows) < set(larger.rows)


DECIDES = """
import os, sys
import jax
sys.path.insert(0, sys.argv[1])
from pbjax.program.analysis import analyse
from pbjax.tuning.shortlist import best_splits, search_within
from pbjax.device import find_device
from pbjax.runtime.phases import Phases
from pbjax.tuning.measured_table import measured_table
from tests.networks import NETWORKS
network = NETWORKS["linen_scan"](2)
device = find_device("cpu", num_cores=os.cpu_count() or 1)
inputs = network.inputs(6)
analysis = analyse(network.model, inputs, device=device, variables=network.variables)
table = measured_table(analysis, inputs, sys.argv[2], Phases())
found = search_within(table, 6, device.memory_bytes)
sizes = [spec.sizes for spec in best_splits(found)]
print(found.digest, analysis.fingerprint, table.rows_measured, sizes)
"""


def test_same_profile_decides_the_same_in_another_process(timer, tmp_path):
    path = tmp_path / "table.json"
    network = NETWORKS["linen_scan"](2)
    run(network, 6, split=(3, 3), profile=path)
    device = find_device("cpu", num_cores=os.cpu_count() or 1)
    analysis = analyse(network.model, tokens(6), device=device, variables=network.variables)
    table = measured_table(analysis, tokens(6), path, Phases())
    here = search_within(table, 6, device.memory_bytes)
    there = subprocess.run(
        [sys.executable, "-c", DECIDES, str(Path(__file__).parent.parent), str(path)],
        env={
            "PYTHONHASHSEED": "7",
            "JAX_PLATFORMS": "cpu",
            "XLA_FLAGS": os.environ.get("XLA_FLAGS", ""),
        },
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    sizes = [spec.sizes for spec in best_splits(here)]
    assert there.strip() == f"{here.digest} {analysis.fingerprint} 0 {sizes}"
    assert len(here.digest) == 64


def test_plan_of_a_search_reads_back_equal(timer, tmp_path):
    plan = run(small(), 6).plan
    plan.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == plan
    assert len(plan.digest) == 64
