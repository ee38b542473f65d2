"""Pairs of stages: what they save together, at which staggers they share slots, their budgets."""

import pytest

from pbjax.device import ResourceClass
from pbjax.planning.corun_pairs import find_pairs, measured_budgets, stage_budgets
from pbjax.planning.program_summary import ProgramSummary
from pbjax.planning.throughput import Evaluator
from pbjax.planning.timetable import PROLOGUE, Task, timetable
from tests.rows import TABLE, A, B, C, corun, profile, row
from tests.search_tables import stage

BOTH = ProgramSummary(prologue=None, block=(A, B), epilogue=None, num_blocks=1)
TENSOR, MEMORY = stage("gemm", ResourceClass.TENSOR), stage("norm", ResourceClass.MEMORY)


def saving(table, first, second, summary=BOTH, sm_budgets=None):
    """Share of the summed seconds that the predicted slot of two stages saves."""
    sizes = first[1], second[1]
    places = [summary.block.index(stage) for stage, _ in (first, second)]
    slot = tuple(Task(sub_batch=i, stage=place, block=0) for i, place in enumerate(places))
    together = Evaluator(summary, table, sm_budgets).slot_seconds(sizes, slot)
    return 1 - together / sum(table.seconds(*each) for each in (first, second))


def test_pair_saves_what_its_slowdowns_leave():
    # together max(4 * 1.25, 2 * 1.5) = 5 of 4 + 2 seconds
    assert saving(TABLE, (A, 8), (B, 8)) == pytest.approx(1 / 6)


def test_saving_does_not_depend_on_the_order_of_the_two():
    assert saving(TABLE, (A, 8), (B, 5)) == saving(TABLE, (B, 5), (A, 8)) > 0


def test_pair_without_a_row_saves_nothing():
    assert saving(TABLE, (A, 8), (A, 8)) == 0.0


def test_pair_that_is_slower_together_saves_nothing():
    table = profile(row(A, 2), row(B, 2), corun=[corun((A, B), (2, 2), (2.5, 2.5))])
    assert saving(table, (A, 2), (B, 2)) == 0.0


def test_pair_within_budgets_may_lose_but_is_no_shorter_than_its_longest_stage():
    summary = ProgramSummary(prologue=None, block=(TENSOR, MEMORY), epilogue=None, num_blocks=1)
    pair, budgets = ((TENSOR, 8), (MEMORY, 8), summary), {"TENSOR": 92, "MEMORY": 40}
    rows = [row(s, b, b * 0.1) for s in (TENSOR, MEMORY) for b in (2, 8)]
    rows += [row(TENSOR, b, b * 0.15, sm_budget=92) for b in (2, 8)]
    table = profile(*rows, corun=[corun((TENSOR, MEMORY), (8, 8), (1.5, 1.0), (92, 0))])
    assert saving(table, *pair, budgets) == pytest.approx(1 - 1.8 / 1.6)
    assert saving(table, *pair) == 0.0
    assert saving(profile(*rows), *pair, budgets) == pytest.approx(1 - 2.0 / 1.6)
    fast = profile(*rows, corun=[corun((TENSOR, MEMORY), (8, 8), (0.5, 1.0), (92, 0))])
    assert saving(fast, *pair, budgets) == pytest.approx(1 - 1.2 / 1.6)


def test_saving_comes_from_the_nearest_row():
    near, far = corun((A, B), (8, 8), (1.5, 1.5)), corun((A, B), (2, 2), (1.0, 1.0))
    table = profile(row(A, 2), row(A, 8), row(B, 2), row(B, 8), corun=[far, near])
    assert saving(table, (A, 6), (B, 6)) == pytest.approx(0.25)
    assert saving(table, (A, 3), (B, 3)) == pytest.approx(0.5)


def test_no_stage_gets_faster_beside_another():
    table = profile(row(A, 2), row(B, 2), corun=[corun((A, B), (2, 2), (0.5, 0.5))])
    assert saving(table, (A, 2), (B, 2)) == 0.5


def test_stage_beside_itself_saves_the_same_in_either_order():
    rows = (row(A, 2, 1.0), row(A, 8, 1.5), row(B, 2), row(B, 8))
    table = profile(*rows, corun=[corun((A, A), (4, 4), (1.0, 1.4))])
    # together max(1.0, 1.5) * 1.2 = 1.8 of 2.5 seconds
    assert saving(table, (A, 2), (A, 8)) == saving(table, (A, 8), (A, 2)) == pytest.approx(0.28)


# Offsets


def slots_together(summary, staggers, first, second):
    """In how many slots the first sub-batch is at one position and the second at another."""
    wanted = {0: first + PROLOGUE, 1: second + PROLOGUE}
    slots = [{t.sub_batch: t.stage for t in slot} for slot in timetable(summary, staggers).slots()]
    return sum(slot == wanted for slot in slots)


@pytest.mark.parametrize("num_blocks", [1, 2, 5])
@pytest.mark.parametrize("num_stages", [1, 2, 3])
def test_offsets_count_the_slots_that_hold_both(num_stages, num_blocks):
    block = tuple(stage(f"s{i}") for i in range(num_stages))
    ends = stage("prologue"), stage("epilogue")
    summary = ProgramSummary(prologue=ends[0], block=block, epilogue=ends[1], num_blocks=num_blocks)
    every = (ends[0], *block, ends[1])
    pairs = [corun((a, b), (2, 2), (1.0, 1.0)) for i, a in enumerate(every) for b in every[i:]]
    table = profile(*(row(s, 2) for s in every), corun=pairs)
    (found,) = find_pairs(summary, table, [0] * len(every)).values()
    assert len(found) == len(every) ** 2
    for pair in found:
        assert pair.place == pair.first * (len(every) + 1) + pair.second
        expected = {}
        for ahead in range(1 - num_stages, num_stages):
            staggers = (max(ahead, 0), max(-ahead, 0))
            expected[ahead] = slots_together(summary, staggers, pair.first, pair.second)
        assert dict(pair.offsets) == {ahead: count for ahead, count in expected.items() if count}


# Budgets


def test_measured_budgets_are_those_of_pairs_of_different_classes_in_the_block():
    other = stage("other", ResourceClass.MEMORY)
    summary = ProgramSummary(prologue=other, block=(TENSOR, MEMORY, A), epilogue=None, num_blocks=1)
    pairs = [
        corun((TENSOR, MEMORY), (2, 2), (1.0, 1.0), (92, 40)),
        corun((MEMORY, A), (2, 2), (1.0, 1.0), (40, 0)),
        corun((TENSOR, other), (2, 2), (1.0, 1.0), (80, 52)),  # the prologue is in no block
        corun((TENSOR, TENSOR), (2, 2), (1.0, 1.0), (66, 66)),  # one class shares no SMs out
    ]
    found = measured_budgets(summary, profile(corun=pairs))
    assert found == ({}, {"MEMORY": 40}, {"MEMORY": 40, "TENSOR": 92})


def test_stage_has_a_budget_only_where_its_rows_have_it():
    summary = ProgramSummary(prologue=None, block=(TENSOR, MEMORY), epilogue=C, num_blocks=1)
    table = profile(row(TENSOR, 2, sm_budget=92), row(MEMORY, 2), row(MEMORY, 2, sm_budget=30))
    assert stage_budgets(summary, table, {"TENSOR": 92, "MEMORY": 40}) == [0, 92, 0, 0]
    assert stage_budgets(summary, table, {"TENSOR": 92, "MEMORY": 30}) == [0, 92, 30, 0]
