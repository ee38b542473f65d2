"""Offline and server scenario of a benchmark, after MLPerf Inference: arrivals, batching, search.

Pure: no framework. The clock and what runs a batch are given from outside, so that the loop which
serves on a GPU is the loop that is simulated and tested.

Offline: all items are there at the start; the figure is items per second.
Server: queries of one item arrive as a Poisson process; the figure is the highest rate at which the
99th percentile of the latency, counted from a query's arrival on schedule to its result, stays
within the limit. A candidate is searched by bisection and then verified by several runs; after one
that fails it is lowered by a little.

Source: MLPerf Inference Rules (mlcommons/inference_policies, inference_rules.adoc), "Scenarios" and
"LoadGen Operation". Here the candidate comes from a simulation with the measured time of a batch,
over as many queries as the rules ask for; the runs that verify it are shorter than theirs.
"""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np

TAIL = 0.99
RULE_QUERIES = 270_336  # For the 99th percentile within 0.05 % at 99 % confidence, by the rules.
BISECTIONS, CHECKS, LOWER_BY, MOST_LOWERINGS = 10, 3, 0.01, 6


class Clock(Protocol):
    """Seconds from any origin."""

    def now(self) -> float:
        """The time."""
        ...

    def wait_until(self, moment_s: float) -> None:
        """Returns at that time or later."""
        ...


class WallClock:
    """The real one."""

    def now(self) -> float:
        """See Clock."""
        return time.perf_counter()

    def wait_until(self, moment_s: float) -> None:
        """See Clock."""
        while (left := moment_s - time.perf_counter()) > 0:
            time.sleep(left)


class SimulatedClock:
    """A clock that moves only when told."""

    def __init__(self) -> None:
        """Starts at 0."""
        self.time_s = 0.0

    def now(self) -> float:
        """See Clock."""
        return self.time_s

    def wait_until(self, moment_s: float) -> None:
        """See Clock."""
        self.time_s = max(self.time_s, moment_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """Latencies and batches of a run of the server scenario.

    Attributes:
      latencies_s: The latency of every query, in order of arrival.
      batch_sizes: Queries of every batch, in order.
    """

    latencies_s: np.ndarray
    batch_sizes: list[int]

    @property
    def tail_s(self) -> float:
        """The 99th percentile of the latency."""
        return percentile(self.latencies_s, TAIL)

    @property
    def mean_batch_size(self) -> float:
        """Queries of a batch."""
        return len(self.latencies_s) / len(self.batch_sizes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """A run at one rate.

    Attributes:
      rate_per_s: Mean queries per second.
      tail_s: The 99th percentile of the latency.
      mean_batch_size: Queries of a batch.
    """

    rate_per_s: float
    tail_s: float
    mean_batch_size: float


def poisson_arrivals(rate_per_s: float, num_queries: int, seed: int) -> np.ndarray:
    """Times of arrival in seconds, ascending: gaps are exponential with mean 1 / rate.

    Args:
      rate_per_s: Mean queries per second.
      num_queries: The number of queries.
      seed: The same seed, rate and number give the same times.

    Returns:
      A float64 array [num_queries].

    Raises:
      ValueError: The rate is no positive number, or there is no query.
    """
    if not (math.isfinite(rate_per_s) and rate_per_s > 0):
        raise ValueError(f"rate of {rate_per_s} per second: rates are positive; give another")
    if num_queries < 1:
        raise ValueError(f"{num_queries} queries: at least 1 is needed; ask for more")
    gaps = np.random.default_rng(seed).exponential(1 / rate_per_s, num_queries)
    return np.cumsum(gaps)


def percentile(values: np.ndarray, fraction: float) -> float:
    """The smallest of the values that at least this share of them does not exceed.

    Args:
      values: At least one.
      fraction: The share, in (0, 1].

    Returns:
      One of the values: nearest rank, nothing interpolated.

    Raises:
      ValueError: No values, or a fraction outside.
    """
    if not len(values):
        raise ValueError("percentile of 0 values: at least 1 is needed; run more queries")
    if not 0 < fraction <= 1:
        raise ValueError(f"percentile at {fraction}: it lies in (0, 1]; give another")
    # The product is rounded first, since 0.99 * 100 must not become a rank of 100.
    rank = math.ceil(round(fraction * len(values), 9))
    return float(np.partition(values, rank - 1)[rank - 1])


def serve(
    arrivals_s: np.ndarray, run_batch: Callable[[int], None], batch_size: int, clock: Clock
) -> Served:
    """Serves queries in order of arrival; a batch takes all that wait, up to its size.

    A batch starts once the one before is done and a query is there: nothing waits for more queries.

    Args:
      arrivals_s: Times of arrival since the start, ascending.
      run_batch: run_batch(n) runs a batch of n queries and returns when their results are there.
      batch_size: The most queries of a batch.
      clock: Tells the time.

    Returns:
      Latencies and batches.
    """
    start, done = clock.now(), 0
    latencies, sizes = np.empty(len(arrivals_s)), []
    while done < len(arrivals_s):
        clock.wait_until(start + arrivals_s[done])
        arrived = int(np.searchsorted(arrivals_s, clock.now() - start, side="right"))
        # At least the one that was waited for, should a sum of floats fall short of its time.
        size = min(max(arrived - done, 1), batch_size)
        run_batch(size)
        latencies[done : done + size] = clock.now() - start - arrivals_s[done : done + size]
        sizes.append(size)
        done += size
    return Served(latencies_s=latencies, batch_sizes=sizes)


def simulate(arrivals_s: np.ndarray, service_s: Callable[[int], float], batch_size: int) -> Served:
    """What `serve` would see if a batch of n queries took service_s(n) seconds."""
    clock = SimulatedClock()

    def run_batch(size: int) -> None:
        clock.time_s += service_s(size)

    return serve(arrivals_s, run_batch, batch_size, clock)


def simulated_rate(
    service_s: Callable[[int], float], batch_size: int, latency_s: float, seed: int
) -> float:
    """The highest rate per second whose simulated tail is within the limit; 0 if none is.

    Args:
      service_s: Seconds of a batch by its number of queries.
      batch_size: The most queries of a batch.
      latency_s: The limit.
      seed: The seed of the arrivals, which are the same at every rate but for their scale.

    Returns:
      Found by bisection up to the rate of full batches, to a thousandth of that.
    """
    if service_s(1) > latency_s:
        return 0.0
    low, high = 0.0, batch_size / service_s(batch_size)
    for _ in range(BISECTIONS):
        rate = (low + high) / 2
        arrivals = poisson_arrivals(rate, RULE_QUERIES, seed)
        met = simulate(arrivals, service_s, batch_size).tail_s <= latency_s
        low, high = (rate, high) if met else (low, rate)
    return low


def verified_rate(
    probe: Callable[[float, int], Served], candidate_per_s: float, latency_s: float, seed: int
) -> tuple[float, list[Probe]]:
    """Lowers a candidate until several runs in a row stay within the limit.

    By 1 % after the first that does not, and by twice as much each time.

    Args:
      probe: probe(rate, seed) serves queries at a rate.
      candidate_per_s: The first rate.
      latency_s: The limit of the tail.
      seed: The seed of the first check; the others count on from it.

    Returns:
      The rate, 0 if none held, and every run.
    """
    probes, rate = [], candidate_per_s
    for lowering in range(1 + MOST_LOWERINGS if candidate_per_s else 0):
        for check in range(CHECKS):
            served = probe(rate, seed + check)
            probes.append(
                Probe(rate_per_s=rate, tail_s=served.tail_s, mean_batch_size=served.mean_batch_size)
            )
            if served.tail_s > latency_s:
                break
        else:
            return rate, probes
        rate *= 1 - LOWER_BY * 2**lowering
    return 0.0, probes
