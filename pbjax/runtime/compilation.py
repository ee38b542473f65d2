"""The programs that compete for a batch: compiled, compared with each other, and timed."""

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

import jax
from jax.stages import Compiled, Lowered
from jaxtyping import Array

from pbjax.planning.profile_rows import measured_size
from pbjax.planning.timetable import timetable
from pbjax.program.analysis import PROBE_SIZE, Analysis
from pbjax.program.stages import graph_fingerprint
from pbjax.runtime.device_trace import overlap
from pbjax.runtime.execution import SplitProgram, WeightLayout, overlap_options
from pbjax.runtime.measured_programs import MeasuredProgram, program_label
from pbjax.runtime.program_cache import note_verified, program_key
from pbjax.runtime.timing import time_alternately, traced_kernels
from pbjax.runtime.verification import fresh_inputs, largest_difference

VERIFIED_SEEDS = (0, 1)
TRACED_CALLS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramSpec:
    """One way to run a batch.

    Attributes:
      sizes: Rows of each sub-batch.
      staggers: How many stages each runs ahead.
      predicted_s: From the profile, or None.
      plain: Whether it is the model as it was given, where fusion has put kernels into it.
      sm_budgets: As in `Plan`.
      unroll: Blocks in one step of the loop.
      compiler_options: Of a plan; None for those that let staggered sub-batches overlap.
    """

    sizes: tuple[int, ...]
    staggers: tuple[int, ...]
    predicted_s: float | None = None
    plain: bool = False
    sm_budgets: Mapping[str, int] = field(default_factory=dict, hash=False)
    unroll: int = 1
    compiler_options: Mapping[str, str | int | bool] | None = field(default=None, hash=False)

    @property
    def name(self) -> str:
        """What the way is called in reports: plain, unsplit, sequential or split."""
        if len(self.sizes) == 1:
            return "plain" if self.plain else "unsplit"
        return "split" if any(self.staggers) else "sequential"

    @property
    def label(self) -> str:
        """The name and what is chosen beside sizes and staggers."""
        return program_label(self.name, self.sm_budgets, self.unroll)


@dataclass(frozen=True, slots=True, kw_only=True)
class CompiledProgram:
    """A way to run the batch, compiled.

    Attributes:
      spec: What it runs.
      program: Called as program(weights, *leaves).
      pack: From leaves of the params to the program's weights.
      weights: What pack returned for the model's own params.
      options: Compiler options.
      temporary_bytes: Device memory beside weights, inputs and outputs.
      weight_bytes: Device memory of weights that the program holds apart from the user's own.
      needed_bytes: Device memory while it runs: all of the model's weights, inputs, outputs,
        temporaries and code; 0 where the compiler does not say.
      compile_s: Seconds that lowering and compiling took.
      key: Identifies program and model where programs are kept; else empty.
    """

    spec: ProgramSpec
    program: Callable
    pack: Callable[[Sequence[Array]], tuple[Array, ...]]
    weights: tuple[Array, ...]
    options: Mapping[str, str | int | bool]
    temporary_bytes: int
    weight_bytes: int
    needed_bytes: int
    compile_s: float
    key: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LoweredProgram:
    """A way to run the batch, lowered: `compile` takes no lock of Python's and may run in a thread.

    Attributes:
      analysis: The model.
      spec: What it runs.
      lowered: The program.
      pack: As in `CompiledProgram`.
      own_weights: What pack returns for the model's own params, made when first needed.
      options: Compiler options.
      lower_s: Seconds that lowering took.
    """

    analysis: Analysis
    spec: ProgramSpec
    lowered: Lowered
    pack: Callable[[Sequence[Array]], tuple[Array, ...]]
    own_weights: Callable[[], tuple[Array, ...]]
    options: Mapping[str, str | int | bool]
    lower_s: float

    def compile(self) -> tuple[Compiled, float]:
        """The compiled program, and the seconds that this took."""
        start = time.perf_counter()
        return self.lowered.compile(), time.perf_counter() - start

    def finish(self, program: Compiled, compile_s: float) -> CompiledProgram:
        """What `compile` returned, with its weights and the memory that it needs."""
        analysis, weights = self.analysis, self.own_weights()
        params = jax.tree.leaves(analysis.model.params)
        first = len(analysis.weights) - len(analysis.graph.constants)
        own = {id(leaf) for leaf in (*params, *analysis.weights[first:])}
        memory = program.memory_analysis()
        held = {id(w) for w in weights}
        beside = sum(leaf.nbytes for leaf in params if id(leaf) not in held)
        source = graph_fingerprint(analysis.source)
        return CompiledProgram(
            spec=self.spec,
            program=program,
            pack=self.pack,
            weights=weights,
            options=self.options,
            temporary_bytes=memory.temp_size_in_bytes if memory else 0,
            weight_bytes=sum(w.nbytes for w in weights if id(w) not in own),
            needed_bytes=beside + bytes_while_running(memory) if memory else 0,
            compile_s=self.lower_s + compile_s,
            key=program_key(self.lowered, sorted(self.options.items()), source),
        )


class PackedWeights:
    """The weights of all split programs of one model: stacked when first needed, and once.

    Attributes:
      layout: How they are passed.
      pack: From leaves of any params of the model to the weights of a split program. It outlives
        the model in what `optimize` returns, and so holds captured arrays, but no params.
    """

    def __init__(self, analysis: Analysis):
        """Stacks nothing yet."""
        self._leaves = analysis.weights
        self.layout = WeightLayout.of(analysis.program_at(PROBE_SIZE))
        self.pack = partial(_pack, self.layout, analysis.prepare)

    @cached_property
    def own(self) -> tuple[Array, ...]:
        """Those of the model's own params."""
        return self.layout.pack(self._leaves)


def _pack(
    layout: WeightLayout, prepare: Callable[[Sequence[Array]], tuple[Array, ...]], params
) -> tuple[Array, ...]:
    return layout.pack(prepare(params))


def lower_unsplit(analysis: Analysis, leaves: Sequence[Array], spec: ProgramSpec) -> LoweredProgram:
    """The model, jitted, with what fusion has found: what a split has to beat.

    Where it has found nothing, or for a plain way, the model itself: what the user would run
    without pbjax.

    Args:
      analysis: The model.
      leaves: Leaves of the inputs; only shapes and dtypes count.
      spec: The whole batch as one.
    """
    if analysis.fused and not spec.plain:
        return _lower_fused(analysis, leaves, spec)
    params_tree = jax.tree.structure(analysis.model.params)

    def unsplit(weights, *leaves):
        inputs = jax.tree.unflatten(analysis.batch.tree, leaves)
        return analysis.model.apply(jax.tree.unflatten(params_tree, weights), *inputs)

    params = tuple(jax.tree.leaves(analysis.model.params))
    return _lowered(
        analysis, unsplit, leaves, spec, pack=tuple, own_weights=lambda: params, options={}
    )


def compile_unsplit(
    analysis: Analysis, leaves: Sequence[Array], spec: ProgramSpec
) -> CompiledProgram:
    """What `lower_unsplit` lowers, compiled."""
    lowered = lower_unsplit(analysis, leaves, spec)
    return lowered.finish(*lowered.compile())


def _lower_fused(analysis: Analysis, leaves: Sequence[Array], spec: ProgramSpec) -> LoweredProgram:
    traced = analysis.traced_at(sum(spec.sizes))

    def fused(weights, *leaves):
        return jax.tree.unflatten(traced.graph.out_tree, traced.run(weights, leaves))

    def own_weights() -> tuple[Array, ...]:
        if traced.shares_weights(analysis.traced_at(PROBE_SIZE)):
            return tuple(analysis.weights[i] for i in traced.read)
        return traced.pack(jax.tree.leaves(analysis.model.params))

    return _lowered(
        analysis, fused, leaves, spec, pack=traced.pack, own_weights=own_weights, options={}
    )


def lower_split(
    analysis: Analysis,
    weights: PackedWeights,
    leaves: Sequence[Array],
    spec: ProgramSpec,
) -> LoweredProgram:
    """The batch in sub-batches, in one program.

    Args:
      analysis: The model.
      weights: Of all split programs of the model.
      leaves: Leaves of the inputs; only shapes and dtypes count.
      spec: Sizes, staggers, budgets and the rest.
    """
    programs = tuple(analysis.program_at(measured_size(size)) for size in spec.sizes)
    run = SplitProgram(
        programs=programs,
        sizes=spec.sizes,
        timetable=timetable(analysis.summary, spec.staggers),
        layout=weights.layout,
        in_axes=analysis.batch.axes,
        out_axes=analysis.out_axes,
        unroll=spec.unroll,
        sm_budgets=spec.sm_budgets,
    )
    out_tree = analysis.graph.out_tree

    def split(weights, *leaves):
        return jax.tree.unflatten(out_tree, run(weights, leaves))

    options = spec.compiler_options
    if options is None:
        options = overlap_options() if any(spec.staggers) else {}
    return _lowered(
        analysis,
        split,
        leaves,
        spec,
        pack=weights.pack,
        own_weights=lambda: weights.own,
        options=options,
    )


def verify(
    analysis: Analysis,
    leaves: Sequence[Array],
    programs: Sequence[CompiledProgram],
    reference: CompiledProgram,
    progress: Callable[[int, int, str], None],
) -> float | None:
    """Largest difference between the outputs of programs and model on fresh random inputs.

    Where programs are kept, so is that they have been verified.

    Args:
      analysis: The model.
      leaves: Leaves of the example inputs: the fresh ones are of their kind.
      programs: What is checked.
      reference: The model as it was given, which they are compared with.
      progress: Called as progress(done, total, item).

    Returns:
      The difference; None if there is nothing to check.

    Raises:
      VerificationError: It is larger than the dtypes allow.
    """
    worst = [0.0] * len(programs)
    for turn, seed in enumerate(VERIFIED_SEEDS if programs else ()):
        fresh = fresh_inputs(leaves, analysis.batch.axes, seed)
        expected = jax.tree.leaves(reference.program(reference.weights, *fresh))
        for index, checked in enumerate(programs):
            name = checked.spec.name
            done, total = turn * len(programs) + index, len(VERIFIED_SEEDS) * len(programs)
            progress(done, total, f"{checked.spec.label} {checked.spec.sizes}")
            outputs = jax.tree.leaves(checked.program(checked.weights, *fresh))
            found = largest_difference(analysis.source, outputs, expected, name)
            worst[index] = max(worst[index], found)
    for checked, difference in zip(programs, worst, strict=True):
        note_verified(checked.key, difference)
    return max(worst, default=None)


def measure(
    programs: Sequence[CompiledProgram],
    leaves: Sequence[Array],
    progress: Callable[[int, int, str], None],
) -> tuple[MeasuredProgram, ...]:
    """Times programs in turn on the same inputs.

    Args:
      programs: What to time.
      leaves: Leaves of the inputs.
      progress: Called as progress(done, total, item).
    """
    calls = [partial(compiled.program, compiled.weights, *leaves) for compiled in programs]
    timings = time_alternately(calls, progress)
    return tuple(
        MeasuredProgram(
            name=compiled.spec.name,
            sizes=compiled.spec.sizes,
            staggers=compiled.spec.staggers,
            predicted_s=compiled.spec.predicted_s,
            measured_s=timing.median_s,
            spread_s=timing.spread_s,
            temporary_bytes=compiled.temporary_bytes,
            weight_bytes=compiled.weight_bytes,
            compile_s=compiled.compile_s,
            sm_budgets=compiled.spec.sm_budgets,
            unroll=compiled.spec.unroll,
            needed_bytes=compiled.needed_bytes,
        )
        for compiled, timing in zip(programs, timings, strict=True)
    )


def overlapped_share(compiled: CompiledProgram, leaves: Sequence[Array]) -> float | None:
    """How much of the memory-bound kernels' time Tensor-Core kernels ran in too, by a device trace.

    None off the GPU, where no kernels are traced.
    """
    call = partial(compiled.program, compiled.weights, *leaves)
    kernels = traced_kernels(call, (), TRACED_CALLS) if jax.default_backend() == "gpu" else ()
    return overlap(kernels).share if kernels else None


def _lowered(
    analysis: Analysis,
    function: Callable,
    leaves: Sequence[Array],
    spec: ProgramSpec,
    *,
    pack: Callable[[Sequence[Array]], tuple[Array, ...]],
    own_weights: Callable[[], tuple[Array, ...]],
    options: Mapping[str, str | int | bool],
) -> LoweredProgram:
    params = jax.tree.leaves(analysis.model.params)
    shapes = [jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in leaves]
    start = time.perf_counter()
    jitted = jax.jit(function, compiler_options=dict(options) or None)
    lowered = jitted.lower(jax.eval_shape(pack, params), *shapes)
    return LoweredProgram(
        analysis=analysis,
        spec=spec,
        lowered=lowered,
        pack=pack,
        own_weights=own_weights,
        options=options,
        lower_s=time.perf_counter() - start,
    )


def compile_all(
    lower: Sequence[Callable[[], LoweredProgram]], progress: Callable[[int, int, str], None]
) -> list[CompiledProgram]:
    """Compiles programs in threads while the next ones are lowered.

    Args:
      lower: Lowers each program.
      progress: Called as progress(done, total, item).
    """
    with ThreadPoolExecutor() as pool:
        compiling = []
        for make in lower:
            lowered = make()
            spec = lowered.spec
            progress(len(compiling), len(lower), f"{spec.label} {spec.sizes}")
            compiling.append((lowered, pool.submit(lowered.compile)))
        return [lowered.finish(*done.result()) for lowered, done in compiling]


def bytes_while_running(memory: Any) -> int:
    """What a program's arguments, results, temporaries and code take together."""
    parts = ("argument", "output", "temp", "generated_code")
    total = sum(getattr(memory, f"{part}_size_in_bytes") for part in parts)
    return total - memory.alias_size_in_bytes
