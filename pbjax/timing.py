"""Measured seconds: of a stage, of two stages side by side, of a whole function.

On a GPU a stage's time is the summed duration of its kernels in a profiler trace, since launching
a short stage takes longer than running it; elsewhere, and for whole functions everywhere, it is
the wall clock around calls that are queued back to back. Stages are fed with what the stages
before them really computed. What a profile does with the figures is in `profiling`.
"""

import os
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from pathlib import Path

import jax
import jax.numpy as jnp
from jax import lax
from jax.stages import Lowered
from jaxtyping import Array

from pallas_kernels.dispatch import default_sm_budget
from pbjax.device_trace import Kernel, read_kernels, union_length
from pbjax.errors import DeviceError
from pbjax.execution import Lane, WeightLayout, overlap_options, run_inline
from pbjax.profiling import Run, Timing
from pbjax.schedule import PROLOGUE
from pbjax.stages import Program, Stage
from pbjax.trace import Aval

# A sample lasts at least this long, so that neither the clock's resolution nor a hiccup matters.
MIN_SAMPLE_S = 0.02
SAMPLES = 5
CLOCK_TICK_S = 1e-6
# Whole programs on a GPU: so many calls are queued that what launches them hides behind the work.
MIN_QUEUED_CALLS = 4
MIN_QUEUED_S = 0.15
MAX_TRACED_CALLS = 100


def time_function(function: Callable, *args: object, samples: int = SAMPLES) -> Timing:
    """Wall-clock seconds of a call, with calls queued back to back within a sample.

    Args:
      function: Compiled or jitted; the first call is not counted.
      *args: What it is called with.
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
    """Wall-clock seconds of several functions, sampled in turn so that a drift hits all alike.

    Args:
      functions: Called without arguments; the first calls are not counted.
      progress: Called as progress(done, total, item) before each round of samples.
      samples: How many samples of each to take.
    """
    for function in functions:
        jax.block_until_ready(function())
    calls = [_calls_to_queue(_sample(function, (), 1)) for function in functions]
    seconds: list[list[float]] = [[] for _ in functions]
    for done in range(samples):
        progress(done, samples, "rounds")
        for function, count, times in zip(functions, calls, seconds, strict=True):
            times.append(_sample(function, (), count))
    return [summary(times) for times in seconds]


# Stages as they run in one program: name, size and SM budget of each.
type _Job = tuple[tuple[str, int, int], ...]


class StageTimer:
    """Times the stages of a program at any batch size, alone and side by side."""

    def __init__(
        self,
        program_at: Callable[[int], Program],
        weights: Sequence[Array],
        inputs: Sequence[Array],
        in_axes: Sequence[int | None],
    ):
        """Prepares to time stages.

        Args:
          program_at: The program traced at a batch size that `measured_size` gives.
          weights: Leaves of the params, then captured arrays.
          inputs: Leaves of the example inputs; their first rows feed smaller sub-batches.
          in_axes: Batch axis of each input, or None.
        """
        self._program_at = program_at
        self._weights = weights
        self._inputs = inputs
        self._in_axes = in_axes
        self._compiled: dict[_Job, Callable] = {}
        self._args: dict[int, dict[str, Sequence[Array]]] = {}

    def __call__(self, run: Run) -> Timing:
        """Seconds of one stage alone."""
        return self._time((run,))

    def pair(self, first: Run, second: Run) -> Timing:
        """Seconds until two stages have ended that run in one program, independent of each other.

        On a GPU they are one CUDA graph whose kernels may run side by side.
        """
        return self._time((first, second))

    def prepare(
        self,
        wanted: Sequence[tuple[Run, ...]],
        progress: Callable[[int, int, str], None] = lambda *_: None,
    ) -> None:
        """Compiles what is to be timed, in parallel, and computes what its stages are fed with.

        Tracing and lowering hold Python's lock and depend on contexts of this thread; compiling
        does neither, and takes a thread for each core.

        Args:
          wanted: Runs to be timed, each alone or two side by side.
          progress: Called as progress(done, total, item).
        """
        jobs = dict.fromkeys(map(_job, wanted))
        sizes = sorted({size for job in jobs for _, size, _ in job} - self._args.keys())
        before = [((name, size, 0),) for size in sizes for name in _stages(self._program_at(size))]
        missing = [job for job in dict.fromkeys([*before, *jobs]) if job not in self._compiled]
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            try:
                self._compile_all(missing, pool, progress)
            except BaseException:
                pool.shutdown(cancel_futures=True)
                raise
        for size in sizes:
            self._args[size] = self._run_through(size)

    def _time(self, runs: tuple[Run, ...]) -> Timing:
        job = _job(runs)
        if job not in self._compiled:
            self.prepare([runs])
        args = [self._args[size][name] for name, size, _ in job]
        return _time_kernels(self._compiled[job], *args)

    def _compile_all(
        self,
        jobs: Sequence[_Job],
        pool: ThreadPoolExecutor,
        progress: Callable[[int, int, str], None],
    ) -> None:
        futures: dict[Future, _Job] = {}
        for job in jobs:
            progress(sum(future.done() for future in futures), len(jobs), _label(job))
            futures[pool.submit(_compile, self._lower(job))] = job
        for done, future in enumerate(as_completed(futures)):
            self._compiled[futures[future]] = future.result()
            progress(done + 1, len(jobs), _label(futures[future]))

    def _lower(self, job: _Job) -> Lowered:
        stages = [_stages(self._program_at(size))[name] for name, size, _ in job]

        def together(*args):
            results = []
            for (stage, _), (*_, budget), given in zip(stages, job, args, strict=True):
                with default_sm_budget(budget or None):
                    results.append(run_inline(stage, given))
            return results

        options = overlap_options() if len(job) > 1 else {}
        shapes = [
            [jax.ShapeDtypeStruct(avals[v].shape, avals[v].dtype) for v in stage.reads]
            for stage, avals in stages
        ]
        return jax.jit(together, compiler_options=options or None).lower(*shapes)

    def _run_through(self, size: int) -> dict[str, Sequence[Array]]:
        """Runs every stage once, the block's for its first repetition, and keeps their inputs."""
        program = self._program_at(size)
        kept: dict[str, Sequence[Array]] = {}

        def run_and_keep(stage: Stage, args: Sequence[Array]) -> Sequence[Array]:
            kept[stage.name] = args
            return self._compiled[((stage.name, size, 0),)](args)[0]

        layout = WeightLayout.of(program)
        outer, weights = self._environment(program, layout, size)
        lane = Lane(program, outer, weights, run_and_keep)
        if program.prologue is not None:
            lane.run(PROLOGUE, 0)
        lane.live.update(weights)  # as they are: slices of a stack would be a copy for every size
        for index in range(len(program.stages)):
            lane.run(index, 0)
        if program.epilogue is not None:
            lane.collected = [pieces * program.block.count for pieces in lane.collected]
            lane.run(len(program.stages), 0)
        return kept

    def _environment(
        self, program: Program, layout: WeightLayout, size: int
    ) -> tuple[dict[int, Array], dict[int, Array]]:
        outer = {number: self._weights[number] for number in layout.loose}
        for number, x, axis in zip(program.graph.inputs, self._inputs, self._in_axes, strict=True):
            outer[number] = x if axis is None else lax.slice_in_dim(x, 0, size, axis=axis)
        first_block = {
            link.inner: self._weights[link.outer[0]]
            for link in layout.stacked
            if isinstance(link.outer[0], int)
        }
        return outer, first_block


def _job(runs: Sequence[Run]) -> _Job:
    return tuple((run.stage.name, run.size, run.sm_budget) for run in runs)


def _stages(program: Program) -> Mapping[str, tuple[Stage, Sequence[Aval]]]:
    """The stages by name, with the shapes and dtypes of the values that they number."""
    inner, outer = program.block.avals, program.graph.avals
    found = {stage.name: (stage, inner) for stage in program.stages}
    ends = [end for end in (program.prologue, program.epilogue) if end is not None]
    return found | {end.name: (end, outer) for end in ends}


def _label(job: _Job) -> str:
    return " beside ".join(f"{name} at batch size {size}" for name, size, _ in job)


def _compile(lowered: Lowered) -> Callable:
    """Compiles, and runs once on zeros: kernels of ours compile when they are first launched."""
    compiled = lowered.compile()
    args, kwargs = lowered.in_avals
    zeros = jax.tree.map(lambda aval: jnp.zeros(aval.shape, aval.dtype), args)
    jax.block_until_ready(compiled(*zeros, **kwargs))
    return compiled


def _time_kernels(function: Callable, *args: object) -> Timing:
    """Seconds of a short function: of its kernels on a GPU, by the wall clock elsewhere."""
    if jax.default_backend() != "gpu":
        return time_function(function, *args)
    jax.block_until_ready(function(*args))
    calls = max(SAMPLES, min(MAX_TRACED_CALLS, _calls_per_sample(_sample(function, args, 1))))
    kernels = traced_kernels(function, args, calls)
    return summary(busy_seconds([(k.start_s, k.end_s) for k in kernels], calls))


def _calls_to_queue(seconds_per_call: float) -> int:
    calls = _calls_per_sample(seconds_per_call)
    if jax.default_backend() != "gpu":
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
    """Every kernel that some calls, queued back to back, ran on the GPU; none elsewhere."""
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
