"""Measured seconds: of a stage, of two stages side by side, of a whole function.

On a GPU a stage's time is the summed duration of its kernels in a profiler trace, since launching
a short stage takes longer than running it; elsewhere, and for whole functions everywhere, it is
the wall clock around calls that are queued back to back. Stages are fed with what the stages
before them really computed. What a profile does with the figures is in `profiling`.
"""

import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import jax
from jax import lax
from jaxtyping import Array

from pbjax.device_trace import Kernel, read_kernels, union_length
from pbjax.errors import DeviceError
from pbjax.execution import Lane, WeightLayout, overlap_options, run_inline
from pbjax.profile_rows import measured_size
from pbjax.profiling import StageInfo, Timing
from pbjax.schedule import PROLOGUE
from pbjax.stages import Program, Stage

# A sample lasts at least this long, so that neither the clock's resolution nor a hiccup matters.
MIN_SAMPLE_S = 0.02
SAMPLES = 5
CLOCK_TICK_S = 1e-6
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
    calls = [_calls_per_sample(_sample(function, (), 1)) for function in functions]
    seconds: list[list[float]] = [[] for _ in functions]
    for done in range(samples):
        progress(done, samples, "rounds")
        for function, count, times in zip(functions, calls, seconds, strict=True):
            times.append(_sample(function, (), count))
    return [summary(times) for times in seconds]


class StageTimer:
    """Times the stages of a program at any batch size."""

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
        # All sizes are kept: a profile asks for one stage at every size before the next stage.
        self._stages: dict[int, dict[str, tuple[Callable, Sequence[Array]]]] = {}

    def __call__(self, stage: StageInfo, batch_size: int) -> Timing:
        """Seconds of one stage alone."""
        function, args = self._prepared(stage.name, batch_size)
        return _time_kernels(function, *args)

    def pair(self, first: StageInfo, second: StageInfo, batch_size: int) -> tuple[float, float]:
        """Slowdowns of two stages that run in one program without depending on each other.

        Returns:
          For each, the seconds of the pair over its own seconds alone.
        """
        f, f_args = self._prepared(first.name, batch_size)
        g, g_args = self._prepared(second.name, batch_size)
        options = overlap_options()
        if options:  # a trace would otherwise run the kernels one by one, outside the graph
            options["xla_enable_command_buffers_during_profiling"] = True
        both = jax.jit(lambda a, b: (f(*a), g(*b)), compiler_options=options)
        together = _time_kernels(both, f_args, g_args).median_s
        alone = _time_kernels(f, *f_args).median_s, _time_kernels(g, *g_args).median_s
        return together / alone[0], together / alone[1]

    def _prepared(self, name: str, batch_size: int) -> tuple[Callable, Sequence[Array]]:
        size = measured_size(batch_size)
        if size not in self._stages:
            self._stages[size] = self._run_through(self._program_at(size), size)
        return self._stages[size][name]

    def _run_through(
        self, program: Program, size: int
    ) -> dict[str, tuple[Callable, Sequence[Array]]]:
        """Runs every stage once, the block's for its first repetition, and keeps their inputs."""
        kept: dict[str, tuple[Callable, Sequence[Array]]] = {}

        def run_and_keep(stage: Stage, args: Sequence[Array]) -> Sequence[Array]:
            function = jax.jit(lambda *args: run_inline(stage, args))
            kept[stage.name] = function, args
            return function(*args)

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


def _time_kernels(function: Callable, *args: object) -> Timing:
    """Seconds of a short function: of its kernels on a GPU, by the wall clock elsewhere."""
    if jax.default_backend() != "gpu":
        return time_function(function, *args)
    wall_s = time_function(function, *args, samples=1).median_s
    calls = max(SAMPLES, min(MAX_TRACED_CALLS, _calls_per_sample(wall_s)))
    kernels = traced_kernels(function, args, calls)
    return summary(busy_seconds([(k.start_s, k.end_s) for k in kernels], calls))


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
