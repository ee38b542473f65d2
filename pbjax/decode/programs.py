"""Steps that carry state, as programs that the core can tune: the state is donated to each call."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from pbjax.decode.interleaved_program import InterleavedProgram
from pbjax.decode.search import SpecSearch
from pbjax.decode.state import Pieces, StateLayout, StepRunner, find_state
from pbjax.errors import InputError
from pbjax.program.analysis import Analysis, whole_batch
from pbjax.runtime.compilation import CompiledProgram, LoweredProgram, ProgramSpec, lower
from pbjax.runtime.program_cache import note_verified
from pbjax.runtime.timing import Sampler
from pbjax.runtime.verification import Difference, compare_output
from pbjax.tuning.request import Request
from pbjax.tuning.shortlist import device_room

# From weights and the leaves of two sub-batches' inputs to the leaves of their outputs.
type PairFunction = Callable[..., tuple[list[Array], list[Array]]]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepWorkload:
    """A step with example inputs; programs are called on copies of the example's state.

    Attributes:
      analysis: The step.
      layout: The place of the state, which is one piece.
      leaves: Leaves of the example inputs.
      specs: Predicted launches of two sub-batches at any sizes; None if the batch has none.
    """

    analysis: Analysis
    layout: StateLayout
    leaves: tuple[Array, ...]
    specs: SpecSearch | None

    @classmethod
    def of(cls, request: Request, analysis: Analysis) -> "StepWorkload":
        """The workload of a request with `state`.

        Raises:
          InputError: The state is not returned once, or three copies of it do not fit the device.
          InputTypeError: An input is only a shape.
        """
        layout = find_state(analysis, request)
        _check_room(analysis, layout, request.leaves)
        specs = None if analysis.unsplittable else SpecSearch(analysis)
        return cls(analysis=analysis, layout=layout, leaves=request.leaves, specs=specs)

    @property
    def state_bytes(self) -> int:
        """Bytes of the state."""
        return sum(self.leaves[i].nbytes for i in self.layout.inputs)

    @property
    def held_bytes(self) -> int:
        """The example's state, and that which the reference returned."""
        return 2 * self.state_bytes

    def layout_of(self, spec: ProgramSpec) -> StateLayout:
        """How a program cuts the state."""
        return replace(self.layout, sizes=spec.sizes)

    def lower(self, spec: ProgramSpec) -> LoweredProgram:
        """Lowers the whole step, or its two sub-batches in the order of their launches."""
        if spec.is_whole:
            return self._lower(spec, self._whole(spec))
        assert self.specs is not None
        found = self.specs.at(spec.sizes)
        launches = (found if spec.interleaved else found.in_sequence()).launches
        first, second = (self.analysis.traced_at(size).graph for size in spec.sizes)
        return self.lower_pair(spec, InterleavedProgram(graphs=(first, second), launches=launches))

    def lower_pair(self, spec: ProgramSpec, program: PairFunction) -> LoweredProgram:
        """Lowers two sub-batches that run as a given function."""
        layout = self.layout_of(spec)
        other_axes = _others(layout, self.analysis.batch.axes)
        out_axes, _ = _parted(layout, self.analysis.out_axes)
        first, second = spec.sizes

        def pair(weights, pieces, others):
            parts = [
                [_rows(x, axis, start, size) for x, axis in zip(others, other_axes, strict=True)]
                for start, size in ((0, first), (first, second))
            ]
            merged = [_merged(layout, p, o) for p, o in zip(pieces, parts, strict=True)]
            parted = [_parted(layout, outputs) for outputs in program(weights, *merged)]
            outputs = zip(out_axes, *(rest for rest, _ in parted), strict=True)
            joined = [
                a if axis is None else lax.concatenate([a, b], axis) for axis, a, b in outputs
            ]
            return joined, tuple(state for _, state in parted)

        return self._lower(spec, pair)

    def differences(
        self,
        programs: Sequence[CompiledProgram],
        reference: CompiledProgram,
        progress: Callable[[int, int, str], None],
    ) -> list[Difference]:
        """How far each program's outputs and new state are from the reference's on the example.

        Where programs are kept, so is that they have been verified.
        """
        if not programs:
            return []
        expected, (state,) = self.call(reference, self.start(reference))
        found = []
        for done, program in enumerate(programs):
            progress(done, len(programs), f"{program.spec.label} {program.spec.sizes}")
            found.append(self._difference(program, expected, state))
            if not found[-1].fault:
                note_verified(program.key, found[-1].largest)
        return found

    def sampler(self, program: CompiledProgram) -> Sampler:
        """Times calls that are queued, after one that is not counted."""

        def sample(calls: int) -> float:
            outputs, pieces = jax.block_until_ready(self.call(program, self.start(program)))
            start = time.perf_counter()
            for _ in range(calls):
                outputs, pieces = self.call(program, pieces)
            jax.block_until_ready((outputs, pieces))
            return (time.perf_counter() - start) / calls

        return sample

    def overlapped_fraction(self, program: CompiledProgram) -> float | None:
        """None: what overlaps shares a launch, which a trace does not take apart."""
        return None

    def runner(self, kept: CompiledProgram) -> StepRunner:
        """Calls of the program that is kept."""
        layout, out_tree = self.layout_of(kept.spec), self.analysis.graph.out_tree
        return StepRunner(kept.program, kept.weights, layout, out_tree)

    def start(self, program: CompiledProgram) -> Pieces:
        """A copy of the example's state in the pieces of a program."""
        pieces = self.layout_of(program.spec).cut([self.leaves[i] for i in self.layout.inputs])
        # A single piece is the example itself, which a call would use up.
        return jax.tree.map(jnp.copy, pieces) if len(pieces) == 1 else pieces

    def call(self, program: CompiledProgram, pieces: Pieces) -> tuple[list[Array], Pieces]:
        """Outputs and new state of one call.

        Integers in the state, such as lengths, are those of the example in every call, so that it
        does not grow out of its arrays.
        """
        others = tuple(_others(self.layout, self.leaves))
        return program.program(program.weights, self._steady(program, pieces), others)

    def _whole(self, spec: ProgramSpec) -> Callable:
        whole = whole_batch(self.analysis, plain=spec.plain, layers=spec.layers)
        layout = self.layout

        def unsplit(weights, pieces, others):
            outputs, state = _parted(layout, whole(weights, _merged(layout, pieces[0], others)))
            return outputs, (state,)

        return unsplit

    def _lower(self, spec: ProgramSpec, function: Callable) -> LoweredProgram:
        analysis, layout = self.analysis, self.layout_of(spec)
        options = dict(spec.compiler_options) or None
        jitted = jax.jit(function, donate_argnums=1, compiler_options=options)
        pieces = jax.eval_shape(layout.cut, [self.leaves[i] for i in layout.inputs])
        arguments = (analysis.weights, pieces, tuple(_others(layout, self.leaves)))
        return lower(analysis, spec, jitted, arguments, lambda: analysis.weights)

    def _difference(
        self, program: CompiledProgram, expected: Sequence[Array], state: Sequence[Array]
    ) -> Difference:
        outputs, pieces = self.call(program, self.start(program))
        source = self.analysis.source
        constants = map(jnp.asarray, source.constants)
        values = (*jax.tree.leaves(self.analysis.model.params), *constants, *self.leaves)
        worst, layout = Difference(), self.layout_of(program.spec)
        numbers, _ = _parted(layout, range(len(source.outputs)))
        for number, got, want in zip(numbers, outputs, expected, strict=True):
            worst |= compare_output(source, f"output {number}", got, want, number, values)
        for place, want in enumerate(state):
            name, axis = f"state {place}", layout.axes[place]
            found = [piece[place] for piece in pieces]
            if axis is not None and jnp.issubdtype(want.dtype, jnp.integer):
                # Chosen tokens, which near-ties may change; few bytes.
                whole, number = jnp.concatenate(found, axis), layout.outputs[place]
                worst |= compare_output(source, name, whole, want, number, values)
                continue
            # Leaf by leaf: the pieces of all of it at once would be one more state.
            parts = replace(layout, axes=(axis,)).cut([want])
            for got, part in zip(found, parts, strict=True):
                worst |= compare_output(source, name, got, part[0])
        return worst

    def _steady(self, program: CompiledProgram, pieces: Pieces) -> Pieces:
        layout = self.layout_of(program.spec)
        places = [i for i, x in enumerate(pieces[0]) if jnp.issubdtype(x.dtype, jnp.integer)]
        given = [self.leaves[layout.inputs[i]] for i in places]
        cut = replace(layout, axes=tuple(layout.axes[i] for i in places)).cut(given)
        steady = [list(piece) for piece in pieces]
        for piece, integers in zip(steady, cut, strict=True):
            for place, x in zip(places, integers, strict=True):
                piece[place] = jnp.copy(x)
        return tuple(map(tuple, steady))


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


def _check_room(analysis: Analysis, layout: StateLayout, leaves: Sequence[Array]) -> None:
    """Refuses a state of which three copies do not fit the device, before anything is compiled.

    The example stays whole, and the states that two programs return are compared.
    """
    state = sum(leaves[i].nbytes for i in layout.inputs)
    weights = sum(x.nbytes for x in analysis.weights)
    room = device_room(analysis.device)
    if weights + 3 * state > room:
        raise InputError(
            f"optimize(state={layout.argument}): the state is {state / 1e9:.1f} GB, the weights "
            f"{weights / 1e9:.1f} GB; three states beside the weights must fit "
            f"{room / 1e9:.1f} GB, since programs are compared on copies; pass an example with a "
            "smaller batch or state"
        )
