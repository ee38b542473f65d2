"""From a graph to a program: prologue, N repetitions of a block cut into stages, epilogue.

A stage is a contiguous group of operations with one resource class, the unit that is measured and
scheduled. `cut` decides once where to cut, on the graph of the whole batch; `build` applies the
decision to the same function traced at any batch size. `repetition` finds the block that repeats,
and `execution` runs the stages.
"""

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile

import numpy as np
from jax.extend.core import Literal

from pbjax.device import Device, ResourceClass
from pbjax.graph.classify import Label, classify
from pbjax.graph.cost import equation_cost
from pbjax.graph.dataflow import live_bytes, signature
from pbjax.graph.trace import Atom, Aval, Graph, Operation, loop_body
from pbjax.planning.timetable import MAX_SUB_BATCHES
from pbjax.program.blocks import Block, extract_block
from pbjax.program.fused_costs import fused_seconds
from pbjax.program.repetition import Repetition, find_repetition

# What a stage costs in any cutting, as a share of its block: shorter ones are not worth a slot.
STAGE_SHARE = 0.03


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """A contiguous group of operations.

    Attributes:
      name: Unique within the program.
      resource: The class in which its operations spend most of their predicted time.
      operations: In program order, in the numbering of the block, or of the graph outside it.
      reads: Values from outside that it needs.
      writes: Values of its own that are needed after it.
    """

    name: str
    resource: ResourceClass
    operations: tuple[Operation, ...]
    reads: tuple[int, ...]
    writes: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Cutting:
    """The cuts of a graph, which hold for the same function traced at any batch size.

    Attributes:
      repetition: The place of the block.
      starts: Position in the block at which each stage begins.
      names: Names of the stages.
      resources: Resource classes of the stages.
      ends: Resource classes of prologue and epilogue.
    """

    repetition: Repetition
    starts: tuple[int, ...]
    names: tuple[str, ...]
    resources: tuple[ResourceClass, ...]
    ends: tuple[ResourceClass, ResourceClass]


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """A graph cut into prologue, block and epilogue.

    Attributes:
      graph: The graph it was cut from.
      block: The operations that repeat.
      stages: The stages of the block.
      prologue: Everything before the block; None if there is nothing.
      epilogue: Everything after it; None if there is nothing.
    """

    graph: Graph
    block: Block
    stages: tuple[Stage, ...]
    prologue: Stage | None
    epilogue: Stage | None

    def live(self, stage: int) -> tuple[int, ...]:
        """Values of the block that exist before a stage and are still needed from it on.

        Args:
          stage: 0 .. number of stages.
        """
        needed = {a for s in self.stages[stage:] for a in s.reads} | _results(self.block)
        written = {value for s in self.stages[:stage] for value in s.writes}
        carried = {carry.inner for carry in self.block.carry}
        return tuple(sorted(needed & (written | carried)))


def cut(graph: Graph, labels: Sequence[Label], device: Device, probe: Graph) -> Cutting:
    """Decides where a graph is cut.

    Of all cuttings of the block into contiguous stages the cheapest is taken, by dynamic
    programming: a stage costs the time of its operations outside its own class, since another
    sub-batch's stage of that class cannot run beside them; a cut costs the time to write and read
    back the values that cross it. There are as many stages as there may be sub-batches, or more,
    since two sub-batches at one stage compete for one resource.

    Args:
      graph: The function traced at the whole batch.
      labels: One for each of its operations.
      device: Whose bandwidth the crossing values cost.
      probe: The function traced at another batch size.

    Returns:
      The cutting.
    """
    seconds = fused_seconds(graph.operations, graph.avals, graph.outputs, labels, device)
    labels = [replace(label, seconds=s) for label, s in zip(labels, seconds, strict=True)]
    repetition = find_repetition(graph, seconds, probe)
    block = extract_block(graph, repetition)
    if repetition.scanned:
        inner_labels = _body_labels(loop_body(graph.operations[repetition.start]), device)
    else:
        inner_labels = labels[repetition.start : repetition.start + repetition.period]
    starts = _cheapest_starts(block, inner_labels, device)
    pieces = [slice(a, b) for a, b in zip(starts, (*starts[1:], None), strict=True)]
    resources = tuple(_resource(inner_labels[piece]) for piece in pieces)
    return Cutting(
        repetition=repetition,
        starts=starts,
        names=_names([block.operations[piece] for piece in pieces], resources),
        resources=resources,
        ends=(_resource(labels[: repetition.start]), _resource(labels[repetition.end :])),
    )


def build(graph: Graph, cutting: Cutting) -> Program:
    """Applies a cutting to a graph equal to the one it was decided on.

    Args:
      graph: The same function, traced at any batch size.
      cutting: The cuts.

    Returns:
      The program.
    """
    repetition = cutting.repetition
    block = extract_block(graph, repetition)
    prologue = graph.operations[: repetition.start]
    epilogue = graph.operations[repetition.end :]
    after_prologue = _atoms_read(graph.operations[repetition.start :]) | _values(graph.outputs)
    starts = cutting.starts
    pieces = [block.operations[a:b] for a, b in zip(starts, (*starts[1:], None), strict=True)]
    needed = _results(block)
    stages = []
    for k in reversed(range(len(pieces))):
        stages.append(_stage(cutting.names[k], cutting.resources[k], pieces[k], needed))
        needed = needed | set(stages[-1].reads)
    before, after = cutting.ends
    return Program(
        graph=graph,
        block=block,
        stages=tuple(reversed(stages)),
        prologue=_stage("prologue", before, prologue, after_prologue) if prologue else None,
        epilogue=_stage("epilogue", after, epilogue, _values(graph.outputs)) if epilogue else None,
    )


def graph_fingerprint(graph: Graph) -> str:
    """12 hex digits over the operations of a graph and their shapes and dtypes."""
    digest = hashlib.sha256(repr([repr(aval) for aval in graph.avals]).encode())
    for line in _dataflow(graph.operations, graph.avals):
        digest.update(line.encode())
    return digest.hexdigest()[:12]


def stage_fingerprint(stage: Stage, avals: Sequence[Aval]) -> str:
    """12 hex digits over a stage's operations; `avals` are those of its block, or of the graph."""
    text = "\n".join(_dataflow(stage.operations, avals))
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def _body_labels(body: Graph, device: Device) -> list[Label]:
    labels = classify(body, device)
    seconds = fused_seconds(body.operations, body.avals, body.outputs, labels, device)
    return [replace(label, seconds=s) for label, s in zip(labels, seconds, strict=True)]


def _cheapest_starts(block: Block, labels: Sequence[Label], device: Device) -> tuple[int, ...]:
    count = len(block.operations)
    crossing = live_bytes(block.operations, block.avals, tuple(_results(block)))
    busy = {r: np.zeros(count + 1) for r in ResourceClass}
    for k, label in enumerate(labels):
        for resource, sums in busy.items():
            sums[k + 1] = sums[k] + label.seconds * (label.resource == resource)
    sums = np.stack(list(busy.values()))
    whole = float(sums[:, -1].sum())

    def costs(end: int) -> np.ndarray:
        """Seconds that a last stage from each earlier position up to end costs."""
        spent = sums[:, end : end + 1] - sums[:, :end]
        foreign = spent.sum(axis=0) - spent.max(axis=0)
        boundary = 2 * np.array(crossing[:end]) / device.memory_bytes_per_s
        # A stage of reshapes alone takes no time, and so can be beside nothing.
        idle = whole * (spent.sum(axis=0) == 0)
        return foreign + boundary + idle + STAGE_SHARE * whole

    return _cheapest_path(count, costs, min(MAX_SUB_BATCHES, count))


def _cheapest_path(
    count: int, costs: Callable[[int], np.ndarray], min_pieces: int
) -> tuple[int, ...]:
    """Begins of the contiguous pieces of 0 .. count whose costs add up to the least.

    Args:
      count: Position at which the last piece ends.
      costs: A function from an end to the cost of a piece from each position before it.
      min_pieces: Least number of pieces.
    """
    best = np.full((min_pieces + 1, count + 1), np.inf)
    best[0, 0] = 0.0
    previous = np.zeros((min_pieces + 1, count + 1, 2), int)
    for end in range(1, count + 1):
        cost = costs(end)
        for pieces in range(1, min_pieces + 1):
            # The last row stands for min_pieces or more, so it may follow on itself.
            for before in {pieces - 1, pieces} if pieces == min_pieces else {pieces - 1}:
                totals = best[before, :end] + cost
                begin = int(np.argmin(totals))
                if totals[begin] < best[pieces, end]:
                    best[pieces, end] = totals[begin]
                    previous[pieces, end] = before, begin
    begins, pieces, end = [], min_pieces, count
    while end > 0:
        pieces, end = previous[pieces, end]
        begins.append(int(end))
    return tuple(reversed(begins))


def _resource(labels: Sequence[Label]) -> ResourceClass:
    seconds = dict.fromkeys(ResourceClass, 0.0)
    for label in labels:
        seconds[label.resource] += label.seconds
    return max(seconds, key=lambda resource: seconds[resource])


def _names(
    pieces: Sequence[Sequence[Operation]], resources: Sequence[ResourceClass]
) -> tuple[str, ...]:
    """Names stages after the innermost scope in which most of their FLOPs are.

    FLOPs count rather than operations: a norm has more of these than the product that it feeds.
    """
    work = [_work(operations) for operations in pieces]
    known = [path for found in work for path in found if path]
    shared = sum(1 for _ in takewhile(lambda level: len({*level}) == 1, zip(*known, strict=False)))
    names: list[str] = []
    for found, resource in zip(work, resources, strict=True):
        scope = _main_scope(found)
        if len(scope) <= shared:  # All stages are in that one: of this the largest part, then.
            scope = max(found, key=lambda path: found[path])
        names.append(scope[-1] if scope else resource.lower())
    return tuple(
        f"{name}.{names[: k + 1].count(name)}" if names.count(name) > 1 else name
        for k, name in enumerate(names)
    )


def _work(operations: Sequence[Operation]) -> dict[tuple[str, ...], float]:
    """FLOPs by scope, 1 for what has none; JAX's own scopes, such as vmap(), are left out."""
    found: dict[tuple[str, ...], float] = {}
    for operation in operations:
        path = tuple(scope for scope in operation.scope.split("/") if scope.isidentifier())
        found[path] = found.get(path, 0.0) + max(equation_cost(operation.equation).flops, 1.0)
    return found


def _main_scope(work: Mapping[tuple[str, ...], float]) -> tuple[str, ...]:
    """The innermost scope that more than half of the work is in."""
    scopes = {path[:depth] for path in work for depth in range(len(path) + 1)}
    inside = {s: sum(w for path, w in work.items() if path[: len(s)] == s) for s in scopes}
    return max((s for s in scopes if 2 * inside[s] > inside[()]), key=len)


def _stage(
    name: str, resource: ResourceClass, operations: Sequence[Operation], needed: set[int]
) -> Stage:
    written = {value for operation in operations for value in operation.outputs}
    return Stage(
        name=name,
        resource=resource,
        operations=tuple(operations),
        reads=tuple(sorted(_atoms_read(operations) - written)),
        writes=tuple(sorted(written & needed)),
    )


def _atoms_read(operations: Sequence[Operation]) -> set[int]:
    return _values([atom for operation in operations for atom in operation.inputs])


def _values(atoms: Sequence[Atom]) -> set[int]:
    return {atom for atom in atoms if isinstance(atom, int)}


def _results(block: Block) -> set[int]:
    """Values of the block that are needed after a repetition."""
    carried = [carry.result for carry in block.carry]
    return _values([*carried, *(y.inner for y in block.ys)])


def _dataflow(operations: Sequence[Operation], avals: Sequence[Aval]) -> Iterator[str]:
    """Each operation's signature with its values numbered in order of appearance."""
    seen: dict[int, int] = {}
    for operation in operations:
        reads = [
            "literal" if isinstance(a, Literal) else seen.setdefault(a, len(seen))
            for a in operation.inputs
        ]
        writes = [seen.setdefault(v, len(seen)) for v in operation.outputs]
        yield f"{signature(operation, avals)} {reads} {writes}"
