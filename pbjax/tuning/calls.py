"""Calls without state: the whole batch, or its sub-batches, as programs that the core can tune."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from pbjax.planning.profile_rows import measured_size
from pbjax.planning.timetable import timetable
from pbjax.program.analysis import Analysis
from pbjax.program.traced_model import TracedModel
from pbjax.program.unrolling import unrolled
from pbjax.runtime.compilation import CompiledProgram, LoweredProgram, ProgramSpec, lower
from pbjax.runtime.device_trace import overlap
from pbjax.runtime.execution import SplitProgram, WeightLayout
from pbjax.runtime.program_cache import note_verified
from pbjax.runtime.timing import Sampler, on_gpu, sampler, traced_kernels
from pbjax.runtime.verification import Difference, compare, fresh_inputs
from pbjax.tuning.optimized import Bucket
from pbjax.tuning.request import Request

VERIFIED_SEEDS = (0, 1)
TRACED_CALLS = 3

type Pack = Callable[[Sequence[Array]], tuple[Array, ...]]


class StackedWeights:
    """The weights of programs that loop over a model's layers: stacked once, when first needed.

    Attributes:
      pack: From leaves of any params of the model to such weights. It outlives the model in what
        `optimize` returns, and so holds captured arrays, but no params.
    """

    def __init__(self, analysis: Analysis):
        """Stacks nothing yet."""
        self._analysis = analysis

    @cached_property
    def layout(self) -> WeightLayout:
        """How the weights are passed."""
        return WeightLayout.of(self._analysis.program)

    @property
    def pack(self) -> Pack:
        """From leaves of any params of the model to the stacked weights."""
        return partial(_stack, self.layout, self._analysis.prepare)

    @cached_property
    def own(self) -> tuple[Array, ...]:
        """The weights of the model's own params."""
        return self.layout.pack(self._analysis.weights)


def _stack(layout: WeightLayout, prepare: Pack, params: Sequence[Array]) -> tuple[Array, ...]:
    return layout.pack(prepare(params))


@dataclass(frozen=True, slots=True, kw_only=True)
class CallWorkload:
    """A model with example inputs of one batch size.

    Attributes:
      analysis: The model.
      stacked: The weights of programs that loop over layers.
      leaves: Leaves of the inputs.
    """

    analysis: Analysis
    stacked: StackedWeights
    leaves: tuple[Array, ...]

    @classmethod
    def of(
        cls, request: Request, analysis: Analysis, stacked: StackedWeights, batch_size: int
    ) -> "CallWorkload":
        """The workload of the first rows of a request's inputs."""
        leaves = (
            x
            if axis is None or x.shape[axis] == batch_size
            else lax.slice_in_dim(x, 0, batch_size, axis=axis)
            for x, axis in zip(request.leaves, analysis.batch.axes, strict=True)
        )
        return cls(analysis=analysis, stacked=stacked, leaves=tuple(leaves))

    @property
    def held_bytes(self) -> int:
        """Nothing: what programs return is compared, and let go of, one at a time."""
        return 0

    def pack(self, spec: ProgramSpec) -> Pack:
        """From leaves of any params of the model to the weights that a program takes."""
        if _loops(spec):
            return self.stacked.pack
        return tuple if self._is_given(spec) else self._traced(spec).pack

    def lower(self, spec: ProgramSpec) -> LoweredProgram:
        """Lowers the program of a spec; of the inputs only shapes and dtypes count."""
        if _loops(spec):
            function, own_weights = self._in_sub_batches(spec), lambda: self.stacked.own
        elif self._is_given(spec):
            function, own_weights = self._given(), self._own_params
        else:
            function, own_weights = self._replayed(spec), partial(self._own_weights, spec)
        params = jax.tree.leaves(self.analysis.model.params)
        jitted = jax.jit(function, compiler_options=dict(spec.compiler_options) or None)
        shapes = [jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in self.leaves]
        arguments = (jax.eval_shape(self.pack(spec), params), *shapes)
        return lower(self.analysis, spec, jitted, arguments, own_weights)

    def differences(
        self,
        programs: Sequence[CompiledProgram],
        reference: CompiledProgram,
        progress: Callable[[int, int, str], None],
    ) -> list[Difference]:
        """How far each program's outputs are from the reference's on fresh random inputs.

        Where programs are kept, so is that they have been verified.
        """
        worst = [Difference()] * len(programs)
        source = self.analysis.traced_at(sum(reference.spec.sizes)).source
        weights = (*self._own_params(), *map(jnp.asarray, source.constants))
        total = len(VERIFIED_SEEDS) * len(programs)
        for turn, seed in enumerate(VERIFIED_SEEDS if programs else ()):
            fresh = fresh_inputs(self.leaves, self.analysis.batch.axes, seed)
            expected = jax.tree.leaves(reference.program(reference.weights, *fresh))
            for index, checked in enumerate(programs):
                spec = checked.spec
                progress(turn * len(programs) + index, total, f"{spec.label} {spec.sizes}")
                outputs = jax.tree.leaves(checked.program(checked.weights, *fresh))
                worst[index] |= compare(source, outputs, expected, (*weights, *fresh))
        for checked, difference in zip(programs, worst, strict=True):
            if not difference.fault:
                note_verified(checked.key, difference.largest)
        return worst

    def sampler(self, program: CompiledProgram) -> Sampler:
        """Times calls of a program on the example inputs."""
        return sampler(self._call(program))

    def overlapped_fraction(self, program: CompiledProgram) -> float | None:
        """Share of memory-bound kernels' time that Tensor-Core kernels cover; None off the GPU."""
        kernels = traced_kernels(self._call(program), (), TRACED_CALLS) if on_gpu() else ()
        return overlap(kernels).share if kernels else None

    def bucket(self, kept: CompiledProgram) -> Bucket:
        """The program that is kept, with what its calls are checked for."""
        return Bucket(
            batch_size=sum(kept.spec.sizes),
            signature=tuple((leaf.shape, leaf.dtype) for leaf in self.leaves),
            program=kept.program,
            pack=self.pack(kept.spec),
            weights=kept.weights,
        )

    def _call(self, program: CompiledProgram) -> Callable[[], object]:
        return partial(program.program, program.weights, *self.leaves)

    def _is_given(self, spec: ProgramSpec) -> bool:
        """Whether a spec runs the user's function itself, not its graph."""
        return spec.layers == "as given" and (spec.plain or not self.analysis.fused)

    def _given(self) -> Callable:
        model, batch = self.analysis.model, self.analysis.batch
        params_tree = jax.tree.structure(model.params)

        def unsplit(weights, *leaves):
            inputs = jax.tree.unflatten(batch.tree, leaves)
            return model.apply(jax.tree.unflatten(params_tree, weights), *inputs)

        return unsplit

    def _own_params(self) -> tuple[Array, ...]:
        return tuple(jax.tree.leaves(self.analysis.model.params))

    def _traced(self, spec: ProgramSpec) -> TracedModel:
        return self.analysis.traced_at(sum(spec.sizes))

    def _replayed(self, spec: ProgramSpec) -> Callable:
        traced = self._traced(spec)
        if spec.layers == "unrolled":
            traced = replace(traced, graph=unrolled(traced.graph, self.analysis.summary.num_blocks))

        def unsplit(weights, *leaves):
            return jax.tree.unflatten(traced.graph.out_tree, traced.run(weights, leaves))

        return unsplit

    def _own_weights(self, spec: ProgramSpec) -> tuple[Array, ...]:
        traced = self._traced(spec)
        if traced.shares_weights(self.analysis.traced):
            return tuple(self.analysis.weights[i] for i in traced.read)
        return traced.pack(self._own_params())

    def _in_sub_batches(self, spec: ProgramSpec) -> Callable:
        analysis = self.analysis
        run = SplitProgram(
            programs=tuple(analysis.program_at(measured_size(size)) for size in spec.sizes),
            sizes=spec.sizes,
            timetable=timetable(analysis.summary, spec.staggers),
            layout=self.stacked.layout,
            in_axes=analysis.batch.axes,
            out_axes=analysis.out_axes,
            unroll=spec.unroll,
            sm_budgets=spec.sm_budgets,
        )
        out_tree = analysis.graph.out_tree

        def split(weights, *leaves):
            return jax.tree.unflatten(out_tree, run(weights, leaves))

        return split


def _loops(spec: ProgramSpec) -> bool:
    """Whether a program loops over layers whose weights are stacked."""
    return not spec.is_whole or spec.layers == "scanned"
