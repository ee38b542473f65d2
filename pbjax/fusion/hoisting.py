"""Moves operations on weights alone out of a program.

Joined, transposed or cast weights are the same in every call. After hoisting they are weights
themselves, computed once.
"""

from collections.abc import Set
from dataclasses import dataclass, replace

from jax.extend.core import Literal
from jaxtyping import Array

from pbjax.fusion.reading import VIEWS, Reading
from pbjax.graph.trace import Atom, Graph, evaluate, without_dead_code


@dataclass(frozen=True, slots=True, kw_only=True)
class Hoisted:
    """A program whose weights are those of the model, then prepared ones, then captured arrays.

    Attributes:
      graph: The program.
      preparation: A graph that computes the prepared weights from the original weights.
    """

    graph: Graph
    preparation: Graph

    def prepare(self, weights: list[Array]) -> list[Array]:
        """Computes the weights of `graph`.

        Args:
          weights: Weights of the graph that was given to `hoist`: the model's, then the captured.
        """
        env = dict(enumerate(weights))
        evaluate(self.preparation.operations, env)
        prepared = [env[a] for a in self.preparation.outputs if isinstance(a, int)]
        held = len(weights) - len(self.preparation.constants)
        return [*weights[:held], *prepared, *weights[held:]]


def hoist(graph: Graph, keep: Set[int] = frozenset()) -> Hoisted:
    """Moves operations on weights alone out of a program; views, which cost nothing, stay.

    Args:
      graph: A traced function.
      keep: Numbers of values that stay, such as those that depend on the batch size.

    Returns:
      The remaining program, and the graph that prepares its weights.
    """
    moved = _moved(Reading(graph), keep)
    preparation = without_dead_code(replace(graph, outputs=tuple(moved)))
    return Hoisted(graph=_with_weights(graph, moved), preparation=preparation)


def _moved(reading: Reading, keep: Set[int]) -> list[int]:
    """The values that become weights: the last ones made of weights alone, before views."""
    held = set(reading.graph.weights)
    for operation in reading.graph.operations:
        reads = held.intersection(a for a in operation.inputs if isinstance(a, int))
        if reads and all(reading.is_weight(v) and v not in keep for v in operation.outputs):
            held.update(operation.outputs)
    moved: dict[int, None] = {}
    for operation in reading.graph.operations:
        if held.issuperset(operation.outputs):
            continue
        for atom in operation.inputs:
            if isinstance(atom, int) and atom in held:
                value = _unviewed(reading, atom)
                if reading.maker(value) is not None:
                    moved.setdefault(value)
    return list(moved)


def _unviewed(reading: Reading, value: int) -> int:
    while reading.primitive(value) in VIEWS and reading.primitive(value) != "transpose":
        (before,) = reading.operation(value).inputs
        if isinstance(before, Literal):
            return value
        value = before
    return value


def _with_weights(graph: Graph, moved: list[int]) -> Graph:
    held = graph.num_weights - len(graph.constants)
    leaves = graph.num_weights + graph.num_inputs
    order = [*range(held), *moved, *range(held, leaves)]
    numbers = {old: new for new, old in enumerate(order)}
    avals = [graph.avals[old] for old in order]
    operations = []
    for operation in graph.operations:
        if set(operation.outputs) <= set(moved):
            continue
        for value in operation.outputs:
            numbers[value] = len(avals)
            avals.append(graph.avals[value])
        operations.append(
            replace(
                operation,
                inputs=tuple(_renumbered(numbers, a) for a in operation.inputs),
                outputs=tuple(numbers[value] for value in operation.outputs),
            )
        )
    prepared = [f"prepared[{i}]" for i in range(len(moved))]
    return without_dead_code(
        replace(
            graph,
            avals=tuple(avals),
            operations=tuple(operations),
            num_weights=graph.num_weights + len(moved),
            outputs=tuple(_renumbered(numbers, a) for a in graph.outputs),
            names=(*graph.names[:held], *prepared, *graph.names[held:]),
        )
    )


def _renumbered(numbers: dict[int, int], atom: Atom) -> Atom:
    return atom if isinstance(atom, Literal) else numbers[atom]
