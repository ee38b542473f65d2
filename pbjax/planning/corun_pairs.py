"""Which stages of two sub-batches meet in a slot, and what was measured of them together."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

from pbjax.planning.profile_rows import CorunRow
from pbjax.planning.profile_table import Profile
from pbjax.planning.program_summary import ProgramSummary


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """Two positions of the chain that cost otherwise together than one after the other.

    Positions count the prologue as 0, the block's stages from 1, the epilogue as the last.

    Attributes:
      first: Position of the first sub-batch.
      second: Position of the second.
      place: first * width + second, where width is one more than there are positions.
      slowdowns: Of both, for each measured pair of batch sizes; at least 1; none where they were
        not measured together, but budgets make them slower.
      offsets: By how many stages the first must run ahead for them to meet, and how often then.
    """

    first: int
    second: int
    place: int
    slowdowns: tuple[tuple[float, float], ...]
    offsets: tuple[tuple[int, int], ...]


# Whether within budgets, and the pairs of batch sizes with rows.
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
    """The budget of each stage from prologue to epilogue; 0 where its rows have none.

    A stage without kernels that take a budget has no such rows, and runs as it is.
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
    """The pairs of positions that cost otherwise together, by budget or not and batch sizes.

    Args:
      summary: The program.
      profile: Its measured table.
      budgets: Of each stage, as `stage_budgets` gives them.
    """
    chain = (summary.prologue, *summary.block, summary.epilogue)
    pairs: dict[_Measured, list[Pair]] = {}
    for first, stage_a in enumerate(chain):
        for second, stage_b in enumerate(chain):
            if stage_a is None or stage_b is None:
                continue
            # Stages of one class share no slot out.
            apart = stage_a.resource != stage_b.resource
            both = (budgets[first], budgets[second]) if apart else (0, 0)
            rows = [r for r in profile.corun_rows(stage_a, stage_b) if r.sm_budgets == both]
            if rows or any(both):
                pair = Pair(
                    first=first,
                    second=second,
                    place=first * (len(chain) + 1) + second,
                    slowdowns=tuple(slowed(row) for row in rows),
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
    # They also meet when the first is in the next block, or the second is; once less, at the ends.
    other = ahead - num_stages if ahead > 0 else ahead + num_stages
    return (ahead, num_blocks), (other, num_blocks - 1)


def slowed(row: CorunRow) -> tuple[float, float]:
    """The slowdowns of a pair; neither stage gets faster by company."""
    return max(row.slowdowns[0], 1.0), max(row.slowdowns[1], 1.0)
