"""The pairs of stages that two sub-batches may run in one slot, with their measured slowdowns."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

from pbjax.planning.profile_rows import CorunRow
from pbjax.planning.profile_table import Profile
from pbjax.planning.program_summary import ProgramSummary


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """Two positions whose time together differs from the sum of their times alone.

    Positions count the prologue as 0, the block's stages from 1, the epilogue as the last.

    Attributes:
      first: Position of the first sub-batch.
      second: Position of the second.
      place: first * width + second, where width is one more than there are positions.
      slowdowns: Slowdowns of both for each measured pair of batch sizes, at least 1; empty for a
        pair that was not measured together and only becomes slower by its budgets.
      offsets: Pairs (how many stages the first runs ahead, how many slots then hold both).
    """

    first: int
    second: int
    place: int
    slowdowns: tuple[tuple[float, float], ...]
    offsets: tuple[tuple[int, int], ...]


# Whether the pair runs within budgets, and the pairs of batch sizes that have rows.
type _Measured = tuple[bool, tuple[tuple[int, int], ...]]


def measured_budgets(summary: ProgramSummary, profile: Profile) -> tuple[Mapping[str, int], ...]:
    """The SM budgets under which stages of the block were measured together, none first."""
    found: set[tuple[tuple[str, int], ...]] = {()}
    for first, second in combinations(summary.block, 2):
        for row in profile.corun_rows(first, second) if first.resource != second.resource else ():
            sides = zip((first, second), row.sm_budgets, strict=True)
            found.add(tuple(sorted((s.resource.value, budget) for s, budget in sides if budget)))
    return tuple(dict(budgets) for budgets in sorted(found))


def stage_budgets(
    summary: ProgramSummary, profile: Profile, sm_budgets: Mapping[str, int]
) -> list[int]:
    """The budget of each stage from prologue to epilogue; 0 where it has no rows at its budget.

    A stage without kernels that take a budget has no such rows and runs unchanged.
    """
    stages = (summary.prologue, *summary.block, summary.epilogue)
    budgets = [sm_budgets.get(stage.resource, 0) if stage else 0 for stage in stages]
    return [
        budget if stage and budget in profile.budgets(stage) else 0
        for stage, budget in zip(stages, budgets, strict=True)
    ]


def find_pairs(
    summary: ProgramSummary, profile: Profile, budgets: Sequence[int]
) -> dict[_Measured, list[Pair]]:
    """All pairs of positions with measured rows or budgets, by what was measured of them.

    Args:
      summary: The program.
      profile: Its measured table.
      budgets: The budget of each stage, as `stage_budgets` gives it.
    """
    stages = (summary.prologue, *summary.block, summary.epilogue)
    pairs: dict[_Measured, list[Pair]] = {}
    for first, stage_a in enumerate(stages):
        for second, stage_b in enumerate(stages):
            if stage_a is None or stage_b is None:
                continue
            # Stages of one class run without budgets in a slot.
            apart = stage_a.resource != stage_b.resource
            both = (budgets[first], budgets[second]) if apart else (0, 0)
            rows = [r for r in profile.corun_rows(stage_a, stage_b) if r.sm_budgets == both]
            if rows or any(both):
                pair = Pair(
                    first=first,
                    second=second,
                    place=first * (len(stages) + 1) + second,
                    slowdowns=tuple(_slowdowns(row) for row in rows),
                    offsets=_offsets(summary, first, second),
                )
                key = any(both), tuple(row.batch_sizes for row in rows)
                pairs.setdefault(key, []).append(pair)
    return pairs


def _offsets(summary: ProgramSummary, first: int, second: int) -> tuple[tuple[int, int], ...]:
    num_stages, num_blocks = len(summary.block), summary.num_blocks
    inner = range(1, num_stages + 1)
    ahead = first - second
    if first not in inner or second not in inner:
        return ((ahead, 1),) if abs(ahead) < num_stages else ()
    if ahead == 0 or num_blocks == 1:
        return ((ahead, num_blocks),)
    # They also share a slot when one of them is a block further on; once less, at the ends.
    other = ahead - num_stages if ahead > 0 else ahead + num_stages
    return (ahead, num_blocks), (other, num_blocks - 1)


def _slowdowns(row: CorunRow) -> tuple[float, float]:
    """The slowdowns of a pair, at least 1: no stage gets faster beside another."""
    return max(row.slowdowns[0], 1.0), max(row.slowdowns[1], 1.0)
