"""Two sub-batches woven into one sequence of launches: matrix products of one, with reading beside.

A kernel can take a partner along in the same launch: a host, bound by Tensor Cores, carries a part
of a guest, bound by memory. `weave` walks two sub-batches through the same operations and decides
which part of which guest rides in which host. There are no slots here: a sub-batch at a guest waits
for the other's hosts, and goes on when its guest is done, so the two settle into turns by
themselves. It runs nothing; what a launch is stands in `woven`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

# A host carries guests for this many times its own seconds at most: the one warpgroup of an SM that
# reads beside a product is slower than a kernel of readers, which the rest is left to.
CAPACITY = 1.4


class Role(StrEnum):
    """What an operation can do in a launch."""

    HOST = "host"
    GUEST = "guest"
    ALONE = "alone"


@dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    """One operation of a sub-batch.

    Attributes:
      role: Host, guest, or neither.
      seconds: Predicted, with the whole device to itself.
      parts: Into how many pieces of equal time a guest can be divided.
      hosting_s: Of a host, in a launch that leaves a guest room, before the guest's are added.
      num_bytes: That a host or a guest reads and writes.
      join_s: Of a guest, to make one result of those of its pieces.
    """

    role: Role
    seconds: float
    parts: int = 1
    hosting_s: float = 0.0
    num_bytes: float = 0.0
    join_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """Parts first .. first + count - 1 of an operation; a host or lone operation has one part.

    Attributes:
      lane: Which of the two sub-batches.
      item: Number of the operation in its sub-batch.
      first: First of the parts.
      count: How many parts.
    """

    lane: int
    item: int
    first: int = 0
    count: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """What runs next: an operation, or a host with a piece of a guest beside it."""

    main: Piece
    guest: Piece | None = None


def weave(
    first: Sequence[Item], second: Sequence[Item], capacity: float = CAPACITY
) -> tuple[Launch, ...]:
    """Orders the operations of two sub-batches.

    Each sub-batch keeps its own order; every part of every operation runs exactly once. A guest is
    shared out over the hosts that the other sub-batch runs before its own next guest, by their
    seconds; what exceeds their capacity runs alone.

    Args:
      first: Operations of one sub-batch, in program order.
      second: Of the other.
      capacity: Seconds of guest that a host carries for each of its own.
    """
    lanes = (_Lane(0, first), _Lane(1, second))
    launches: list[Launch] = []
    while True:
        for lane in lanes:
            while lane.role == Role.ALONE:
                launches.append(Launch(main=lane.take()))
        roles = [lane.role for lane in lanes]
        if roles == [None, None]:
            return tuple(launches)
        if Role.HOST in roles and Role.GUEST in roles:
            host, guest = lanes if roles[0] == Role.HOST else reversed(lanes)
            launches.append(_together(host, guest, capacity))
        else:
            launches.append(Launch(main=_next_alone(lanes).take()))


class _Lane:
    """A sub-batch on its way; `done` parts of its current operation have run."""

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

    def hosts_s(self) -> float:
        """Seconds of the hosts from here to the next guest, or to the end."""
        total = 0.0
        for item in self.items[self.place :]:
            if item.role == Role.GUEST:
                break
            total += item.hosting_s * (item.role == Role.HOST)
        return total

    def take(self, count: int | None = None) -> Piece:
        """The next parts of the current operation, all that are left by default."""
        count = self.left if count is None else count
        piece = Piece(lane=self.number, item=self.place, first=self.done, count=count)
        self.done += count
        if not self.left:
            self.place, self.done = self.place + 1, 0
        return piece


def _together(host: _Lane, guest: _Lane, capacity: float) -> Launch:
    """A host with its share of the guest that waits; without one if the share is below a part."""
    seconds, total = host.items[host.place].hosting_s, host.hosts_s()
    waiting = guest.items[guest.place]
    share = round(guest.left * seconds / total) if total > 0 else guest.left
    part_s = waiting.seconds / waiting.parts
    room = int(capacity * seconds / part_s) if part_s > 0 else guest.left
    count = min(share, room, guest.left)
    return Launch(main=host.take(), guest=guest.take(count) if count else None)


def _next_alone(lanes: Sequence[_Lane]) -> _Lane:
    """Which lane goes on by itself.

    Of two at hosts the one that is sooner at a guest, of two at guests the one further through.
    """
    going = [lane for lane in lanes if lane.role is not None]
    if all(lane.role == Role.HOST for lane in going):
        return min(going, key=lambda lane: lane.hosts_s())
    return min(going, key=lambda lane: lane.left / lane.items[lane.place].parts)
