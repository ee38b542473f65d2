"""Predictions worked out the plain way: what a pair saves, and what no split can beat."""

from pbjax.planning.profile_rows import measured_size, nearest
from pbjax.planning.throughput import Evaluator
from pbjax.planning.timetable import MAX_SUB_BATCHES


def pair_saving(profile, first, second, sm_budgets=(0, 0)):
    """Share of the summed seconds that running two stages together saves, from 0 to 0.5.

    saving = 1 - together / (t_a + t_b),   together = max(t'_a s_a, t'_b s_b, t_a, t_b)

    with the seconds t alone, t' alone at the budgets, and the slowdowns s of the row whose batch
    sizes are nearest in ratio. Without budgets a pair that is slower together saves nothing: it
    need not run together. With budgets it must, and where no row was measured
    together = t'_a + t'_b, so that the saving may be negative.

    Args:
      profile: The measured table.
      first: A stage and its rows.
      second: The other stage and its rows.
      sm_budgets: Budgets of both; 0 for none.
    """
    (stage_a, size_a), (stage_b, size_b) = first, second
    rows = [r for r in profile.corun_rows(stage_a, stage_b) if r.sm_budgets == sm_budgets]
    alone = profile.seconds(stage_a, size_a), profile.seconds(stage_b, size_b)
    within = [profile.seconds(*s, b) for s, b in zip((first, second), sm_budgets, strict=True)]
    if not sum(alone) or not (rows or any(sm_budgets)):
        return 0.0
    together = sum(within)
    if rows:
        measured = [row.batch_sizes for row in rows]
        row = rows[nearest(measured, measured_size(size_a), measured_size(size_b))]
        together = max(t * max(s, 1.0) for t, s in zip(within, row.slowdowns, strict=True))
    saving = 1 - max(together, *alone) / sum(alone)
    return saving if any(sm_budgets) else max(0.0, saving)


def lower_bound(summary, profile, batch_size):
    """Seconds that no split of the batch, with any staggers, is predicted to beat.

    Let c(b) be the seconds of the whole program for b rows alone, m the least c(b) / b over the
    sizes up to B, and w the largest share of their seconds that two stages save together. A slot of
    k tasks takes at least 1 / k of their summed seconds, since no slot is shorter than its longest
    task, and at least 1 - (k - 1) w of them, since each task is in k - 1 pairs. The summed seconds
    of all tasks are at least m B, and no more than three sub-batches run. Hence

      makespan >= m B max(1 / 3, 1 - 2 w).
    """
    evaluator = Evaluator(summary, profile)
    smallest = evaluator.smallest_size
    # On a line between measured sizes c(b) / b is monotone, so its least value is at an end.
    ends = sorted({smallest, measured_size(smallest), batch_size, *evaluator.kinks})
    rates = [evaluator.path_seconds(b) / b for b in ends if smallest <= b <= batch_size]
    kept = max(1 / MAX_SUB_BATCHES, 1 - (MAX_SUB_BATCHES - 1) * _largest_saving(profile))
    return min(rates) * batch_size * kept


def _largest_saving(profile):
    # max(x s, (1 - x) t) is least where both are equal, and is then s t / (s + t).
    largest = 0.0
    for row in profile.corun:
        if any(row.sm_budgets):
            return 0.5  # its seconds alone were measured on fewer SMs: its slowdowns say no more
        s, t = (max(slowdown, 1.0) for slowdown in row.slowdowns)
        largest = max(largest, 1 - s * t / (s + t))
    return largest
