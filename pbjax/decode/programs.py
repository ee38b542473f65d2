"""The programs that compete for a step: compiled with the state donated, compared, and timed."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from pbjax.decode.interleaved_program import InterleavedProgram
from pbjax.decode.search import InterleavedSpec
from pbjax.decode.state import Pieces, StateLayout
from pbjax.errors import FusionError, InputError, VerificationError
from pbjax.program.analysis import Analysis, whole_batch
from pbjax.runtime.compilation import bytes_while_running
from pbjax.runtime.timing import Timing, calls_to_queue, summary
from pbjax.runtime.verification import allowed_difference, error_and_magnitude

ROUNDS = 7


@dataclass(frozen=True, slots=True, kw_only=True)
class LoweredStep:
    """A way to run a step, not yet compiled.

    Attributes:
      name: plain (as given, where fusion changed it), unsplit, sequential, or interleaved.
      layout: How the state is cut.
      lowered: The program; see `StepProgram`.
      predicted_s: By what its kernels were measured to take.
      lower_s: Seconds that tracing and lowering took.
    """

    name: str
    layout: StateLayout
    lowered: jax.stages.Lowered
    predicted_s: float | None
    lower_s: float

    def compile(self) -> "StepProgram":
        """Compiles it; several may be compiled at a time, in threads."""
        start = time.perf_counter()
        program = self.lowered.compile()
        memory = program.memory_analysis()
        return StepProgram(
            name=self.name,
            layout=self.layout,
            program=program,
            predicted_s=self.predicted_s,
            temporary_bytes=memory.temp_size_in_bytes if memory else 0,
            needed_bytes=bytes_while_running(memory) if memory else 0,
            compile_s=self.lower_s + time.perf_counter() - start,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class StepProgram:
    """A way to run a step, compiled.

    Attributes:
      name: plain (as given, where fusion changed it), unsplit, sequential, or interleaved.
      layout: How the state is cut.
      program: Called as program(weights, pieces, others); pieces are donated.
      predicted_s: By what its kernels were measured to take.
      temporary_bytes: Device memory beside weights, state, inputs and outputs.
      needed_bytes: Device memory while it runs, all of these included.
      compile_s: Seconds that lowering and compiling took.
    """

    name: str
    layout: StateLayout
    program: Callable
    predicted_s: float | None
    temporary_bytes: int
    needed_bytes: int
    compile_s: float


def lower_unsplit(
    analysis: Analysis,
    layout: StateLayout,
    leaves: Sequence[Array],
    *,
    predicted_s: float | None = None,
    plain: bool = False,
) -> LoweredStep:
    """The function with its state donated, and with what fusion has found unless it is plain."""
    whole = whole_batch(analysis, plain=plain)

    def unsplit(weights, pieces, others):
        outputs, state = _parted(layout, whole(weights, _merged(layout, pieces[0], others)))
        return outputs, (state,)

    name = "plain" if plain else "unsplit"
    jitted = jax.jit(unsplit, donate_argnums=1)
    return _lowered(name, analysis, layout, jitted, leaves, predicted_s)


def lower_interleaved(
    analysis: Analysis,
    layout: StateLayout,
    leaves: Sequence[Array],
    spec: InterleavedSpec,
    name: str,
) -> LoweredStep:
    """Two sub-batches in the given order of launches."""
    first, second = (analysis.traced_at(size).graph for size in spec.sizes)
    program = InterleavedProgram(graphs=(first, second), launches=spec.launches)
    step = PairStep(name=name, sizes=spec.sizes, program=program, predicted_s=spec.predicted_s)
    return step.lower(analysis, layout, leaves)


@dataclass(frozen=True, slots=True, kw_only=True)
class PairStep:
    """A step as one program of two sub-batches.

    Attributes:
      name: Of the program.
      sizes: Rows of each.
      program: Called as program(weights, first, second) with the leaves of both sub-batches'
        inputs; returns those of their outputs.
      predicted_s: Seconds, where they are predicted.
      options: Of the compiler.
    """

    name: str
    sizes: tuple[int, int]
    program: Callable[..., tuple[list[Array], list[Array]]]
    predicted_s: float | None = None
    options: Mapping[str, str | int | bool] | None = None

    def lower(
        self, analysis: Analysis, layout: StateLayout, leaves: Sequence[Array]
    ) -> LoweredStep:
        """Lowers it with the state cut into two pieces, which are donated."""
        layout = replace(layout, sizes=self.sizes)
        other_axes = _others(layout, analysis.batch.axes)
        out_axes, _ = _parted(layout, analysis.out_axes)

        def pair(weights, pieces, others):
            parts = [
                [_rows(x, axis, start, size) for x, axis in zip(others, other_axes, strict=True)]
                for start, size in ((0, self.sizes[0]), (self.sizes[0], self.sizes[1]))
            ]
            merged = [_merged(layout, p, o) for p, o in zip(pieces, parts, strict=True)]
            parted = [_parted(layout, outputs) for outputs in self.program(weights, *merged)]
            outputs = zip(out_axes, *(rest for rest, _ in parted), strict=True)
            joined = [
                a if axis is None else lax.concatenate([a, b], axis) for axis, a, b in outputs
            ]
            return joined, tuple(state for _, state in parted)

        compiled = dict(self.options) if self.options else None
        jitted = jax.jit(pair, donate_argnums=1, compiler_options=compiled)
        return _lowered(self.name, analysis, layout, jitted, leaves, self.predicted_s)


def _rows(x: Array, axis: int | None, start: int, size: int) -> Array:
    return x if axis is None else lax.slice_in_dim(x, start, start + size, axis=axis)


def _merged(layout: StateLayout, state: Sequence[Array], others: Sequence[Array]) -> list[Array]:
    start = layout.inputs.start
    return [*others[:start], *state, *others[start:]]


def _others[T](layout: StateLayout, leaves: Sequence[T]) -> list[T]:
    return [*leaves[: layout.inputs.start], *leaves[layout.inputs.stop :]]


def _parted[T](layout: StateLayout, leaves: Sequence[T]) -> tuple[list[T], tuple[T, ...]]:
    """Outputs that are not state, and those that are."""
    where = layout.outputs
    return [*leaves[: where.start], *leaves[where.stop :]], tuple(leaves[where.start : where.stop])


def _lowered(
    name: str,
    analysis: Analysis,
    layout: StateLayout,
    jitted: jax.stages.Wrapped,
    leaves: Sequence[Array],
    predicted: float | None,
) -> LoweredStep:
    start = time.perf_counter()
    state = [leaves[i] for i in layout.inputs]
    pieces = jax.eval_shape(layout.cut, state)
    lowered = jitted.lower(analysis.weights, pieces, tuple(_others(layout, leaves)))
    return LoweredStep(
        name=name,
        layout=layout,
        lowered=lowered,
        predicted_s=predicted,
        lower_s=time.perf_counter() - start,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Timed:
    """A program that was timed.

    Attributes:
      step: The program.
      seconds: Of a call, in each round.
    """

    step: StepProgram
    seconds: tuple[float, ...]

    @property
    def timing(self) -> Timing:
        """Median and spread over the rounds."""
        return summary(self.seconds)

    def gain(self, other: "Timed") -> Timing:
        """Seconds that this program saves over another, round by round: a drift hits both alike."""
        pairs = zip(other.seconds, self.seconds, strict=True)
        return summary([theirs - own for theirs, own in pairs])


class Runner:
    """Calls programs on the example, one copy of its state at a time.

    The state that a call returns goes into the next one; integers in it, such as lengths, are those
    of the example in every call, so that it does not grow out of its arrays.
    """

    def __init__(self, analysis: Analysis, leaves: Sequence[Array]):
        """Copies nothing yet.

        Args:
          analysis: The function.
          leaves: Leaves of the example inputs.
        """
        self._weights = analysis.weights
        self._leaves = leaves

    def start(self, step: StepProgram) -> Pieces:
        """A copy of the example's state in the pieces of a program."""
        pieces = step.layout.cut([self._leaves[i] for i in step.layout.inputs])
        # A single piece is the example itself, which a call would use up.
        return jax.tree.map(jnp.copy, pieces) if len(pieces) == 1 else pieces

    def call(self, step: StepProgram, pieces: Pieces) -> tuple[list[Array], Pieces]:
        """Outputs and new state of one call."""
        others = tuple(_others(step.layout, self._leaves))
        return step.program(self._weights, self._steady(step.layout, pieces), others)

    def seconds(
        self, steps: Sequence[StepProgram], progress: Callable[[int, int, str], None]
    ) -> list[Timed]:
        """Wall-clock seconds of a call of each program, in turns.

        Args:
          steps: The programs.
          progress: Called as progress(done, total, item).
        """
        calls = [calls_to_queue(self._sample(step, 1)) for step in steps]
        times: list[list[float]] = [[] for _ in steps]
        for done in range(ROUNDS):
            progress(done, ROUNDS, "rounds")
            for step, count, found in zip(steps, calls, times, strict=True):
                found.append(self._sample(step, count))
        return [Timed(step=s, seconds=tuple(t)) for s, t in zip(steps, times, strict=True)]

    def _sample(self, step: StepProgram, calls: int) -> float:
        """Seconds of one of several calls that are queued, after one that is not counted."""
        outputs, pieces = jax.block_until_ready(self.call(step, self.start(step)))
        start = time.perf_counter()
        for _ in range(calls):
            outputs, pieces = self.call(step, pieces)
        jax.block_until_ready((outputs, pieces))
        return (time.perf_counter() - start) / calls

    def _steady(self, layout: StateLayout, pieces: Pieces) -> Pieces:
        places = [i for i, x in enumerate(pieces[0]) if jnp.issubdtype(x.dtype, jnp.integer)]
        given = [self._leaves[layout.inputs[i]] for i in places]
        cut = replace(layout, axes=tuple(layout.axes[i] for i in places)).cut(given)
        steady = [list(piece) for piece in pieces]
        for piece, integers in zip(steady, cut, strict=True):
            for place, x in zip(places, integers, strict=True):
                piece[place] = jnp.copy(x)
        return tuple(map(tuple, steady))


def check_room(analysis: Analysis, layout: StateLayout, leaves: Sequence[Array]) -> None:
    """Refuses a state of which three copies do not fit the device.

    The example stays whole, and the states that two programs return are compared.

    Raises:
      InputError: They do not fit.
    """
    state = sum(leaves[i].nbytes for i in layout.inputs)
    weights = sum(x.nbytes for x in analysis.weights)
    room = analysis.device.memory_bytes
    if weights + 3 * state > room:
        raise InputError(
            f"optimize(state={layout.argument}): the state is {state / 1e9:.1f} GB, the weights "
            f"{weights / 1e9:.1f} GB; three states beside the weights must fit "
            f"{room / 1e9:.1f} GB, since programs are compared on copies; pass an example with a "
            "smaller batch or state"
        )


def differences(
    analysis: Analysis, runner: Runner, steps: Sequence[StepProgram], reference: StepProgram
) -> float:
    """Largest difference of outputs and new state between programs and the function as given.

    Raises:
      VerificationError: It is larger than the dtypes allow.
    """
    expected, (state,) = runner.call(reference, runner.start(reference))
    worst = 0.0
    for step in steps:
        outputs, pieces = runner.call(step, runner.start(step))
        compared = partial(_difference, analysis, step.name)
        worst = max(worst, *map(compared, outputs, expected))
        for place, want in enumerate(state):
            # Leaf by leaf: the pieces of all of it at once would be one more state.
            axes = (step.layout.axes[place],)
            parts = replace(step.layout, axes=axes).cut([want])
            worst = max(worst, *map(compared, (p[place] for p in pieces), (p[0] for p in parts)))
    return worst


def _difference(analysis: Analysis, name: str, got: Array, want: Array) -> float:
    found, magnitude = map(float, error_and_magnitude(got, want))
    if jnp.issubdtype(got.dtype, jnp.floating):
        allowed = allowed_difference(analysis.source, got.dtype, magnitude)
    else:
        allowed = 0.0
    if not found <= allowed:
        if name == "unsplit":  # Without fusion it is the function itself.
            raise FusionError(
                f"optimize: {got.dtype}{got.shape} of the step with kernels differs by "
                f"{found:.3g} from the function's; {allowed:.3g} is allowed for {got.dtype}; pass "
                "fuse='none'"
            )
        raise VerificationError(
            f"optimize: {got.dtype}{got.shape} of the {name} step differs by {found:.3g} from the "
            f"function's; {allowed:.3g} is allowed for {got.dtype}; keep the function as it is, or "
            "try fuse='none', and please report it"
        )
    return found
