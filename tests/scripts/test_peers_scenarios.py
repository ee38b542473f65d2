"""Arrivals, batching and the search of a rate, by a clock that moves only when told."""

import importlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st


@pytest.fixture(scope="module")
def scenarios():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend("scripts")
        yield importlib.import_module("benchmarks.peers.scenarios")


gaps = st.lists(st.floats(0, 2), min_size=1, max_size=60)
costs = st.tuples(st.floats(0.01, 3), st.floats(0, 0.5))


def served_one_by_one(arrivals, sizes, service_s):
    """Completions, from sizes alone: the plain account that `serve` must agree with."""
    free, first, done = 0.0, 0, []
    for size in sizes:
        start = max(free, arrivals[first])
        free = start + service_s(size)
        done += [free] * size
        first += size
    return np.array(done)


@settings(max_examples=150)
@given(gaps=gaps, cost=costs, batch_size=st.integers(1, 9))
def test_no_query_is_lost_and_none_is_faster_than_its_batch(scenarios, gaps, cost, batch_size):
    arrivals = np.cumsum(gaps)

    def service_s(size):
        return cost[0] + cost[1] * size

    served = scenarios.simulate(arrivals, service_s, batch_size)
    assert sum(served.batch_sizes) == len(arrivals) == len(served.latencies_s)
    assert min(served.batch_sizes) >= 1
    assert max(served.batch_sizes) <= batch_size
    of_batch = np.repeat([service_s(size) for size in served.batch_sizes], served.batch_sizes)
    assert np.all(served.latencies_s >= of_batch * (1 - 1e-9))
    # In order of arrival: no query is done before one that came earlier.
    assert np.all(np.diff(arrivals + served.latencies_s) >= -1e-9)
    expected = served_one_by_one(arrivals, served.batch_sizes, service_s) - arrivals
    np.testing.assert_allclose(served.latencies_s, expected, atol=1e-9)


@settings(max_examples=100)
@given(gaps=gaps, batch_size=st.integers(1, 9))
def test_nothing_waits_while_the_device_is_free(scenarios, gaps, batch_size):
    arrivals = np.cumsum(gaps)
    served = scenarios.simulate(arrivals, lambda size: 1.0, batch_size)
    completions = arrivals + served.latencies_s
    first, free = 0, 0.0
    for size in served.batch_sizes:
        start = completions[first] - 1.0
        assert start == pytest.approx(max(free, arrivals[first]))
        # A batch leaves out only who had not come yet, or whom it had no place for.
        left_out = arrivals[first + size : first + size + 1]
        assert size == batch_size or np.all(left_out > start - 1e-9)
        free, first = completions[first], first + size


def test_a_batch_takes_all_that_wait_up_to_its_size(scenarios):
    arrivals = np.array([0.0, 0.1, 0.2, 0.3, 5.0])
    served = scenarios.simulate(arrivals, lambda size: 1.0, 3)
    assert served.batch_sizes == [1, 3, 1]
    np.testing.assert_allclose(served.latencies_s, [1.0, 1.9, 1.8, 1.7, 1.0])
    assert served.mean_batch_size == pytest.approx(5 / 3)


def test_serving_by_the_wall_clock_waits_for_arrivals(scenarios):
    ran = []
    arrivals = np.array([0.0, 0.02, 0.04])
    clock = scenarios.WallClock()
    start = clock.now()
    served = scenarios.serve(arrivals, ran.append, 8, clock)
    assert clock.now() - start >= 0.04
    assert sum(ran) == 3
    assert np.all(served.latencies_s >= 0)


def test_arrivals_are_a_poisson_process(scenarios):
    arrivals = scenarios.poisson_arrivals(50.0, 200_000, seed=3)
    gaps = np.diff(arrivals, prepend=0.0)
    assert np.all(gaps >= 0)
    # Mean and standard deviation of an exponential are equal; five standard errors.
    error = 5 * 0.02 / 200_000**0.5
    assert gaps.mean() == pytest.approx(0.02, abs=error)
    assert gaps.std() == pytest.approx(0.02, abs=3 * error)
    assert np.mean(gaps > 0.02) == pytest.approx(np.exp(-1), abs=0.01)
    # Counts in spans of a second have a variance like their mean.
    counts = np.bincount(arrivals.astype(int))[:-1]
    assert counts.var() / counts.mean() == pytest.approx(1, abs=0.1)


def test_a_seed_gives_the_same_arrivals_again(scenarios):
    once, again = (scenarios.poisson_arrivals(7.0, 100, seed=1) for _ in range(2))
    np.testing.assert_array_equal(once, again)
    assert not np.array_equal(once, scenarios.poisson_arrivals(7.0, 100, seed=2))


@pytest.mark.parametrize("rate", [0.0, -1.0, float("nan"), float("inf")])
def test_a_rate_that_is_not_positive_is_refused(scenarios, rate):
    with pytest.raises(ValueError, match="rates are positive"):
        scenarios.poisson_arrivals(rate, 10, seed=0)


def test_no_queries_are_refused(scenarios):
    with pytest.raises(ValueError, match="0 queries: at least 1"):
        scenarios.poisson_arrivals(1.0, 0, seed=0)


@given(
    values=st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=300),
    fraction=st.sampled_from([0.01, 0.5, 0.9, 0.99, 1.0]),
)
def test_a_percentile_is_the_smallest_value_that_enough_do_not_exceed(scenarios, values, fraction):
    found = scenarios.percentile(np.array(values), fraction)
    enough = fraction * len(values) - 1e-6
    assert found in values
    assert sum(value <= found for value in values) >= enough
    assert sum(value < found for value in values) < enough


def test_a_percentile_ignores_how_a_product_rounds(scenarios):
    # 0.07 * 100 is 7.000000000000001 in floats.
    assert scenarios.percentile(np.arange(1, 101), 0.07) == 7


@pytest.mark.parametrize(("count", "fraction"), [(0, 0.5), (3, 0.0), (3, 1.1)])
def test_a_percentile_of_nothing_or_beyond_all_is_refused(scenarios, count, fraction):
    with pytest.raises(ValueError, match="percentile"):
        scenarios.percentile(np.zeros(count), fraction)


def test_a_loose_limit_allows_nearly_full_batches(scenarios, monkeypatch):
    monkeypatch.setattr(scenarios, "RULE_QUERIES", 20_000)
    loose = scenarios.simulated_rate(lambda size: 0.01, 16, latency_s=0.2, seed=0)
    tight = scenarios.simulated_rate(lambda size: 0.01, 16, latency_s=0.021, seed=0)
    assert 0.9 * 1600 < loose <= 1600
    assert 0 < tight < loose


def test_the_rate_found_is_within_the_limit_and_a_little_more_is_not(scenarios, monkeypatch):
    monkeypatch.setattr(scenarios, "RULE_QUERIES", 20_000)

    def service_s(size):
        return 0.004 + 0.0005 * size

    def tail_s(rate):
        arrivals = scenarios.poisson_arrivals(rate, 20_000, seed=5)
        return scenarios.simulate(arrivals, service_s, 16).tail_s

    rate = scenarios.simulated_rate(service_s, 16, latency_s=0.03, seed=5)
    assert tail_s(rate) <= 0.03 < tail_s(rate * 1.01)


def test_a_limit_below_one_query_s_batch_allows_no_rate(scenarios):
    assert scenarios.simulated_rate(lambda size: 0.01, 16, latency_s=0.009, seed=0) == 0.0


def served_with_tail(scenarios, tail_s):
    return scenarios.Served(latencies_s=np.full(10, tail_s), batch_sizes=[10])


def test_a_candidate_is_lowered_until_every_check_holds(scenarios):
    seen = []

    def probe(rate, seed):
        seen.append((rate, seed))
        # The second seed is the hardest: it holds only below 98.
        slow = rate > (98 if seed == 11 else 99.5)
        return served_with_tail(scenarios, 0.2 if slow else 0.05)

    rate, probes = scenarios.verified_rate(probe, 100.0, 0.1, seed=10)
    assert rate == pytest.approx(100 * 0.99 * 0.98)
    assert [seed for _, seed in seen] == [10, 10, 11, 10, 11, 12]
    assert [probe.tail_s for probe in probes] == [0.2, 0.05, 0.2, 0.05, 0.05, 0.05]


def test_a_rate_that_never_holds_is_0(scenarios):
    rate, probes = scenarios.verified_rate(
        lambda rate, seed: served_with_tail(scenarios, 1.0), 100.0, 0.1, seed=0
    )
    assert rate == 0.0
    assert len(probes) == 1 + scenarios.MOST_LOWERINGS
    assert probes[-1].rate_per_s < 60


def test_no_candidate_is_not_run(scenarios):
    assert scenarios.verified_rate(None, 0.0, 0.1, seed=0) == (0.0, [])
