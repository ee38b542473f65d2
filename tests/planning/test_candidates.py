"""The space of candidates: its sizes, its staggers and budgets, and how many there are."""

from dataclasses import replace

import pytest

from pbjax.device import ResourceClass
from pbjax.planning.candidates import Candidates, SearchOptions
from pbjax.planning.memory import predicted_bytes
from pbjax.planning.profiling import ProgramSummary
from tests.search_tables import TWO, corun, row, stage, table


def candidates(batch_size, first=2, summary=TWO, more=(), **options):
    profile = table(summary, {first: 1.0, 60: 30.0})
    profile = replace(profile, rows=(*profile.rows, *more))
    return Candidates(summary, profile, batch_size, SearchOptions(**options))


def splits(batch_size, count, smallest):
    """Every split into so many sub-batches, sizes falling, found the plain way."""
    if count == 1:
        return {(batch_size,)}
    return {
        (*rest, last)
        for last in range(smallest, batch_size // count + 1)
        for rest in splits(batch_size - last, count - 1, last)
    }


@pytest.mark.parametrize(("first", "smallest"), [(2, 1), (3, 3), (4, 4)])
@pytest.mark.parametrize("batch_size", [8, 9, 10, 11, 12, 13, 31])
def test_every_split_is_there_once_and_counted(batch_size, first, smallest):
    found = candidates(batch_size, first)
    assert found.smallest == smallest
    assert found.counts == [n for n in (1, 2, 3) if n == 1 or n * smallest <= batch_size]
    for count in found.counts:
        every = list(found.all_sizes(count))
        assert len(every) == len(set(every)) == found.num_sizes(count)
        assert set(every) == splits(batch_size, count, smallest)


def test_staggers_start_at_zero_and_are_all_there():
    found = candidates(6)
    assert found.choices[1] == [(0,)]
    assert found.choices[2] == [(0, 0), (0, 1), (1, 0)]
    assert len(found.choices[3]) == 2**3 - 1
    # 1 split of one size, 3 of two with 3 staggers each, 3 of three with 7.
    assert found.num_candidates() == 1 + 3 * 3 + 3 * 7


def test_budgets_multiply_the_candidates_of_several_sub_batches():
    gemm, norm = stage("gemm", ResourceClass.TENSOR), stage("norm", ResourceClass.MEMORY)
    summary = ProgramSummary(prologue=None, block=(gemm, norm), epilogue=None, num_blocks=2)
    profile = table(summary, {2: 1.0, 60: 30.0}, corun(gemm, norm, (4, 4), (1.0, 1.0), (92, 40)))
    within = [row(s, b, 0.6 * b, sms) for s, sms in ((gemm, 92), (norm, 40)) for b in (2, 60)]
    profile = replace(profile, rows=(*profile.rows, *within))
    assert Candidates(summary, profile, 6, SearchOptions()).num_candidates() == 1 + 2 * (9 + 21)
    fixed = SearchOptions(sm_budgets={})
    assert Candidates(summary, profile, 6, fixed).num_candidates() == 1 + 9 + 21


def test_fixed_staggers_allow_only_their_orders_and_numbers():
    found = candidates(6, staggers=(1, 0))
    assert found.counts == [1, 2]
    assert found.choices == {1: [(1,)], 2: [(0, 1), (1, 0)]}


def test_fewer_sub_batches_may_be_asked_for():
    assert candidates(9, max_sub_batches=2).counts == [1, 2]
    assert candidates(1).counts == [1]


@pytest.mark.parametrize("sizes", [(3, 3), (2, 2, 2)])
def test_staggers_are_dropped_exactly_where_their_memory_exceeds_the_limit(sizes):
    block = tuple(stage(name, held_bytes_per_row=10.0) for name in ("a", "b"))
    summary = ProgramSummary(prologue=None, block=block, epilogue=None, num_blocks=2)
    count = len(sizes)
    needed = predicted_bytes(summary, sizes, (*[0] * (count - 1), 1))
    enough = candidates(6, summary=summary, memory_limit_bytes=needed)
    assert enough.choices[count] == candidates(6, summary=summary).choices[count]
    less = candidates(6, summary=summary, memory_limit_bytes=needed - 1)
    assert less.choices[count] == [(0,) * count]
    assert less.dropped >= (len(enough.choices[count]) - 1) * less.num_sizes(count)


def test_makespans_that_differ_by_rounding_are_equal():
    found = candidates(6)
    found.predict_all((6,))
    found.predict_all((3, 3))
    # The table is linear from 2 rows on, so both take 8 stages x 0.5 s x 6 rows.
    assert found.found[(6,)].makespan_s == pytest.approx(24)
    assert found.found[(6,)].rounded == found.found[(3, 3)].rounded
    # Of equal ones the unsplit batch: it is as balanced and has fewer sub-batches.
    assert found.first([(3, 3), (6,)]) == (6,)
