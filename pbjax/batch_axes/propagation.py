"""The search for the batch's rows in every value of a graph; models that mix rows are refused.

The graph is compared with a probe, the same function traced at another batch size: what changes
between the two is the batch, whatever other axes happen to have its length. The walk here carries
the rows from the inputs through every operation by the rules of `rules`, `indexing` and `loops`.
It computes and cuts nothing.
"""

from collections.abc import Mapping, Sequence
from typing import Never

import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal
from jax.typing import ArrayLike

from pbjax.batch_axes.indexing import INDEXING_RULES, fold, generate, index_step, special
from pbjax.batch_axes.layout import (
    Constant,
    Content,
    Fact,
    Layout,
    Rows,
    SplitError,
    Step,
    fits,
    refuse,
    rows_of,
)
from pbjax.batch_axes.loops import LOOP_RULES, Bodies
from pbjax.batch_axes.rules import RULES, Located
from pbjax.errors import InputError
from pbjax.graph.trace import Atom, Graph, Operation, describe, made_by, read_by

__all__ = ["Rows", "SplitError", "find_rows"]

type Env = dict[int, Fact]

# Parameters that hold shapes or bodies: the rules look at these; any other must not change with the
# batch size.
_SIZED = {
    "reshape": {"new_sizes"},
    "broadcast_in_dim": {"shape"},
    "iota": {"shape"},
    "empty": {"shape"},
    "empty2": {"shape"},
    "slice": {"start_indices", "limit_indices"},
    "dynamic_slice": {"slice_sizes"},
    "gather": {"slice_sizes"},
    "split": {"sizes"},
    "tile": {"reps"},
    "random_bits": {"shape"},
    "scan": {"length", "ft_in", "ft_out"},
}


def find_rows(
    graph: Graph,
    probe: Graph,
    batch_size: int,
    probe_size: int,
    in_axes: Sequence[int | None],
) -> tuple[Rows | None, ...]:
    """Finds where the rows of the batch lie in every value of a graph.

    Args:
      graph: A function traced at batch_size.
      probe: The same function traced at probe_size.
      batch_size: Rows in the inputs of graph; at least 2, because programs treat one row apart.
      probe_size: Rows in the inputs of probe; at least 2 and not batch_size.
      in_axes: For each input leaf, the axis that the rows lie along, or None if all rows share it.

    Returns:
      One entry for each value of the graph: where its rows lie, or None if it is the same for all.

    Raises:
      InputError: The sizes, axes and shapes of the inputs do not agree.
      SplitError: The function mixes rows, or its result for a row depends on the batch size. The
        message names the first such operation.
    """
    _check_sizes(graph, batch_size, probe_size, in_axes)
    walk = _Walk(batch_size, probe_size)
    facts: list[Fact] = [None] * graph.num_weights
    facts += [None if axis is None else Layout(rows=Rows(axis=axis)) for axis in in_axes]
    _check_leaves(graph, probe, walk, facts)
    env = walk.graph(graph, probe, facts)
    for number, (atom, twin) in enumerate(zip(graph.outputs, probe.outputs, strict=True)):
        _check_output(_output(graph, number), walk.read(env, atom, twin))
    return tuple(rows_of(env[value]) for value in range(len(graph.avals)))


def _check_sizes(
    graph: Graph, batch_size: int, probe_size: int, in_axes: Sequence[int | None]
) -> None:
    if min(batch_size, probe_size) < 2 or batch_size == probe_size:
        raise InputError(
            f"find_rows(batch_size={batch_size}, probe_size={probe_size}): these sizes do not "
            "tell rows from other axes; two that differ, of at least 2, are allowed; trace the "
            "function at two such sizes"
        )
    if len(in_axes) != graph.num_inputs:
        raise InputError(
            f"find_rows: {len(in_axes)} batch axes for {graph.num_inputs} inputs; one axis or None "
            "is needed for each input leaf; flatten the axes like the inputs"
        )


def _check_leaves(graph: Graph, probe: Graph, walk: "_Walk", facts: Sequence[Fact]) -> None:
    if len(graph.names) != len(probe.names):
        longer = max(graph, probe, key=lambda each: len(each.names))
        walk.changed(
            f"{len(graph.names)} weights and inputs become {len(probe.names)}",
            f"whether there is a captured array {read_by(longer, longer.weights[-1])}",
        )
    pairs = zip(graph.avals, probe.avals, strict=False)
    for value, (name, fact, (aval, twin)) in enumerate(
        zip(graph.names, facts, pairs, strict=False)
    ):
        if fits(rows_of(fact), aval.shape, twin.shape, walk.batch_size, walk.probe_size):
            continue
        sizes = f"{aval.shape} at batch size {walk.batch_size}, {twin.shape} at {walk.probe_size}"
        if name.startswith("captured"):
            what = f"the captured array {read_by(graph, value)}"
            walk.changed(f"its shape changes: {sizes}", what)
        _refuse_input(name, fact, sizes)


def _refuse_input(name: str, fact: Fact, sizes: str) -> Never:
    rows = rows_of(fact)
    axis = rows.axis if rows else None
    raise InputError(
        f"find_rows: {name} has shape {sizes}, and its batch axis is given as {axis}; only the "
        "batch axis may change with the batch size; correct batch_axes"
    )


def _output(graph: Graph, number: int) -> str:
    """Names an output in messages."""
    return f"output {number}, {made_by(graph, graph.outputs[number])},"


def _check_output(name: str, fact: Fact) -> None:
    rows = rows_of(fact)
    if special(fact):
        refuse(name, "is made of row numbers or of the batch size")
    if rows is not None and (rows.outer, rows.inner) != (1, 1):
        raise SplitError(
            f"{name} has the batch merged into axis {rows.axis} "
            f"({rows.outer} x batch x {rows.inner})",
            "every output needs a batch axis of its own; return it before the reshape that merges "
            "them",
        )


class _Walk:
    """Carries facts through a graph and its probe, operation by operation."""

    def __init__(self, batch_size: int, probe_size: int):
        self.batch_size = batch_size
        self.probe_size = probe_size

    def changed(self, found: str, what: str) -> Never:
        """Refuses a program that is another one at another batch size."""
        raise SplitError(
            f"{what} depends on the batch size: from {self.batch_size} to {self.probe_size} rows "
            f"{found}",
            "the program must be the same for every batch size; do not branch on the length of the "
            "batch or bake arrays of it into the model",
        )

    def read(
        self, env: Mapping[int, Fact], atom: Atom, twin: Atom, reader: Operation | None = None
    ) -> Fact:
        """Returns the fact about a value, or about a literal in the graph and in the probe."""
        if not isinstance(atom, Literal):
            return env[atom]
        assert isinstance(twin, Literal)
        if np.ndim(atom.val) == np.ndim(twin.val) == 0:
            return Constant(value=np.asarray(atom.val), probe_value=np.asarray(twin.val))
        if not _same(atom.val, twin.val):
            where = "returned by a call" if reader is None else f"read by {describe(reader)},"
            self._changed_array(where, atom.val, twin.val)
        return None

    def graph(self, graph: Graph, probe: Graph, facts: Sequence[Fact]) -> Env:
        """Facts of all values of a graph, from those of its weights and inputs."""
        env: Env = dict(enumerate(facts))
        self._check_alike(graph, probe)
        for operation, twin in zip(graph.operations, probe.operations, strict=True):
            self._check_params(operation, twin)
            inputs = zip(operation.inputs, twin.inputs, strict=True)
            step = Step(
                operation=operation,
                twin=twin,
                facts=tuple(self.read(env, a, b, operation) for a, b in inputs),
                batch_size=self.batch_size,
                probe_size=self.probe_size,
            )
            outputs = self.transfer(step)
            for number, fact in enumerate(outputs):
                step.check(rows_of(fact), number)
            env.update(zip(operation.outputs, outputs, strict=True))
        return env

    def results(self, bodies: Bodies, facts: Sequence[Fact]) -> list[Fact]:
        """Facts of the results of a body, from those of its inputs."""
        body, twin = bodies
        env = self.graph(body, twin, [None] * body.num_weights + list(facts))
        return [self.read(env, a, b) for a, b in zip(body.outputs, twin.outputs, strict=True)]

    def _check_alike(self, graph: Graph, probe: Graph) -> None:
        for operation, twin in zip(graph.operations, probe.operations, strict=False):
            if _wiring(operation) != _wiring(twin):
                results = f"with {len(operation.outputs)} results becomes"
                found = f"it {results} {describe(twin)} with {len(twin.outputs)}"
                self.changed(found, describe(operation))
        counts = len(graph.operations), len(probe.operations)
        if counts[0] != counts[1]:
            longer = max(graph, probe, key=lambda each: len(each.operations))
            extra = describe(longer.operations[min(counts)])
            self.changed(f"{counts[0]} operations become {counts[1]}", f"whether there is {extra}")
        for number, atoms in enumerate(zip(graph.outputs, probe.outputs, strict=False)):
            if _numbers(atoms[:1]) != _numbers(atoms[1:]):
                self.changed("it is another value", _output(graph, number))
        first = graph.num_weights - len(graph.constants)
        for value, arrays in enumerate(zip(graph.constants, probe.constants, strict=False), first):
            if not _same(*arrays):
                self._changed_array(read_by(graph, value), *arrays)

    def _changed_array(self, name: str, value: ArrayLike, probe_value: ArrayLike) -> None:
        shapes = f"shape {np.shape(value)} becomes {np.shape(probe_value)}"
        self.changed(f"its values change ({shapes})", f"the captured array {name}")

    def _check_params(self, operation: Operation, twin: Operation) -> None:
        ignored = _SIZED.get(operation.primitive, set())
        for name, value in operation.params.items():
            other = twin.params[name]
            if name not in ignored and not _holds_code(value) and not _equal(value, other):
                self.changed(f"{name} changes from {value} to {other}", describe(operation))

    def transfer(self, step: Step) -> tuple[Fact, ...]:
        """Facts of the outputs of one operation."""
        folded = fold(step)
        if folded is not None:
            return folded
        loop_rule = LOOP_RULES.get(step.operation.primitive)
        if loop_rule is not None:
            return loop_rule(step, self.results)
        if any(special(fact) for fact in step.facts):
            outputs = index_step(step)
            if outputs is not None:
                return outputs
        if not any(isinstance(fact, Layout) for fact in step.facts):
            return generate(step)
        return _by_rule(step)


def _by_rule(step: Step) -> tuple[Fact, ...]:
    """Applies the primitive's rule; a uniform value takes whatever factorisation fits."""
    primitive = step.operation.primitive
    rule = RULES.get(primitive) or INDEXING_RULES.get(primitive)
    if rule is None:
        step.refuse("is an operation that pbjax does not know, and rows of the batch enter it")
    layouts = [fact for fact in step.facts if isinstance(fact, Layout)]
    uniform = all(layout.content == Content.UNIFORM for layout in layouts)
    try:
        outputs = _checked(step, rule(step, _located(step, layouts, outside=False)))
    except SplitError:
        if not uniform:
            raise
        outputs = _checked(step, rule(step, _located(step, layouts, outside=True)))
    keeps = uniform and primitive not in ("concatenate", "dot_general", "reshape")
    content = Content.UNIFORM if keeps else Content.DATA
    return tuple(None if rows is None else Layout(rows=rows, content=content) for rows in outputs)


def _checked(step: Step, outputs: Located) -> Located:
    for number, rows in enumerate(outputs):
        step.check(rows, number)
    return outputs


def _located(step: Step, layouts: Sequence[Layout], outside: bool) -> Located:
    """Rows of every input, with the uniform ones factorised like the others."""
    data = [layout.rows for layout in layouts if layout.content != Content.UNIFORM]

    def place(fact: Fact) -> Rows | None:
        if not isinstance(fact, Layout) or fact.content != Content.UNIFORM:
            return rows_of(fact)
        total = fact.rows.outer * fact.rows.inner
        for rows in data:
            if rows.outer * rows.inner == total:
                return rows.moved(fact.rows.axis)
        outer, inner = (total, 1) if outside else (1, total)
        return Rows(axis=fact.rows.axis, outer=outer, inner=inner)

    return tuple(place(fact) for fact in step.facts)


def _wiring(operation: Operation) -> tuple[object, ...]:
    return operation.primitive, _numbers(operation.inputs), operation.outputs


def _numbers(atoms: Sequence[Atom]) -> tuple[int | None, ...]:
    return tuple(None if isinstance(atom, Literal) else atom for atom in atoms)


def _holds_code(value: object) -> bool:
    if isinstance(value, tuple | list):
        return any(_holds_code(item) for item in value)
    return isinstance(value, Jaxpr | ClosedJaxpr) or callable(value)


def _same(value: ArrayLike, other: ArrayLike) -> bool:
    return value is other or np.array_equal(value, other)


def _equal(value: object, other: object) -> bool:
    return value is other or bool(np.all(value == other))
