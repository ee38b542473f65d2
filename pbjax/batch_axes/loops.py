"""Rules for loops, branches and kernels, which carry the rows of the batch as their bodies do.

A rule takes the step and a function that follows the facts of a body's inputs to its results.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from pallas_kernels.operation import PRIMITIVE as KERNEL
from pbjax.batch_axes.indexing import plain
from pbjax.batch_axes.layout import Content, Fact, Layout, Rows, Step, rows_of
from pbjax.graph.trace import Graph, body_graph, scan_parts

type Bodies = tuple[Graph, Graph]
type Follow = Callable[[Bodies, Sequence[Fact]], list[Fact]]
type LoopRule = Callable[[Step, Follow], tuple[Fact, ...]]


def _merged(step: Step, fact: Fact, other: Fact) -> Layout | None:
    """Returns the fact that holds for a value that is one of two."""
    first, second = plain(step, fact), plain(step, other)
    if first == second:
        return first
    if first is None or second is None:
        step.refuse("holds a value that has rows at one time and none at another")
    if (
        Content.UNIFORM not in (first.content, second.content)
        or first.rows.axis != second.rows.axis
    ):
        step.refuse("moves the rows of a value from one place to another")
    return first if second.content == Content.UNIFORM else second


def _bodies(step: Step, name: str) -> Bodies:
    """The body that a parameter holds, in the graph and in the probe."""
    around, twin = step.operation, step.twin
    return body_graph(step.params[name], around), body_graph(step.twin_params[name], twin)


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


def _scan(step: Step, follow: Follow) -> tuple[Fact, ...]:
    """A scan along the batch keeps rows apart only if it carries nothing from one to the next."""
    roles = scan_parts(step.operation)
    facts = [plain(step, fact) for fact in step.facts]
    first_xs = len(roles.consts) + len(roles.carry)
    consts, carry = facts[: len(roles.consts)], facts[len(roles.consts) : first_xs]
    xs = facts[first_xs:]
    bodies = _bodies(step, "jaxpr")
    if any(layout is not None and layout.rows.axis == 0 for layout in xs):
        if carry or any(consts) or any(rows_of(layout) != Rows(axis=0) for layout in xs):
            step.refuse("goes through the rows one after the other and lets them meet")
        follow(bodies, [None] * len(facts))
        return (Layout(rows=Rows(axis=0)),) * len(step.operation.outputs)
    if step.params["length"] != step.twin_params["length"]:
        step.refuse("loops as many times as there are rows")
    steps = [_shifted(layout, -1) for layout in xs]
    results = _settled(step, carry, lambda carried: follow(bodies, [*consts, *carried, *steps]))
    ys = [_shifted(plain(step, fact), 1) for fact in results[len(carry) :]]
    return (*results[: len(carry)], *ys)


def _shifted(layout: Fact, by: int) -> Fact:
    if not isinstance(layout, Layout):
        return None
    return replace(layout, rows=layout.rows.moved(layout.rows.axis + by))


def _while(step: Step, follow: Follow) -> tuple[Fact, ...]:
    params = step.params
    facts = [plain(step, fact) for fact in step.facts]
    num_test, num_body = params["cond_nconsts"], params["body_nconsts"]
    tests, consts = facts[:num_test], facts[num_test : num_test + num_body]
    body, test = _bodies(step, "body_jaxpr"), _bodies(step, "cond_jaxpr")
    carry = _settled(
        step,
        facts[num_test + num_body :],
        lambda carried: follow(body, [*consts, *carried]),
    )
    (again,) = follow(test, [*tests, *carry])
    # Under vmap the test has one entry for each row, and each row stops by its own.
    rows = rows_of(plain(step, again))
    if rows is not None and any(rows_of(fact) != rows for fact in carry):
        step.refuse("stops by a row, and carries values of no row or of rows that lie elsewhere")
    return tuple(carry)


def _cond(step: Step, follow: Follow) -> tuple[Fact, ...]:
    facts = [plain(step, fact) for fact in step.facts]
    pairs = zip(step.params["branches"], step.twin_params["branches"], strict=True)
    merged: list[Fact] | None = None
    for branch, twin in pairs:
        bodies = body_graph(branch, step.operation), body_graph(twin, step.twin)
        results = follow(bodies, facts[1:])
        if merged is None:
            merged = [plain(step, fact) for fact in results]
        merged = [_merged(step, a, b) for a, b in zip(merged, results, strict=True)]
    return tuple(merged or ())


def _kernel(step: Step, follow: Follow) -> tuple[Fact, ...]:
    """A kernel does to the rows what it means in plain JAX."""
    return tuple(follow(_bodies(step, "plain"), step.facts))


LOOP_RULES: Mapping[str, LoopRule] = {
    KERNEL: _kernel,
    "scan": _scan,
    "while": _while,
    "cond": _cond,
}
