"""Loops over layers: the body of a scan as a graph, and the scan with a rewritten body."""

from collections.abc import Sequence
from dataclasses import replace

import jax
import jax.numpy as jnp
from jax.extend.core import Literal

from pbjax.graph.trace import Atom, Graph, Operation, evaluate, loop_body, scan_parts


def body_of(operation: Operation, weights: frozenset[int]) -> tuple[Graph, frozenset[int]]:
    """The body of a scan, and those of its inputs that are weights or slices of weights.

    Args:
      operation: The scan.
      weights: Values of the graph around it that do not depend on a call's inputs.
    """
    body, parts = loop_body(operation), scan_parts(operation)
    given: Sequence[Atom] = (*parts.consts, *parts.carry, *parts.xs)
    carried = range(len(parts.consts), len(parts.consts) + len(parts.carry))
    held = (
        number
        for i, (number, atom) in enumerate(zip(body.inputs, given, strict=True))
        if i not in carried and (isinstance(atom, Literal) or atom in weights)
    )
    return body, frozenset(held)


def with_body(operation: Operation, body: Graph) -> Operation:
    """The scan with another body of the same inputs and outputs."""

    def run(*inputs):
        env = dict(enumerate([*map(jnp.asarray, body.constants), *inputs]))
        evaluate(body.operations, env)
        return [a.val if isinstance(a, Literal) else env[a] for a in body.outputs]

    avals = [body.avals[i] for i in body.inputs]
    closed = jax.make_jaxpr(run)(*(jax.ShapeDtypeStruct(a.shape, a.dtype) for a in avals))
    jaxpr = closed.jaxpr if not closed.consts else closed
    params = dict(operation.params, jaxpr=jaxpr)
    return replace(operation, equation=operation.equation.replace(params=params))
