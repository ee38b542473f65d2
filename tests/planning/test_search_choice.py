"""What the search chooses: sizes, staggers and SM budgets, within the options it is given."""

import random

import pytest

from pbjax.device import ResourceClass
from pbjax.errors import InputError
from pbjax.planning.profiling import Profile, ProgramSummary
from pbjax.planning.search import SearchOptions, best_staggers, search
from pbjax.planning.throughput import evaluate
from pbjax.planning.timetable import Split
from tests.search_tables import (
    ONE,
    PROVENANCE,
    TWO,
    corun,
    program,
    random_table,
    row,
    stage,
    table,
)

# What is chosen


def test_largest_sub_batch_is_not_chosen_on_a_cliff():
    profile = table(ONE, {2: 0.2, 64: 1.0, 65: 3.0, 128: 4.0})
    assert search(ONE, profile, 128).best.split == Split(sizes=(64, 64))


def test_batch_is_not_split_where_rows_get_cheaper_together():
    profile = table(TWO, {2: 1.0, 128: 1.0})
    assert search(TWO, profile, 128).best.split == Split(sizes=(128,))


def test_batch_is_not_split_for_a_tie():
    profile = table(TWO, {2: 0.02, 128: 1.28})
    assert search(TWO, profile, 96).best.split == Split(sizes=(96,))


def test_overlap_that_pays_is_used_with_its_stagger():
    a, b = TWO.block
    pair = corun(a, b, (48, 48), (1.1, 1.1))
    result = search(TWO, table(TWO, {2: 0.02, 128: 1.28}, pair), 96)
    assert len(result.best.split.sizes) > 1
    assert len(set(result.best.staggers)) > 1
    assert result.best.prediction.makespan_s < result.by_count[1].prediction.makespan_s


def test_of_equal_staggers_the_one_under_which_classes_meet_least_is_taken():
    profile = table(TWO, {2: 0.02, 128: 1.28})
    assert search(TWO, profile, 96).by_count[2].staggers == (0, 1)


def test_of_equal_makespans_the_better_balanced_is_taken():
    # 15 s + 10 s, and 12.5 s twice: both 25 s
    profile = table(ONE, {2: 2.0, 10: 10.0, 30: 15.0, 40: 60.0})
    result = search(ONE, profile, 40, SearchOptions(max_sub_batches=2))
    assert result.best.split == Split(sizes=(20, 20))


def test_runner_up_has_other_sizes():
    result = search(TWO, random_table(random.Random(5), TWO, 64), 64)
    assert result.runner_up.split != result.best.split
    assert result.runner_up.prediction.makespan_s >= result.best.prediction.makespan_s


def test_trajectory_ends_with_a_closed_window_or_saturation():
    result = search(TWO, random_table(random.Random(5), TWO, 512), 512)
    assert result.trajectory[0].window == 64
    assert all(visit.split.batch_size == 512 for visit in result.trajectory)
    assert result.trajectory[-1].window < 64


GEMM, NORM = stage("gemm", ResourceClass.TENSOR), stage("norm", ResourceClass.MEMORY)
PAIR = ProgramSummary(prologue=None, block=(GEMM, NORM), epilogue=None, num_blocks=4)
SHARED = (92, 40)


def pair_table(*pairs, sizes=(2, 128), slower=1.1):
    """Seconds that rise with the rows, and the same a little slower within budgets."""
    budgets = dict(zip((GEMM, NORM), SHARED, strict=True))
    rows = [row(s, b, 0.01 * b) for s in (GEMM, NORM) for b in (2, 128)]
    rows += [row(s, b, 0.01 * slower * b, budgets[s]) for s in (GEMM, NORM) for b in sizes]
    return Profile(provenance=PROVENANCE, rows=tuple(rows), corun=pairs)


def test_budgets_under_which_overlap_pays_are_chosen():
    result = search(PAIR, pair_table(corun(GEMM, NORM, (48, 48), (1.1, 1.1), SHARED)), 96)
    assert result.best.sm_budgets == {"TENSOR": 92, "MEMORY": 40}
    assert len(set(result.best.staggers)) > 1


def test_budgets_under_which_it_does_not_pay_are_not():
    result = search(PAIR, pair_table(corun(GEMM, NORM, (48, 48), (2.0, 2.0), SHARED)), 96)
    assert result.best.split == Split(sizes=(96,))
    assert not any(each.sm_budgets for each in result.by_count.values())


def test_sizes_that_were_not_measured_within_budgets_run_without():
    profile = pair_table(corun(GEMM, NORM, (48, 48), (1.1, 1.1), SHARED), sizes=(40, 56))
    result = search(PAIR, profile, 96, policy="exhaustive")
    assert result.best.sm_budgets
    assert all(40 <= size <= 56 for size in result.best.split.sizes)
    assert result.by_count[3].sm_budgets == {}
    assert search(PAIR, profile, 96).best == result.best


def test_given_sizes_get_the_best_budgets():
    profile = pair_table(corun(GEMM, NORM, (48, 48), (1.1, 1.1), SHARED))
    found = best_staggers(PAIR, profile, Split(sizes=(50, 46)))
    assert found.sm_budgets == {"TENSOR": 92, "MEMORY": 40}
    options = SearchOptions(sm_budgets={})
    assert best_staggers(PAIR, profile, Split(sizes=(50, 46)), options).sm_budgets == {}


# Options


@pytest.mark.parametrize("most", [1, 2, 3])
def test_number_of_sub_batches_can_be_limited(most):
    profile = random_table(random.Random(1), TWO, 64)
    result = search(TWO, profile, 64, SearchOptions(max_sub_batches=most))
    assert set(result.by_count) == set(range(1, most + 1))


def test_fixed_staggers_are_kept_and_the_sizes_fitted_to_them():
    summary = program(3)
    profile = random_table(random.Random(8), summary, 48)
    result = search(summary, profile, 48, SearchOptions(staggers=(2, 0, 1)), policy="exhaustive")
    free = search(summary, profile, 48, policy="exhaustive")
    assert [c.staggers for c in result.by_count.values()] == [(2,), (2, 0), (2, 0, 1)]
    assert result.best.prediction.makespan_s >= free.best.prediction.makespan_s * (1 - 1e-9)


def test_fixed_staggers_give_the_best_order_of_sizes():
    summary = program(3, num_blocks=2)
    profile = random_table(random.Random(4), summary, 12)
    options = SearchOptions(staggers=(2, 0), max_sub_batches=2)
    found = search(summary, profile, 12, options).by_count[2].prediction.makespan_s
    every = [
        evaluate(summary, profile, Split(sizes=(b, 12 - b)), (2, 0)).makespan_s
        for b in range(1, 12)
    ]
    assert found == pytest.approx(min(every))


def test_foreign_fixed_staggers_are_refused():
    with pytest.raises(InputError, match=r"staggers from 0 to 1"):
        search(TWO, table(TWO, {2: 1.0, 4: 1.0}), 4, SearchOptions(staggers=(0, 2)))


def test_given_sizes_keep_their_order_and_get_the_best_staggers():
    summary = program(3, num_blocks=2)
    profile = random_table(random.Random(2), summary, 24)
    split = Split(sizes=(3, 12, 9))
    found = best_staggers(summary, profile, split)
    every = [
        evaluate(summary, profile, split, (a, b, c)).makespan_s
        for a in range(3)
        for b in range(3)
        for c in range(3)
    ]
    assert found.split == split
    assert found.prediction.makespan_s == pytest.approx(min(every))


def test_given_sizes_with_fixed_staggers_are_not_searched():
    with pytest.raises(InputError, match=r"the options fix the staggers"):
        best_staggers(
            TWO, table(TWO, {2: 1.0, 4: 1.0}), Split(sizes=(4,)), SearchOptions(staggers=(0,))
        )


def test_given_sizes_below_the_table_are_refused():
    profile = table(TWO, {16: 1.0, 32: 2.0})
    with pytest.raises(InputError, match=r"batch_size=10.*from 16 to 32"):
        best_staggers(TWO, profile, Split(sizes=(10, 10)))
