"""Two sub-batches interleaved into one sequence of launches.

One launch can hold two kernels: a compute kernel (a matrix product, bound by Tensor Cores) and a
part of a memory kernel (decode attention, bound by bandwidth). `interleave` walks two sub-batches
through the same operations and decides which part of which memory kernel runs beside which compute
kernel. There are no slots here: a sub-batch at a memory kernel waits for the compute kernels of the
other, and goes on when its own is done, so the two settle into turns by themselves. Nothing is run
here; `interleaved_program` defines what a launch does.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

# A compute kernel takes memory work of at most this many times its own seconds: the one warpgroup
# of an SM that reads beside a product is slower than a kernel of readers, which takes the rest.
CAPACITY = 1.4


class Role(StrEnum):
    """What an operation can do in a launch."""

    COMPUTE = "compute"
    MEMORY = "memory"
    ALONE = "alone"


@dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    """One operation of a sub-batch.

    Attributes:
      role: Compute kernel, memory kernel, or neither.
      seconds: Predicted, with the whole device to itself.
      parts: Pieces of equal time that a memory kernel can be divided into.
      paired_s: Seconds of a compute kernel in a launch that leaves room for a memory kernel, those
        of the latter not included.
      num_bytes: Bytes that a compute or memory kernel reads and writes.
      join_s: Seconds to join the results of a memory kernel's pieces.
    """

    role: Role
    seconds: float
    parts: int = 1
    paired_s: float = 0.0
    num_bytes: float = 0.0
    join_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """Parts first .. first + count - 1 of an operation; all but memory kernels have one part.

    Attributes:
      sub_batch: Which of the two sub-batches.
      item: Number of the operation in its sub-batch.
      first: First of the parts.
      count: How many parts.
    """

    sub_batch: int
    item: int
    first: int = 0
    count: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """An operation, or a compute kernel with a piece of a memory kernel beside it."""

    main: Piece
    memory: Piece | None = None


def interleave(
    first: Sequence[Item], second: Sequence[Item], capacity: float = CAPACITY
) -> tuple[Launch, ...]:
    """Orders the operations of two sub-batches.

    Each sub-batch keeps its own order; every part of every operation runs exactly once. A
    memory kernel is shared out, by seconds, over the compute kernels that the other sub-batch runs
    before its own next memory kernel; what exceeds their capacity runs alone.

    Args:
      first: Operations of one sub-batch, in program order.
      second: Operations of the other.
      capacity: Seconds of memory work that a compute kernel takes for each second of its own.
    """
    sub_batches = (_SubBatchState(0, first), _SubBatchState(1, second))
    launches: list[Launch] = []
    while True:
        for sub_batch in sub_batches:
            while sub_batch.role == Role.ALONE:
                launches.append(Launch(main=sub_batch.take()))
        roles = [sub_batch.role for sub_batch in sub_batches]
        if roles == [None, None]:
            return tuple(launches)
        if Role.COMPUTE in roles and Role.MEMORY in roles:
            compute, memory = sub_batches if roles[0] == Role.COMPUTE else reversed(sub_batches)
            launches.append(_together(compute, memory, capacity))
        else:
            launches.append(Launch(main=_next_alone(sub_batches).take()))


class _SubBatchState:
    """The state of a sub-batch; `done` parts of its current operation have run."""

    def __init__(self, number: int, items: Sequence[Item]):
        self.number = number
        self.items = items
        self.place = 0
        self.done = 0

    @property
    def role(self) -> Role | None:
        return self.items[self.place].role if self.place < len(self.items) else None

    @property
    def left(self) -> int:
        """Parts of the current operation that have not run."""
        return self.items[self.place].parts - self.done

    def compute_s(self) -> float:
        """Seconds of the compute kernels from here to the next memory kernel, or to the end."""
        total = 0.0
        for item in self.items[self.place :]:
            if item.role == Role.MEMORY:
                break
            total += item.paired_s * (item.role == Role.COMPUTE)
        return total

    def take(self, count: int | None = None) -> Piece:
        """The next parts of the current operation, all that are left by default."""
        count = self.left if count is None else count
        piece = Piece(sub_batch=self.number, item=self.place, first=self.done, count=count)
        self.done += count
        if not self.left:
            self.place, self.done = self.place + 1, 0
        return piece


def _together(compute: _SubBatchState, memory: _SubBatchState, capacity: float) -> Launch:
    """A compute kernel with its share of the waiting memory kernel, if that is a part or more."""
    seconds, total = compute.items[compute.place].paired_s, compute.compute_s()
    waiting = memory.items[memory.place]
    share = round(memory.left * seconds / total) if total > 0 else memory.left
    part_s = waiting.seconds / waiting.parts
    room = int(capacity * seconds / part_s) if part_s > 0 else memory.left
    count = min(share, room, memory.left)
    return Launch(main=compute.take(), memory=memory.take(count) if count else None)


def _next_alone(sub_batches: Sequence[_SubBatchState]) -> _SubBatchState:
    """The sub-batch that goes on by itself.

    If both are at compute kernels, it is the one that reaches a memory kernel sooner; if both are
    at memory kernels, the one that has less of its own left.
    """
    going = [sub_batch for sub_batch in sub_batches if sub_batch.role is not None]
    if all(sub_batch.role == Role.COMPUTE for sub_batch in going):
        return min(going, key=lambda sub_batch: sub_batch.compute_s())
    return min(going, key=lambda sub_batch: sub_batch.left / sub_batch.items[sub_batch.place].parts)
