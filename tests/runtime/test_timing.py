"""Timing: unions of intervals, kernels of calls, samples, and kernels under load."""

import pytest

from pbjax.errors import DeviceError
from pbjax.runtime import timing
from pbjax.runtime.device_trace import Kernel, union_length
from pbjax.runtime.timing import busy_seconds, time_alternately, time_function, time_under_load


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


def test_call_too_short_for_the_clock_is_taken_for_one_tick(monkeypatch):
    clock = Clock(monkeypatch)
    found = time_function(clock.job("f", endless(1.0, 0.0, then=1e-7)), samples=1)
    assert len(clock.calls) == 2 + int(timing.MIN_SAMPLE_S / timing.CLOCK_TICK_S)
    assert found.median_s == pytest.approx(1e-7)


def test_spread_is_the_distance_of_the_quartiles(monkeypatch):
    clock = Clock(monkeypatch)
    found = time_function(clock.job("f", iter([9.0, 1.0, 7.0, 1.0, 3.0, 2.0, 5.0])))
    assert (found.median_s, found.spread_s, found.samples) == (3.0, 4.5, 5)


def kernel(program, start_s, seconds):
    return Kernel(name="k", start_s=start_s, end_s=start_s + seconds, program=program)


def test_kernels_under_load_are_told_from_the_load(monkeypatch):
    """Two jobs of 2 ms and of two kernels of 0.24 ms, between calls of 0.9 ms of something else."""
    clock = Clock(monkeypatch)
    trace, queued = [], []

    def job(program, *spans):
        def run():
            queued.append(program)
            for seconds in spans:
                trace.append(kernel(program, clock.now, seconds))
                clock.now += seconds

        return run

    def traced(function, args, calls):
        queued.append("trace")
        trace.clear()
        function(*args)
        return tuple(trace)

    monkeypatch.setattr(timing, "traced_kernels", traced)
    jobs = {"jit_a": job("jit_a", 2e-3), "jit_b": job("jit_b", 2.4e-4, 2.4e-4)}
    a, b = time_under_load(job("jit_load", 9e-4), jobs)
    assert (a.median_s, a.samples) == (pytest.approx(2e-3), timing.ROUNDS)
    assert (b.median_s, b.samples) == (pytest.approx(4.8e-4), 2 * timing.ROUNDS)
    start = queued.index("trace")
    settled = queued[:start][::-1].index("jit_b") - 1
    assert settled * 9e-4 == pytest.approx(timing.SETTLE_S, rel=0.02)
    one_round = [*["jit_load"] * 4, "jit_a", *["jit_load"] * 4, "jit_b", "jit_b"]
    assert queued[start + 1 :] == [*one_round * timing.ROUNDS, "jit_load"]


def test_job_without_kernels_in_the_trace_is_refused(monkeypatch):
    Clock(monkeypatch)
    monkeypatch.setattr(timing, "traced_kernels", lambda *_: (kernel("jit_load", 0.0, 1.0),))
    monkeypatch.setattr(timing, "SETTLE_S", 1e-5)
    monkeypatch.setattr(timing, "LOAD_S", 1e-5)
    with pytest.raises(DeviceError, match="0 kernels"):
        time_under_load(lambda: None, {"jit_a": lambda: None})
