"""Two sub-batches as one function of woven launches.

The operations of both run in the order that `weave` gives; a host and the piece of a guest beside
it become one launch, by the arguments that traced kernels keep. Layers are not scanned over: each
keeps its own weights and caches, since a kernel would get a copy of a slice of a stack.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import jax
from jax.extend.core import Literal
from jaxtyping import Array

from pallas_kernels.corun import pairs
from pallas_kernels.operation import PRIMITIVE as KERNEL
from pallas_kernels.operation import arguments_of
from pbjax.classify import Label
from pbjax.trace import Graph, Operation, evaluate
from pbjax.weave import Item, Launch, Piece, Role

# How much of the shorter of two partners a launch takes beside the longer one (docs/kernels_corun).
COLLISION = 0.6


def items(graph: Graph, labels: Sequence[Label]) -> tuple[Item, ...]:
    """What each operation of a sub-batch can do in a launch, with its predicted seconds.

    Args:
      graph: The model traced at the size of the sub-batch.
      labels: One for each operation.
    """
    return tuple(
        _item(operation, label) for operation, label in zip(graph.operations, labels, strict=True)
    )


def _item(operation: Operation, label: Label) -> Item:
    if operation.primitive == KERNEL:
        name = operation.params["name"]
        if name in pairs.HOSTS:
            return Item(role=Role.HOST, seconds=label.seconds)
        if name in pairs.GUESTS:
            parts = pairs.num_parts(_call(operation, _avals(operation)))
            return Item(role=Role.GUEST, seconds=label.seconds, parts=parts)
    return Item(role=Role.ALONE, seconds=label.seconds)


def _avals(operation: Operation) -> list[object]:
    return [atom.aval for atom in operation.equation.invars]


def _call(operation: Operation, operands: Sequence) -> pairs.Call:
    return pairs.Call(
        name=operation.params["name"], arguments=arguments_of(operation.params, operands)
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class WovenProgram:
    """A function of the weights and of both sub-batches' inputs.

    Attributes:
      graphs: The model traced at the sizes of the two sub-batches.
      launches: What runs, in order.
    """

    graphs: tuple[Graph, Graph]
    launches: tuple[Launch, ...]

    def __call__(
        self, weights: Sequence[Array], first: Sequence[Array], second: Sequence[Array]
    ) -> tuple[list[Array], list[Array]]:
        """The outputs of both sub-batches, flattened.

        Args:
          weights: Leaves of the params, then captured arrays.
          first: Leaves of the inputs of one sub-batch.
          second: Of the other.
        """
        lanes = [
            _Lane(graph, weights, inputs)
            for graph, inputs in zip(self.graphs, (first, second), strict=True)
        ]
        for launch in self.launches:
            main, guest = launch.main, launch.guest
            if guest is None:
                lanes[main.lane].run(main)
            else:
                host, riding = lanes[main.lane].call(main), lanes[guest.lane].call(guest)
                with jax.named_scope("beside"):
                    results, part = pairs.beside(host, riding, guest.first, guest.count)
                lanes[main.lane].finish(main, results)
                lanes[guest.lane].finish(guest, part)
        return lanes[0].outputs(), lanes[1].outputs()


class _Lane:
    """The values of one sub-batch on its way; parts of a guest are kept until it is whole."""

    def __init__(self, graph: Graph, weights: Sequence[Array], inputs: Sequence[Array]):
        self._graph = graph
        self._values: dict[int, Array] = dict(zip(graph.weights, weights, strict=True))
        self._values.update(zip(graph.inputs, inputs, strict=True))
        self._parts: list[Sequence[Array]] = []

    def run(self, piece: Piece) -> None:
        """Runs a piece of an operation by itself."""
        operation = self._graph.operations[piece.item]
        if operation.primitive == KERNEL and operation.params["name"] in pairs.GUESTS:
            call = self.call(piece)
            if piece.count < pairs.num_parts(call):
                self.finish(piece, pairs.part(call, piece.first, piece.count))
                return
        evaluate([operation], self._values)

    def call(self, piece: Piece) -> pairs.Call:
        """The kernel of an operation with its arguments."""
        operation = self._graph.operations[piece.item]
        return _call(operation, [self._read(atom) for atom in operation.inputs])

    def finish(self, piece: Piece, results: object) -> None:
        """Takes what a piece returned; with the last one the operation is done."""
        operation = self._graph.operations[piece.item]
        self._parts.append(jax.tree.leaves(results))
        if operation.params["name"] in pairs.GUESTS:
            call = self.call(piece)
            if piece.first + piece.count < pairs.num_parts(call):
                return
        whole = [pairs.join(parts) for parts in zip(*self._parts, strict=True)]
        self._parts = []
        self._values.update(zip(operation.outputs, whole, strict=True))

    def outputs(self) -> list[Array]:
        """What the model returns for this sub-batch."""
        return [self._read(atom) for atom in self._graph.outputs]

    def _read(self, atom: int | Literal) -> Array:
        return atom.val if isinstance(atom, Literal) else self._values[atom]


def predicted_s(launches: Sequence[Launch], lanes: Sequence[Sequence[Item]]) -> float:
    """Seconds of woven launches: of partners the longer, and COLLISION of the shorter."""
    return sum(_launch_s(launch, lanes) for launch in launches)


def _launch_s(launch: Launch, lanes: Sequence[Sequence[Item]]) -> float:
    main = _piece_s(launch.main, lanes)
    guest = _piece_s(launch.guest, lanes) if launch.guest else 0.0
    return max(main, guest) + COLLISION * min(main, guest)


def _piece_s(piece: Piece, lanes: Sequence[Sequence[Item]]) -> float:
    item = lanes[piece.lane][piece.item]
    return item.seconds * piece.count / item.parts
