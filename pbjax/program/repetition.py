"""The search for operations of a graph that repeat.

A network of N equal layers traces into N equal runs of operations (Python loop) or into one scan.
Runs are found by structure alone, so names and scopes of the user's model do not matter. What the
runs have in common becomes a block in `blocks`.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from jax.extend.core import Literal

from pbjax.graph.dataflow import live_bytes, signature
from pbjax.graph.trace import Atom, Graph, Operation

# A run of operations is the network's block only if it covers at least this share of the time.
MIN_COVERAGE = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Repetition:
    """The place of the block: `count` runs of `period` operations from position `start`.

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


def find_repetition(graph: Graph, seconds: Sequence[float], probe: Graph) -> Repetition:
    """Finds the longest stretch of equal runs of operations, weighed by time.

    Args:
      graph: A traced function.
      seconds: The predicted time of each operation, by which stretches are compared.
      probe: The function traced at another batch size.

    Returns:
      The repetition; all operations once if nothing repeats.
    """
    total = sum(seconds)
    scanned = _longest_scan(graph, seconds, probe)
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


def _longest_scan(graph: Graph, seconds: Sequence[float], probe: Graph) -> Repetition | None:
    """The scan that takes longest; a scan over the rows of the batch does not count."""
    scans = [
        i
        for i, (operation, twin) in enumerate(zip(graph.operations, probe.operations, strict=True))
        if operation.primitive == "scan"
        and not operation.params["reverse"]
        and operation.params["length"] == twin.params["length"] > 1
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
    """Finds the valid start of the runs across which the fewest bytes live."""
    crossing = live_bytes(graph.operations, graph.avals, graph.outputs)
    for count in range(length // period, 1, -1):
        begins = range(start, start + length - count * period + 1)
        for begin in sorted(begins, key=lambda i: (crossing[i], _same_scope(graph, i), i)):
            repetition = Repetition(start=begin, period=period, count=count)
            if match_runs(graph, repetition) is not None:
                return repetition
    return None


def _same_scope(graph: Graph, position: int) -> bool:
    if position == 0:
        return False
    before, after = graph.operations[position - 1 : position + 1]
    return before.scope == after.scope


@dataclass(frozen=True, slots=True)
class ScanLinks:
    """The values that N repetitions read from outside, by the roles that they have in a scan.

    Attributes:
      consts: Values that every repetition reads.
      carry: N atoms for each value handed on, with its place (operation, output) in a repetition.
      xs: N atoms for each value of which every repetition reads its own.
    """

    consts: tuple[Atom, ...]
    carry: dict[tuple[Atom, ...], tuple[int, int]]
    xs: tuple[tuple[Atom, ...], ...]


def match_runs(graph: Graph, repetition: Repetition) -> ScanLinks | None:
    """Follows the data through all repetitions; None if they are not fed alike."""
    runs = runs_of(graph, repetition)
    places = [
        {v: (k, m) for k, operation in enumerate(run) for m, v in enumerate(operation.outputs)}
        for run in runs
    ]
    consts: dict[Atom, None] = {}
    carry: dict[tuple[Atom, ...], tuple[int, int]] = {}
    xs: dict[tuple[Atom, ...], None] = {}
    for atoms in aligned(runs, lambda operation: operation.inputs):
        if isinstance(atoms[0], Literal):
            continue
        inside = [_place(place, atom) for place, atom in zip(places, atoms, strict=True)]
        if any(inside):
            if len(set(inside)) > 1:
                return None
        elif len(set(atoms)) == 1 and not any(atoms[0] in place for place in places):
            consts[atoms[0]] = None
        elif not any(atom in place for atom in atoms for place in places):
            xs[atoms] = None
        else:
            before = _from_previous(places, atoms)
            if before is None:
                return None
            carry[atoms] = before
    return ScanLinks(tuple(consts), carry, tuple(xs))


def _place(places: dict[int, tuple[int, int]], atom: Atom) -> tuple[int, int] | None:
    return places.get(atom) if isinstance(atom, int) else None


def runs_of(graph: Graph, repetition: Repetition) -> list[Sequence[Operation]]:
    """The runs of a repetition that is no scan."""
    starts = range(repetition.start, repetition.end, repetition.period)
    return [graph.operations[s : s + repetition.period] for s in starts]


def aligned(
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
