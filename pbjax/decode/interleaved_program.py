"""Two sub-batches as one function of interleaved launches.

The operations of both run in the order that `interleave` gives; a compute kernel and the piece of a
memory kernel beside it become one launch, by the arguments that traced kernels keep. Layers are not
scanned over: each keeps its own weights and caches, since a kernel would get a copy of a slice of a
stack.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import jax
from jax.extend.core import Literal
from jaxtyping import Array

from pallas_kernels.corun import pairs
from pallas_kernels.operation import PRIMITIVE as KERNEL
from pallas_kernels.operation import arguments_of
from pbjax.decode.interleave import Launch, Piece, Role
from pbjax.graph.trace import Graph, Operation, evaluate


def call_of(operation: Operation, operands: Sequence) -> pairs.Call:
    """The call that a kernel operation was traced from.

    Args:
      operation: A compute or memory kernel.
      operands: Its operands, or their shapes and dtypes.
    """
    return pairs.Call(
        name=operation.params["name"], arguments=arguments_of(operation.params, operands)
    )


def role_of(operation: Operation) -> Role:
    """What an operation can do in a launch."""
    name = operation.params["name"] if operation.primitive == KERNEL else None
    if name in pairs.HOSTS:
        return Role.COMPUTE
    return Role.MEMORY if name in pairs.GUESTS else Role.ALONE


@dataclass(frozen=True, slots=True, kw_only=True)
class InterleavedProgram:
    """A function of the weights and of both sub-batches' inputs.

    Attributes:
      graphs: The model traced at the sizes of the two sub-batches.
      launches: The launches, in order.
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
          second: Inputs of the other.
        """
        sub_batches = [
            _SubBatchState(graph, weights, inputs)
            for graph, inputs in zip(self.graphs, (first, second), strict=True)
        ]
        for launch in self.launches:
            main, memory = launch.main, launch.memory
            if memory is None:
                sub_batches[main.sub_batch].run(main)
            else:
                compute, overlapped_fraction = (
                    sub_batches[main.sub_batch].call(main),
                    sub_batches[memory.sub_batch].call(memory),
                )
                with jax.named_scope("beside"):
                    results, part = pairs.beside(
                        compute, overlapped_fraction, memory.first, memory.count
                    )
                sub_batches[main.sub_batch].finish(main, results)
                sub_batches[memory.sub_batch].finish(memory, part)
        return sub_batches[0].outputs(), sub_batches[1].outputs()


class _SubBatchState:
    """The values of one sub-batch; parts of a memory kernel are kept until all have run."""

    def __init__(self, graph: Graph, weights: Sequence[Array], inputs: Sequence[Array]):
        self._graph = graph
        self._values: dict[int, Array] = dict(zip(graph.weights, weights, strict=True))
        self._values.update(zip(graph.inputs, inputs, strict=True))
        self._parts: list[Sequence[Array]] = []

    def run(self, piece: Piece) -> None:
        """Runs a piece of an operation by itself."""
        operation = self._graph.operations[piece.item]
        if role_of(operation) == Role.MEMORY:
            call = self.call(piece)
            if piece.count < pairs.num_parts(call):
                self.finish(piece, pairs.part(call, piece.first, piece.count))
                return
        evaluate([operation], self._values)

    def call(self, piece: Piece) -> pairs.Call:
        """The kernel of an operation with its arguments."""
        operation = self._graph.operations[piece.item]
        return call_of(operation, [self._read(atom) for atom in operation.inputs])

    def finish(self, piece: Piece, results: object) -> None:
        """Takes what a piece returned; with the last one the operation is done."""
        operation = self._graph.operations[piece.item]
        self._parts.append(jax.tree.leaves(results))
        if role_of(operation) == Role.MEMORY:
            call = self.call(piece)
            if piece.first + piece.count < pairs.num_parts(call):
                return
        whole = [pairs.join(parts) for parts in zip(*self._parts, strict=True)]
        self._parts = []
        self._values.update(zip(operation.outputs, whole, strict=True))

    def outputs(self) -> list[Array]:
        """The model's outputs for this sub-batch."""
        return [self._read(atom) for atom in self._graph.outputs]

    def _read(self, atom: int | Literal) -> Array:
        return atom.val if isinstance(atom, Literal) else self._values[atom]
