"""Where the rows of the batch lie in every value of a graph; models that mix rows are refused.

The graph is compared with a probe, the same function traced at another batch size: what changes
between the two is the batch, whatever other axes happen to have its length. The walk here carries
the rows from the inputs through every operation by the rules of `batching_rules` and
`batching_indexing`, through loops and branches by their bodies. It computes and cuts nothing.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal
from jax.typing import ArrayLike

from pallas_kernels.operation import PRIMITIVE as KERNEL
from pbjax.batch_axes.indexing import INDEXING_RULES, fold, generate, index_step, plain, special
from pbjax.batch_axes.layout import (
    Constant,
    Fact,
    Kind,
    Layout,
    Rows,
    SplitError,
    Step,
    fits,
    refuse,
)
from pbjax.batch_axes.rules import RULES, Located
from pbjax.errors import InputError
from pbjax.graph.trace import Atom, Graph, Operation, body_graph, describe, scan_parts

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
        _check_output(number, walk.read(env, atom, twin))
    return tuple(_rows(env[value]) for value in range(len(graph.avals)))


def _rows(fact: Fact) -> Rows | None:
    return fact.rows if isinstance(fact, Layout) else None


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
        walk.changed(
            f"{len(graph.names)} weights and inputs become {len(probe.names)}", "the function"
        )
    pairs = zip(graph.avals, probe.avals, strict=False)
    for name, fact, (aval, twin) in zip(graph.names, facts, pairs, strict=False):
        if not fits(_rows(fact), aval.shape, twin.shape, walk.batch_size, walk.probe_size):
            _refuse_leaf(name, fact, walk, aval.shape, twin.shape)


def _refuse_leaf(
    name: str, fact: Fact, walk: "_Walk", shape: tuple[int, ...], twin_shape: tuple[int, ...]
) -> None:
    sizes = f"{shape} at batch size {walk.batch_size} and {twin_shape} at {walk.probe_size}"
    if name.startswith("captured"):
        walk.changed(f"its shape is {sizes}", f"the array {name}")
    axis = fact.rows.axis if isinstance(fact, Layout) else None
    raise InputError(
        f"find_rows: {name} has shape {sizes}, and its batch axis is given as {axis}; only the "
        "batch axis may change with the batch size; correct batch_axes"
    )


def _check_output(number: int, fact: Fact) -> None:
    rows = _rows(fact)
    if special(fact):
        refuse(f"output {number}", "is made of row numbers or of the batch size")
    if rows is not None and (rows.outer, rows.inner) != (1, 1):
        raise SplitError(
            f"output {number} has the batch merged into axis {rows.axis} "
            f"({rows.outer} x batch x {rows.inner})",
            "every output needs a batch axis of its own; return it before the reshape that merges "
            "them",
        )


class _Walk:
    """Carries facts through a graph and its probe, operation by operation."""

    def __init__(self, batch_size: int, probe_size: int):
        self.batch_size = batch_size
        self.probe_size = probe_size

    def changed(self, found: str, what: str) -> None:
        """Refuses a program that is another one at another batch size."""
        raise SplitError(
            f"{what} depends on the batch size: from {self.batch_size} to {self.probe_size} rows "
            f"{found}",
            "the program must be the same for every batch size; do not branch on the length of the "
            "batch or bake arrays of it into the model",
        )

    def read(self, env: Mapping[int, Fact], atom: Atom, twin: Atom) -> Fact:
        """What is known of a value, or of a literal in the graph and in the probe."""
        if not isinstance(atom, Literal):
            return env[atom]
        assert isinstance(twin, Literal)
        if np.ndim(atom.val) == np.ndim(twin.val) == 0:
            return Constant(value=np.asarray(atom.val), probe_value=np.asarray(twin.val))
        self._check_captured("captured in a call", atom.val, twin.val)
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
                facts=tuple(self.read(env, a, b) for a, b in inputs),
                batch_size=self.batch_size,
                probe_size=self.probe_size,
            )
            outputs = self.transfer(step)
            for number, fact in enumerate(outputs):
                step.check(_rows(fact), number)
            env.update(zip(operation.outputs, outputs, strict=True))
        return env

    def _check_alike(self, graph: Graph, probe: Graph) -> None:
        for operation, twin in zip(graph.operations, probe.operations, strict=False):
            if _wiring(operation) != _wiring(twin):
                results = f"with {len(operation.outputs)} results becomes"
                found = f"it {results} {describe(twin)} with {len(twin.outputs)}"
                self.changed(found, describe(operation))
        if len(graph.operations) != len(probe.operations):
            self.changed(
                f"its {len(graph.operations)} operations become {len(probe.operations)}",
                "the function",
            )
        if _numbers(graph.outputs) != _numbers(probe.outputs):
            self.changed("it returns other values", "the function")
        names = graph.names[graph.num_weights - len(graph.constants) :]
        for name, *values in zip(names, graph.constants, probe.constants, strict=False):
            self._check_captured(name, *values)

    def _check_captured(self, name: str, value: ArrayLike, probe_value: ArrayLike) -> None:
        if value is not probe_value and not np.array_equal(value, probe_value):
            shapes = f"shape {np.shape(value)} becomes {np.shape(probe_value)}"
            self.changed(f"its values change ({shapes})", f"the array {name}")

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
        nested = _NESTED.get(step.operation.primitive)
        if nested is not None:
            return nested(self, step)
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
    uniform = all(layout.kind == Kind.UNIFORM for layout in layouts)
    try:
        outputs = _checked(step, rule(step, _located(step, layouts, outside=False)))
    except SplitError:
        if not uniform:
            raise
        outputs = _checked(step, rule(step, _located(step, layouts, outside=True)))
    keeps = uniform and primitive not in ("concatenate", "dot_general", "reshape")
    kind = Kind.UNIFORM if keeps else Kind.DATA
    return tuple(None if rows is None else Layout(rows=rows, kind=kind) for rows in outputs)


def _checked(step: Step, outputs: Located) -> Located:
    for number, rows in enumerate(outputs):
        step.check(rows, number)
    return outputs


def _located(step: Step, layouts: Sequence[Layout], outside: bool) -> Located:
    """Rows of every input, with the uniform ones factorised like the others."""
    data = [layout.rows for layout in layouts if layout.kind != Kind.UNIFORM]

    def place(fact: Fact) -> Rows | None:
        if not isinstance(fact, Layout) or fact.kind != Kind.UNIFORM:
            return _rows(fact)
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


def _equal(value: object, other: object) -> bool:
    return value is other or bool(np.all(value == other))


def _merged(step: Step, fact: Fact, other: Fact) -> Layout | None:
    """What is known of a value that is one of two."""
    first, second = plain(step, fact), plain(step, other)
    if first == second:
        return first
    if first is None or second is None:
        step.refuse("holds a value that has rows at one time and none at another")
    if Kind.UNIFORM not in (first.kind, second.kind) or first.rows.axis != second.rows.axis:
        step.refuse("moves the rows of a value from one place to another")
    return first if second.kind == Kind.UNIFORM else second


def _bodies(step: Step, name: str) -> tuple[Graph, Graph]:
    """The body that a parameter holds, in the graph and in the probe."""
    return body_graph(step.params[name], step.operation), body_graph(
        step.twin_params[name], step.twin
    )


def _results(walk: _Walk, bodies: tuple[Graph, Graph], facts: Sequence[Fact]) -> list[Fact]:
    body, twin = bodies
    env = walk.graph(body, twin, [None] * body.num_weights + list(facts))
    return [walk.read(env, a, b) for a, b in zip(body.outputs, twin.outputs, strict=True)]


def _settled(
    step: Step, start: Sequence[Fact], run: Callable[[Sequence[Fact]], list[Fact]]
) -> list[Fact]:
    """Runs a loop's body until what is known of its carry changes no more; returns all its results.

    A fact changes at most from uniform to data, so each carried value costs at most one more run.
    """
    carry = list(start)
    while True:
        results = run(carry)
        merged: list[Fact] = [_merged(step, a, b) for a, b in zip(carry, results, strict=False)]
        if merged == carry:
            return [*merged, *results[len(carry) :]]
        carry = merged


def _scan(walk: _Walk, step: Step) -> tuple[Fact, ...]:
    """A scan along the batch keeps rows apart only if it carries nothing from one to the next."""
    roles = scan_parts(step.operation)
    facts = [plain(step, fact) for fact in step.facts]
    first_xs = len(roles.consts) + len(roles.carry)
    consts, carry = facts[: len(roles.consts)], facts[len(roles.consts) : first_xs]
    xs = facts[first_xs:]
    bodies = _bodies(step, "jaxpr")
    if any(layout is not None and layout.rows.axis == 0 for layout in xs):
        if carry or any(consts) or any(_rows(layout) != Rows(axis=0) for layout in xs):
            step.refuse("goes through the rows one after the other and lets them meet")
        _results(walk, bodies, [None] * len(facts))
        return (Layout(rows=Rows(axis=0)),) * len(step.operation.outputs)
    if step.params["length"] != step.twin_params["length"]:
        step.refuse("loops as many times as there are rows")
    steps = [_shifted(layout, -1) for layout in xs]
    results = _settled(
        step, carry, lambda carried: _results(walk, bodies, [*consts, *carried, *steps])
    )
    ys = [_shifted(plain(step, fact), 1) for fact in results[len(carry) :]]
    return (*results[: len(carry)], *ys)


def _shifted(layout: Fact, by: int) -> Fact:
    if not isinstance(layout, Layout):
        return None
    return replace(layout, rows=layout.rows.moved(layout.rows.axis + by))


def _while(walk: _Walk, step: Step) -> tuple[Fact, ...]:
    params = step.params
    facts = [plain(step, fact) for fact in step.facts]
    num_test, num_body = params["cond_nconsts"], params["body_nconsts"]
    tests, consts = facts[:num_test], facts[num_test : num_test + num_body]
    body, test = _bodies(step, "body_jaxpr"), _bodies(step, "cond_jaxpr")
    carry = _settled(
        step,
        facts[num_test + num_body :],
        lambda carried: _results(walk, body, [*consts, *carried]),
    )
    (again,) = _results(walk, test, [*tests, *carry])
    # Under vmap the test has one entry for each row, and each row stops by its own.
    rows = _rows(plain(step, again))
    if rows is not None and any(_rows(fact) != rows for fact in carry):
        step.refuse("stops by a row, and carries values of no row or of rows that lie elsewhere")
    return tuple(carry)


def _cond(walk: _Walk, step: Step) -> tuple[Fact, ...]:
    facts = [plain(step, fact) for fact in step.facts]
    pairs = zip(step.params["branches"], step.twin_params["branches"], strict=True)
    merged: list[Fact] | None = None
    for branch, twin in pairs:
        bodies = body_graph(branch, step.operation), body_graph(twin, step.twin)
        results = _results(walk, bodies, facts[1:])
        if merged is None:
            merged = [plain(step, fact) for fact in results]
        merged = [_merged(step, a, b) for a, b in zip(merged, results, strict=True)]
    return tuple(merged or ())


def _kernel(walk: _Walk, step: Step) -> tuple[Fact, ...]:
    """A kernel does to the rows what it means in plain JAX."""
    return tuple(_results(walk, _bodies(step, "plain"), step.facts))


_NESTED: Mapping[str, Callable[[_Walk, Step], tuple[Fact, ...]]] = {
    KERNEL: _kernel,
    "scan": _scan,
    "while": _while,
    "cond": _cond,
}
