"""Predicted makespans: against a plain simulation of the timetable, the baseline and the bound."""

from dataclasses import replace
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pbjax.device import ResourceClass
from pbjax.errors import InputError
from pbjax.planning.profiling import Profile, ProgramSummary
from pbjax.planning.throughput import Evaluator, evaluate
from pbjax.planning.timetable import Split, Task, timetable
from tests.search_tables import PROVENANCE, corun, row, stage
from tests.throughput_truth import lower_bound, pair_saving

SIZES = (2, 3, 8, 20, 60)
# Sums of subnormal numbers are not good to nine digits.
SECONDS = st.floats(0, 10, allow_subnormal=False)


@st.composite
def cases(draw):
    """A program, its table, a split and staggers, all as plain data."""
    num_stages = draw(st.integers(1, 5))
    names = [f"s{draw(st.integers(0, 4))}" for _ in range(num_stages)]
    ends = draw(st.sampled_from(["", "prologue", "epilogue", "prologue epilogue"])).split()
    different = sorted({*names, *ends})
    times = {
        name: draw(st.lists(SECONDS, min_size=len(SIZES), max_size=len(SIZES)))
        for name in different
    }
    pairs = {}
    for _ in range(draw(st.integers(0, 6))):
        pair = tuple(sorted(draw(st.sampled_from(different)) for _ in range(2)))
        sizes = (draw(st.sampled_from(SIZES)), draw(st.sampled_from(SIZES)))
        sizes = tuple(sorted(sizes)) if pair[0] == pair[1] else sizes
        pairs[pair, sizes] = (draw(st.floats(0.9, 2.5)), draw(st.floats(0.9, 2.5)))
    split = draw(st.lists(st.integers(1, 20), min_size=1, max_size=3))
    staggers = [draw(st.integers(0, num_stages - 1)) for _ in split]
    return {
        "names": names,
        "ends": ends,
        "times": times,
        "pairs": pairs,
        "num_blocks": draw(st.integers(1, 4)),
        "split": tuple(split),
        "staggers": tuple(staggers),
    }


def build(case):
    summary = ProgramSummary(
        prologue=stage("prologue") if "prologue" in case["ends"] else None,
        block=tuple(stage(name) for name in case["names"]),
        epilogue=stage("epilogue") if "epilogue" in case["ends"] else None,
        num_blocks=case["num_blocks"],
    )
    rows = [
        row(stage(name), size, seconds)
        for name, times in case["times"].items()
        for size, seconds in zip(SIZES, times, strict=True)
    ]
    pairs = [
        corun(stage(a), stage(b), sizes, slow) for ((a, b), sizes), slow in case["pairs"].items()
    ]
    return summary, Profile(provenance=PROVENANCE, rows=tuple(rows), corun=tuple(pairs))


def simulated(summary, profile, sizes, staggers, budget_of=lambda profile, stage: 0):
    """The sum over the slots, read off the timetable task by task."""

    def saving(first, second):
        apart = first[0].resource != second[0].resource
        budgets = [budget_of(profile, stage) if apart else 0 for stage, _ in (first, second)]
        return pair_saving(profile, first, second, tuple(budgets))

    stages = (summary.prologue, *summary.block, summary.epilogue)
    total = 0.0
    for slot in timetable(summary, staggers).slots():
        tasks = [(stages[task.stage + 1], sizes[task.sub_batch]) for task in slot]
        times = [profile.seconds(stage, size) for stage, size in tasks]
        saved = sum(
            (times[i] + times[j]) * saving(tasks[i], tasks[j])
            for i in range(len(tasks))
            for j in range(i)
        )
        total += max(sum(times) - saved, *times, 0.0)
    return total


CLASSES = {f"s{i}": list(ResourceClass)[i % 3] for i in range(5)}
BUDGETS = {"TENSOR": 92, "MEMORY": 40}


@st.composite
def budget_cases(draw):
    """As `cases`, of three classes; some stages have rows at budgets, and pairs of them too."""
    case = draw(cases())
    lists = st.lists(SECONDS, min_size=len(SIZES), max_size=len(SIZES))
    names = sorted({name for name in case["names"] if CLASSES[name] in BUDGETS})
    within = {name: draw(lists) for name in names if draw(st.booleans())}
    slowdowns = st.tuples(st.floats(0.9, 2.5), st.floats(0.9, 2.5))
    shared = {
        (pair, draw(st.sampled_from([(2, 3), (8, 8)]))): draw(slowdowns)
        for pair in combinations(sorted(within), 2)
        if CLASSES[pair[0]] != CLASSES[pair[1]] and draw(st.booleans())
    }
    return case | {"within": within, "shared": shared}


def build_within(case):
    summary, profile = build(case)
    block = tuple(stage(each.name, CLASSES[each.name]) for each in summary.block)
    budgets = {name: BUDGETS[CLASSES[name]] for name in case["within"]}
    rows = [
        row(stage(name), size, seconds, budgets[name])
        for name, times in case["within"].items()
        for size, seconds in zip(SIZES, times, strict=True)
    ]
    pairs = [
        corun(stage(a), stage(b), sizes, slow, (budgets[a], budgets[b]))
        for ((a, b), sizes), slow in case["shared"].items()
    ]
    more = {"rows": (*profile.rows, *rows), "corun": (*profile.corun, *pairs)}
    return replace(summary, block=block), replace(profile, **more)


def budget_of(profile, stage):
    budget = BUDGETS.get(stage.resource, 0)
    return budget if budget in profile.budgets(stage) else 0


@given(budget_cases())
def test_makespan_within_budgets_is_the_sum_over_the_slots(case):
    summary, profile = build_within(case)
    prediction = evaluate(
        summary, profile, Split(sizes=case["split"]), case["staggers"], sm_budgets=BUDGETS
    )
    expected = simulated(summary, profile, case["split"], case["staggers"], budget_of)
    assert prediction.makespan_s == pytest.approx(expected, rel=1e-9, abs=1e-12)


@given(budget_cases())
def test_no_split_within_budgets_beats_the_lower_bound(case):
    summary, profile = build_within(case)
    split = Split(sizes=case["split"])
    prediction = evaluate(summary, profile, split, case["staggers"], sm_budgets=BUDGETS)
    bound = lower_bound(summary, profile, split.batch_size)
    assert bound <= prediction.makespan_s * (1 + 1e-9) + 1e-12


@given(budget_cases())
def test_budgets_change_nothing_where_no_stage_was_measured_at_them(case):
    summary, profile = build_within(case)
    split, budgets = Split(sizes=case["split"]), {"TENSOR": 91, "CUDA": 7}
    found = evaluate(summary, profile, split, case["staggers"], sm_budgets=budgets)
    assert found == evaluate(summary, profile, split, case["staggers"])


@given(cases())
def test_makespan_is_the_sum_over_the_slots(case):
    summary, profile = build(case)
    prediction = evaluate(summary, profile, Split(sizes=case["split"]), case["staggers"])
    expected = simulated(summary, profile, case["split"], case["staggers"])
    assert prediction.makespan_s == pytest.approx(expected, rel=1e-9, abs=1e-12)


@given(cases())
def test_no_split_beats_the_lower_bound(case):
    summary, profile = build(case)
    prediction = evaluate(summary, profile, Split(sizes=case["split"]), case["staggers"])
    bound = lower_bound(summary, profile, sum(case["split"]))
    assert prediction.makespan_s >= bound * (1 - 1e-9)


@given(cases())
def test_one_sub_batch_takes_what_the_unsplit_program_takes(case):
    summary, profile = build(case)
    size = case["split"][0]
    prediction = evaluate(summary, profile, Split(sizes=(size,)), case["staggers"][:1])
    ends = [each for each in (summary.prologue, summary.epilogue) if each]
    baseline = sum(profile.seconds(each, size) for each in ends)
    baseline += summary.num_blocks * sum(profile.seconds(each, size) for each in summary.block)
    assert prediction.makespan_s == pytest.approx(baseline)
    assert prediction.balance == 1.0


@given(cases(), st.randoms(use_true_random=False))
def test_order_of_the_rows_changes_nothing(case, shuffler):
    summary, profile = build(case)
    rows, pairs = list(profile.rows), list(profile.corun)
    shuffler.shuffle(rows)
    shuffler.shuffle(pairs)
    shuffled = Profile(provenance=PROVENANCE, rows=tuple(rows), corun=tuple(pairs))
    split, staggers = Split(sizes=case["split"]), case["staggers"]
    assert evaluate(summary, profile, split, staggers) == evaluate(
        summary, shuffled, split, staggers
    )


@given(cases())
def test_order_of_the_sub_batches_changes_nothing(case):
    summary, profile = build(case)
    evaluator = Evaluator(summary, profile)
    forth = evaluator.makespan(case["split"], case["staggers"])
    back = evaluator.makespan(case["split"][::-1], case["staggers"][::-1])
    assert forth == pytest.approx(back)


@given(cases(), st.integers(0, 4))
def test_running_all_sub_batches_further_ahead_changes_nothing(case, shift):
    summary, profile = build(case)
    evaluator = Evaluator(summary, profile)
    room = len(summary.block) - 1 - max(case["staggers"])
    shifted = tuple(stagger + min(shift, room) for stagger in case["staggers"])
    makespan = evaluator.makespan(case["split"], case["staggers"])
    assert evaluator.makespan(case["split"], shifted) == pytest.approx(makespan)


@given(cases())
def test_pair_totals_never_promise_less_than_the_makespan_saves(case):
    """What the search discards by this bound cannot have been better."""
    summary, profile = build(case)
    evaluator, sizes, staggers = Evaluator(summary, profile), case["split"], case["staggers"]
    last = len(summary.block) - 1
    promised = sum(
        evaluator.pair_totals(sizes[j], sizes[k])[staggers[j] - staggers[k] + last]
        for k in range(len(sizes))
        for j in range(k)
    )
    alone = sum(evaluator.path_seconds(size) for size in sizes)
    makespan = evaluator.makespan(sizes, staggers)
    assert alone - promised <= makespan + 1e-9
    if len(sizes) == 2:
        assert alone - promised == pytest.approx(makespan, abs=1e-9)


@given(cases())
def test_evaluator_that_is_kept_predicts_what_a_fresh_one_does(case):
    summary, profile = build(case)
    kept = Evaluator(summary, profile)
    split, staggers = Split(sizes=case["split"]), case["staggers"]
    kept.evaluate(Split(sizes=(5, 5, 5)), (0, 0, 0))
    kept.evaluate(split, staggers)
    assert kept.evaluate(split, staggers) == evaluate(summary, profile, split, staggers)


A, B = stage("a", ResourceClass.TENSOR), stage("b", ResourceClass.MEMORY)
SUMMARY = ProgramSummary(prologue=None, block=(A, B), epilogue=None, num_blocks=3)
ROWS = (row(A, 2, 1.0), row(A, 8, 4.0), row(B, 2, 1.0), row(B, 8, 4.0))


def test_two_staggered_sub_batches_by_hand():
    pair = corun(A, B, (4, 4), (1.25, 1.25))
    profile = Profile(provenance=PROVENANCE, rows=ROWS, corun=(pair,))
    prediction = evaluate(SUMMARY, profile, Split(sizes=(4, 4)), (0, 1))
    # Alone each runs 6 stages of 2 s; in 5 slots both run, in 2.5 s instead of 4.
    assert prediction.makespan_s == pytest.approx(24 - 5 * 1.5)
    assert prediction.items_per_s == pytest.approx(8 / 16.5)
    assert prediction.class_s[ResourceClass.TENSOR] == pytest.approx(12)
    assert prediction.class_s[ResourceClass.CUDA] == 0
    assert prediction.sub_batch_s == pytest.approx((12, 12))
    assert prediction.balance == pytest.approx(1)
    assert prediction.bubble_fraction == pytest.approx(1 - 12 / 16.5)
    assert prediction.ideal_s == pytest.approx(2 + 5 * 2 + 2)


def test_nothing_overlaps_that_was_not_measured_to():
    profile = Profile(provenance=PROVENANCE, rows=ROWS)
    prediction = evaluate(SUMMARY, profile, Split(sizes=(4, 4)), (0, 1))
    assert prediction.makespan_s == pytest.approx(24)


def test_two_stages_within_budgets_by_hand():
    gemm, norm = stage("gemm", ResourceClass.TENSOR), stage("norm", ResourceClass.MEMORY)
    summary = ProgramSummary(prologue=None, block=(gemm, norm), epilogue=None, num_blocks=1)
    alone = [row(s, b, t * b) for s, t in ((gemm, 1.0), (norm, 0.5)) for b in (2, 60)]
    within = [row(gemm, b, 1.2 * b, 92) for b in (2, 60)] + [
        row(norm, b, 1.0 * b, 40) for b in (2, 60)
    ]
    pair = corun(gemm, norm, (8, 8), (1.05, 1.1), (92, 40))
    profile = Profile(provenance=PROVENANCE, rows=(*alone, *within), corun=(pair,))
    budgets = {"TENSOR": 92, "MEMORY": 40}
    for staggers, num_shared in (((0, 0), 0), ((0, 1), 1)):
        found = evaluate(summary, profile, Split(sizes=(8, 8)), staggers, sm_budgets=budgets)
        # In a shared slot 8 + 4 s become 8 x 1.2 x 1.05 s.
        assert found.makespan_s == pytest.approx(24 - num_shared * (12 - 10.08))
    whole = evaluate(summary, profile, Split(sizes=(16,)), (0,), sm_budgets=budgets)
    assert whole.makespan_s == pytest.approx(24)


def test_pair_that_was_not_measured_is_slower_within_budgets():
    gemm, norm = stage("gemm", ResourceClass.TENSOR), stage("norm", ResourceClass.MEMORY)
    summary = ProgramSummary(prologue=None, block=(gemm, norm), epilogue=None, num_blocks=1)
    rows = [row(s, b, 1.0 * b) for s in (gemm, norm) for b in (2, 60)]
    rows += [row(gemm, b, 1.5 * b, 92) for b in (2, 60)]
    profile = Profile(provenance=PROVENANCE, rows=tuple(rows))
    found = evaluate(
        summary, profile, Split(sizes=(8, 8)), (0, 1), sm_budgets={"TENSOR": 92, "MEMORY": 40}
    )
    assert found.makespan_s == pytest.approx(32 + 4)


def test_sub_batch_of_one_row_costs_what_two_rows_cost():
    profile = Profile(provenance=PROVENANCE, rows=ROWS)
    one = evaluate(SUMMARY, profile, Split(sizes=(7, 1)), (0, 0))
    assert one.sub_batch_s[1] == 6.0


def test_table_of_zeros_is_predicted_without_dividing_by_them():
    rows = tuple(row(each, size, 0.0) for each in (A, B) for size in (2, 8))
    pair = corun(A, B, (4, 4), (1.0, 1.0))
    profile = Profile(provenance=PROVENANCE, rows=rows, corun=(pair,))
    prediction = evaluate(SUMMARY, profile, Split(sizes=(4, 4)), (0, 1))
    assert prediction.makespan_s == 0
    assert prediction.items_per_s == float("inf")
    assert (prediction.balance, prediction.bubble_fraction) == (1.0, 0.0)


def test_unbalanced_split_says_so():
    profile = Profile(provenance=PROVENANCE, rows=ROWS)
    assert evaluate(SUMMARY, profile, Split(sizes=(6, 2)), (0, 0)).balance == pytest.approx(1 / 3)


def test_missing_stage_is_refused_before_anything_is_predicted():
    with pytest.raises(InputError, match=r"stage='b'"):
        Evaluator(SUMMARY, Profile(provenance=PROVENANCE, rows=ROWS[:2]))


def test_size_that_was_not_measured_is_refused():
    profile = Profile(provenance=PROVENANCE, rows=ROWS)
    with pytest.raises(InputError, match=r"batch_size=9.*from 2 to 8"):
        evaluate(SUMMARY, profile, Split(sizes=(9,)), (0,))


def test_number_of_staggers_must_be_that_of_sub_batches():
    profile = Profile(provenance=PROVENANCE, rows=ROWS)
    with pytest.raises(InputError, match=r"1 staggers for 2 sub-batches"):
        evaluate(SUMMARY, profile, Split(sizes=(4, 4)), (0,))


def test_stagger_of_a_whole_block_is_refused():
    profile = Profile(provenance=PROVENANCE, rows=ROWS)
    with pytest.raises(InputError, match=r"staggers from 0 to 1"):
        evaluate(SUMMARY, profile, Split(sizes=(4,)), (2,))


def test_sub_batches_within_budgets_are_covered_where_every_stage_was_measured():
    rows = [row(A, b, 1.0, 92) for b in (4, 20)] + [row(B, b, 1.0, 40) for b in (6, 16)]
    profile = Profile(provenance=PROVENANCE, rows=(*ROWS, *rows))
    evaluator = Evaluator(SUMMARY, profile, {"TENSOR": 92, "MEMORY": 40})
    covered = {sizes: evaluator.covers(sizes) for sizes in ((6, 16), (16, 6), (5, 8), (8, 17))}
    assert covered == {(6, 16): True, (16, 6): True, (5, 8): False, (8, 17): False}
    assert Evaluator(SUMMARY, profile).covers((1, 8))
    assert not Evaluator(SUMMARY, profile).covers((1, 9))


@pytest.mark.parametrize(("first", "smallest"), [(2, 1), (3, 3), (5, 5)])
def test_smallest_sub_batch_is_the_smallest_that_every_stage_was_measured_at(first, smallest):
    rows = (row(A, 2, 1.0), row(A, 8, 4.0), row(B, first, 1.0), row(B, 8, 4.0))
    assert Evaluator(SUMMARY, Profile(provenance=PROVENANCE, rows=rows)).smallest_size == smallest


def test_seconds_bend_at_measured_sizes_and_where_the_nearest_pair_changes():
    pairs = (corun(A, B, (2, 2), (1.0, 1.0)), corun(A, B, (8, 32), (1.0, 1.0)))
    rows = (*ROWS, row(A, 3, 1.5), row(A, 6, 1.0, 92))
    profile = Profile(provenance=PROVENANCE, rows=rows, corun=pairs)
    # sqrt(2 * 8) = 4 and sqrt(8 * 32) = 16: from the next size on the other pair is nearer.
    assert Evaluator(SUMMARY, profile).kinks == (2, 3, 4, 5, 8, 16, 17)
    assert Evaluator(SUMMARY, profile, {"TENSOR": 92}).kinks == (2, 3, 6, 8)
    assert Evaluator(SUMMARY, Profile(provenance=PROVENANCE, rows=ROWS)).kinks == (2, 8)


def test_nothing_is_saved_without_a_pair_and_something_with_one():
    profile = Profile(provenance=PROVENANCE, rows=ROWS)
    pair = corun(A, B, (4, 4), (1.25, 1.25))
    assert Evaluator(SUMMARY, profile).saves_nothing
    assert not Evaluator(SUMMARY, replace(profile, corun=(pair,))).saves_nothing


@pytest.mark.parametrize(
    ("pairs", "seconds"),
    [
        # 8 s alone; the first two save 0.5, the first and the third 2.
        ([corun(A, B, (4, 4), (1.75, 1.75)), corun(A, B, (4, 8), (1.75, 1.0))], 8 - 0.5 - 2),
        # Every pair saves 2, but the third takes 4.
        ([corun(a, B, (4, b), (1.0, 1.0)) for a, b in ((A, 4), (A, 8), (B, 8))], 4.0),
    ],
)
def test_three_in_a_slot_save_as_pairs_but_take_as_long_as_the_longest(pairs, seconds):
    evaluator = Evaluator(SUMMARY, Profile(provenance=PROVENANCE, rows=ROWS, corun=tuple(pairs)))
    slot = tuple(Task(sub_batch=i, stage=stage, block=0) for i, stage in enumerate((0, 1, 1)))
    assert evaluator.slot_seconds((4, 4, 8), slot) == pytest.approx(seconds)


def test_lower_bound_is_reached_where_nothing_overlaps_and_rows_cost_the_same():
    profile = Profile(provenance=PROVENANCE, rows=ROWS)
    assert lower_bound(SUMMARY, profile, 8) == pytest.approx(24)
