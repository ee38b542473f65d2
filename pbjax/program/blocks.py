"""The repeated block of a graph: the operations that the layers of a network have in common.

A block is one template of operations in its own numbering, and the values that each of its N
repetitions reads and returns, by the roles of a scan: consts that all read, a carry that each hands
to the next, xs of which each reads its own (the layer's weights), and ys that each returns. A graph
in which nothing repeats is one block with a single repetition. `repetition` finds where a graph
repeats.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import cast

from jax.extend.core import Literal

from pbjax.graph.trace import Atom, Aval, Graph, Operation, loop_body, scan_parts
from pbjax.program.repetition import Repetition, ScanLinks, aligned, match_runs, runs_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Carry:
    """A value that each repetition hands to the next.

    Attributes:
      inner: Its number inside the block.
      initial: The value that the first repetition reads, in the graph's numbering.
      result: The value that a repetition hands on, in the block's numbering.
      final: The number in the graph of the value that the last repetition hands on.
    """

    inner: int
    initial: Atom
    result: Atom
    final: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Const:
    """A value that every repetition reads.

    Attributes:
      inner: Its number inside the block.
      outer: The same value in the graph.
    """

    inner: int
    outer: Atom


@dataclass(frozen=True, slots=True, kw_only=True)
class Stacked:
    """An x: each repetition reads its own, from an array stacked along a leading axis.

    Attributes:
      inner: Its number inside the block.
      outer: The array in the graph.
    """

    inner: int
    outer: Atom


@dataclass(frozen=True, slots=True, kw_only=True)
class Apart:
    """An x: each repetition reads its own, which stand apart in the graph.

    Attributes:
      inner: Its number inside the block.
      outer: N values in the graph.
    """

    inner: int
    outer: tuple[Atom, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Collected:
    """A y: a result of each repetition that is read after the block.

    Attributes:
      inner: The value inside the block.
      outer: N values in the graph, or the one that stacks them along a leading axis.
    """

    inner: Atom
    outer: int | tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """One template for N repetitions.

    Attributes:
      operations: The template, in the block's own numbering of values.
      avals: Shape and dtype of the block's values.
      count: N, the number of repetitions.
      consts: Values that every repetition reads.
      carry: Values handed from repetition to repetition.
      xs: Values of which each repetition reads its own: the weights of a layer.
      ys: Results of each repetition that are read after the block.
    """

    operations: tuple[Operation, ...]
    avals: tuple[Aval, ...]
    count: int
    consts: tuple[Const, ...]
    carry: tuple[Carry, ...]
    xs: tuple[Stacked | Apart, ...]
    ys: tuple[Collected, ...]


def extract_block(graph: Graph, repetition: Repetition) -> Block:
    """Builds the block of a repetition that `find_repetition` found in an equal graph."""
    if repetition.scanned:
        return _scanned_block(graph, graph.operations[repetition.start])
    links = match_runs(graph, repetition)
    if links is None:
        raise AssertionError("a repetition fits every graph that is equal to the one it came from")
    return _unrolled_block(graph, repetition, links)


def _unrolled_block(graph: Graph, repetition: Repetition, links: ScanLinks) -> Block:
    runs = runs_of(graph, repetition)
    consts = [(atom,) * len(runs) for atom in links.consts]
    leaves = [*consts, *links.carry, *links.xs]
    numbers = {atoms: i for i, atoms in enumerate(leaves)}
    avals = [_aval(graph, atoms) for atoms in leaves]
    for values in aligned(runs, lambda operation: operation.outputs):
        numbers[values] = len(avals)
        avals.append(_aval(graph, values))
    template = _template(runs, numbers)
    carry = tuple(
        Carry(
            inner=numbers[atoms],
            initial=atoms[0],
            result=template[k].outputs[m],
            final=runs[-1][k].outputs[m],
        )
        for atoms, (k, m) in links.carry.items()
    )
    return Block(
        operations=template,
        avals=tuple(avals),
        count=len(runs),
        consts=tuple(Const(inner=i, outer=atom) for i, atom in enumerate(links.consts)),
        carry=carry,
        xs=tuple(Apart(inner=numbers[atoms], outer=atoms) for atoms in links.xs),
        ys=_collected(graph, repetition, template, {c.final for c in carry}),
    )


def _aval(graph: Graph, atoms: tuple[Atom, ...]) -> Aval:
    first = atoms[0]
    return graph.avals[first] if isinstance(first, int) else cast(Aval, first.aval)


def _template(
    runs: Sequence[Sequence[Operation]], numbers: dict[tuple[Atom, ...], int]
) -> tuple[Operation, ...]:
    """The first run in the numbering of the block.

    A value is known by its counterparts in all runs: the first run alone does not tell whether
    later runs read the same value or their own.
    """
    return tuple(
        replace(
            aligned[0],
            inputs=tuple(
                atoms[0] if isinstance(atoms[0], Literal) else numbers[atoms]
                for atoms in zip(*(operation.inputs for operation in aligned), strict=True)
            ),
            outputs=tuple(
                numbers[values]
                for values in zip(*(operation.outputs for operation in aligned), strict=True)
            ),
        )
        for aligned in zip(*runs, strict=True)
    )


def _collected(
    graph: Graph, repetition: Repetition, template: Sequence[Operation], finals: set[int]
) -> tuple[Collected, ...]:
    """Results that are read after the block, apart from the carry of the last repetition."""
    after = graph.operations[repetition.end :]
    atoms = (*graph.outputs, *(atom for operation in after for atom in operation.inputs))
    read_after = {atom for atom in atoms if isinstance(atom, int)} - finals
    found = []
    for k, operations in enumerate(zip(*runs_of(graph, repetition), strict=True)):
        for m, values in enumerate(zip(*(o.outputs for o in operations), strict=True)):
            if read_after.intersection(values):
                found.append(Collected(inner=template[k].outputs[m], outer=values))
    return tuple(found)


def _scanned_block(graph: Graph, operation: Operation) -> Block:
    body, parts = loop_body(operation), scan_parts(operation)
    captured = [Const(inner=i, outer=Literal(c, body.avals[i])) for i, c in _captured(body)]
    leaves = iter(body.inputs)
    consts = tuple(Const(inner=next(leaves), outer=atom) for atom in parts.consts)
    inner_carry = [next(leaves) for _ in parts.carry]
    xs = tuple(Stacked(inner=next(leaves), outer=atom) for atom in parts.xs)
    results = body.outputs
    carry = tuple(
        Carry(inner=inner, initial=initial, result=result, final=final)
        for inner, initial, result, final in zip(
            inner_carry, parts.carry, results[: len(parts.carry)], parts.carry_out, strict=True
        )
    )
    ys = tuple(
        Collected(inner=inner, outer=outer)
        for inner, outer in zip(results[len(parts.carry) :], parts.ys, strict=True)
    )
    return Block(
        operations=body.operations,
        avals=body.avals,
        count=operation.params["length"],
        consts=(*captured, *consts),
        carry=carry,
        xs=xs,
        ys=ys,
    )


def _captured(body: Graph) -> Iterator[tuple[int, object]]:
    return zip(body.weights, body.constants, strict=True)
