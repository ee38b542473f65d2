"""`optimize` from end to end, on small networks and with a stage timer that runs nothing."""

import json
import time
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import pbjax
from pallas_kernels.testing import assert_close
from pbjax import errors
from pbjax.arguments import whole_numbers
from pbjax.device import find_device
from pbjax.runtime.compile_clock import STEPS, CompileClock
from pbjax.runtime.execution import SubBatchState

from .fakes import FakeTimer, fake_measure
from .jobs import check_house_form, check_outputs, run, small
from .networks import NETWORKS, D, T, normal, tokens

# Batches of two have one split, which compiles in half the time of the splits of five.
BATCH_SIZES = dict.fromkeys(NETWORKS, 2) | dict.fromkeys(
    ("nnx_loop", "linen_scan", "two_axes", "no_repetition"), 5
)


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
        with CompileClock() as clock:
            fast = run(network, batch_size, progress=lambda *state: seen.append(state))
        wall_s = time.perf_counter() - start
    return {
        "network": network,
        "batch_size": batch_size,
        "fast": fast,
        "before": before,
        "wall_s": wall_s,
        "making_s": sum(clock.seconds.values()),
        "progress": seen,
    }


def _is_nnx(network):
    return isinstance(network.model, nnx.Module)


def test_outputs_keep_values_structure_and_dtypes(job):
    check_outputs(job["fast"], job["network"], job["batch_size"])


NNX_NETWORKS = [name for name in NETWORKS if name.startswith("nnx")]


@pytest.mark.parametrize("job", NNX_NETWORKS, indirect=True, scope="module")
def test_model_is_not_changed(job):
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


def test_all_that_makes_programs_is_in_a_phase(job):
    phases = {phase.name: phase.seconds for phase in job["fast"].report().phases}
    assert sum(phases.values()) <= job["wall_s"]
    # Not all to the moment: a step that ends in one phase may have begun before it.
    assert sum(phases.get(step, 0.0) for step in STEPS) >= 0.8 * job["making_s"]


def test_progress_names_every_phase(job):
    named = dict.fromkeys(name for name, *_ in job["progress"])
    clocked = {phase.name for phase in job["fast"].report().phases}
    assert clocked - {"trace", "lower", "compile"} == named.keys() - {"compile"}
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


def test_sizes_of_numpy_are_numbers_like_others(timer, tmp_path):
    fast = run(small(), 6, split=tuple(np.array([4, 2])))
    fast.plan.save(tmp_path / "plan.json")
    assert pbjax.Plan.load(tmp_path / "plan.json").sizes == (4, 2)


@pytest.mark.parametrize("sizes", [3, "33", (3.0, 3.0), ("3", "3"), (None,)], ids=str)
def test_sizes_that_are_no_numbers_are_refused(sizes):
    with pytest.raises(errors.InputTypeError) as error:
        whole_numbers("optimize(split)", sizes)
    check_house_form(error)


def test_shapes_in_place_of_examples_are_refused(timer):
    with pytest.raises(errors.InputTypeError) as error:
        pbjax.optimize(small().model, *jax.eval_shape(lambda: tokens(6)))
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
    with pytest.raises(errors.ModelError, match="raises at batch size") as error:
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
def test_model_that_mixes_its_batch_runs_whole_and_the_operation_is_named(timer, mix, operation):
    weights = normal(1, D, D)

    def model(x):
        return mix(jnp.tanh(x @ weights))

    fast = pbjax.optimize(model, *tokens(6))
    assert (fast.plan.decision, fast.plan.sizes) == ("unsplit", (6,))
    assert operation in fast.plan.reason
    assert_close(fast(*tokens(6)), model(*tokens(6)), reduction=T * D, roundings=20)
    assert not timer.stages
    with pytest.raises(errors.ModelError, match=operation) as error:
        pbjax.optimize(model, *tokens(6), split=(4, 2))
    check_house_form(error)


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
    monkeypatch.setattr("pbjax.tuning.autotune.measure", fake_measure(seconds))
    plan = run(small(), 6).plan
    assert plan.decision == decision
    assert reason in plan.reason
    assert "2 ms" in plan.reason
    assert plan.measured.unsplit == 2e-3
    assert plan.measured.split == split_s


def test_gain_inside_the_noise_keeps_the_unsplit_program(timer, monkeypatch):
    seconds = {"unsplit": 2e-3, "split": 2e-3 - 1.5e-6, "sequential": 2e-3}
    monkeypatch.setattr("pbjax.tuning.autotune.measure", fake_measure(seconds))
    plan = run(small(), 6).plan
    assert plan.decision == "unsplit"
    assert "inside the noise" in plan.reason


@pytest.mark.parametrize("factor", [1.01, float("nan")])
def test_program_made_wrong_is_refused(timer, monkeypatch, factor):
    run_stage = SubBatchState._run_stage

    def wrong(self, index, block):
        run_stage(self, index, block)
        if index == 1:
            self.live = {value: x * factor for value, x in self.live.items()}

    monkeypatch.setattr(SubBatchState, "_run_stage", wrong)
    with pytest.raises(errors.VerificationError, match="output 0") as error:
        run(NETWORKS["nnx_scan"](2), 6, split=(3, 3))
    check_house_form(error)
