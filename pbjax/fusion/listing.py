"""Matches and near misses of fusion, as plain data and as text for a report."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass

from pbjax.fusion.fusing import Fusion
from pbjax.fusion.rewriting import Match, Miss


@dataclass(frozen=True, slots=True, kw_only=True)
class MatchKind:
    """Equal matches, such as those of equal layers.

    Attributes:
      name: Their name; a minus before it in `fuse` leaves them out.
      kernel: The kernel that replaces the operations.
      where: The first of them in the program.
      count: How many there are; in the body of a loop, for one step.
      in_loop: Whether they are in the body of a loop.
      left_out: Whether they were left out.
    """

    name: str
    kernel: str
    where: str
    count: int
    in_loop: bool
    left_out: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class NearMiss:
    """Parts that looked like a pattern and were left alone for one reason, with their count."""

    pattern: str
    where: str
    reason: str
    count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FusionReport:
    """The outcome of fusion for a model.

    Attributes:
      reason: The reason why no pattern was looked for; empty if some were.
      kinds: The matches, equal ones together.
      misses: The near misses, equal ones together.
      operations_before: Number of operations of the traced graph.
      operations_after: Number of operations with kernels, without those on weights alone.
    """

    reason: str = ""
    kinds: tuple[MatchKind, ...] = ()
    misses: tuple[NearMiss, ...] = ()
    operations_before: int = 0
    operations_after: int = 0

    def to_dict(self) -> dict[str, object]:
        """The report as JSON-compatible data."""
        return asdict(self)

    def __str__(self) -> str:
        """A section of a report, one line for each kind of match or near miss."""
        if self.reason:
            return f"fusion: none: {self.reason}"
        title = (
            f"fusion: {self.operations_before:,} operations become {self.operations_after:,}; "
            "leave a match out by fuse='all,-NAME'"
        )
        if not self.kinds:
            title = "fusion: none: no kernel computes a part of it"
        return "\n".join([title, *map(_line, self.kinds), *map(_miss_line, self.misses)])


def listed(fusion: Fusion, num_operations: int) -> FusionReport:
    """Lists a fusion.

    Args:
      fusion: A result of `fuse`.
      num_operations: Number of operations of the program that runs.
    """
    kinds: dict[str, MatchKind] = {}
    for found, in_loop, left_out in _all_matches(fusion):
        count = kinds[found.name].count + 1 if found.name in kinds else 1
        where = kinds[found.name].where if found.name in kinds else found.where
        kinds[found.name] = MatchKind(
            name=found.name,
            kernel=found.kernel,
            where=where,
            count=count,
            in_loop=in_loop,
            left_out=left_out,
        )
    misses = Counter(_all_misses(fusion))
    return FusionReport(
        kinds=tuple(kinds.values()),
        misses=tuple(
            NearMiss(pattern=m.pattern, where=m.where, reason=m.reason, count=count)
            for m, count in misses.items()
        ),
        operations_before=len(fusion.source.operations),
        operations_after=num_operations,
    )


def _all_matches(fusion: Fusion, *, in_loop: bool = False) -> Iterator[tuple[Match, bool, bool]]:
    found = [(m, in_loop, False) for m in fusion.matches]
    found += [(m, in_loop, True) for m in fusion.left_out]
    yield from sorted(found, key=lambda entry: min(entry[0].outputs))
    for loop in fusion.loops:
        yield from _all_matches(loop, in_loop=True)


def _all_misses(fusion: Fusion) -> Iterator[Miss]:
    yield from fusion.misses
    for loop in fusion.loops:
        yield from _all_misses(loop)


def _line(kind: MatchKind) -> str:
    how = f"{kind.count} x"
    where = f"{'in a loop, ' if kind.in_loop else ''}first at {kind.where}"
    end = ": left out" if kind.left_out else ""
    return f"  {kind.name:13} {how:>5} {kind.kernel}, {where}{end}"


def _miss_line(miss: NearMiss) -> str:
    how = f", {miss.count} x" if miss.count > 1 else ""
    return f"  not matched: {miss.pattern} at {miss.where}{how}: {miss.reason}"
