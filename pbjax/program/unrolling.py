"""A graph whose loops over layers are written out."""

from dataclasses import replace

from pbjax.graph.trace import Graph, Operation


def unrolled(graph: Graph, num_blocks: int) -> Graph:
    """Writes out the scans over the layers.

    Args:
      graph: A traced model.
      num_blocks: How many layers it has: the length of the scans that are meant.
    """

    def written_out(operation: Operation) -> Operation:
        params = operation.params
        if operation.primitive != "scan" or params["length"] != num_blocks:
            return operation
        equation = operation.equation.replace(params={**params, "unroll": num_blocks})
        return replace(operation, equation=equation)

    return replace(graph, operations=tuple(map(written_out, graph.operations)))
