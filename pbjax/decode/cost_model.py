"""Predicted seconds of a sub-batch's operations, at any size, and of interleaved launches.

Products and decode attention are predicted by what their kernels were measured to take, the rest by
bytes at the measured bandwidth and what a short launch takes beside its work: one follows another
without a gap. Nothing is measured here.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import cast

import jax

from pallas_kernels.corun import costs, pairs
from pbjax.decode.interleave import Item, Launch, Piece, Role
from pbjax.decode.interleaved_program import call_of, role_of
from pbjax.device import Device
from pbjax.graph.classify import classify
from pbjax.graph.trace import Atom, Aval, Graph, Operation
from pbjax.planning.ceilings import calibrated
from pbjax.program.fused_costs import KERNELS, fused_seconds

# Where nobody has measured a device: the share of its bandwidth that a copy reaches, and what a
# launch takes beside its work, both of an H200.
COPY_SHARE, LAUNCH_S = 0.9, 2e-6
# Of an H200: what calls that follow each other take, over a single call, whose clock has not fallen
# yet (docs/design/decode_step.md).
SUSTAINED = 1.07
# XLA computes what feeds these where it writes their results.
_FUSED_INTO = frozenset(name for name in KERNELS if name.startswith("scatter"))

type SubBatches = tuple[tuple[Item, ...], tuple[Item, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """Rates of a device for all but products and attention.

    Attributes:
      peak_bytes_per_s: Bandwidth of its datasheet.
      reached: The device with the rates that it reaches.
      launch_s: Seconds that a launch takes beside its work.
    """

    peak_bytes_per_s: float
    reached: Device
    launch_s: float


def rates_of(device: Device) -> Rates:
    """Rates of a device: its measured ceilings, or shares of its datasheet where there are none."""
    reached = calibrated(device)
    if reached is device:
        bandwidth = COPY_SHARE * device.memory_bytes_per_s
        reached = replace(device, memory_bytes_per_s=bandwidth, launch_s=LAUNCH_S)
    return Rates(
        peak_bytes_per_s=device.memory_bytes_per_s, reached=reached, launch_s=reached.launch_s
    )


class Costs:
    """Items of a function's operations at any batch size, from its graphs at two sizes.

    Every length in a graph is linear in the batch size, and so are the bytes of what XLA fuses.
    """

    def __init__(self, graphs: tuple[Graph, Graph], sizes: tuple[int, int], rates: Rates):
        """Takes a function traced at two batch sizes.

        Args:
          graphs: With the same operations.
          sizes: Rows of each; they differ.
          rates: Rates of the device.
        """
        self._graphs = graphs
        self._sizes = sizes
        self.rates = rates
        self._seconds = tuple(_lone_seconds(graph, rates) for graph in graphs)

    def items(self, size: int) -> tuple[Item, ...]:
        """What each operation can do in a launch with `size` rows, and its predicted seconds."""
        first, second = self._sizes
        share = (size - second) / (first - second)
        lone = [b + share * (a - b) for a, b in zip(*self._seconds, strict=True)]
        return tuple(
            self._item(operation, seconds, size)
            for operation, seconds in zip(self._graphs[0].operations, lone, strict=True)
        )

    def _item(self, operation: Operation, seconds: float, size: int) -> Item:
        role, rates = role_of(operation), self.rates
        if role == Role.ALONE:
            return Item(role=role, seconds=seconds)
        call = call_of(operation, [self._resized(atom, size) for atom in operation.inputs])
        seconds = SUSTAINED * costs.alone_s(call, rates.peak_bytes_per_s)
        num_bytes = costs.num_bytes(call)
        if role == Role.COMPUTE:
            paired_s = SUSTAINED * costs.paired_s(call)
            return Item(role=role, seconds=seconds, paired_s=paired_s, num_bytes=num_bytes)
        joined = 2 * call.arguments["q"].size * call.arguments["q"].dtype.itemsize
        return Item(
            role=role,
            seconds=seconds,
            parts=pairs.num_parts(call),
            num_bytes=num_bytes,
            join_s=SUSTAINED * (joined / rates.reached.memory_bytes_per_s + rates.launch_s),
        )

    def _resized(self, atom: Atom, size: int) -> Aval:
        if not isinstance(atom, int):
            return cast(Aval, atom.aval)
        (first, second), (a, b) = self._sizes, (graph.avals[atom] for graph in self._graphs)
        shape = tuple(
            n + (m - n) * (size - second) // (first - second)
            for m, n in zip(a.shape, b.shape, strict=True)
        )
        return jax.ShapeDtypeStruct(shape, a.dtype)


def _lone_seconds(graph: Graph, rates: Rates) -> list[float]:
    """Seconds of each operation by its bytes, and of its launch if it has one of its own."""
    operations = graph.operations
    labels = classify(graph, rates.reached)
    seconds = fused_seconds(operations, graph.avals, graph.outputs, labels, rates.reached)
    readers = [o for o in operations if o.primitive in KERNELS - _FUSED_INTO]
    stored = {atom for o in readers for atom in o.inputs if isinstance(atom, int)}
    stored.update(atom for atom in graph.outputs if isinstance(atom, int))
    launched = [o.primitive in KERNELS or bool(stored.intersection(o.outputs)) for o in operations]
    return [
        SUSTAINED * (s + rates.launch_s * (own and s > 0))
        for s, own in zip(seconds, launched, strict=True)
    ]


def predicted_s(launches: Sequence[Launch], sub_batches: SubBatches, rates: Rates) -> float:
    """Seconds of interleaved launches, and of joining the pieces of what was divided."""
    total, pieces = 0.0, set()
    for launch in launches:
        total += _launch_s(launch, sub_batches, rates)
        for piece in (launch.main, launch.memory):
            if piece is not None and (piece.sub_batch, piece.item) not in pieces:
                pieces.add((piece.sub_batch, piece.item))
                item = sub_batches[piece.sub_batch][piece.item]
                total += item.join_s * (piece.count < item.parts)
    return total


def _launch_s(launch: Launch, sub_batches: SubBatches, rates: Rates) -> float:
    main = sub_batches[launch.main.sub_batch][launch.main.item]
    if launch.memory is None:
        return _share(launch.main, sub_batches) * main.seconds
    memory, share = (
        sub_batches[launch.memory.sub_batch][launch.memory.item],
        _share(launch.memory, sub_batches),
    )
    return costs.together_s(
        main.paired_s,
        share * memory.seconds,
        main.num_bytes + share * memory.num_bytes,
        rates.peak_bytes_per_s,
    )


def _share(piece: Piece, sub_batches: SubBatches) -> float:
    return piece.count / sub_batches[piece.sub_batch][piece.item].parts
