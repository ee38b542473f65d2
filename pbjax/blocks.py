"""The repeated block of a graph: the operations that the layers of a network have in common.

A network of N equal layers traces into N equal runs of operations (Python loop) or into one scan.
Both become a `Block`: one template of operations in its own numbering, and how each of its N
repetitions is fed: values shared by all, values carried from one repetition to the next, values
that differ from one repetition to the next (the layer's weights), and results collected from
each. Runs are found by structure alone, so names and scopes of the user's model do not matter. A
graph in which nothing repeats is one block with a single repetition.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import cast

import numpy as np
from jax.extend.core import Literal

from pbjax.trace import Atom, Aval, Graph, Operation, loop_body, scan_parts

# A run of operations is the network's block only if it covers at least this share of the time.
MIN_COVERAGE = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Repetition:
    """Where the block is: `count` runs of `period` operations from position `start`.

    Attributes:
      scanned: The block is the body of the scan at `start`; the period is then 1.
    """

    start: int
    period: int
    count: int
    scanned: bool = False

    @property
    def end(self) -> int:
        """The position after the last run."""
        return self.start + self.period * (1 if self.scanned else self.count)


@dataclass(frozen=True, slots=True, kw_only=True)
class Carry:
    """A value that each repetition hands to the next.

    Attributes:
      inner: Its number inside the block.
      initial: What the first repetition reads, in the graph's numbering.
      result: What the repetition hands on, in the block's numbering.
      final: The number in the graph of what the last repetition hands on.
    """

    inner: int
    initial: Atom
    result: Atom
    final: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Shared:
    """A value that every repetition reads.

    Attributes:
      inner: Its number inside the block.
      outer: The same value in the graph.
    """

    inner: int
    outer: Atom


@dataclass(frozen=True, slots=True, kw_only=True)
class Stacked:
    """A value of which each repetition reads its own, from an array stacked along a leading axis.

    Attributes:
      inner: Its number inside the block.
      outer: The array in the graph.
    """

    inner: int
    outer: Atom


@dataclass(frozen=True, slots=True, kw_only=True)
class Apart:
    """A value of which each repetition reads its own, and which stand apart in the graph.

    Attributes:
      inner: Its number inside the block.
      outer: N values in the graph.
    """

    inner: int
    outer: tuple[Atom, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Collected:
    """A result of each repetition that is read after the block.

    Attributes:
      inner: What it is inside the block.
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
      shared: Values that every repetition reads.
      carries: Values handed from repetition to repetition.
      per_block: Values of which each repetition reads its own: the weights of a layer.
      collected: Results of each repetition that are read after the block.
    """

    operations: tuple[Operation, ...]
    avals: tuple[Aval, ...]
    count: int
    shared: tuple[Shared, ...]
    carries: tuple[Carry, ...]
    per_block: tuple[Stacked | Apart, ...]
    collected: tuple[Collected, ...]


def find_repetition(graph: Graph, seconds: Sequence[float]) -> Repetition:
    """Finds the longest stretch of equal runs of operations, weighed by time.

    Args:
      graph: A traced function.
      seconds: The predicted time of each operation: what a stretch is worth.

    Returns:
      The repetition; all operations once if nothing repeats.
    """
    total = sum(seconds)
    scanned = _longest_scan(graph, seconds)
    if scanned is not None and seconds[scanned.start] >= MIN_COVERAGE * total:
        return scanned
    worth = np.concatenate([[0.0], np.cumsum(seconds)])
    for start, period, length in _candidates(_signatures(graph), worth):
        if worth[start + length] - worth[start] < MIN_COVERAGE * total:
            break
        found = _best_rotation(graph, start, period, length)
        if found is not None:
            return found
    return Repetition(start=0, period=len(graph.operations), count=1)


def extract_block(graph: Graph, repetition: Repetition) -> Block:
    """Builds the block of a repetition that `find_repetition` found in an equal graph."""
    if repetition.scanned:
        return _scanned_block(graph, graph.operations[repetition.start])
    links = _match(graph, repetition)
    if links is None:
        raise AssertionError("a repetition fits every graph that is equal to the one it came from")
    return _unrolled_block(graph, repetition, links)


def _longest_scan(graph: Graph, seconds: Sequence[float]) -> Repetition | None:
    scans = [
        i
        for i, operation in enumerate(graph.operations)
        if operation.primitive == "scan"
        and not operation.params["reverse"]
        and operation.params["length"] > 1
    ]
    if not scans:
        return None
    longest = max(scans, key=lambda i: seconds[i])
    length = graph.operations[longest].params["length"]
    return Repetition(start=longest, period=1, count=length, scanned=True)


def _signatures(graph: Graph) -> np.ndarray:
    """One integer for each operation; operations equal in all but their values share it."""
    seen: dict[object, int] = {}
    return np.array(
        [seen.setdefault(signature(o, graph.avals), len(seen)) for o in graph.operations]
    )


def signature(operation: Operation, avals: Sequence[Aval]) -> tuple[object, ...]:
    """What makes two operations equal: primitive, parameters, shapes, dtypes and literals."""
    operands = tuple(
        f"literal {np.asarray(a.val)!r}" if isinstance(a, Literal) else _shape(avals[a])
        for a in operation.inputs
    )
    results = tuple(_shape(avals[i]) for i in operation.outputs)
    params = tuple((k, str(v)) for k, v in sorted(operation.params.items()))
    return operation.primitive, params, operands, results


def _shape(aval: Aval) -> str:
    return f"{aval.dtype}{tuple(aval.shape)}"


def _candidates(signatures: np.ndarray, worth: np.ndarray) -> list[tuple[int, int, int]]:
    """(start, period, length) of every stretch of at least two equal runs, best first."""
    found = []
    for period in range(1, len(signatures) // 2 + 1):
        equal = signatures[:-period] == signatures[period:]
        edges = np.flatnonzero(np.diff(np.concatenate([[0], equal.astype(np.int8), [0]])))
        for begin, end in zip(edges[::2], edges[1::2], strict=True):
            if end - begin >= period:
                length = int(end - begin) + period
                whole = length - length % period
                value = worth[begin + whole] - worth[begin]
                found.append((-round(float(value / worth[-1]), 3), period, int(begin), length))
    return [(begin, period, length) for _, period, begin, length in sorted(found)]


def _best_rotation(graph: Graph, start: int, period: int, length: int) -> Repetition | None:
    """Of the places where the runs may begin, the valid one across which the fewest bytes live."""
    crossing = live_bytes(graph.operations, graph.avals, graph.outputs, graph.weights)
    for count in range(length // period, 1, -1):
        begins = range(start, start + length - count * period + 1)
        for begin in sorted(begins, key=lambda i: (crossing[i], _same_scope(graph, i), i)):
            repetition = Repetition(start=begin, period=period, count=count)
            if _match(graph, repetition) is not None:
                return repetition
    return None


def _same_scope(graph: Graph, position: int) -> bool:
    if position == 0:
        return False
    before, after = graph.operations[position - 1 : position + 1]
    return before.scope == after.scope


def live_bytes(
    operations: Sequence[Operation],
    avals: Sequence[Aval],
    outputs: Sequence[Atom],
    weights: range,
) -> list[int]:
    """Bytes of values written before and read after each position between operations.

    Args:
      operations: In program order.
      avals: Shape and dtype of the values.
      outputs: Values read after the last operation.
      weights: Values that are always there and do not count; nor does any other value that no
        operation writes.

    Returns:
      One figure for each position, 0 .. len(operations).
    """
    last = {atom: len(operations) for atom in outputs if isinstance(atom, int)}
    change = [0] * (len(operations) + 2)
    for position in range(len(operations) - 1, -1, -1):
        operation = operations[position]
        for atom in operation.inputs:
            if isinstance(atom, int):
                last.setdefault(atom, position)
        for value in operation.outputs:
            if value in last:
                size = nbytes(avals[value])
                change[position + 1] += size
                change[last[value] + 1] -= size
    return [int(total) for total in np.cumsum(change[:-1])]


def nbytes(aval: Aval) -> int:
    """Bytes of a value."""
    return int(np.prod(aval.shape, dtype=np.int64)) * aval.dtype.itemsize


@dataclass(frozen=True, slots=True)
class _Links:
    """How the values that the repetitions read from outside go together: N atoms for each."""

    shared: tuple[Atom, ...]
    carried: dict[tuple[Atom, ...], tuple[int, int]]
    per_block: tuple[tuple[Atom, ...], ...]


def _match(graph: Graph, repetition: Repetition) -> _Links | None:
    """Follows the data through all repetitions; None if they are not fed alike."""
    runs = _runs(graph, repetition)
    places = [
        {v: (k, m) for k, operation in enumerate(run) for m, v in enumerate(operation.outputs)}
        for run in runs
    ]
    shared: dict[Atom, None] = {}
    carried: dict[tuple[Atom, ...], tuple[int, int]] = {}
    per_block: dict[tuple[Atom, ...], None] = {}
    for atoms in _aligned(runs, lambda operation: operation.inputs):
        if isinstance(atoms[0], Literal):
            continue
        inside = [_place(place, atom) for place, atom in zip(places, atoms, strict=True)]
        if any(inside):
            if len(set(inside)) > 1:
                return None
        elif len(set(atoms)) == 1 and not any(atoms[0] in place for place in places):
            shared[atoms[0]] = None
        elif not any(atom in place for atom in atoms for place in places):
            per_block[atoms] = None
        else:
            before = _from_previous(places, atoms)
            if before is None:
                return None
            carried[atoms] = before
    return _Links(tuple(shared), carried, tuple(per_block))


def _place(places: dict[int, tuple[int, int]], atom: Atom) -> tuple[int, int] | None:
    return places.get(atom) if isinstance(atom, int) else None


def _runs(graph: Graph, repetition: Repetition) -> list[Sequence[Operation]]:
    starts = range(repetition.start, repetition.end, repetition.period)
    return [graph.operations[s : s + repetition.period] for s in starts]


def _aligned(
    runs: Sequence[Sequence[Operation]], atoms_of: Callable[[Operation], tuple[Atom, ...]]
) -> Iterator[tuple[Atom, ...]]:
    """The counterparts of each value: what the runs read, or write, at the same place."""
    for operations in zip(*runs, strict=True):
        yield from zip(*map(atoms_of, operations), strict=True)


def _from_previous(
    places: Sequence[dict[int, tuple[int, int]]], atoms: Sequence[Atom]
) -> tuple[int, int] | None:
    """The place in the previous repetition that every repetition but the first reads."""
    if any(atoms[0] in place for place in places):
        return None
    found = {_place(place, atom) for place, atom in zip(places, atoms[1:], strict=False)}
    return found.pop() if len(found) == 1 else None


def _unrolled_block(graph: Graph, repetition: Repetition, links: _Links) -> Block:
    runs = _runs(graph, repetition)
    shared = [(atom,) * len(runs) for atom in links.shared]
    leaves = [*shared, *links.carried, *links.per_block]
    numbers = {atoms: i for i, atoms in enumerate(leaves)}
    avals = [_aval(graph, atoms) for atoms in leaves]
    for values in _aligned(runs, lambda operation: operation.outputs):
        numbers[values] = len(avals)
        avals.append(_aval(graph, values))
    template = _template(runs, numbers)
    carries = tuple(
        Carry(
            inner=numbers[atoms],
            initial=atoms[0],
            result=template[k].outputs[m],
            final=runs[-1][k].outputs[m],
        )
        for atoms, (k, m) in links.carried.items()
    )
    return Block(
        operations=template,
        avals=tuple(avals),
        count=len(runs),
        shared=tuple(Shared(inner=i, outer=atom) for i, atom in enumerate(links.shared)),
        carries=carries,
        per_block=tuple(Apart(inner=numbers[atoms], outer=atoms) for atoms in links.per_block),
        collected=_collected(graph, repetition, template, {c.final for c in carries}),
    )


def _aval(graph: Graph, atoms: tuple[Atom, ...]) -> Aval:
    first = atoms[0]
    return graph.avals[first] if isinstance(first, int) else cast(Aval, first.aval)


def _template(
    runs: Sequence[Sequence[Operation]], numbers: dict[tuple[Atom, ...], int]
) -> tuple[Operation, ...]:
    """The first run in the numbering of the block.

    A value is known by its counterparts in all runs: what the first run reads does not tell whether
    later runs read the same value or their own.
    """
    return tuple(
        Operation(
            primitive=aligned[0].primitive,
            scope=aligned[0].scope,
            inputs=tuple(
                atoms[0] if isinstance(atoms[0], Literal) else numbers[atoms]
                for atoms in zip(*(operation.inputs for operation in aligned), strict=True)
            ),
            outputs=tuple(
                numbers[values]
                for values in zip(*(operation.outputs for operation in aligned), strict=True)
            ),
            equation=aligned[0].equation,
        )
        for aligned in zip(*runs, strict=True)
    )


def _collected(
    graph: Graph, repetition: Repetition, template: Sequence[Operation], finals: set[int]
) -> tuple[Collected, ...]:
    """Results that something after the block reads, apart from what the last repetition carries."""
    after = graph.operations[repetition.end :]
    atoms = (*graph.outputs, *(atom for operation in after for atom in operation.inputs))
    read_after = {atom for atom in atoms if isinstance(atom, int)} - finals
    found = []
    for k, operations in enumerate(zip(*_runs(graph, repetition), strict=True)):
        for m, values in enumerate(zip(*(o.outputs for o in operations), strict=True)):
            if read_after.intersection(values):
                found.append(Collected(inner=template[k].outputs[m], outer=values))
    return tuple(found)


def _scanned_block(graph: Graph, operation: Operation) -> Block:
    body, parts = loop_body(operation), scan_parts(operation)
    captured = [Shared(inner=i, outer=Literal(c, body.avals[i])) for i, c in _captured(body)]
    leaves = iter(body.inputs)
    shared = tuple(Shared(inner=next(leaves), outer=atom) for atom in parts.consts)
    inner_carry = [next(leaves) for _ in parts.carry]
    per_block = tuple(Stacked(inner=next(leaves), outer=atom) for atom in parts.xs)
    results = body.outputs
    carries = tuple(
        Carry(inner=inner, initial=initial, result=result, final=final)
        for inner, initial, result, final in zip(
            inner_carry, parts.carry, results[: len(parts.carry)], parts.carry_out, strict=True
        )
    )
    collected = tuple(
        Collected(inner=inner, outer=outer)
        for inner, outer in zip(results[len(parts.carry) :], parts.ys, strict=True)
    )
    return Block(
        operations=body.operations,
        avals=body.avals,
        count=operation.params["length"],
        shared=(*captured, *shared),
        carries=carries,
        per_block=per_block,
        collected=collected,
    )


def _captured(body: Graph) -> Iterator[tuple[int, object]]:
    return zip(body.weights, body.constants, strict=True)
