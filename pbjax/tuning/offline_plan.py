"""The outcome of a search without the device: as a plan, as text and as plain data."""

import datetime
from collections.abc import Mapping
from dataclasses import asdict

import jax

from pbjax.planning.plan import Plan, Seconds
from pbjax.planning.profile_table import Profile
from pbjax.planning.program_summary import ProgramSummary
from pbjax.planning.search import Candidate, SearchResult, best_staggers
from pbjax.planning.throughput import Evaluator
from pbjax.planning.timetable import Split
from pbjax.program.analysis import Analysis

# As when whole programs are timed: what a split gains must be more than twice the spread.
NOISE_FACTOR = 2.0


def plan_of(
    analysis: Analysis, summary: ProgramSummary, profile: Profile, found: SearchResult
) -> Plan:
    """The plan that a search predicts to be fastest; nothing in it was measured as a whole.

    Args:
      analysis: The model.
      summary: The stages that were searched.
      profile: Their measured table.
      found: The result of the search.

    Returns:
      The plan, with the best split beside the unsplit program whichever is kept.
    """
    batch_size, split = found.best.split.batch_size, best_split(found)
    fits = 1 in found.by_count
    whole = found.by_count.get(1) or best_staggers(summary, profile, Split(sizes=(batch_size,)))
    shown = split or whole
    noise_s = NOISE_FACTOR * table_spread(summary, profile, found)
    gains = split is not None and (
        whole.prediction.makespan_s - split.prediction.makespan_s > noise_s
    )
    sequential_s = sequential_seconds(summary, profile, split)
    why = reason(whole, split, sequential_s, noise_s)
    return Plan(
        model=analysis.model.name,
        fingerprint=analysis.fingerprint,
        device_kind=profile.provenance.device_kind,
        jax=jax.__version__,
        batch_size=analysis.batch.batch_size,
        sizes=shown.split.sizes,
        staggers=shown.staggers,
        sm_budgets=dict(shown.sm_budgets),
        unroll=1,
        compiler_options={},
        decision="split" if gains or not fits else "unsplit",
        reason=why if fits else f"the unsplit batch does not fit the device; {why}",
        digest=found.digest,
        predicted=Seconds(
            unsplit=whole.prediction.makespan_s,
            sequential=sequential_s,
            split=split.prediction.makespan_s if split else None,
        ),
        measured=Seconds(),
        max_difference=None,
        date=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    )


def best_split(found: SearchResult) -> Candidate | None:
    """The best candidate with two or three sub-batches; None if the batch cannot be split."""
    several = [candidate for count, candidate in found.by_count.items() if count > 1]
    if found.best in several:
        return found.best
    return min(several, key=lambda candidate: candidate.prediction.makespan_s, default=None)


def sequential_seconds(
    summary: ProgramSummary, profile: Profile, split: Candidate | None
) -> float | None:
    """Predicted seconds of the same sub-batches one after the other, without budgets."""
    if split is None:
        return None
    return sum(map(Evaluator(summary, profile).path_seconds, split.split.sizes))


def table_spread(summary: ProgramSummary, profile: Profile, found: SearchResult) -> float:
    """By how much repeated measurements of all stages of the unsplit batch spread, in seconds.

    The quartile distances of the rows nearest to the batch, added up: stages were measured one
    after the other, so that what disturbed one need not have disturbed the next.
    """
    batch_size = found.best.split.batch_size
    chain = (summary.prologue, *summary.block, summary.epilogue)
    repeats = (1, *[summary.num_blocks] * len(summary.block), 1)
    total = 0.0
    for stage, times in zip(chain, repeats, strict=True):
        rows = [r for r in profile.rows if stage and r.fingerprint == stage.fingerprint]
        alone = [row for row in rows if not row.sm_budget]
        nearest = min(alone, key=lambda row: abs(row.batch_size - batch_size), default=None)
        total += times * nearest.spread_s if nearest else 0.0
    return total


def reason(
    whole: Candidate, split: Candidate | None, sequential_s: float | None, noise_s: float
) -> str:
    """Why the unsplit batch or a split is kept, in a sentence.

    Args:
      whole: The unsplit batch.
      split: The best split; None if the batch cannot be split.
      sequential_s: Predicted seconds of the split's sub-batches one after the other.
      noise_s: Seconds that a split must gain.
    """
    unsplit_s = whole.prediction.makespan_s
    if split is None or sequential_s is None or not unsplit_s:
        return "the batch cannot be split, or the table says that nothing takes any time"
    split_s, ideal_s = split.prediction.makespan_s, split.prediction.ideal_s
    sizes = " + ".join(map(str, split.split.sizes))
    longer = sequential_s / unsplit_s - 1
    figures = (
        f"splitting into {sizes} {'lengthens' if longer > 0 else 'shortens'} the kernels by "
        f"{abs(longer):.1%}, and running them side by side gives back "
        f"{(sequential_s - split_s) / unsplit_s:.1%}: "
        f"{unsplit_s / split_s:.3f}x of the unsplit speed"
    )
    if unsplit_s - split_s > noise_s:
        return f"{figures}, more than the noise of {1e3 * noise_s:.3g} ms"
    if split_s < unsplit_s:
        return f"{figures}, inside the noise of {1e3 * noise_s:.3g} ms"
    bound = f"{unsplit_s / ideal_s:.3f}x if different classes overlapped wholly"
    return f"{figures}; {bound}"


def document_of(plan: Plan, found: SearchResult, best: SearchResult | None) -> dict[str, object]:
    """The plan and how it was found, as JSON takes it.

    Args:
      plan: The plan.
      found: The result of the search.
      best: The exhaustive search, if there was one.
    """
    document: dict[str, object] = {
        "plan": asdict(plan),
        "search": _search_of(found),
        "candidates": [_candidate_of(each) for each in found.by_count.values()],
    }
    if best is not None:
        document["exhaustive"] = _search_of(best) | _candidate_of(best.best)
    return document


def _search_of(found: SearchResult) -> dict[str, object]:
    return {
        "seconds": found.seconds,
        "evaluations": found.evaluations,
        "bounds": found.bounds,
        "dropped": found.dropped,
    }


def _candidate_of(candidate: Candidate) -> dict[str, object]:
    return {
        "sizes": candidate.split.sizes,
        "staggers": candidate.staggers,
        "sm_budgets": dict(candidate.sm_budgets),
        "predicted_s": candidate.prediction.makespan_s,
    }


def plan_text(
    plan: Plan, profile: Profile, found: SearchResult, best: SearchResult | None, *, title: str
) -> str:
    """The plan as a person reads it.

    Args:
      plan: The plan.
      profile: The table that it rests on.
      found: The result of the search.
      best: The exhaustive search, if there was one.
      title: Name of the model.
    """
    where = profile.provenance
    lines = [
        f"{title} on {plan.device_kind}, batch {plan.batch_size}; table of {where.date[:10]}, jax "
        f"{where.jax}, {len(profile.rows)} rows, {len(profile.corun)} pairs",
        f"plan: {plan.decision}",
        f"why: {plan.reason}",
        "",
        f"{'':12} {'sizes':>16} {'staggers':>9} {'SM budgets':>22} {'predicted ms':>13}",
    ]
    lines += [_line(_name(each), each) for each in found.by_count.values()]
    if plan.predicted.sequential is not None:
        sizes, sequential_ms = " + ".join(map(str, plan.sizes)), 1e3 * plan.predicted.sequential
        lines.append(f"{'in sequence':12} {sizes:>16} {'':>9} {'':>22} {sequential_ms:13.3f}")
    if best is not None:
        lines.append(_line("exhaustive", best.best))
    lines += [
        "",
        f"searched in {found.seconds:.3f} s: {found.evaluations} predictions, "
        f"{found.bounds} bounds; {found.dropped} dropped for memory",
    ]
    return "\n".join(lines)


def _name(candidate: Candidate) -> str:
    return "unsplit" if len(candidate.split.sizes) == 1 else f"in {len(candidate.split.sizes)}"


def _line(name: str, candidate: Candidate) -> str:
    sizes = " + ".join(map(str, candidate.split.sizes))
    staggers = ", ".join(map(str, candidate.staggers))
    budgets = _budgets(candidate.sm_budgets)
    return (
        f"{name:12} {sizes:>16} {staggers:>9} {budgets:>22} "
        f"{1e3 * candidate.prediction.makespan_s:13.3f}"
    )


def _budgets(budgets: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {sms}" for name, sms in budgets.items()) or "none"
