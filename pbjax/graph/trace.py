"""Traces a function into a flat graph of operations.

`trace` runs the function abstractly and inlines every nested call (jit, remat, custom
derivatives), which leaves one list of operations in program order. Loops and branches (scan, while,
cond) stay whole. Values are numbered: weights first, then inputs, then the results of the
operations in order. A function traced at another batch size gives the same numbers, so that one
cutting of the graph serves sub-batches of every size. `cost` counts operations, and `batch_axes`
finds the batch.
"""

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol, cast, runtime_checkable

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var
from jaxtyping import Array

from pbjax.errors import ModelError
from pbjax.graph.cost import CALLS
from pbjax.graph.source_lines import traced_line

type Atom = int | Literal


@runtime_checkable
class Aval(Protocol):
    """Shape and dtype of a value."""

    shape: tuple[int, ...]
    dtype: np.dtype


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """One equation of the flat graph.

    Attributes:
      primitive: Name of the JAX primitive, such as "dot_general".
      scope: Name scopes around it, joined by "/"; empty where the program names none.
      inputs: Numbers of the values it reads; literals stand for themselves.
      outputs: Numbers of the values it writes.
      equation: The traced equation, for its parameters and for running it.
      callers: Equations of the calls and loops around it, the innermost last: an operation inside a
        library's function is known by the line that calls it.
    """

    primitive: str
    scope: str
    inputs: tuple[Atom, ...]
    outputs: tuple[int, ...]
    equation: JaxprEqn
    callers: tuple[JaxprEqn, ...] = field(default=(), repr=False, compare=False)

    @property
    def params(self) -> Mapping:
        """The parameters of the primitive."""
        return self.equation.params


@dataclass(frozen=True, slots=True, kw_only=True)
class Graph:
    """A traced function: values 0 .. num_weights - 1 are weights, the next num_inputs are inputs.

    Attributes:
      avals: Shape and dtype of every value, by its number.
      operations: Operations in program order; each value is written once, before it is read.
      num_weights: How many values are parameters or arrays that the function captured.
      num_inputs: How many values are inputs of a call.
      outputs: The function's results, flattened.
      constants: The captured arrays: the last of the weights.
      names: A name for each weight and input, for messages and reports.
      out_tree: Structure of the function's results.
    """

    avals: tuple[Aval, ...]
    operations: tuple[Operation, ...]
    num_weights: int
    num_inputs: int
    outputs: tuple[Atom, ...]
    constants: tuple[jax.Array | np.ndarray, ...]
    names: tuple[str, ...]
    out_tree: jax.tree_util.PyTreeDef

    @property
    def weights(self) -> range:
        """Numbers of the weights."""
        return range(self.num_weights)

    @property
    def inputs(self) -> range:
        """Numbers of the inputs of a call."""
        return range(self.num_weights, self.num_weights + self.num_inputs)


def trace(apply: Callable, params: object, *inputs: object) -> Graph:
    """Traces apply(params, *inputs) into a flat graph.

    Args:
      apply: A function that JAX can trace.
      params: Pytree of arrays or of their shapes and dtypes; its leaves become the weights.
      *inputs: Pytrees of arrays or of their shapes and dtypes.

    Returns:
      The graph, without operations that no output needs.

    Raises:
      ModelError: The function has side effects.
    """
    closed, out_shape = jax.make_jaxpr(apply, return_shape=True)(params, *inputs)
    if closed.effects:
        effects = ", ".join(sorted(str(effect) for effect in closed.effects))
        first = next(equation for equation in closed.jaxpr.eqns if equation.effects)
        raise ModelError(
            f"trace: {first.primitive.name} ({traced_line([first])}) has side effects ({effects}); "
            "only pure functions can be optimized; remove debug prints and callbacks from the model"
        )
    named = _leaf_names("params", params), _leaf_names("inputs", inputs)
    names = named[0] + [f"captured[{i}]" for i in range(len(closed.consts))] + named[1]
    builder = _Builder()
    variables = closed.jaxpr.invars
    leaves = variables[: len(named[0])] + closed.jaxpr.constvars + variables[len(named[0]) :]
    env: dict[Var, Atom] = {var: builder.add(var) for var in leaves}
    builder.inline(closed.jaxpr, env, "", ())
    outputs = tuple(_read(env, atom) for atom in closed.jaxpr.outvars)
    num_weights = len(named[0]) + len(closed.consts)
    return without_dead_code(
        Graph(
            avals=tuple(builder.avals),
            operations=tuple(builder.operations),
            num_weights=num_weights,
            num_inputs=len(leaves) - num_weights,
            outputs=outputs,
            constants=tuple(closed.consts),
            names=tuple(names),
            out_tree=jax.tree.structure(out_shape),
        )
    )


def evaluate(operations: Sequence[Operation], env: dict[int, Array]) -> None:
    """Runs operations in order, reading and writing the values in env by their numbers."""
    for operation in operations:
        equation = operation.equation
        args = [a.val if isinstance(a, Literal) else env[a] for a in operation.inputs]
        scope = jax.named_scope(operation.scope) if operation.scope else contextlib.nullcontext()
        with scope, equation.ctx.manager:
            params = equation.primitive.get_bind_params(equation.params)
            results = equation.primitive.bind(*args, **params)
        if not equation.primitive.multiple_results:
            results = [results]
        env.update(zip(operation.outputs, results, strict=True))


def describe(operation: Operation) -> str:
    """The operation's primitive, scope and line in the user's source, for messages.

    The line is that of the nearest frame outside of jax, flax and pbjax.
    """
    where = f" in {operation.scope}" if operation.scope else ""
    equations = (operation.equation, *reversed(operation.callers))
    return f"{operation.primitive}{where} ({traced_line(equations)})"


def read_by(graph: Graph, value: int) -> str:
    """What a value without a name is known by in messages: the first operation that reads it."""
    reader = next((o for o in graph.operations if value in o.inputs), None)
    return "that it returns" if reader is None else f"read by {describe(reader)},"


def made_by(graph: Graph, atom: Atom) -> str:
    """What a value is called in messages: the operation that makes it."""
    if isinstance(atom, Literal):
        return f"a constant of shape {np.shape(atom.val)}"
    maker = next((o for o in graph.operations if atom in o.outputs), None)
    return "a weight or input" if maker is None else describe(maker)


def loop_body(operation: Operation, name: str = "jaxpr") -> Graph:
    """The body of a loop or branch as a graph with the body's inputs.

    Args:
      operation: A scan, while or cond.
      name: The parameter that holds the body: "jaxpr" of a scan, "body_jaxpr" of a while.
    """
    return body_graph(operation.params[name], operation)


def body_graph(body: ClosedJaxpr | Jaxpr, around: Operation | None = None) -> Graph:
    """A nested jaxpr as a graph of its own; the arrays it captured are its weights.

    Args:
      body: The jaxpr.
      around: The loop or branch that it is a body of.
    """
    consts, jaxpr = _consts(body), _open(body)
    builder = _Builder()
    variables = (*jaxpr.constvars, *jaxpr.invars)
    env: dict[Var, Atom] = {var: builder.add(var) for var in variables}
    callers = () if around is None else (*around.callers, around.equation)
    builder.inline(jaxpr, env, "", callers)
    return without_dead_code(
        Graph(
            avals=tuple(builder.avals),
            operations=tuple(builder.operations),
            num_weights=len(consts),
            num_inputs=len(jaxpr.invars),
            outputs=tuple(_read(env, atom) for atom in jaxpr.outvars),
            constants=tuple(consts),
            names=tuple(f"body[{i}]" for i in range(len(env))),
            out_tree=jax.tree.structure([0] * len(jaxpr.outvars)),
        )
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ScanParts:
    """Operands and results of a scan by their roles, in the numbering of the graph around it."""

    consts: tuple[Atom, ...]
    carry: tuple[Atom, ...]
    xs: tuple[Atom, ...]
    carry_out: tuple[int, ...]
    ys: tuple[int, ...]


def scan_parts(operation: Operation) -> ScanParts:
    """Splits the operands and results of a scan by their roles."""
    roles_in = operation.params["ft_in"].update(operation.inputs).unpack()
    roles_out = operation.params["ft_out"].update(operation.outputs).unpack()
    consts, carry, xs = (tuple(role) for role in roles_in)
    carry_out, ys = (tuple(role) for role in roles_out)
    return ScanParts(consts=consts, carry=carry, xs=xs, carry_out=carry_out, ys=ys)


def _leaf_names(root: str, tree: object) -> list[str]:
    paths = jax.tree_util.tree_flatten_with_path(tree)[0]
    return [root + jax.tree_util.keystr(path) for path, _ in paths]


def _open(jaxpr: ClosedJaxpr | Jaxpr) -> Jaxpr:
    return jaxpr.jaxpr if isinstance(jaxpr, ClosedJaxpr) else jaxpr


def _read(env: Mapping[Var, Atom], atom: Var | Literal) -> Atom:
    return atom if isinstance(atom, Literal) else env[atom]


class _Builder:
    """Collects avals and operations while nested calls are inlined."""

    def __init__(self):
        self.avals: list[Aval] = []
        self.operations: list[Operation] = []

    def add(self, var: Var) -> int:
        self.avals.append(cast(Aval, var.aval))
        return len(self.avals) - 1

    def inline(
        self, jaxpr: Jaxpr, env: dict[Var, Atom], scope: str, callers: tuple[JaxprEqn, ...]
    ) -> None:
        for equation in jaxpr.eqns:
            inner_scope = "/".join(filter(None, (scope, str(equation.source_info.name_stack))))
            body_name = CALLS.get(equation.primitive.name)
            if body_name is None:
                self._append(equation, env, inner_scope, callers)
            else:
                self._inline_call(equation, equation.params[body_name], env, inner_scope, callers)

    def _append(
        self,
        equation: JaxprEqn,
        env: dict[Var, Atom],
        scope: str,
        callers: tuple[JaxprEqn, ...],
    ) -> None:
        inputs = tuple(_read(env, atom) for atom in equation.invars)
        outputs = tuple(map(self.add, equation.outvars))
        env.update(zip(equation.outvars, outputs, strict=True))
        self.operations.append(
            Operation(
                primitive=equation.primitive.name,
                scope=scope,
                inputs=inputs,
                outputs=outputs,
                equation=equation,
                callers=callers,
            )
        )

    def _inline_call(
        self,
        equation: JaxprEqn,
        body: ClosedJaxpr | Jaxpr,
        env: dict[Var, Atom],
        scope: str,
        callers: tuple[JaxprEqn, ...],
    ) -> None:
        jaxpr = _open(body)
        consts = [_literal(c, v) for c, v in zip(_consts(body), jaxpr.constvars, strict=True)]
        args = [_read(env, atom) for atom in equation.invars]
        inner = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *args), strict=True))
        self.inline(jaxpr, inner, scope, (*callers, equation))
        results = [_read(inner, atom) for atom in jaxpr.outvars]
        env.update(zip(equation.outvars, results, strict=True))


def _consts(body: ClosedJaxpr | Jaxpr) -> Sequence[jax.Array | np.ndarray]:
    return body.consts if isinstance(body, ClosedJaxpr) else (getattr(body, "consts", None) or ())


def _literal(value: object, var: Var) -> Literal:
    return Literal(value, var.aval)


def without_dead_code(graph: Graph) -> Graph:
    """The graph without operations that no output needs, its values numbered in order."""
    live = {atom for atom in graph.outputs if isinstance(atom, int)}
    kept: list[Operation] = []
    for operation in reversed(graph.operations):
        if live.intersection(operation.outputs):
            kept.append(operation)
            live.update(atom for atom in operation.inputs if isinstance(atom, int))
    return _renumbered(graph, kept[::-1])


def _renumbered(graph: Graph, operations: Sequence[Operation]) -> Graph:
    leaves = graph.num_weights + graph.num_inputs
    numbers = {i: i for i in range(leaves)}
    for operation in operations:
        for output in operation.outputs:
            numbers[output] = len(numbers)

    def renumber(atoms: Sequence[Atom]) -> tuple[Atom, ...]:
        return tuple(atom if isinstance(atom, Literal) else numbers[atom] for atom in atoms)

    return Graph(
        avals=tuple(graph.avals[old] for old in numbers),
        operations=tuple(
            replace(
                operation,
                inputs=renumber(operation.inputs),
                outputs=tuple(numbers[i] for i in operation.outputs),
            )
            for operation in operations
        ),
        num_weights=graph.num_weights,
        num_inputs=graph.num_inputs,
        outputs=renumber(graph.outputs),
        constants=graph.constants,
        names=graph.names,
        out_tree=graph.out_tree,
    )
