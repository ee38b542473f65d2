"""Turns a timetable and programs into one jitted function.

Each sub-batch runs the stages of its own program (the same cutting, traced at its own size). The
function walks the timetable: fill, then one `lax.scan` whose step is the steady part, then drain.
Nothing orders the stages of one slot, so that a device may run them at the same time. `timing`
measures stages; `planning.search` decides on a timetable.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import cast

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import Literal
from jaxtyping import Array

from pallas_kernels.dispatch import default_sm_budget
from pallas_kernels.operation import PRIMITIVE as KERNEL
from pallas_kernels.relaunch import can_relaunch, relaunch
from pbjax.device import ResourceClass
from pbjax.graph.trace import Atom, Aval, Operation, evaluate
from pbjax.planning.profile_rows import measured_size
from pbjax.planning.timetable import PROLOGUE, Slot, Timetable
from pbjax.program.blocks import Apart, Collected, Stacked
from pbjax.program.stages import Program, Stage

type Runner = Callable[[Stage, Sequence[Array]], Sequence[Array]]


def overlap_options() -> dict[str, str | int | bool]:
    """Compiler options with which independent stages may overlap; none except on a GPU.

    The whole step has to be one CUDA graph whose nodes depend on each other by data alone
    (CONCURRENT), and matrix products of sub-batches that share a weight must not be merged. The
    last option keeps the graph under a profiler, which would otherwise run kernels one by one.
    """
    if jax.default_backend() != "gpu":
        return {}
    return {
        "xla_gpu_command_buffer_scheduling_mode": "CONCURRENT",
        "xla_gpu_graph_min_graph_size": 1,
        "xla_gpu_dot_merger_threshold_mb": 0,
        "xla_enable_command_buffers_during_profiling": True,
    }


def run_inline(stage: Stage, args: Sequence[Array]) -> list[Array]:
    """Runs a stage's operations one after the other.

    Where `default_sm_budget` holds a budget, our kernels are launched anew within it; other
    operations, and kernels inside a loop of the stage, run as they were traced.
    """
    env: dict[int, Array] = dict(zip(stage.reads, args, strict=True))
    if default_sm_budget.value is None:
        evaluate(stage.operations, env)
    else:
        for operation in stage.operations:
            _evaluate_within_budget(operation, env)
    return [env[value] for value in stage.writes]


def _evaluate_within_budget(operation: Operation, env: dict[int, Array]) -> None:
    if operation.primitive != KERNEL or not can_relaunch(operation.params):
        evaluate((operation,), env)
        return
    operands = [a.val if isinstance(a, Literal) else env[a] for a in operation.inputs]
    scope = jax.named_scope(operation.scope) if operation.scope else nullcontext()
    with scope, operation.equation.ctx.manager:
        results = relaunch(operation.params, operands)
    env.update(zip(operation.outputs, results, strict=True))


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightLayout:
    """How a program's weights are passed: the weights of layers stacked, the others unchanged.

    Attributes:
      loose: Numbers of the weights that are passed unchanged.
      stacked: Values of the block that are a weight in each of its N repetitions.
    """

    loose: tuple[int, ...]
    stacked: tuple[Apart, ...]

    @staticmethod
    def of(program: Program) -> "WeightLayout":
        """The layout for a program; every weight that it reads appears once."""
        weights = program.graph.weights
        apart = [x for x in program.block.xs if isinstance(x, Apart)]
        stacked = tuple(
            x for x in apart if all(isinstance(a, int) and a in weights for a in x.outer)
        )
        elsewhere = _read_outside(program, stacked)
        return WeightLayout(loose=tuple(w for w in weights if w in elsewhere), stacked=stacked)

    def pack(self, leaves: Sequence[Array]) -> tuple[Array, ...]:
        """The arrays to pass to the program; stacks the layers' weights, one copy of each.

        Args:
          leaves: The weights by their numbers: leaves of the params, then captured arrays.
        """
        layers = ([a for a in x.outer if isinstance(a, int)] for x in self.stacked)
        stacked = (jnp.stack([leaves[i] for i in numbers]) for numbers in layers)
        return (*(leaves[i] for i in self.loose), *stacked)


def _read_outside(program: Program, stacked: Sequence[Apart]) -> set[int]:
    """Values of the graph that are read in another role than that of a stacked weight."""
    block = program.block
    atoms: list[Atom] = [*program.graph.outputs, *(const.outer for const in block.consts)]
    atoms += [carry.initial for carry in block.carry]
    for x in block.xs:
        if x not in stacked:
            atoms += x.outer if isinstance(x, Apart) else [x.outer]
    for stage in (program.prologue, program.epilogue):
        atoms += stage.reads if stage else ()
    return {atom for atom in atoms if isinstance(atom, int)}


class SubBatchState:
    """One sub-batch while its program runs; holds the values that are still needed."""

    def __init__(
        self,
        program: Program,
        outer: Mapping[int, Array],
        per_block: Mapping[int, Array],
        runner: Runner = run_inline,
    ):
        """Starts before the first stage.

        Args:
          program: The program, traced at the size of the sub-batch.
          outer: Weights and inputs by their numbers in the graph.
          per_block: Stacked weights by their numbers in the block.
          runner: Runs one stage.
        """
        self.program = program
        self.outer = dict(outer)
        self.live: dict[int, Array] = {}
        self.collected: list[list[Array]] = [[] for _ in program.block.ys]
        self._shared = {const.inner: const.outer for const in program.block.consts}
        self._per_block = dict(per_block)
        self._runner = runner
        if program.prologue is None:
            self._enter_block()

    def run(self, stage: int, block: int | Array) -> None:
        """Runs one task of the timetable.

        Args:
          stage: PROLOGUE, a stage of the block, or the number of stages for the epilogue.
          block: Number of the block, traced inside a scan.
        """
        if stage == PROLOGUE:
            self._run_end(self.program.prologue)
            self._enter_block()
        elif stage == len(self.program.stages):
            self.leave_block()
            self._run_end(self.program.epilogue)
        else:
            self._run_stage(stage, block)

    def resource(self, stage: int) -> ResourceClass | None:
        """The class of a stage of the timetable; None for a missing prologue or epilogue."""
        ends = {PROLOGUE: self.program.prologue, len(self.program.stages): self.program.epilogue}
        found = ends[stage] if stage in ends else self.program.stages[stage]
        return found.resource if found else None

    def state(self, stage: int) -> tuple[Array, ...]:
        """The values that a sub-batch needs before the given stage, in a fixed order."""
        avals = self.program.block.avals
        return tuple(_strong(self.live[v], avals[v].dtype) for v in self.program.live(stage))

    def restore(self, stage: int, state: Sequence[Array]) -> None:
        """Sets the values that `state` returned before the same stage."""
        self.live = dict(zip(self.program.live(stage), state, strict=True))

    def leave_block(self) -> None:
        """Hands the block's results to the graph around it, after all repetitions have run."""
        for carry in self.program.block.carry:
            self.outer[carry.final] = self.live[carry.inner]
        for y, pieces in zip(self.program.block.ys, self.collected, strict=True):
            joined = lax.concatenate(pieces, 0) if len(pieces) > 1 else pieces[0]
            if isinstance(y.outer, int):
                self.outer[y.outer] = joined
            else:
                self.outer.update({value: joined[i] for i, value in enumerate(y.outer)})

    def outputs(self) -> list[Array]:
        """The program's outputs for this sub-batch."""
        return [self._atom(atom) for atom in self.program.graph.outputs]

    def _enter_block(self) -> None:
        block = self.program.block
        for x in block.xs:
            if x.inner not in self._per_block:
                self._per_block[x.inner] = self._stack(x)
        self.live = {carry.inner: self._atom(carry.initial) for carry in block.carry}

    def _stack(self, x: Stacked | Apart) -> Array:
        if isinstance(x, Stacked):
            return self._atom(x.outer)
        return jnp.stack([self._atom(atom) for atom in x.outer])

    def _run_end(self, stage: Stage | None) -> None:
        if stage is None:
            raise AssertionError("a timetable has tasks only for stages that exist")
        results = self._runner(stage, [self.outer[value] for value in stage.reads])
        self.outer.update(zip(stage.writes, results, strict=True))

    def _run_stage(self, index: int, block: int | Array) -> None:
        stage = self.program.stages[index]
        args = [self._inner(value, block) for value in stage.reads]
        self.live.update(zip(stage.writes, self._runner(stage, args), strict=True))
        for y, pieces in zip(self.program.block.ys, self.collected, strict=True):
            if self._collected_at(y) == index:
                pieces.append(jnp.expand_dims(self._inner(y.inner, block), 0))
        if index == len(self.program.stages) - 1:
            carries = self.program.block.carry
            self.live = {carry.inner: self._inner(carry.result, block) for carry in carries}

    def _collected_at(self, y: Collected) -> int:
        """The stage that writes a collected value; the first for values that stages only read."""
        for index, stage in enumerate(self.program.stages):
            if y.inner in stage.writes:
                return index
        return 0

    def _inner(self, atom: Atom, block: int | Array) -> Array:
        if isinstance(atom, Literal):
            return self._atom(atom)
        if atom in self.live:
            return self.live[atom]
        if atom in self._shared:
            return self._atom(self._shared[atom])
        return lax.dynamic_index_in_dim(self._per_block[atom], block, keepdims=False)

    def _atom(self, atom: Atom) -> Array:
        if isinstance(atom, Literal):
            return jnp.asarray(atom.val, cast(Aval, atom.aval).dtype)
        return self.outer[atom]


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitProgram:
    """A function that runs a batch in sub-batches by a timetable.

    Attributes:
      programs: A program for each sub-batch, traced at its size (one row at `measured_size`).
      sizes: Rows of each sub-batch.
      timetable: The stages of each slot.
      layout: How the weights are passed.
      in_axes: Batch axis of each input; None for one that all sub-batches share.
      out_axes: Batch axis of each output; None for one that does not depend on the batch.
      unroll: Blocks in one step of the loop; overlap ends at the boundary of a step.
      sm_budgets: SMs that the kernels of a stage may fill in a slot with stages of several classes,
        by resource class; a class without a budget may fill all.
    """

    programs: tuple[Program, ...]
    sizes: tuple[int, ...]
    timetable: Timetable
    layout: WeightLayout
    in_axes: tuple[int | None, ...]
    out_axes: tuple[int | None, ...]
    unroll: int = 1
    sm_budgets: Mapping[str, int] = field(default_factory=dict, hash=False)

    def __call__(self, weights: Sequence[Array], inputs: Sequence[Array]) -> tuple[Array, ...]:
        """Outputs of the whole batch, flattened.

        Args:
          weights: The weights that `layout.pack` returned.
          inputs: Leaves of the inputs.
        """
        sub_batches = [
            SubBatchState(program, *self._environment(program, weights, part))
            for program, part in zip(self.programs, self._split(inputs), strict=True)
        ]
        self._walk(self.timetable.fill, sub_batches, 0)
        self._loop(sub_batches)
        self._walk(self.timetable.drain, sub_batches, 0)
        for sub_batch, program in zip(sub_batches, self.programs, strict=True):
            if program.epilogue is None:
                sub_batch.leave_block()
        return self._join([sub_batch.outputs() for sub_batch in sub_batches])

    def _environment(
        self, program: Program, weights: Sequence[Array], inputs: Sequence[Array]
    ) -> tuple[dict[int, Array], dict[int, Array]]:
        loose = dict(zip(self.layout.loose, weights, strict=False))
        stacked = weights[len(self.layout.loose) :]
        inner = (x.inner for x in self.layout.stacked)
        outer = loose | dict(zip(program.graph.inputs, inputs, strict=True))
        return outer, dict(zip(inner, stacked, strict=True))

    def _split(self, inputs: Sequence[Array]) -> list[list[Array]]:
        parts, start = [], 0
        for size in self.sizes:
            leaves = zip(inputs, self.in_axes, strict=True)
            parts.append([_rows(x, axis, start, size) for x, axis in leaves])
            start += size
        return parts

    def _join(self, outputs: Sequence[Sequence[Array]]) -> tuple[Array, ...]:
        joined = []
        for axis, parts in zip(self.out_axes, zip(*outputs, strict=True), strict=True):
            if axis is None:
                joined.append(parts[0])
                continue
            rows = [
                lax.slice_in_dim(part, 0, size, axis=axis)
                for part, size in zip(parts, self.sizes, strict=True)
            ]
            joined.append(lax.concatenate(rows, axis) if len(rows) > 1 else rows[0])
        return tuple(joined)

    def _walk(
        self, slots: Sequence[Slot], sub_batches: Sequence[SubBatchState], first_block: int | Array
    ) -> None:
        for slot in slots:
            classes = [sub_batches[task.sub_batch].resource(task.stage) for task in slot]
            budgets = self.sm_budgets if len(set(classes)) > 1 else {}
            for task, resource in zip(slot, classes, strict=True):
                budget = budgets.get(resource) if resource else None
                with nullcontext() if budget is None else default_sm_budget(budget):
                    sub_batches[task.sub_batch].run(task.stage, first_block + task.block)

    def _loop(self, sub_batches: Sequence[SubBatchState]) -> None:
        steps = self.timetable.num_blocks - 1
        if steps == 0:
            return
        staggers = self.timetable.staggers

        def step(states, index):
            for sub_batch, stagger, state in zip(sub_batches, staggers, states, strict=True):
                sub_batch.restore(stagger, state)
                sub_batch.collected = [[] for _ in sub_batch.collected]
            self._walk(self.timetable.steady, sub_batches, index)
            results = [[piece[0] for (piece,) in sub_batch.collected] for sub_batch in sub_batches]
            return _states(sub_batches, staggers), results

        filled = [sub_batch.collected for sub_batch in sub_batches]
        states, collected = lax.scan(
            step, _states(sub_batches, staggers), jnp.arange(steps), unroll=min(self.unroll, steps)
        )
        for sub_batch, stagger, state in zip(sub_batches, staggers, states, strict=True):
            sub_batch.restore(stagger, state)
        for sub_batch, before, stacks in zip(sub_batches, filled, collected, strict=True):
            sub_batch.collected = [[*a, b] for a, b in zip(before, stacks, strict=True)]


def _states(
    sub_batches: Sequence[SubBatchState], staggers: Sequence[int]
) -> list[tuple[Array, ...]]:
    return [
        sub_batch.state(stagger) for sub_batch, stagger in zip(sub_batches, staggers, strict=True)
    ]


def _rows(x: Array, axis: int | None, start: int, size: int) -> Array:
    """The rows of a sub-batch at the size it is traced at: a single row comes twice."""
    if axis is None:
        return x
    rows = lax.slice_in_dim(x, start, start + size, axis=axis)
    copies = measured_size(size) // size
    return lax.concatenate([rows] * copies, axis) if copies > 1 else rows


def _strong(x: Array, dtype: jnp.dtype) -> Array:
    """The value without a weak type, as a loop carries it."""
    return lax.convert_element_type(x, dtype) if x.weak_type else x
