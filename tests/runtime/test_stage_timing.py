"""Stage timing: what a stage is fed with, what is compiled, and under what load it is timed."""

from itertools import accumulate, chain
from threading import current_thread, main_thread
from time import perf_counter
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import use_abstract_mesh

from pallas_kernels.operation import PRIMITIVE
from pallas_kernels.testing import assert_close
from pbjax.device import find_device
from pbjax.errors import DeviceError
from pbjax.planning.profile_grid import Run
from pbjax.planning.profiling import Timing
from pbjax.program.analysis import analyse
from pbjax.runtime import stage_timing, timing
from pbjax.runtime.stage_timing import StageTimer
from pbjax.runtime.timing import SAMPLES
from tests.kernel_decoder import H200, B, decode_step, inputs
from tests.networks import NETWORKS


def stage_timer(name, batch_size):
    network = NETWORKS[name](2)
    inputs = network.inputs(batch_size)
    device = find_device("cpu", num_cores=2)
    analysis = analyse(
        network.model,
        inputs,
        device=device,
        variables=network.variables,
        batch_axes=network.batch_axes,
    )
    leaves = [jnp.asarray(leaf) for leaf in jax.tree.leaves(inputs)]
    timer = StageTimer(analysis.program_at, analysis.weights, leaves, analysis.batch.axes)
    return network, inputs, analysis, timer


@pytest.fixture
def run_once(monkeypatch):
    """Times nothing, but keeps what the last stage to be timed returned."""
    kept = []

    def run(function, *args):
        kept.append((args, function(*args)))
        return Timing(median_s=2.0, spread_s=0.0, samples=1)

    monkeypatch.setattr(stage_timing, "time_function", run)
    return kept


@pytest.mark.parametrize(
    ("name", "size"), [("two_axes", 1), ("two_axes", 3), ("function_scan", 2), ("function_loop", 1)]
)
def test_every_stage_runs_at_every_size(run_once, name, size):
    _, _, analysis, timer = stage_timer(name, 4)
    for stage in analysis.summary.stages:
        assert timer(Run(stage=stage, batch_size=size)).median_s == 2.0
    assert len(run_once) == len(analysis.summary.stages)


def test_stages_are_fed_with_what_the_stages_before_them_computed(run_once):
    network, inputs, analysis, timer = stage_timer("no_repetition", 4)
    timer(Run(stage=analysis.summary.block[-1], batch_size=4))
    ((_, (results,)),) = run_once
    assert_close(results[-1], network.direct(*inputs), reduction=12, roundings=4)


def test_smaller_sub_batch_gets_the_first_rows(run_once):
    _, (x,), analysis, timer = stage_timer("no_repetition", 4)
    timer(Run(stage=analysis.summary.block[0], batch_size=2))
    (((args,), _),) = run_once
    fed = [a for a in args if a.shape == x[:2].shape]
    np.testing.assert_array_equal(fed[0], x[:2])


def test_pair_runs_both_stages_in_one_program(run_once):
    _, _, analysis, timer = stage_timer("no_repetition", 4)
    first, second, *_ = [Run(stage=stage, batch_size=2) for stage in analysis.summary.block]
    assert timer.pair(first, second).median_s == 2.0
    ((_, both),) = run_once
    for run, together in zip((first, second), both, strict=True):
        timer(run)
        _, (alone,) = run_once[-1]
        for a, b in zip(together, alone, strict=True):
            assert_close(a, b, reduction=12, roundings=4)


def test_what_is_prepared_is_not_compiled_again(run_once, monkeypatch):
    _, _, analysis, timer = stage_timer("no_repetition", 4)
    runs = [Run(stage=stage, batch_size=2) for stage in analysis.summary.stages]
    seen = []
    timer.prepare([(run,) for run in runs], lambda *state: seen.append(state))
    assert seen[-1][:2] == (len(runs), len(runs))
    monkeypatch.setattr(stage_timing, "_compile", lambda lowered: pytest.fail("compiled again"))
    for run in runs:
        timer(run)


def test_stage_that_cannot_be_compiled_is_not_swallowed(monkeypatch):
    _, _, analysis, timer = stage_timer("no_repetition", 4)

    def refuse(lowered):
        raise DeviceError("no such kernel; none; none")

    monkeypatch.setattr(stage_timing, "_compile", refuse)
    with pytest.raises(DeviceError, match="no such kernel"):
        timer(Run(stage=analysis.summary.block[0], batch_size=2))


@pytest.mark.parametrize(("mark", "alone"), [("module", True), ("no such text", False)])
def test_programs_with_cudnn_run_when_no_other_does(monkeypatch, mark, alone):
    *_, analysis, timer = stage_timer("no_repetition", 4)
    runs = [(Run(stage=stage, batch_size=2),) for stage in analysis.summary.stages]
    threads = []
    monkeypatch.setattr(stage_timing, "CUDNN", mark)
    monkeypatch.setattr(stage_timing, "_run_once", lambda *_: threads.append(current_thread()))
    timer.prepare(runs)
    assert len(threads) == len(runs)
    assert {thread is main_thread() for thread in threads} == {alone}


def test_seconds_are_those_of_the_clock_around_calls_of_the_stage(monkeypatch):
    _, _, analysis, timer = stage_timer("no_repetition", 4)
    run = Run(stage=analysis.summary.block[0], batch_size=4)
    timer.prepare([(run,)])
    seconds = [0.5, 1.0, 7.0, 3.0, 2.0, 5.0]
    readings = accumulate(chain.from_iterable((0.25, each) for each in seconds))
    clock = SimpleNamespace(perf_counter=lambda: next(readings))
    monkeypatch.setattr(timing, "time", clock)
    found = timer(run)
    assert (found.median_s, found.spread_s, found.samples) == (3.0, 4.5, SAMPLES)
    assert next(readings, None) is None


def test_clock_of_the_machine_gives_seconds():
    _, _, analysis, timer = stage_timer("no_repetition", 4)
    start = perf_counter()
    found = timer(Run(stage=analysis.summary.block[0], batch_size=4))
    assert 0 < found.median_s < perf_counter() - start


def test_no_weight_is_copied_for_a_size(run_once):
    *_, analysis, timer = stage_timer("function_loop", 6)
    shapes = {weight.shape for weight in analysis.weights}
    own = {id(weight) for weight in analysis.weights}
    for size in (2, 3, 4, 6):
        for stage in analysis.summary.block:
            timer(Run(stage=stage, batch_size=size))
    read = [arg for (args,), _ in run_once for arg in args if arg.shape in shapes]
    assert read
    assert all(id(arg) in own for arg in read)


@pytest.fixture
def loads(monkeypatch):
    """As on a GPU, without one: the load and the jobs of each trace."""
    seen = []

    def run(load, jobs):
        seen.append((load, jobs))
        return [
            Timing(median_s=float(place), spread_s=0.0, samples=5) for place in range(len(jobs))
        ]

    monkeypatch.setattr(stage_timing, "on_gpu", lambda: True)
    monkeypatch.setattr(stage_timing, "time_under_load", run)
    return seen


def test_on_a_gpu_stages_are_timed_between_runs_of_the_whole_block(loads):
    _, _, analysis, timer = stage_timer("no_repetition", 4)
    run = Run(stage=analysis.summary.block[0], batch_size=2)
    timer.prepare([(run,)])
    assert timer(run).median_s == 0.0
    ((load, jobs),) = loads
    (alone,) = jobs.values()
    assert [leaf.shape[0] for leaf in jax.tree.leaves(alone())] == [2]
    assert len(load()) == len(analysis.summary.block)
    assert all(leaf.shape[0] == 4 for leaf in jax.tree.leaves(load()))


def test_several_stages_share_a_trace_and_each_is_timed_once(loads, monkeypatch):
    monkeypatch.setattr(stage_timing, "JOBS_PER_TRACE", 3)
    _, _, analysis, timer = stage_timer("no_repetition", 4)
    first, second, *_ = [Run(stage=stage, batch_size=2) for stage in analysis.summary.block]
    wanted = [
        (Run(stage=each.stage, batch_size=size),) for each in (first, second) for size in (2, 4)
    ]
    timer.prepare([*wanted, (first, second)])
    found = [timer(run).median_s for (run,) in wanted]
    assert found == [0.0, 1.0, 2.0, 0.0]
    assert timer.pair(first, second).median_s == 1.0
    assert [len(jobs) for _, jobs in loads] == [3, 2]
    names = [name for _, jobs in loads for name in jobs]
    assert len(set(names)) == 5


def test_programs_carry_the_names_that_their_kernels_are_found_by(loads):
    _, _, analysis, timer = stage_timer("no_repetition", 4)
    runs = [Run(stage=stage, batch_size=2) for stage in analysis.summary.block]
    timer.prepare([(run,) for run in runs])
    timer(runs[0])
    ((load, jobs),) = loads
    modules = {name: call.func.as_text().split(",")[0] for name, call in jobs.items()}
    assert modules == {name: f"HloModule {name}" for name in jobs}
    assert load.func.as_text().split(",")[0] not in modules.values()


@pytest.fixture
def exports(monkeypatch):
    """Counts what is exported."""
    seen, real = [], stage_timing.export.export

    def count(function, **options):
        seen.append(function)
        return real(function, **options)

    monkeypatch.setattr(stage_timing.export, "export", count)
    return seen


def test_kernels_are_lowered_once_for_all_jobs_of_their_stage(loads, exports):
    with use_abstract_mesh(H200):
        analysis = analyse(decode_step, inputs(B), device=find_device("NVIDIA H200"))
    leaves = jax.tree.leaves(inputs(B))
    timer = StageTimer(analysis.program_at, analysis.weights, leaves, analysis.batch.axes)
    runs = [Run(stage=stage, batch_size=B) for stage in analysis.summary.stages]
    timer.prepare([*((run,) for run in runs), (runs[0], runs[-1])])
    with_kernels = [
        stage
        for stage, _ in stage_timing._stages(analysis.program_at(B)).values()
        if any(operation.primitive == PRIMITIVE for operation in stage.operations)
    ]
    assert len(exports) == len(with_kernels) > 0
    timer(runs[0])
    ((load, jobs),) = loads
    alone = {run.stage.name: call() for run, call in zip(runs, jobs.values(), strict=False)}
    for stage, results in zip(analysis.program_at(B).stages, load(), strict=True):
        for a, b in zip(alone[stage.name][0], results, strict=True):
            np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


@pytest.mark.parametrize("primitive", ["pure_callback", "dot_product_attention_fwd_wrapper"])
def test_stage_with_what_may_not_move_is_lowered_in_place(primitive):
    assert stage_timing._can_export({"reshape", PRIMITIVE})
    assert not stage_timing._can_export({"reshape", PRIMITIVE, primitive})
    assert not stage_timing._can_export({"reshape"})
