"""Matches, the operations that they replace, and the rewritten graph."""

import heapq
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, replace

import jax
import numpy as np
from jax.extend.core import Literal
from jaxtyping import Array

from pallas_kernels.operation import PRIMITIVE
from pbjax.fusion.reading import Reading, Source
from pbjax.graph.dataflow import signature
from pbjax.graph.trace import Atom, Aval, Graph, Operation, describe, trace, without_dead_code


class Mismatch(Exception):
    """A part of a graph looks like a pattern but is none; the text is the reason.

    Attributes:
      anchors: Positions of the operations the match would have begun with, as far as known: if
        another match takes one of them, it is no miss.
      pattern: Name of the pattern, if it is not the one that was looked for.
    """

    def __init__(self, reason: str, anchors: Sequence[int] = (), pattern: str = ""):
        """Takes the reason."""
        super().__init__(reason)
        self.anchors, self.pattern = frozenset(anchors), pattern


@dataclass(frozen=True, slots=True, kw_only=True)
class Operand:
    """A value that a match reads, and how to draw random ones for its verification.

    Attributes:
      value: Number of the value.
      spread: Standard deviation of floats; the largest integer.
    """

    value: int
    spread: float = 1.0


def operand(atom: Atom, spread: float = 1.0) -> Operand:
    """An operand of a match.

    Raises:
      Mismatch: The operand is a literal, which no kernel takes for an array.
    """
    if isinstance(atom, Literal):
        raise Mismatch(f"one of its operands is the number {atom}")
    return Operand(value=atom, spread=spread)


@dataclass(frozen=True, slots=True, kw_only=True)
class Match:
    """Operations that one kernel can replace.

    Attributes:
      pattern: Name of the pattern, which switches it off.
      kernel: The public function that replaces the operations, with the options in use.
      where: The first operation of the match with its scope and line in the user's source.
      scope: Name scope of the match.
      operands: The values that it reads.
      outputs: Numbers of the values that it replaces.
      function: Computes the outputs from the operands, in their shapes and dtypes.
      operations: Positions of the operations between operands and outputs.
      replaced: Positions of those operations that nothing else needs.
      name: The pattern with a number that equal matches share, such as those of equal layers.
    """

    pattern: str
    kernel: str
    where: str
    scope: str
    operands: tuple[Operand, ...]
    outputs: tuple[int, ...]
    function: Callable[..., Sequence[Array]]
    operations: tuple[int, ...]
    replaced: frozenset[int]
    name: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Miss:
    """A part of a graph that looked like a pattern and was left alone.

    Attributes:
      pattern: Name of the pattern.
      where: Its place, as in `Match`.
      reason: The reason why it does not match.
    """

    pattern: str
    where: str
    reason: str

    def __str__(self) -> str:
        """One line for the user."""
        return f"{self.pattern} at {self.where}: not matched: {self.reason}"


def match(
    reading: Reading,
    pattern: str,
    kernel: str,
    *,
    anchors: Sequence[int],
    operands: Sequence[Operand],
    outputs: Sequence[int],
    function: Callable[..., Sequence[Array]],
    gives: np.dtype | None = None,
) -> Match:
    """Makes a match of the operations between operands and outputs.

    Args:
      reading: The graph.
      pattern: See `Match`.
      kernel: See `Match`.
      anchors: Positions of the operations that the pattern begins with; values that follow from
        them within the match must not be read elsewhere. The first gives the match its place.
      operands: See `Match`; repeated ones are read once.
      outputs: See `Match`.
      function: Called with an array for each operand.
      gives: The dtype that the kernel rounds its results to; None for the dtype of the outputs.

    Raises:
      Mismatch: A value in between is returned or read elsewhere, a residual is the result itself,
        or an output keeps more digits than the kernel gives.
    """
    wide = {reading.dtype(value) for value in outputs if _is_wider(reading.dtype(value), gives)}
    if wide:
        what = f"its result stays {wide.pop()}, which the kernel would round to {gives}"
        raise Mismatch(what, anchors, pattern)
    operations = _between(reading, {o.value for o in operands}, outputs)
    if not set(anchors) <= set(operations):
        raise Mismatch("it is added to itself", anchors, pattern)
    replaced = _following(reading, operations, anchors)
    inner = [v for i in sorted(replaced) for v in reading.graph.operations[i].outputs]
    for value in inner:
        reason = _read_elsewhere(reading, value, set(operations))
        if reason is not None and value not in outputs:
            raise Mismatch(reason, anchors, pattern)
    first = reading.graph.operations[anchors[0]]
    return Match(
        pattern=pattern,
        kernel=kernel,
        where=describe(first),
        scope=first.scope,
        operands=tuple(operands),
        outputs=tuple(outputs),
        function=function,
        operations=operations,
        replaced=replaced,
    )


def _is_wider(dtype: np.dtype, gives: np.dtype | None) -> bool:
    """Whether rounding to `gives` loses digits or range; 16-bit dtypes differ in both."""
    if gives is None or dtype == gives:
        return False
    return dtype.itemsize >= gives.itemsize


def named(kernel: str, parts: Mapping[str | None, object]) -> str:
    """A kernel's name with the parts that are present in brackets."""
    present = [str(name) for name, part in parts.items() if part is not None and part is not False]
    return f"{kernel}({', '.join(present)})" if present else kernel


def _between(reading: Reading, operands: set[int], outputs: Sequence[int]) -> tuple[int, ...]:
    found: set[int] = set()
    waiting: list[Atom] = list(outputs)
    while waiting:
        atom = waiting.pop()
        if isinstance(atom, Literal) or atom in operands:
            continue
        operation = reading.maker(atom)
        if operation is None:
            if reading.source(atom) == Source.CONSTANT:
                continue
            name = reading.graph.names[atom]
            raise Mismatch(f"it also reads {name}, which the kernel has no place for")
        index = reading.makers[atom]
        if index not in found:
            found.add(index)
            waiting.extend(operation.inputs)
    return tuple(sorted(found))


def _following(
    reading: Reading, operations: Sequence[int], anchors: Sequence[int]
) -> frozenset[int]:
    found, values = set(), set()
    for index in operations:
        operation = reading.graph.operations[index]
        if index in anchors or values.intersection(
            a for a in operation.inputs if isinstance(a, int)
        ):
            found.add(index)
            values.update(operation.outputs)
    return frozenset(found)


def _read_elsewhere(reading: Reading, value: int, operations: set[int]) -> str | None:
    name = reading.description(value)
    if value in reading.returned:
        return f"the result of its {name} is returned to the user"
    others = [i for i in reading.readers.get(value, ()) if i not in operations]
    if not others:
        return None
    reader = describe(reading.graph.operations[others[0]])
    return f"the result of its {name} is also read by {reader}"


def structure(graph: Graph, m: Match) -> tuple[object, ...]:
    """A key of a match that equal matches share, such as those of equal layers.

    It holds the kernel, operations, shapes, data flow, and the identities of constants. Constants
    that are operands are left out: a match does not depend on their values.
    """
    first = graph.num_weights - len(graph.constants)
    constants = {first + i: id(value) for i, value in enumerate(graph.constants)}
    numbers: dict[int, str] = {}
    for i, read in enumerate(m.operands):
        numbers.setdefault(read.value, f"operand {i}")
        constants.pop(read.value, None)
    steps = []
    for index in m.operations:
        operation = graph.operations[index]
        values = [a for a in (*operation.inputs, *operation.outputs) if isinstance(a, int)]
        places = [(numbers.setdefault(v, str(len(numbers))), constants.get(v)) for v in values]
        steps.append((signature(operation, graph.avals), tuple(places)))
    return m.kernel, tuple(steps), tuple(numbers[value] for value in m.outputs)


def rewrite(graph: Graph, matches: Sequence[Match]) -> Graph:
    """The graph with each match replaced by its function's operations, traced once for a name."""
    avals, traced = list(graph.avals), {}
    makers = Reading(graph).makers
    replaced = {value for m in matches for value in m.outputs}
    kept = [
        (index, operation)
        for index, operation in enumerate(graph.operations)
        if not replaced.intersection(operation.outputs)
    ]
    added = []
    for m in matches:
        place = min(makers[value] for value in m.outputs)
        if m.name not in traced:
            traced[m.name] = _traced(graph, m)
        added += [(place, operation) for operation in _fragment(avals, m, traced[m.name])]
    operations = _ordered([*kept, *_shared(added, avals, replaced)])
    return without_dead_code(replace(graph, avals=tuple(avals), operations=tuple(operations)))


def _shared(
    added: Sequence[tuple[int, Operation]], avals: Sequence[Aval], outputs: Set[int]
) -> list[tuple[int, Operation]]:
    """The added operations; those that several matches have in common come once and first.

    For example all layers read one bias made of a mask, and all stay equal.
    """
    seen: dict[tuple[object, ...], int] = {}
    numbers: dict[int, int] = {}
    kept: list[tuple[int, Operation]] = []
    for place, operation in added:
        inputs = tuple(a if isinstance(a, Literal) else numbers.get(a, a) for a in operation.inputs)
        operation = replace(operation, inputs=inputs)
        single = operation.primitive == PRIMITIVE or not outputs.isdisjoint(operation.outputs)
        single = single or any(isinstance(a, Literal) and np.ndim(a.val) for a in inputs)
        key = (signature(operation, avals), *(a for a in inputs if isinstance(a, int)))
        if single or key not in seen:
            seen.setdefault(key, len(kept))
            kept.append((place, operation))
        else:
            first = kept[seen[key]][1]
            numbers.update(zip(operation.outputs, first.outputs, strict=True))
            kept[seen[key]] = (-1, first)
    return kept


def _traced(graph: Graph, m: Match) -> Graph:
    given = [graph.avals[o.value] for o in m.operands]
    shapes = [jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in given]
    return trace(lambda _, *operands: tuple(m.function(*operands)), (), *shapes)


def _fragment(avals: list[Aval], m: Match, fragment: Graph) -> list[Operation]:
    """The operations of a match's function, with new numbers for their values."""
    numbers: dict[int, Atom] = {}
    for i, value in enumerate(fragment.constants):
        numbers[i] = Literal(value, fragment.avals[i])
    for i, operand in zip(fragment.inputs, m.operands, strict=True):
        numbers[i] = operand.value
    results = dict(zip(fragment.outputs, m.outputs, strict=True))
    placed = []
    for operation in fragment.operations:
        outputs = []
        for value in operation.outputs:
            aval, number = fragment.avals[value], results.get(value, len(avals))
            if number == len(avals):
                avals.append(aval)
            elif (aval.shape, aval.dtype) != (avals[number].shape, avals[number].dtype):
                raise AssertionError(f"{m.kernel}: {aval} in place of {avals[number]}")
            numbers[value] = number
            outputs.append(number)
        inputs = (a if isinstance(a, Literal) else numbers[a] for a in operation.inputs)
        scope = "/".join(filter(None, (m.scope, operation.scope)))
        placed.append(replace(operation, scope=scope, inputs=tuple(inputs), outputs=tuple(outputs)))
    return placed


def _ordered(placed: Sequence[tuple[int, Operation]]) -> list[Operation]:
    """The operations in an order in which values are written before they are read.

    Of all operations that could be next the earliest in the program is taken, so that its order is
    kept wherever possible.
    """
    writers = {v: i for i, (_, operation) in enumerate(placed) for v in operation.outputs}
    followers: list[list[int]] = [[] for _ in placed]
    missing = [0] * len(placed)
    for i, (_, operation) in enumerate(placed):
        before = {writers[a] for a in operation.inputs if isinstance(a, int) and a in writers}
        missing[i] = len(before)
        for j in before:
            followers[j].append(i)
    ready = [(place, i) for i, (place, _) in enumerate(placed) if not missing[i]]
    heapq.heapify(ready)
    ordered = []
    while ready:
        _, i = heapq.heappop(ready)
        ordered.append(placed[i][1])
        for j in followers[i]:
            missing[j] -= 1
            if not missing[j]:
                heapq.heappush(ready, (placed[j][0], j))
    if len(ordered) != len(placed):
        raise AssertionError("fusion: a replaced operation reads a value that depends on it")
    return ordered
