"""`optimize` from end to end, on small networks and with a stage timer that runs nothing."""

import json
import os
import re
import subprocess
import sys
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import pbjax
from pallas_kernels.testing import assert_close
from pbjax import errors
from pbjax.analysis import analyse
from pbjax.choices import searched
from pbjax.device import find_device
from pbjax.execution import Lane
from pbjax.phases import Phases
from pbjax.plan import Plan
from pbjax.profiling import Profile
from pbjax.tables import measured_table

from .fakes import FakeTimer, fake_measure
from .networks import NETWORKS, D, T, normal, tokens

# Batches of two have one split, which compiles in half the time of the splits of five.
BATCH_SIZES = dict.fromkeys(NETWORKS, 2) | dict.fromkeys(
    ("nnx_loop", "linen_scan", "two_axes", "no_repetition"), 5
)
HOUSE_FORM = re.compile(r"[^;]+: [^;]+;[^;]+;[^;]+")


def run(network, batch_size, **options):
    return pbjax.optimize(
        network.model,
        *network.inputs(batch_size),
        variables=network.variables,
        batch_axes=network.batch_axes,
        **options,
    )


def check_house_form(error):
    message = str(error.value)
    assert "\n" not in message
    assert message.count(";") >= 2
    assert HOUSE_FORM.match(message)


@pytest.fixture
def timer(monkeypatch):
    return FakeTimer().install(monkeypatch)


@pytest.fixture(scope="module", params=NETWORKS)
def job(request):
    """A network, optimised once for all tests of what came of it."""
    network = NETWORKS[request.param](2)
    leaves = jax.tree.leaves(nnx.state(network.model)) if _is_nnx(network) else []
    before = [np.array(leaf) for leaf in leaves]
    seen = []
    batch_size = BATCH_SIZES[request.param]
    jax.block_until_ready(network.inputs(batch_size))  # compiles what makes the inputs
    with pytest.MonkeyPatch.context() as monkeypatch:
        FakeTimer().install(monkeypatch)
        start = time.perf_counter()
        fast = run(network, batch_size, progress=lambda *state: seen.append(state))
        wall_s = time.perf_counter() - start
    return {
        "network": network,
        "batch_size": batch_size,
        "fast": fast,
        "before": before,
        "wall_s": wall_s,
        "progress": seen,
    }


def _is_nnx(network):
    return isinstance(network.model, nnx.Module)


def small():
    return NETWORKS["no_repetition"](1)


def scan(num_layers):
    return NETWORKS["function_scan"](num_layers)


def check_outputs(fast, network, batch_size):
    inputs = network.inputs(batch_size)
    found, expected = fast(*inputs), network.direct(*inputs)
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert a.dtype == jnp.asarray(b).dtype
        assert_close(a, b, reduction=12, roundings=20)


def test_outputs_keep_values_structure_and_dtypes(job):
    check_outputs(job["fast"], job["network"], job["batch_size"])


def test_model_is_not_changed(job):
    if not _is_nnx(job["network"]):
        pytest.skip("only nnx modules hold their arrays")
    after = jax.tree.leaves(nnx.state(job["network"].model))
    assert len(after) == len(job["before"]) > 0
    for a, b in zip(after, job["before"], strict=True):
        np.testing.assert_array_equal(np.array(a), b, strict=True)


def test_report_is_text_and_json(job):
    report = job["fast"].report()
    document = json.loads(json.dumps(report.to_dict()))
    assert document["plan"]["sizes"] == list(job["fast"].plan.sizes)
    text = str(report)
    for part in ("stages:", "profile:", "search:", "timetable:", "programs:", "phases:"):
        assert f"\n{part}" in text
    assert f"decision: {job['fast'].plan.decision}: {job['fast'].plan.reason}" in text


def test_unsplit_sequential_and_split_programs_are_timed(job):
    programs = job["fast"].report().programs
    assert programs[0].name == "unsplit"
    size = job["batch_size"]
    assert programs[0].sizes == (size,)
    assert {len(program.sizes) for program in programs} == {1, 2, 3}.intersection(range(size + 1))
    assert all(sum(program.sizes) == size for program in programs)
    assert any(program.name == "sequential" for program in programs)


def test_phases_add_up_to_the_wall_time(job):
    phases = {phase.name: phase.seconds for phase in job["fast"].report().phases}
    assert sum(phases.values()) <= job["wall_s"]
    assert job["wall_s"] - sum(phases.values()) <= max(0.05 * job["wall_s"], 0.05)


def test_progress_names_every_phase(job):
    named = dict.fromkeys(name for name, *_ in job["progress"])
    assert tuple(named) == tuple(phase.name for phase in job["fast"].report().phases)
    assert all(0 <= done <= total for _, done, total, _ in job["progress"])


@pytest.mark.parametrize("sizes", [(4, 2), (1, 2, 3), (5, 1), (6,)])
def test_given_split_runs_as_given(timer, sizes):
    network = small()
    fast = run(network, 6, split=sizes)
    assert fast.plan.sizes == sizes
    assert fast.plan.reason == f"split={sizes} was given"
    assert fast.plan.decision == ("split" if len(sizes) > 1 else "unsplit")
    check_outputs(fast, network, 6)


@pytest.mark.parametrize("sizes", [(2,), (2, 2), (4, 3), (), (6, 0), (7, -1), (1, 1, 2, 2)])
def test_split_that_is_none_of_the_batch_is_refused_before_anything_is_measured(timer, sizes):
    with pytest.raises(errors.InputError) as error:
        run(small(), 6, split=sizes)
    check_house_form(error)
    assert not timer.stages


def test_split_of_a_single_row_is_refused(timer):
    with pytest.raises(errors.InputError, match=r"split=\(2,\)"):
        run(small(), 1, split=(2,))


@pytest.mark.parametrize(
    "options",
    [
        {"buckets": (0,)},
        {"buckets": (7,)},
        {"buckets": (2,), "split": (3, 3)},
        {"unroll": 0},
        {"unroll": -1},
        {"device": find_device("NVIDIA H200")},
        {"batch_axes": 3},
        {"batch_axes": -1},
        {"batch_axes": None},
        {"batch_axes": (0, 0)},
        {"variables": {}},
        {"plan": "none.json"},
    ],
    ids=str,
)
def test_wrong_argument_is_refused_in_the_house_form(timer, options):
    with pytest.raises(errors.PbjaxError) as error:
        pbjax.optimize(small().model, *tokens(6), **options)
    check_house_form(error)
    assert not timer.stages


def test_no_inputs_are_refused():
    with pytest.raises(errors.InputError) as error:
        pbjax.optimize(small().model)
    check_house_form(error)


def test_model_that_raises_when_traced_is_refused_with_its_own_words():
    with pytest.raises(errors.ModelError, match="contracting dimensions") as error:
        pbjax.optimize(lambda x: x @ jnp.eye(3), *tokens(6))
    assert "\n" not in str(error.value)
    assert str(error.value).count(";") >= 2


def test_nnx_module_for_other_inputs_is_refused_with_its_own_words():
    model = NETWORKS["nnx_loop"](1).model
    with pytest.raises(errors.ModelError, match="cannot be traced") as error:
        pbjax.optimize(model, jnp.zeros((4, 3)))
    assert "\n" not in str(error.value)


class BatchNormed(nnx.Module):
    def __init__(self, rngs):
        self.up = nnx.Linear(D, D, rngs=rngs)
        self.norm = nnx.BatchNorm(D, rngs=rngs)

    def __call__(self, x):
        return self.norm(self.up(x))


@pytest.mark.parametrize(
    ("mix", "operation"),
    [
        (lambda x: x - x.mean(axis=0, keepdims=True), "reduce_sum"),
        (lambda x: jnp.cumsum(x, axis=0), "cumsum"),
        (lambda x: jnp.sort(x, axis=0), "sort"),
        (lambda x: x[::-1], "rev"),
        (lambda x: x.reshape(-1, 2 * T, D) @ jnp.eye(D), "reshape"),
        (lambda x: jnp.einsum("btd,ctd->bc", x, x), "dot_general"),
        (lambda x: x * x[:1], "slice"),
    ],
)
def test_model_that_mixes_its_batch_is_refused_by_the_operation_name(timer, mix, operation):
    weights = normal(1, D, D)
    with pytest.raises(errors.ModelError, match=operation) as error:
        pbjax.optimize(lambda x: mix(jnp.tanh(x @ weights)), *tokens(6))
    assert "\n" not in str(error.value)
    assert not timer.stages


def test_batch_norm_in_training_mode_is_refused():
    model = BatchNormed(nnx.Rngs(0))
    model.train()
    with pytest.raises(errors.ModelError, match="mean"):
        pbjax.optimize(model, *tokens(6))


def test_batch_norm_in_eval_mode_runs(timer):
    model = BatchNormed(nnx.Rngs(0))
    model.eval()
    fast = pbjax.optimize(model, *tokens(6), split=(4, 2))
    assert_close(fast(*tokens(6)), model(*tokens(6)), reduction=12, roundings=4)


@pytest.mark.parametrize("name", ["function_scan", "two_axes"])
@pytest.mark.parametrize("batch_size", [1, 2])
def test_smallest_batches_run(timer, name, batch_size):
    network = NETWORKS[name](2)
    fast = run(network, batch_size)
    check_outputs(fast, network, batch_size)


def test_single_row_is_not_measured_and_says_why(timer):
    fast = run(small(), 1)
    assert not timer.stages
    assert fast.plan.decision == "unsplit"
    assert fast.plan.reason == "a batch of one row cannot be split"


@pytest.mark.parametrize(
    "model",
    [lambda x: jnp.tanh(x @ jnp.eye(D)), partial(lambda s, x: jnp.tanh(x @ jnp.eye(D)) * s, 2.0)],
    ids=["lambda", "partial"],
)
def test_function_without_a_name_runs(timer, model):
    fast = pbjax.optimize(model, *tokens(4), split=(2, 2))
    assert_close(fast(*tokens(4)), model(*tokens(4)), reduction=12, roundings=4)


def test_64_bit_inputs_of_numpy_are_taken_as_jax_takes_them(timer):
    table = normal(3, 20, D)
    ids = np.arange(12).reshape(4, 3)
    fast = pbjax.optimize(lambda ids: jnp.tanh(table[ids]).sum(axis=1), ids, split=(2, 2))
    assert_close(fast(ids), jnp.tanh(table[ids]).sum(axis=1), reduction=3, roundings=2)


@pytest.mark.parametrize(
    ("split_s", "decision", "reason"),
    [(1e-3, "split", "more than the noise"), (3e-3, "unsplit", "slower")],
)
def test_faster_program_is_kept_and_the_reason_said(timer, monkeypatch, split_s, decision, reason):
    seconds = {"unsplit": 2e-3, "split": split_s, "sequential": 4e-3}
    monkeypatch.setattr("pbjax.contest.measure", fake_measure(seconds))
    plan = run(small(), 6).plan
    assert plan.decision == decision
    assert reason in plan.reason
    assert "2 ms" in plan.reason
    assert plan.measured.unsplit == 2e-3
    assert plan.measured.split == split_s


def test_gain_inside_the_noise_keeps_the_unsplit_program(timer, monkeypatch):
    seconds = {"unsplit": 2e-3, "split": 2e-3 - 1.5e-6, "sequential": 2e-3}
    monkeypatch.setattr("pbjax.contest.measure", fake_measure(seconds))
    plan = run(small(), 6).plan
    assert plan.decision == "unsplit"
    assert "inside the noise" in plan.reason


@pytest.mark.parametrize("factor", [1.01, float("nan")])
def test_program_made_wrong_is_refused(timer, monkeypatch, factor):
    run_stage = Lane._run_stage

    def wrong(self, index, block):
        run_stage(self, index, block)
        if index == 1:
            self.live = {value: x * factor for value, x in self.live.items()}

    monkeypatch.setattr(Lane, "_run_stage", wrong)
    with pytest.raises(errors.VerificationError, match="output 0") as error:
        run(NETWORKS["nnx_scan"](2), 6, split=(3, 3))
    check_house_form(error)


def test_repeated_layers_are_measured_once(timer):
    run(NETWORKS["function_loop"](2), 6, split=(3, 3))
    few = list(timer.stages)
    timer.stages.clear()
    run(NETWORKS["function_loop"](24), 6, split=(3, 3))
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

    monkeypatch.setattr("pbjax.contest.measure", never)
    again = run(network, 6, plan=tmp_path / "plan.json")
    assert again.plan == first.plan
    assert not timer.stages
    assert not timer.pairs
    check_outputs(again, network, 6)
    assert str(again.report()).count("profile:") == 0


def test_plan_that_decided_for_the_unsplit_program_runs_that(timer, monkeypatch):
    network = small()
    seconds = {"unsplit": 1e-3, "split": 2e-3, "sequential": 2e-3}
    monkeypatch.setattr("pbjax.contest.measure", fake_measure(seconds))
    plan = run(network, 6).plan
    assert plan.decision == "unsplit"
    assert len(plan.sizes) > 1
    again = run(network, 6, plan=plan)
    assert again.plan == plan
    assert not again.report().programs


def test_unroll_of_a_plan_is_kept(timer, monkeypatch):
    unrolls = []
    from pbjax import contest

    compile_split = contest.compile_split

    def spy(*args, unroll):
        unrolls.append(unroll)
        return compile_split(*args, unroll=unroll)

    monkeypatch.setattr("pbjax.contest.compile_split", spy)
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


def test_plan_for_another_batch_is_refused(timer):
    plan = run(small(), 6, split=(3, 3)).plan
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
    monkeypatch.setattr("pbjax.contest.measure", fake_measure(seconds))
    again = run(network, 6, plan=plan)
    assert again.plan.sizes == (4, 2)
    assert again.plan.decision == "unsplit"
    assert getattr(again.plan, field) != value
    assert not timer.stages
    (warning,) = again.report().warnings
    assert f"{field} {value!r} in the plan" in warning
    assert f"warning: {warning}" in str(again.report())


def test_plan_whose_staggers_do_not_fit_is_refused(timer):
    plan = replace(run(small(), 6, split=(3, 3)).plan, staggers=(0, 99))
    with pytest.raises(errors.InputError, match="99") as error:
        run(small(), 6, plan=plan)
    check_house_form(error)


def test_plan_and_split_together_are_refused(timer):
    plan = run(small(), 6, split=(3, 3)).plan
    with pytest.raises(errors.InputError, match="leave out the other") as error:
        run(small(), 6, plan=plan, split=(2, 4))
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


def test_profile_of_another_device_is_refused_and_not_overwritten(timer, tmp_path):
    path = tmp_path / "table.json"
    run(small(), 6, split=(3, 3), profile=path)
    path.write_text(
        path.read_text().replace('"device_kind": "cpu"', '"device_kind": "NVIDIA H200"')
    )
    before = path.read_bytes()
    timer.stages.clear()
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
        lambda text: text.replace('"schema_version": 1', '"schema_version": 2'),
        lambda text: text.replace('"median_s": ', '"median_s": -'),
        lambda text: text.replace('"rows"', '"lines"'),
        lambda text: "\udcff" + text,
    ],
    ids=["empty", "brace", "list", "half", "tail", "schema", "negative", "renamed", "no UTF-8"],
)
def test_damaged_profile_is_refused_and_left_alone(timer, tmp_path, damage):
    path = tmp_path / "table.json"
    run(small(), 2, split=(1, 1), profile=path)
    path.write_bytes(damage(path.read_text()).encode(errors="surrogateescape"))
    before = path.read_bytes()
    timer.stages.clear()
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


def test_rows_of_another_jax_are_used_with_a_warning(timer, tmp_path):
    path = tmp_path / "table.json"
    run(small(), 2, split=(1, 1), profile=path)
    path.write_text(path.read_text().replace(f'"jax": "{jax.__version__}"', '"jax": "0.1.0"'))
    timer.stages.clear()
    fast = run(small(), 2, split=(1, 1), profile=path)
    assert not timer.stages
    assert any("0.1.0" in warning for warning in fast.report().warnings)


def test_profile_object_is_completed_and_not_changed(timer):
    table = run(small(), 2, split=(1, 1)).report().profile
    rows = table.rows
    larger = run(small(), 6, split=(3, 3), profile=table).report().profile
    assert table.rows == rows
    assert set(rows) < set(larger.rows)


DECIDES = """
import os, sys
import jax
sys.path.insert(0, sys.argv[1])
from pbjax.analysis import analyse
from pbjax.choices import searched
from pbjax.device import find_device
from pbjax.phases import Phases
from pbjax.tables import measured_table
from tests.networks import NETWORKS
network = NETWORKS["linen_scan"](2)
device = find_device("cpu", num_cores=os.cpu_count() or 1)
inputs = network.inputs(6)
analysis = analyse(network.model, inputs, device=device, variables=network.variables)
table = measured_table(analysis, inputs, sys.argv[2], Phases())
choice = searched(table, 6)
print(choice.digest, analysis.fingerprint, table.rows_measured, [w.sizes for w in choice.ways])
"""


def test_same_profile_decides_the_same_in_another_process(timer, tmp_path):
    path = tmp_path / "table.json"
    network = NETWORKS["linen_scan"](2)
    run(network, 6, split=(3, 3), profile=path)
    device = find_device("cpu", num_cores=os.cpu_count() or 1)
    analysis = analyse(network.model, tokens(6), device=device, variables=network.variables)
    here = searched(measured_table(analysis, tokens(6), path, Phases()), 6)
    there = subprocess.run(
        [sys.executable, "-c", DECIDES, str(Path(__file__).parent.parent), str(path)],
        env={"PYTHONHASHSEED": "7", "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    sizes = [way.sizes for way in here.ways]
    assert there.strip() == f"{here.digest} {analysis.fingerprint} 0 {sizes}"
    assert len(here.digest) == 64


def test_plan_of_a_search_reads_back_equal(timer, tmp_path):
    plan = run(small(), 6).plan
    plan.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == plan
    assert len(plan.digest) == 64
