"""Measures the seconds of whole functions, and of kernels at the clock of a long run.

Functions are timed by the wall clock around calls that are queued back to back. Kernels are timed
on a GPU by a profiler trace, since launching a short function takes longer than running it. They
run between calls of a load that keeps the device as busy as the program will, after it has run long
enough for the clock to settle at the device's power limit. `stage_timing` times stages so.
"""

import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path

import jax

from pbjax.errors import DeviceError
from pbjax.planning.profiling import Timing
from pbjax.runtime.device_trace import Kernel, read_kernels, union_length

# A sample lasts at least this long, so that neither the clock's resolution nor a hiccup matters.
MIN_SAMPLE_S = 0.02
SAMPLES = 5
CLOCK_TICK_S = 1e-6
# Whole programs on a GPU: enough calls are queued to hide the launches behind the work.
MIN_QUEUED_CALLS = 4
MIN_QUEUED_S = 0.15
# Under load: an H200 at its power limit lowers its clock after 60 to 80 ms. The load is long beside
# the timed kernels, so that the clock is the program's and not that of a stage alone.
SETTLE_S = 0.15
LOAD_S = 0.004
UNDER_LOAD_S = 0.001
MAX_CALLS_UNDER_LOAD = 10
ROUNDS = 5
# Programs are compared round by round: enough rounds for the quartiles of their differences.
COMPARED_ROUNDS = 7

# Seconds of one call, of as many as it is given that are queued back to back.
type Sampler = Callable[[int], float]


def time_function(function: Callable, *args: object, samples: int = SAMPLES) -> Timing:
    """Wall-clock seconds of a call, with calls queued back to back within a sample.

    Args:
      function: A compiled or jitted function; its first call is not counted.
      *args: Its arguments.
      samples: How many samples to take.

    Returns:
      The median and the distance of the quartiles over the samples.
    """
    jax.block_until_ready(function(*args))
    calls = _calls_per_sample(_sample(function, args, 1))
    return summary([_sample(function, args, calls) for _ in range(samples)])


def time_alternately(
    functions: Sequence[Callable], progress: Callable[[int, int, str], None], samples: int = SAMPLES
) -> list[Timing]:
    """Wall-clock seconds of several functions, sampled in turn so that drift affects all alike.

    Args:
      functions: Called without arguments; the first calls are not counted.
      progress: Called as progress(done, total, item) before each round of samples.
      samples: How many samples of each to take.
    """
    return [summary(s) for s in sample_in_turn(map(sampler, functions), progress, samples)]


def sampler(function: Callable) -> Sampler:
    """A sampler of a function without arguments, which is called once before."""
    jax.block_until_ready(function())
    return partial(_sample, function, ())


def sample_in_turn(
    samplers: Iterable[Sampler],
    progress: Callable[[int, int, str], None],
    rounds: int = COMPARED_ROUNDS,
) -> list[tuple[float, ...]]:
    """Seconds of a call of each of several programs in every round, sampled in turn.

    Args:
      samplers: One a program.
      progress: Called as progress(done, total, item) before each round.
      rounds: How many samples of each to take.
    """
    samplers = list(samplers)
    calls = [calls_to_queue(sample(1)) for sample in samplers]
    seconds: list[list[float]] = [[] for _ in samplers]
    for done in range(rounds):
        progress(done, rounds, "rounds")
        for sample, count, times in zip(samplers, calls, seconds, strict=True):
            times.append(sample(count))
    return [tuple(times) for times in seconds]


def time_under_load(load: Callable, jobs: Mapping[str, Callable]) -> list[Timing]:
    """Seconds of kernels on a GPU in a long run, at the clock that it settles at.

    Args:
      load: A function that keeps the device busy, before the jobs and in turn with them.
      jobs: The functions to time, by the name of the HLO module; called without arguments.

    Returns:
      For each job the seconds of one call in which at least one of its kernels ran.

    Raises:
      DeviceError: The trace does not hold the same number of kernels for each call of a job.
    """
    for call in (load, *jobs.values()):
        jax.block_until_ready(call())
    settling, between = (_calls_within(seconds, load) for seconds in (SETTLE_S, LOAD_S))
    counts = [min(MAX_CALLS_UNDER_LOAD, _calls_within(UNDER_LOAD_S, job)) for job in jobs.values()]

    def rounds():
        for _ in range(ROUNDS):
            for job, count in zip(jobs.values(), counts, strict=True):
                _repeat(load, between)
                _repeat(job, count)
        return load()

    _repeat(load, settling)  # still runs when the trace begins
    kernels = traced_kernels(rounds, (), 1)
    return [
        summary(busy_seconds([(k.start_s, k.end_s) for k in kernels if k.program == name], calls))
        for name, calls in zip(jobs, (ROUNDS * count for count in counts), strict=True)
    ]


def on_gpu() -> bool:
    """Whether JAX runs on a GPU."""
    return jax.default_backend() == "gpu"


def _repeat(call: Callable, times: int) -> None:
    for _ in range(times):
        call()


def _calls_within(seconds: float, call: Callable) -> int:
    """How many calls fit into some seconds, at least one."""
    return max(1, int(seconds / max(_sample(call, (), SAMPLES), CLOCK_TICK_S)))


def calls_to_queue(seconds_per_call: float) -> int:
    """How many calls of a whole program make a sample; on a GPU enough for a long run's clock."""
    calls = _calls_per_sample(seconds_per_call)
    if not on_gpu():
        return calls
    return max(calls, MIN_QUEUED_CALLS, int(MIN_QUEUED_S / max(seconds_per_call, CLOCK_TICK_S)))


def _calls_per_sample(seconds_per_call: float) -> int:
    return max(1, int(MIN_SAMPLE_S / max(seconds_per_call, CLOCK_TICK_S)))


def _sample(function: Callable, args: Sequence[object], calls: int) -> float:
    start = time.perf_counter()
    for _ in range(calls - 1):
        function(*args)
    jax.block_until_ready(function(*args))
    return (time.perf_counter() - start) / calls


def traced_kernels(function: Callable, args: Sequence[object], calls: int) -> tuple[Kernel, ...]:
    """All kernels that some calls, queued back to back, ran on the GPU; none elsewhere."""
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0  # events of the interpreter would outnumber the kernels
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder, profiler_options=options):
            _sample(function, args, calls)
        return read_kernels(Path(folder))


def busy_seconds(kernels: Sequence[tuple[float, float]], calls: int) -> list[float]:
    """Seconds of each call in which at least one of its kernels ran.

    Args:
      kernels: Start and end of each kernel; every call ran the same number of them.
      calls: How many calls ran one after the other.

    Raises:
      DeviceError: The trace holds no kernels, or not the same number for each call.
    """
    each, left = divmod(len(kernels), calls)
    if not each or left:
        raise DeviceError(
            f"timing: a profiler trace of {calls} calls holds {len(kernels)} kernels; an equal "
            "number for each call is needed; run nothing else on the device, and measure again"
        )
    ordered = sorted(kernels)
    return [union_length(ordered[i : i + each]) for i in range(0, len(ordered), each)]


def summary(seconds: Sequence[float]) -> Timing:
    """Median and distance of the quartiles of samples."""
    quartiles = statistics.quantiles(seconds, n=4) if len(seconds) > 1 else [seconds[0]] * 3
    return Timing(
        median_s=statistics.median(seconds),
        spread_s=quartiles[2] - quartiles[0],
        samples=len(seconds),
    )
