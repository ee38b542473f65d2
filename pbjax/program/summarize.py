"""A program as plain data: the facts about its stages that prediction and search need.

Weights, and whatever else has one shape at every batch size, are told apart from rows of the batch
by a second program: the same function at another batch size.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from pbjax.graph.cost import equation_cost
from pbjax.graph.dataflow import nbytes
from pbjax.graph.trace import Atom, Aval, Operation
from pbjax.planning.program_summary import ProgramSummary, StageInfo
from pbjax.program.blocks import Apart, Const, Stacked
from pbjax.program.fused_costs import KERNELS, held_bytes
from pbjax.program.stages import Program, Stage, stage_fingerprint


@dataclass(frozen=True, slots=True)
class _Values:
    """The values of a block or graph: shapes and dtypes, those of the probe, and bytes of rows.

    The bytes are 0 for a value that holds no rows of the batch.
    """

    avals: Sequence[Aval]
    probe_avals: Sequence[Aval]
    row_bytes: Sequence[int]


def summary(program: Program, probe: Program | None, batch_size: int) -> ProgramSummary:
    """Writes a program as plain data, for profile and search.

    Args:
      program: The program at the whole batch.
      probe: The same program at another batch size: what differs in shape holds rows of the batch,
        and its operations give the fingerprints, which must not depend on the batch. None where
        there is one size only: what an input enters then counts as rows.
      batch_size: Rows of the whole batch.
    """
    graph, block = program.graph, program.block
    rows_inside, rows = _activations(program) if probe is None else _row_bytes(program, probe)
    probe = probe or program
    inner = _Values(block.avals, probe.block.avals, rows_inside)
    outer = _Values(graph.avals, probe.graph.avals, rows)
    outputs = set(_numbers(graph.outputs))
    # Inputs and outputs of the program count on their own.
    between = [0 if v in graph.inputs or v in outputs else size for v, size in enumerate(rows)]

    def info(stage: Stage, other: Stage, values: _Values, held: int) -> StageInfo:
        found = _stage_info(stage, other, values, batch_size)
        return replace(found, held_bytes_per_row=held / batch_size)

    def end(stage: Stage | None, other: Stage | None) -> StageInfo | None:
        if stage is None or other is None:
            return None
        return info(stage, other, outer, _held_at_end(stage, between))

    held = _held_in_block(program, rows_inside)
    stages = zip(program.stages, probe.stages, held, strict=True)
    return ProgramSummary(
        prologue=end(program.prologue, probe.prologue),
        block=tuple(info(stage, other, inner, each) for stage, other, each in stages),
        epilogue=end(program.epilogue, probe.epilogue),
        num_blocks=block.count,
        weight_bytes=sum(nbytes(graph.avals[value]) for value in graph.weights),
        stacked_weight_bytes=sum(nbytes(graph.avals[value]) for value in _stacked(program)),
        input_bytes_per_row=sum(rows[value] for value in graph.inputs) / batch_size,
        output_bytes_per_row=sum(rows[value] for value in outputs) / batch_size,
        carried_bytes_per_row=sum(rows_inside[c.inner] for c in block.carry) / batch_size,
        waiting_bytes_per_row=_waiting(program, between, rows_inside) / batch_size,
    )


def _row_bytes(program: Program, probe: Program) -> tuple[list[int], list[int]]:
    """Bytes of the values of block and graph whose shape differs from the probe's, 0 of others."""
    pairs = (program.block.avals, probe.block.avals), (program.graph.avals, probe.graph.avals)
    inner, outer = (
        [nbytes(a) if a.shape != b.shape else 0 for a, b in zip(*avals, strict=True)]
        for avals in pairs
    )
    return inner, outer


def _activations(program: Program) -> tuple[list[int], list[int]]:
    """Bytes of the values of block and graph that an input of the call enters, 0 of others."""
    graph, block = program.graph, program.block
    entered = _entered(graph.operations, set(graph.inputs))

    def outside(value: Const | Stacked | Apart) -> bool:
        atoms = value.outer if isinstance(value, Apart) else (value.outer,)
        return not entered.isdisjoint(_numbers(atoms))

    leaves = {value.inner for value in (*block.consts, *block.xs) if outside(value)}
    leaves |= {c.inner for c in block.carry if entered.intersection(_numbers([c.initial, c.final]))}
    inside = _entered(block.operations, leaves)
    inner = [nbytes(aval) if v in inside else 0 for v, aval in enumerate(block.avals)]
    return inner, [nbytes(aval) if v in entered else 0 for v, aval in enumerate(graph.avals)]


def _entered(operations: Sequence[Operation], values: set[int]) -> set[int]:
    """The values and all that is computed from them."""
    found = set(values)
    for operation in operations:
        if not found.isdisjoint(_numbers(operation.inputs)):
            found.update(operation.outputs)
    return found


def _held_at_end(stage: Stage, sizes: Sequence[int]) -> int:
    """Bytes in memory while prologue or epilogue run, at most."""
    return max(held_bytes(stage.operations, sizes, stage.writes, stage.reads))


def _held_in_block(program: Program, sizes: Sequence[int]) -> list[int]:
    """Bytes of the block's values in memory while each of its stages runs, at most."""
    block = program.block
    results = [*(carry.result for carry in block.carry), *(y.inner for y in block.ys)]
    carried = [carry.inner for carry in block.carry]
    held = held_bytes(block.operations, sizes, _numbers(results), carried)
    starts = [0]
    for stage in program.stages:
        starts.append(starts[-1] + len(stage.operations))
    return [max(held[a:b]) for a, b in pairwise(starts)]


def _waiting(program: Program, sizes: Sequence[int], inner: Sequence[int]) -> int:
    """Bytes that all blocks read, that the epilogue waits for, or that blocks leave for it.

    Args:
      program: The program.
      sizes: Bytes of the graph's values.
      inner: Bytes of the block's values.
    """
    block = program.block
    before = set(program.prologue.writes if program.prologue else ())
    later = set(program.epilogue.reads if program.epilogue else ())
    kept = before & (later | set(_numbers(const.outer for const in block.consts)))
    left = sum(inner[value] for value in _numbers(y.inner for y in block.ys))
    return sum(sizes[value] for value in kept) + block.count * left


def _stacked(program: Program) -> set[int]:
    """The weights that each block has its own of, which a split program stacks."""
    weights = program.graph.weights
    apart = [x.outer for x in program.block.xs if isinstance(x, Apart)]
    ours = [outer for outer in apart if all(isinstance(a, int) and a in weights for a in outer)]
    return {value for outer in ours for value in _numbers(outer)}


def _numbers(atoms: Iterable[Atom]) -> list[int]:
    return [atom for atom in atoms if isinstance(atom, int)]


def _stage_info(stage: Stage, other: Stage, values: _Values, batch_size: int) -> StageInfo:
    avals, other_avals = values.avals, values.probe_avals
    rows = [v for v in (*stage.reads, *stage.writes) if values.row_bytes[v]]
    weights = [v for v in stage.reads if not values.row_bytes[v]]
    main = max(rows or stage.reads, key=lambda v: nbytes(avals[v]), default=None)
    kernels = [o for o in stage.operations if o.primitive in KERNELS]
    return StageInfo(
        name=stage.name,
        fingerprint=stage_fingerprint(other, other_avals),
        resource=stage.resource,
        dtype=str(avals[main].dtype) if main is not None else "",
        shape=_row_shape(avals[main], other_avals[main], batch_size) if main is not None else (),
        flops_per_row=_flops(stage.operations) / batch_size,
        contraction_flops_per_row=_flops(kernels) / batch_size,
        bytes_per_row=sum(values.row_bytes[v] for v in rows) / batch_size,
        weight_bytes=sum(nbytes(avals[v]) for v in weights),
    )


def _flops(operations: Sequence[Operation]) -> float:
    costs = (equation_cost(operation.equation) for operation in operations)
    return sum((cost.flops + cost.transcendentals for cost in costs), 0.0)


def _row_shape(aval: Aval, other: Aval, batch_size: int) -> tuple[int, ...]:
    sizes = zip(aval.shape, other.shape, strict=True)
    per_row = [a if a == b else a // batch_size for a, b in sizes]
    return tuple(
        size
        for size, a, b in zip(per_row, aval.shape, other.shape, strict=True)
        if a == b or size > 1
    )
