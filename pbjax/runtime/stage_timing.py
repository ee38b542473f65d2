"""Measures the seconds of a program's stages, alone and side by side.

The inputs of stages are the real results of the stages before them. On a GPU their kernels are
timed under the load of the whole block at the whole batch: stages of one program share one clock,
which in a long run is lower than that of a short stage alone. Elsewhere the wall clock counts.
`planning.profiling` keeps the seconds.
"""

import os
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from functools import partial
from itertools import islice

import jax
import jax.numpy as jnp
from jax import export, lax
from jax.stages import Lowered
from jaxtyping import Array

from pallas_kernels.dispatch import default_sm_budget
from pallas_kernels.operation import PRIMITIVE as KERNEL
from pbjax.graph.trace import Aval
from pbjax.planning.profile_rows import measured_size
from pbjax.planning.profiling import Run, Timing
from pbjax.planning.timetable import PROLOGUE
from pbjax.program.stages import Program, Stage
from pbjax.runtime.execution import SubBatchState, WeightLayout, overlap_options, run_inline
from pbjax.runtime.timing import on_gpu, time_function, time_under_load

# Jobs timed in one trace: most of its time goes into starting, settling and reading.
JOBS_PER_TRACE = 8

# Marks a lowered program with attention by cuDNN. Its first call captures a graph, and fails if
# another thread uses the device meanwhile, as ViT-Base's did on an H200.
CUDNN = "__cudnn$"

# Stages that run in one program: name, size and SM budget of each. The empty job is the whole block
# at the whole batch, one stage after the other: the load under which all others are timed.
type _Part = tuple[str, int, int]
type _Job = tuple[_Part, ...]
_BLOCK: _Job = ()

# Exported stages run only in this process, so custom calls that may change with jax do no harm.
_CUSTOM_CALLS = (export.DisabledSafetyCheck.custom_call("ALL"),)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Lowerable:
    """A stage as a function of the list of its inputs, with their shapes and dtypes."""

    run: Callable
    reads: list[jax.ShapeDtypeStruct]


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
          program_at: Gives the program traced at a batch size, as `measured_size` gives it.
          weights: Leaves of the params, then captured arrays.
          inputs: Leaves of the example inputs; their first rows feed smaller sub-batches.
          in_axes: Batch axis of each input, or None.
        """
        self._program_at = program_at
        self._weights = weights
        self._inputs = inputs
        self._in_axes = in_axes
        self._wanted: dict[_Job, None] = {}
        self._names: dict[_Job, str] = {}
        self._lowerable: dict[_Part, _Lowerable] = {}
        self._compiled: dict[_Job, Callable] = {}
        self._args: dict[int, dict[str, Sequence[Array]]] = {}
        self._timed: dict[_Job, Timing] = {}

    def __call__(self, run: Run) -> Timing:
        """Seconds of one stage alone."""
        return self._time((run,))

    def pair(self, first: Run, second: Run) -> Timing:
        """Seconds until two independent stages of one program have both ended.

        On a GPU they are one CUDA graph whose kernels may run at the same time.
        """
        return self._time((first, second))

    def prepare(
        self,
        wanted: Sequence[tuple[Run, ...]],
        progress: Callable[[int, int, str], None] = lambda *_: None,
    ) -> None:
        """Compiles the wanted runs in parallel, and computes the inputs of their stages.

        Tracing and lowering hold Python's lock and depend on contexts of this thread; compiling
        does neither, and takes a thread for each core.

        Args:
          wanted: Runs to time, each alone or two side by side.
          progress: Called as progress(done, total, item).
        """
        jobs = dict.fromkeys(map(_job, wanted))
        self._wanted |= jobs
        if jobs and on_gpu():
            jobs |= {_BLOCK: None}
        sizes = {size for job in jobs for _, size, _ in self._parts(job)}
        sizes = sorted(sizes - self._args.keys())
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
        if not on_gpu():
            return time_function(self._compiled[job], *self._args_of(job))
        if job not in self._timed:
            left = (each for each in self._wanted if each != job and each not in self._timed)
            together = [job, *islice(left, JOBS_PER_TRACE - 1)]
            calls = {f"jit_{self._names[each]}": self._call(each) for each in together}
            self._timed |= zip(together, time_under_load(self._call(_BLOCK), calls), strict=True)
        return self._timed[job]

    def _call(self, job: _Job) -> Callable:
        return partial(self._compiled[job], *self._args_of(job))

    def _args_of(self, job: _Job) -> list[Sequence[Array]]:
        return [self._args[size][name] for name, size, _ in self._parts(job)]

    def _parts(self, job: _Job) -> _Job:
        batch = zip(self._inputs, self._in_axes, strict=True)
        size = measured_size(next(x.shape[axis] for x, axis in batch if axis is not None))
        return job or tuple((stage.name, size, 0) for stage in self._program_at(size).stages)

    def _compile_all(
        self,
        jobs: Sequence[_Job],
        pool: ThreadPoolExecutor,
        progress: Callable[[int, int, str], None],
    ) -> None:
        futures: dict[Future, _Job] = {}
        alone: list[tuple[Lowered, Future]] = []
        for job in jobs:
            progress(sum(future.done() for future in futures), len(jobs), _label(job))
            lowered = self._lower(job)
            has_cudnn = CUDNN in lowered.as_text()
            future = pool.submit(lowered.compile if has_cudnn else partial(_compile, lowered))
            futures[future] = job
            alone += [(lowered, future)] if has_cudnn else []
        for done, future in enumerate(as_completed(futures)):
            self._compiled[futures[future]] = future.result()
            progress(done + 1, len(jobs), _label(futures[future]))
        for lowered, future in alone:
            _run_once(lowered, future.result())

    def _lower(self, job: _Job) -> Lowered:
        stages = [self._stage(*part) for part in self._parts(job)]

        def together(*args):
            return [stage.run(given) for stage, given in zip(stages, args, strict=True)]

        # The trace names a kernel's program by this name.
        together.__name__ = self._names.setdefault(job, f"job_{len(self._names)}")
        options = overlap_options() if len(job) > 1 else {}
        jitted = jax.jit(together, compiler_options=options or None)
        return jitted.lower(*[stage.reads for stage in stages])

    def _stage(self, name: str, size: int, budget: int) -> "_Lowerable":
        """A stage within a budget; kernels that are slow to lower are lowered once for all jobs."""
        key = name, size, budget
        if key not in self._lowerable:
            stage, avals = _stages(self._program_at(size))[name]
            reads = [jax.ShapeDtypeStruct(avals[v].shape, avals[v].dtype) for v in stage.reads]

            def run(args):
                with default_sm_budget(budget or None):
                    return run_inline(stage, args)

            if on_gpu() and _can_export({operation.primitive for operation in stage.operations}):
                run = export.export(jax.jit(run), disabled_checks=_CUSTOM_CALLS)(reads).call
            self._lowerable[key] = _Lowerable(run=run, reads=reads)
        return self._lowerable[key]

    def _run_through(self, size: int) -> dict[str, Sequence[Array]]:
        """Runs every stage once, the block's for the first repetition, and keeps their inputs."""
        program = self._program_at(size)
        kept: dict[str, Sequence[Array]] = {}

        def run_and_keep(stage: Stage, args: Sequence[Array]) -> Sequence[Array]:
            kept[stage.name] = args
            return self._compiled[((stage.name, size, 0),)](args)[0]

        layout = WeightLayout.of(program)
        outer, weights = self._environment(program, layout, size)
        sub_batch = SubBatchState(program, outer, weights, run_and_keep)
        if program.prologue is not None:
            sub_batch.run(PROLOGUE, 0)
        # Unsliced: slices of a stack would be a copy for every size.
        sub_batch.live.update(weights)
        for index in range(len(program.stages)):
            sub_batch.run(index, 0)
        if program.epilogue is not None:
            sub_batch.collected = [pieces * program.block.count for pieces in sub_batch.collected]
            sub_batch.run(len(program.stages), 0)
        return kept

    def _environment(
        self, program: Program, layout: WeightLayout, size: int
    ) -> tuple[dict[int, Array], dict[int, Array]]:
        outer = {number: self._weights[number] for number in layout.loose}
        for number, x, axis in zip(program.graph.inputs, self._inputs, self._in_axes, strict=True):
            outer[number] = x if axis is None else lax.slice_in_dim(x, 0, size, axis=axis)
        first_block = {
            x.inner: self._weights[x.outer[0]]
            for x in layout.stacked
            if isinstance(x.outer[0], int)
        }
        return outer, first_block


def _job(runs: Sequence[Run]) -> _Job:
    return tuple((run.stage.name, run.size, run.sm_budget) for run in runs)


def _stages(program: Program) -> Mapping[str, tuple[Stage, Sequence[Aval]]]:
    """The stages by name, with the shapes and dtypes of the values in their numbering."""
    inner, outer = program.block.avals, program.graph.avals
    found = {stage.name: (stage, inner) for stage in program.stages}
    ends = [end for end in (program.prologue, program.epilogue) if end is not None]
    return found | {end.name: (end, outer) for end in ends}


def _label(job: _Job) -> str:
    names = " beside ".join(f"{name} at batch size {size}" for name, size, _ in job)
    return names or "the whole block"


def _compile(lowered: Lowered) -> Callable:
    """Compiles and runs once: kernels of ours compile at their first launch."""
    compiled = lowered.compile()
    _run_once(lowered, compiled)
    return compiled


def _run_once(lowered: Lowered, compiled: Callable) -> None:
    args, kwargs = lowered.in_avals
    zeros = jax.tree.map(lambda aval: jnp.zeros(aval.shape, aval.dtype), args)
    jax.block_until_ready(compiled(*zeros, **kwargs))


def _can_export(primitives: Collection[str]) -> bool:
    """Whether a stage has kernels of ours, which are slow to lower, and can be exported.

    Python callbacks cannot be exported. Attention by cuDNN can; but ViT-Base, which has it, was not
    compiled after 150 s on an H200, where other models were after 40 to 90 s.
    """
    stay = re.compile(r"callback|dot_product_attention")
    return KERNEL in primitives and not any(map(stay.search, primitives))
