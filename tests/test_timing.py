"""Timing: unions of intervals, kernels of calls, samples, and what a stage is fed with."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.testing import assert_close
from pbjax import timing
from pbjax.analysis import analyse
from pbjax.device import find_device
from pbjax.device_trace import union_length
from pbjax.errors import DeviceError
from pbjax.profile_grid import Run
from pbjax.timing import StageTimer, busy_seconds, time_alternately, time_function

from .networks import NETWORKS


@pytest.mark.parametrize(
    ("intervals", "length"),
    [
        ([], 0.0),
        ([(1.0, 3.0)], 2.0),
        ([(1.0, 3.0), (2.0, 5.0)], 4.0),
        ([(0.0, 9.0), (2.0, 3.0)], 9.0),
        ([(4.0, 5.0), (0.0, 1.0)], 2.0),
        ([(1.0, 1.0)], 0.0),
    ],
)
def test_union_of_known_intervals(intervals, length):
    assert union_length(intervals) == length


def test_each_call_is_busy_while_one_of_its_kernels_runs():
    first, second = [(0.0, 1.0), (0.5, 2.0)], [(10.0, 11.0), (13.0, 15.0)]
    assert busy_seconds(second + first, 2) == [2.0, 3.0]


@pytest.mark.parametrize(("num_kernels", "calls"), [(0, 1), (0, 5), (3, 2), (1, 2)])
def test_kernels_that_do_not_divide_among_the_calls_are_refused(num_kernels, calls):
    with pytest.raises(DeviceError, match=f"{calls} calls holds {num_kernels} kernels") as error:
        busy_seconds([(float(i), i + 0.5) for i in range(num_kernels)], calls)
    assert str(error.value).count(";") >= 2


class Clock:
    """A clock that only functions under test move."""

    def __init__(self, monkeypatch):
        self.now, self.calls = 0.0, []
        monkeypatch.setattr(timing.time, "perf_counter", lambda: self.now)

    def job(self, name, seconds):
        spans = iter(seconds)

        def run():
            self.calls.append(name)
            self.now += next(spans)

        return run


def endless(first, *rest, then):
    yield first
    yield from rest
    while True:
        yield then


def test_first_call_is_not_counted(monkeypatch):
    clock = Clock(monkeypatch)
    found = time_function(clock.job("f", endless(60.0, then=0.5)), samples=3)
    assert found.median_s == 0.5
    assert found.spread_s == 0.0
    assert found.samples == 3


def test_sample_lasts_at_least_the_least_time(monkeypatch):
    clock = Clock(monkeypatch)
    short = timing.MIN_SAMPLE_S / 8
    found = time_function(clock.job("f", endless(1.0, then=short)), samples=2)
    assert found.median_s == pytest.approx(short)
    assert len(clock.calls) == 2 + 2 * 8


def test_hiccup_moves_no_median(monkeypatch):
    clock = Clock(monkeypatch)
    found = time_function(clock.job("f", endless(1.0, 1.0, 1.0, 50.0, then=1.0)))
    assert found.median_s == 1.0


def test_functions_are_sampled_in_turn(monkeypatch):
    clock = Clock(monkeypatch)
    jobs = [clock.job("a", endless(9.0, then=1.0)), clock.job("b", endless(9.0, then=2.0))]
    found = time_alternately(jobs, lambda *_: None, samples=3)
    assert [timing.median_s for timing in found] == [1.0, 2.0]
    assert clock.calls[-6:] == ["a", "b"] * 3


@pytest.mark.parametrize(("seconds", "calls"), [(1.0, 4), (0.0299, 5), (0.0099, 15)])
def test_calls_are_queued_on_a_gpu_until_launching_them_hides(monkeypatch, seconds, calls):
    clock = Clock(monkeypatch)
    monkeypatch.setattr(timing.jax, "default_backend", lambda: "gpu")
    time_alternately([clock.job("a", endless(9.0, then=seconds))], lambda *_: None, samples=3)
    assert len(clock.calls) == 2 + 3 * calls


def test_call_too_short_for_the_clock_is_timed(monkeypatch):
    clock = Clock(monkeypatch)
    spans = (0.0 if i < 8 else 1.0 for i in range(10**6))
    assert time_function(clock.job("f", spans), samples=1).median_s >= 0.0


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
        return timing.Timing(median_s=2.0, spread_s=0.0, samples=1)

    monkeypatch.setattr(timing, "_time_kernels", run)
    return kept


@pytest.mark.parametrize(
    ("name", "size"), [("two_axes", 1), ("two_axes", 3), ("function_scan", 2), ("function_loop", 1)]
)
def test_every_stage_runs_at_every_size(run_once, name, size):
    _, _, analysis, timer = stage_timer(name, 4)
    for stage in analysis.outline.stages:
        assert timer(Run(stage=stage, batch_size=size)).median_s == 2.0
    assert len(run_once) == len(analysis.outline.stages)


def test_stages_are_fed_with_what_the_stages_before_them_computed(run_once):
    network, inputs, analysis, timer = stage_timer("no_repetition", 4)
    timer(Run(stage=analysis.outline.block[-1], batch_size=4))
    ((_, (results,)),) = run_once
    assert_close(results[-1], network.direct(*inputs), reduction=12, roundings=4)


def test_smaller_sub_batch_gets_the_first_rows(run_once):
    _, (x,), analysis, timer = stage_timer("no_repetition", 4)
    timer(Run(stage=analysis.outline.block[0], batch_size=2))
    (((args,), _),) = run_once
    fed = [a for a in args if a.shape == x[:2].shape]
    np.testing.assert_array_equal(fed[0], x[:2])


def test_pair_runs_both_stages_in_one_program(run_once):
    _, _, analysis, timer = stage_timer("no_repetition", 4)
    first, second, *_ = [Run(stage=stage, batch_size=2) for stage in analysis.outline.block]
    assert timer.pair(first, second).median_s == 2.0
    ((_, both),) = run_once
    for run, together in zip((first, second), both, strict=True):
        timer(run)
        _, (alone,) = run_once[-1]
        for a, b in zip(together, alone, strict=True):
            assert_close(a, b, reduction=12, roundings=4)


def test_what_is_prepared_is_not_compiled_again(run_once, monkeypatch):
    _, _, analysis, timer = stage_timer("no_repetition", 4)
    runs = [Run(stage=stage, batch_size=2) for stage in analysis.outline.stages]
    seen = []
    timer.prepare([(run,) for run in runs], lambda *state: seen.append(state))
    assert seen[-1][:2] == (len(runs), len(runs))
    monkeypatch.setattr(timing, "_compile", lambda lowered: pytest.fail("compiled again"))
    for run in runs:
        timer(run)


def test_stage_that_cannot_be_compiled_is_not_swallowed(monkeypatch):
    _, _, analysis, timer = stage_timer("no_repetition", 4)

    def refuse(lowered):
        raise DeviceError("no such kernel; none; none")

    monkeypatch.setattr(timing, "_compile", refuse)
    with pytest.raises(DeviceError, match="no such kernel"):
        timer(Run(stage=analysis.outline.block[0], batch_size=2))


def test_real_clock_gives_positive_seconds():
    _, _, analysis, timer = stage_timer("no_repetition", 4)
    found = timer(Run(stage=analysis.outline.block[0], batch_size=4))
    assert 0 < found.median_s < 1
    assert found.spread_s >= 0
    assert found.samples == timing.SAMPLES


def test_no_weight_is_copied_for_a_size(run_once):
    *_, analysis, timer = stage_timer("function_loop", 6)
    shapes = {weight.shape for weight in analysis.weights}
    own = {id(weight) for weight in analysis.weights}
    for size in (2, 3, 4, 6):
        for stage in analysis.outline.block:
            timer(Run(stage=stage, batch_size=size))
    read = [arg for (args,), _ in run_once for arg in args if arg.shape in shapes]
    assert read
    assert all(id(arg) in own for arg in read)
