"""Bytes that each operation of a graph moves, as a good compiler would run it, by their contents.

Operations with equally many kernels before them run as one fused group: values between them never
reach memory. Reshapes, transpositions and broadcasts move nothing by themselves. A value of twice
the size of its sources or more is made again where it is read. Caches are updated in place.
`report` decides how long the bytes take.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Literal, cast

from pbjax.graph.dataflow import nbytes
from pbjax.graph.trace import Atom, Aval, Graph, Operation
from pbjax.program.fused_costs import KERNELS
from pbjax.roofline.points import Traffic

# The contents of a value; names of the fields of Traffic.
Holds = Literal["weights", "activations", "kv_cache"]

CONTRACTIONS = frozenset(("dot_general", "conv_general_dilated", "ragged_dot_general"))

# Written in place: the result is the first operand with some of its entries replaced.
UPDATES = frozenset(
    (
        "dynamic_update_slice",
        *("scatter", "scatter-add", "scatter-sub", "scatter-mul", "scatter-min", "scatter-max"),
    )
)
_ALIASES = frozenset(
    (
        *("bitcast_convert_type", "broadcast_in_dim", "copy", "copy_p", "expand_dims", "name"),
        *("layout_constraint", "optimization_barrier", "pvary", "reshape", "sharding_constraint"),
        *("squeeze", "stop_gradient", "transpose"),
    )
)
# A value is made again where it is read if its sources are half of its size or less: weights in
# 8 bits, a broadcast; but not a row that is appended to many.
MADE_ANEW = 2
_LOOK_UPS = frozenset(("dynamic_slice", "gather", "slice"))
# Operations whose result is still a cache if an operand is one.
_KEEPS_CACHE = _ALIASES | _LOOK_UPS | {"concatenate", "convert_element_type", "pad", "select_n"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Moved:
    """Bytes that a graph moves, and where.

    Attributes:
      traffic: Bytes of each operation.
      regions: The number of the attention that each operation is a part of, or None.
      fused: Whether an attention runs as one kernel.
      roots: The values that are read from memory when each value is needed; none for a value that
        is made from nothing.
      holds: Contents of each value.
      temporary_bytes: Bytes of results of operations in memory at the peak.
      launches: Whether a kernel ends with each operation.
    """

    traffic: tuple[Traffic, ...]
    regions: tuple[int | None, ...]
    fused: bool
    roots: tuple[tuple[int, ...], ...]
    holds: tuple[Holds, ...]
    temporary_bytes: int
    launches: tuple[bool, ...]


def measure_traffic(graph: Graph, leaves: Sequence[Holds], *, fuse_attention: bool) -> Moved:
    """Counts the bytes that each operation moves.

    Args:
      graph: Any graph.
      leaves: Contents of its weights and inputs, in their order.
      fuse_attention: Whether two contractions of activations with a softmax between them run as
        one kernel, whatever primitives they are made of.

    Returns:
      The bytes, with one entry for each operation.
    """
    values = _Values(graph, leaves)
    regions = _attention_regions(graph, values)
    charges = _Charges(graph, values, regions if fuse_attention else {})
    return Moved(
        traffic=tuple(charges.traffic),
        regions=tuple(regions.get(i) for i in range(len(graph.operations))),
        fused=fuse_attention,
        roots=tuple(tuple(sorted(roots)) for roots in values.roots),
        holds=tuple(values.holds),
        temporary_bytes=charges.temporary_bytes(),
        launches=charges.launches(),
    )


class _Values:
    """The origin of every value of a graph, and the number of kernels before it."""

    def __init__(self, graph: Graph, leaves: Sequence[Holds]):
        self.sizes = [nbytes(aval) for aval in graph.avals]
        self.roots: list[frozenset[int]] = [frozenset((i,)) for i in range(len(leaves))]
        self.holds: list[Holds] = list(leaves)
        self.levels: list[int] = [0] * len(leaves)
        self.producers: list[int | None] = [None] * len(leaves)
        for position, operation in enumerate(graph.operations):
            self._add(position, operation)

    def inputs(self, atoms: Sequence[Atom]) -> frozenset[int]:
        """The roots of some operands."""
        return frozenset[int]().union(*(self.roots[a] for a in atoms if isinstance(a, int)))

    def level(self, operation: Operation) -> int:
        """The most kernels before any of its operands."""
        return max((self.levels[a] for a in operation.inputs if isinstance(a, int)), default=0)

    def _add(self, position: int, operation: Operation) -> None:
        roots, level = self.inputs(operation.inputs), self.level(operation)
        holds = self._held(operation)
        kernel = operation.primitive in KERNELS and operation.primitive not in UPDATES
        for value in operation.outputs:
            self.producers.append(position)
            self.levels.append(level + kernel)
            own = frozenset((value,))
            if kernel:
                self.roots.append(own)
            elif operation.primitive in UPDATES:
                target = self.inputs(operation.inputs[:1])
                self.roots.append(target if len(target) == 1 else own)
            elif operation.primitive in _ALIASES or (
                operation.primitive not in _LOOK_UPS and self.is_cheaper_anew(roots, value)
            ):
                self.roots.append(roots)
            else:
                self.roots.append(own)
            self.holds.append(holds)

    def is_cheaper_anew(self, roots: Iterable[int], value: int) -> bool:
        """Whether a value is made where it is read instead of written to memory."""
        return MADE_ANEW * sum(self.sizes[root] for root in roots) <= self.sizes[value]

    def _held(self, operation: Operation) -> Holds:
        held = [self.holds[atom] for atom in operation.inputs if isinstance(atom, int)]
        if operation.primitive in UPDATES:
            return held[0] if isinstance(operation.inputs[0], int) else "activations"
        if operation.primitive in _KEEPS_CACHE and "kv_cache" in held:
            return "kv_cache"
        return "weights" if held and set(held) == {"weights"} else "activations"


def is_between_activations(operation: Operation, holds: Sequence[Holds]) -> bool:
    """Whether a contraction has no operand that holds weights."""
    operands = operation.inputs[:2]
    return all(not isinstance(a, int) or holds[a] != "weights" for a in operands)


def _attention_regions(graph: Graph, values: _Values) -> dict[int, int]:
    """The position of the attention's last contraction, by operation inside the attention."""
    producers = values.producers
    regions: dict[int, int] = {}
    for last, operation in enumerate(graph.operations):
        if operation.primitive != "dot_general" or last in regions:
            continue
        if not is_between_activations(operation, values.holds):
            continue
        found, firsts = {last}, set()
        waiting = [producers[a] for a in operation.inputs if isinstance(a, int)]
        while waiting:
            position = waiting.pop()
            if position is None or position in found or position in regions:
                continue
            before = graph.operations[position]
            if before.primitive == "dot_general":
                if is_between_activations(before, values.holds):
                    firsts.add(position)
                    found.add(position)
            elif before.primitive not in KERNELS and before.primitive not in UPDATES:
                found.add(position)
                waiting += [producers[a] for a in before.inputs if isinstance(a, int)]
        inside = _reached_from(firsts, sorted(found), graph, producers)
        if any(graph.operations[i].primitive in ("exp", "exp2") for i in inside):
            regions.update(dict.fromkeys(inside, last))
    return regions


def _reached_from(
    firsts: set[int], positions: Sequence[int], graph: Graph, producers: Sequence[int | None]
) -> set[int]:
    """The first positions, and those of the others that their results flow into."""
    reached = set(firsts)
    for position in positions:
        sources = (producers[a] for a in graph.operations[position].inputs if isinstance(a, int))
        if reached.intersection(source for source in sources if source is not None):
            reached.add(position)
    return reached


@dataclass(slots=True)
class _Lifetime:
    birth: int
    death: int


@dataclass(slots=True)
class _Amounts:
    """Bytes of one operation, summed by their contents."""

    parts: dict[Holds, float] = field(default_factory=dict)

    def add(self, holds: Holds, amount: int) -> None:
        self.parts[holds] = self.parts.get(holds, 0.0) + float(amount)


class _Charges:
    """The bytes that each operation reads from memory and writes to it."""

    def __init__(self, graph: Graph, values: _Values, regions: Mapping[int, int]):
        self._graph, self._values = graph, values
        self._units = [self._unit(i, o, regions) for i, o in enumerate(graph.operations)]
        self._amounts = [_Amounts() for _ in graph.operations]
        self._stored: dict[int, _Lifetime] = {}
        self._charged: set[tuple[int, object]] = set()
        self._ends = {unit: position for position, unit in enumerate(self._units)}
        self._last_read: dict[int, int] = {}
        for position, operation in enumerate(graph.operations):
            # An operation whose result is made again where it is read, or is a view, reads nothing.
            own = any(value in values.roots[value] for value in operation.outputs)
            if own or operation.primitive in UPDATES:
                self._read(position, operation)
        for position, operation in enumerate(graph.operations):
            self._write_kernel(position, operation)
        for atom in graph.outputs:
            if isinstance(atom, int):
                self._return(atom)
        self.traffic = [Traffic(**amounts.parts) for amounts in self._amounts]

    def launches(self) -> tuple[bool, ...]:
        """Whether each operation is the last of a unit that writes, or an update in place.

        A compiler fuses into an update the operations that make its entries, but nothing else.
        """
        moving = {u for u, moved in zip(self._units, self.traffic, strict=True) if moved.total}
        positions = (self._values.producers[value] for value in self._stored)
        last = {self._units[i]: i for i in sorted(i for i in positions if i is not None)}
        return tuple(
            o.primitive in UPDATES or (u in moving and last.get(u) == i)
            for i, (o, u) in enumerate(zip(self._graph.operations, self._units, strict=True))
        )

    def temporary_bytes(self) -> int:
        """The most bytes written by operations that are alive at once."""
        change = [0] * (len(self._graph.operations) + 2)
        for value, life in self._stored.items():
            change[life.birth] += self._values.sizes[value]
            change[max(life.death, life.birth) + 1] -= self._values.sizes[value]
        return max(accumulate(change))

    def _unit(self, position: int, operation: Operation, regions: Mapping[int, int]) -> object:
        """Operations of one unit hand values to each other without memory."""
        if position in regions:
            return "attention", regions[position]
        if operation.primitive in KERNELS and operation.primitive not in UPDATES:
            return "kernel", position
        return "fused", self._values.level(operation)

    def _read(self, position: int, operation: Operation) -> None:
        updates = operation.primitive in UPDATES
        for place, atom in enumerate(operation.inputs):
            if not isinstance(atom, int):
                continue
            for root in self._values.roots[atom]:
                # A fused group reads when it runs, which is not before its last operation.
                last = max(self._ends[self._units[position]], self._last_read.get(root, 0))
                self._last_read[root] = last
                if root in self._stored:
                    self._stored[root].death = last
                if updates and place == 0:
                    self._update(position, operation, root)
                else:
                    self._read_root(position, operation, root, looks_up=place == 0)

    def _read_root(self, position: int, operation: Operation, root: int, *, looks_up: bool) -> None:
        producer, unit = self._values.producers[root], self._units[position]
        if producer is not None and self._units[producer] == unit:
            return
        self._store(root)
        size = self._values.sizes[root]
        if looks_up and operation.primitive in _LOOK_UPS:
            size = sum(self._values.sizes[value] for value in operation.outputs)
        elif (root, unit) in self._charged:
            return
        else:
            self._charged.add((root, unit))
        self._amounts[position].add(self._values.holds[root], size)

    def _update(self, position: int, operation: Operation, root: int) -> None:
        place = 1 if operation.primitive == "dynamic_update_slice" else 2
        aval = cast(Aval, operation.equation.invars[place].aval)
        times = 1 if operation.primitive in ("dynamic_update_slice", "scatter") else 2
        self._amounts[position].add(self._values.holds[root], times * nbytes(aval))

    def _store(self, root: int) -> None:
        """Charges the write of a value to the operation that makes it, if there is one."""
        position = self._values.producers[root]
        if position is None or root in self._stored:
            return
        death = self._last_read.get(root, position)
        self._stored[root] = _Lifetime(position, max(death, position))
        self._amounts[position].add(self._values.holds[root], self._values.sizes[root])

    def _write_kernel(self, position: int, operation: Operation) -> None:
        if self._units[position] == ("kernel", position):
            for value in operation.outputs:
                self._store(value)

    def _return(self, value: int) -> None:
        """Keeps a result until the end; one that is made again where it is read is written too."""
        position, end = self._values.producers[value], len(self._graph.operations)
        roots = self._values.roots[value]
        made_anew = position is not None and self._values.is_cheaper_anew(roots, value)
        for root in (value,) if made_anew else roots:
            self._store(root)
            if root in self._stored:
                self._stored[root].death = end
