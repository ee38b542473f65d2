"""The search: against the exhaustive one, its edges, its refusals, and that it repeats itself."""

import json
import os
import random
import subprocess
import sys
from hashlib import sha256
from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pbjax.device import ResourceClass
from pbjax.errors import InputError, MemoryBudgetError
from pbjax.profiling import CorunRow, Outline, Profile, Row, StageInfo, grid
from pbjax.schedule import Split
from pbjax.search import SearchOptions, best_staggers, predicted_bytes, search
from pbjax.throughput import evaluate, lower_bound

from .fakes import provenance

PROVENANCE = provenance()
SHAPES = ("rising", "ragged", "plateau", "cliff", "straight")


def stage(name, resource=ResourceClass.CUDA, bytes_per_row=1.0, weight_bytes=0):
    return StageInfo(
        name=name,
        fingerprint=sha256(name.encode()).hexdigest()[:12],
        resource=resource,
        dtype="float32",
        shape=(4,),
        flops_per_row=1.0,
        bytes_per_row=bytes_per_row,
        weight_bytes=weight_bytes,
    )


def row(stage, batch_size, median_s, sm_budget=0):
    return Row(
        stage=stage.name,
        fingerprint=stage.fingerprint,
        resource=stage.resource,
        dtype=stage.dtype,
        batch_size=batch_size,
        shape=stage.shape,
        sm_budget=sm_budget,
        median_s=median_s,
        spread_s=0.0,
        samples=1,
    )


def corun(a, b, sizes, slowdowns, sm_budgets=(0, 0)):
    return CorunRow(
        stages=(a.name, b.name),
        fingerprints=(a.fingerprint, b.fingerprint),
        batch_sizes=sizes,
        sm_budgets=sm_budgets,
        slowdowns=slowdowns,
    )


def program(num_stages, num_blocks=3, has_ends=True):
    classes = list(ResourceClass)
    return Outline(
        prologue=stage("prologue") if has_ends else None,
        block=tuple(stage(f"s{i}", classes[i % 3]) for i in range(num_stages)),
        epilogue=stage("epilogue") if has_ends else None,
        num_blocks=num_blocks,
    )


def curve(chance, shape, sizes):
    """Random seconds over the sizes, of one kind of shape."""
    base, slope = chance.uniform(0, 3), chance.uniform(0.01, 0.2)
    tile, edge = chance.choice((8, 16, 32, 64)), chance.choice(sizes)
    shapes = {
        "rising": lambda b: base + slope * b,
        "ragged": lambda b: chance.uniform(0.2, 1) * (base + slope * b),
        "plateau": lambda b: base + slope * tile * -(-b // tile),
        "cliff": lambda b: (base + slope * b) * (1 if b <= edge else 1.6),
        "straight": lambda b: slope * b,
    }
    return [shapes[shape](b) * 1e-4 for b in sizes]


def random_table(chance, outline, batch_size, num_extra=0):
    """A table of random shape, in which a random part of the pairs saves a random part."""
    extra = chance.sample(range(3, batch_size), num_extra)
    sizes = sorted({*grid(batch_size), *extra})
    shape, share = chance.choice(SHAPES), chance.choice((0, 0.4, 1))
    rows = [
        row(each, size, seconds)
        for each in outline.stages
        for size, seconds in zip(sizes, curve(chance, shape, sizes), strict=True)
    ]
    measured = sorted(chance.sample(sizes, min(3, len(sizes))))
    pairs = [
        corun(a, b, (m, n), (chance.uniform(1, 2.2), chance.uniform(1, 2.2)))
        for i, a in enumerate(outline.stages)
        for b in outline.stages[i:]
        if chance.random() < share
        for m in measured
        for n in measured
        if a is not b or m <= n
    ]
    return Profile(provenance=PROVENANCE, rows=tuple(rows), corun=tuple(pairs))


def with_budgets(chance, outline, profile):
    """The table with rows of stages and pairs of the block at two choices of budgets."""
    sizes = sorted({each.batch_size for each in profile.rows})
    sizes = sizes[chance.randint(0, 1) * (len(sizes) > 3) :]
    rows, pairs = list(profile.rows), list(profile.corun)
    for share in (0.3, 0.7):
        sms = round(132 * share), round(10 * share), 110 - round(110 * share)
        budgets = dict(zip(ResourceClass, sms, strict=True))
        pairs_there = [
            (a, b) for a, b in combinations(outline.block, 2) if a.resource != b.resource
        ]
        for each in {s.name: s for pair in pairs_there for s in pair}.values():
            slower = chance.uniform(1, 1.6)
            rows += [
                row(each, b, slower * profile.seconds(each, b), budgets[each.resource])
                for b in sizes
            ]
        pairs += [
            corun(
                a,
                b,
                (chance.choice(sizes),) * 2,
                (chance.uniform(1, 1.3), chance.uniform(1, 1.3)),
                (budgets[a.resource], budgets[b.resource]),
            )
            for a, b in pairs_there
            if chance.random() < 0.8
        ]
    return Profile(provenance=PROVENANCE, rows=tuple(rows), corun=tuple(pairs))


def table(outline, seconds, *pairs):
    """A table of one curve for all stages, given as {batch size: seconds}."""
    rows = [row(each, b, s) for each in outline.stages for b, s in seconds.items()]
    return Profile(provenance=PROVENANCE, rows=tuple(rows), corun=pairs)


ONE = program(1, num_blocks=1, has_ends=False)
TWO = program(2, num_blocks=4, has_ends=False)


# Quality


@pytest.mark.parametrize(("seed", "num_stages"), [*((seed, 1) for seed in range(10)), (10, 2)])
def test_window_is_within_a_hundredth_of_exhaustive_for_a_tenth_of_the_evaluations(
    seed, num_stages
):
    chance = random.Random(seed)
    outline = program(num_stages, chance.choice((1, 2, 12)), chance.random() < 0.5)
    profile = random_table(chance, outline, 256, chance.choice((0, 0, 30)))
    window = search(outline, profile, 256)
    exhaustive = search(outline, profile, 256, policy="exhaustive")
    assert window.best.prediction.makespan_s <= 1.01 * exhaustive.best.prediction.makespan_s
    assert window.evaluations + window.bounds <= exhaustive.evaluations / 10


@settings(max_examples=20, deadline=None)
@given(st.randoms(use_true_random=False), st.integers(1, 20), st.integers(1, 3))
def test_small_batches_get_the_exhaustive_optimum(chance, batch_size, num_stages):
    outline = program(num_stages, chance.choice((1, 4)), chance.random() < 0.5)
    profile = random_table(chance, outline, batch_size)
    window = search(outline, profile, batch_size)
    exhaustive = search(outline, profile, batch_size, policy="exhaustive")
    assert window.best == exhaustive.best
    for count, candidate in exhaustive.by_count.items():
        found = window.by_count[count].prediction.makespan_s
        assert found == pytest.approx(candidate.prediction.makespan_s)


@pytest.mark.parametrize("seed", range(3))
def test_window_over_budgets_is_within_a_hundredth_of_exhaustive(seed):
    chance = random.Random(seed)
    outline = program(2, chance.choice((1, 12)))
    profile = with_budgets(chance, outline, random_table(chance, outline, 96))
    window = search(outline, profile, 96)
    exhaustive = search(outline, profile, 96, policy="exhaustive")
    assert window.best.prediction.makespan_s <= 1.01 * exhaustive.best.prediction.makespan_s
    assert window.evaluations + window.bounds <= exhaustive.evaluations / 10


@settings(max_examples=15, deadline=None)
@given(st.randoms(use_true_random=False), st.integers(1, 16), st.integers(1, 3))
def test_small_batches_get_the_exhaustive_optimum_of_all_budgets(chance, batch_size, num_stages):
    outline = program(num_stages, chance.choice((1, 4)), chance.random() < 0.5)
    profile = with_budgets(chance, outline, random_table(chance, outline, batch_size))
    window = search(outline, profile, batch_size)
    exhaustive = search(outline, profile, batch_size, policy="exhaustive")
    assert window.best == exhaustive.best
    assert window.best.sm_budgets == exhaustive.best.sm_budgets


@settings(max_examples=8, deadline=None)
@given(st.randoms(use_true_random=False), st.integers(2, 24))
def test_budgets_are_predicted_as_evaluate_does_and_chosen_only_if_faster(chance, batch_size):
    outline = program(2)
    profile = with_budgets(chance, outline, random_table(chance, outline, batch_size))
    result = search(outline, profile, batch_size)
    without = search(outline, profile, batch_size, SearchOptions(sm_budgets={}))
    assert not any(each.sm_budgets for each in without.by_count.values())
    for count, found in result.by_count.items():
        again = evaluate(outline, profile, found.split, found.staggers, sm_budgets=found.sm_budgets)
        assert found.prediction == again
        assert sum(found.sm_budgets.values()) <= 132
        if found.sm_budgets:
            best = without.by_count[count].prediction.makespan_s
            assert found.prediction.makespan_s < best


@settings(max_examples=12, deadline=None)
@given(st.randoms(use_true_random=False), st.integers(1, 300), st.integers(1, 4))
def test_result_is_between_the_bound_and_the_unsplit_program(chance, batch_size, num_stages):
    outline = program(num_stages)
    profile = random_table(chance, outline, batch_size)
    result = search(outline, profile, batch_size)
    best = result.best.prediction.makespan_s
    assert lower_bound(outline, profile, batch_size) <= best * (1 + 1e-9)
    assert best <= result.by_count[1].prediction.makespan_s * (1 + 1e-9)


@settings(max_examples=12, deadline=None)
@given(st.randoms(use_true_random=False), st.integers(2, 200))
def test_candidates_predict_what_evaluate_does(chance, batch_size):
    outline = program(3)
    profile = random_table(chance, outline, batch_size)
    result = search(outline, profile, batch_size)
    for candidate in (*result.by_count.values(), result.runner_up):
        again = evaluate(outline, profile, candidate.split, candidate.staggers)
        assert candidate.prediction == again
        assert candidate.split.batch_size == batch_size


def test_large_batch_is_searched_within_its_evaluations():
    outline = program(6, 12)
    profile = random_table(random.Random(3), outline, 4096)
    result = search(outline, profile, 4096, SearchOptions(max_evaluations=500))
    assert result.evaluations + result.bounds <= 500 + 4 * 91
    assert set(result.by_count) == {1, 2, 3}


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
PAIR = Outline(prologue=None, block=(GEMM, NORM), epilogue=None, num_blocks=4)
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


# Edges


@pytest.mark.parametrize(
    ("batch_size", "counts"), [(1, {1}), (2, {1, 2}), (3, {1, 2, 3}), (4, {1, 2, 3})]
)
@pytest.mark.parametrize("policy", ["window", "exhaustive"])
def test_tiny_batches_have_as_many_sub_batches_as_rows(batch_size, counts, policy):
    profile = table(TWO, {2: 1.0, 4: 1.5})
    result = search(TWO, profile, batch_size, policy=policy)
    assert set(result.by_count) == counts
    assert result.best.split == Split(sizes=(batch_size,))
    assert (result.runner_up is None) == (batch_size == 1)


@pytest.mark.parametrize("batch_size", [0, -3])
def test_batch_without_rows_is_refused(batch_size):
    with pytest.raises(InputError, match=rf"batch size {batch_size}"):
        search(TWO, table(TWO, {2: 1.0, 4: 1.5}), batch_size)


def test_program_of_one_stage_is_searched():
    assert search(ONE, table(ONE, {2: 1.0, 9: 2.0}), 9).best.staggers == (0,)


def test_table_of_zeros_is_searched():
    assert search(TWO, table(TWO, {2: 0.0, 64: 0.0}), 64).best.split == Split(sizes=(64,))


def test_batch_beyond_the_table_is_refused():
    with pytest.raises(InputError, match=r"batch_size=65.*from 2 to 64.*measure"):
        search(TWO, table(TWO, {2: 1.0, 64: 2.0}), 65)


def test_sub_batches_below_the_table_are_no_candidates():
    profile = table(ONE, {16: 0.1, 32: 9.0, 64: 10.0})
    result = search(ONE, profile, 64, policy="exhaustive")
    assert min(min(c.split.sizes) for c in result.by_count.values()) >= 16
    assert search(ONE, profile, 64).best == result.best


def test_missing_stage_is_refused():
    profile = table(ONE, {2: 1.0, 64: 2.0})
    with pytest.raises(InputError, match=r"stage='s1'.*measure"):
        search(TWO, profile, 64)


def test_unknown_policy_is_refused():
    # The run-time type check of the tests would refuse it first.
    unchecked = getattr(search, "__wrapped__", search)
    with pytest.raises(InputError, match=r"'window' and 'exhaustive' are allowed"):
        unchecked(TWO, table(TWO, {2: 1.0, 4: 1.0}), 4, policy="random")


@pytest.mark.parametrize(
    "option",
    [
        {"max_sub_batches": 0},
        {"max_sub_batches": 4},
        {"first_window": 0.0},
        {"decay": 1.0},
        {"saturation_rounds": 0},
        {"epsilon": float("nan")},
        {"max_evaluations": 0},
    ],
)
def test_option_out_of_range_is_refused(option):
    with pytest.raises(InputError, match=next(iter(option))):
        SearchOptions(**option)


# Options


@pytest.mark.parametrize("most", [1, 2, 3])
def test_number_of_sub_batches_can_be_limited(most):
    profile = random_table(random.Random(1), TWO, 64)
    result = search(TWO, profile, 64, SearchOptions(max_sub_batches=most))
    assert set(result.by_count) == set(range(1, most + 1))


def test_fixed_staggers_are_kept_and_the_sizes_fitted_to_them():
    outline = program(3)
    profile = random_table(random.Random(8), outline, 48)
    result = search(outline, profile, 48, SearchOptions(staggers=(2, 0, 1)), policy="exhaustive")
    free = search(outline, profile, 48, policy="exhaustive")
    assert [c.staggers for c in result.by_count.values()] == [(2,), (2, 0), (2, 0, 1)]
    assert result.best.prediction.makespan_s >= free.best.prediction.makespan_s * (1 - 1e-9)


def test_fixed_staggers_give_the_best_order_of_sizes():
    outline = program(3, num_blocks=2)
    profile = random_table(random.Random(4), outline, 12)
    options = SearchOptions(staggers=(2, 0), max_sub_batches=2)
    found = search(outline, profile, 12, options).by_count[2].prediction.makespan_s
    every = [
        evaluate(outline, profile, Split(sizes=(b, 12 - b)), (2, 0)).makespan_s
        for b in range(1, 12)
    ]
    assert found == pytest.approx(min(every))


def test_foreign_fixed_staggers_are_refused():
    with pytest.raises(InputError, match=r"staggers from 0 to 1"):
        search(TWO, table(TWO, {2: 1.0, 4: 1.0}), 4, SearchOptions(staggers=(0, 2)))


def test_given_sizes_keep_their_order_and_get_the_best_staggers():
    outline = program(3, num_blocks=2)
    profile = random_table(random.Random(2), outline, 24)
    split = Split(sizes=(3, 12, 9))
    found = best_staggers(outline, profile, split)
    every = [
        evaluate(outline, profile, split, (a, b, c)).makespan_s
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


# Memory


WIDE, NARROW = stage("wide", bytes_per_row=100.0, weight_bytes=10), stage("narrow", weight_bytes=5)
WIDE_PROGRAM = Outline(prologue=None, block=(WIDE, NARROW), epilogue=None, num_blocks=2)


def test_bytes_are_the_weights_and_the_largest_slot():
    assert predicted_bytes(WIDE_PROGRAM, Split(sizes=(8,)), (0,)) == 30 + 800
    assert predicted_bytes(WIDE_PROGRAM, Split(sizes=(4, 4)), (0, 0)) == 30 + 800
    assert predicted_bytes(WIDE_PROGRAM, Split(sizes=(4, 4)), (0, 1)) == 30 + 404


def test_candidates_over_the_memory_limit_are_dropped():
    profile = table(WIDE_PROGRAM, {2: 1.0, 8: 1.0})
    result = search(WIDE_PROGRAM, profile, 8, SearchOptions(memory_limit_bytes=500))
    assert result.dropped > 0
    assert result.best.split != Split(sizes=(8,))
    for candidate in result.by_count.values():
        assert predicted_bytes(WIDE_PROGRAM, candidate.split, candidate.staggers) <= 500


def test_limit_that_nothing_fits_is_refused_with_the_bytes():
    profile = table(WIDE_PROGRAM, {2: 1.0, 8: 1.0})
    with pytest.raises(MemoryBudgetError, match=r"830 bytes .*100 bytes are allowed"):
        search(WIDE_PROGRAM, profile, 8, SearchOptions(memory_limit_bytes=100))


def test_given_sizes_over_the_limit_are_refused():
    profile = table(WIDE_PROGRAM, {2: 1.0, 8: 1.0})
    with pytest.raises(MemoryBudgetError, match=r"100 bytes are allowed"):
        best_staggers(
            WIDE_PROGRAM, profile, Split(sizes=(4, 4)), SearchOptions(memory_limit_bytes=100)
        )


# Repeatability


def test_shuffled_rows_give_the_same_result():
    outline = program(3)
    profile = random_table(random.Random(6), outline, 200)
    rows, pairs = list(profile.rows), list(profile.corun)
    random.Random(1).shuffle(rows)
    random.Random(2).shuffle(pairs)
    shuffled = Profile(provenance=PROVENANCE, rows=tuple(rows), corun=tuple(pairs))
    first, second = search(outline, profile, 200), search(outline, shuffled, 200)
    assert first.digest == second.digest
    assert first.best == second.best
    assert first.trajectory == second.trajectory


def test_digest_changes_with_program_table_and_options():
    outline, other = program(2), program(2, num_blocks=4)
    profile, changed = (random_table(random.Random(seed), outline, 32) for seed in (1, 2))
    digests = {
        search(outline, profile, 32).digest,
        search(other, profile, 32).digest,
        search(outline, changed, 32).digest,
        search(outline, profile, 31).digest,
        search(outline, profile, 32, SearchOptions(epsilon=0.01)).digest,
        search(outline, with_budgets(random.Random(1), outline, profile), 32).digest,
    }
    assert len(digests) == 6


IN_A_NEW_PROCESS = """
import sys
from pbjax.device import ResourceClass
from pbjax.profiling import Outline, Profile, StageInfo
from pbjax.search import search
profile = Profile.load(sys.argv[1])
rows = {row.stage: row for row in profile.rows}
stages = [
    StageInfo(
        name=name, fingerprint=rows[name].fingerprint, resource=rows[name].resource,
        dtype="float32", shape=(4,), flops_per_row=1.0, bytes_per_row=1.0, weight_bytes=0,
    )
    for name in ("s0", "s1", "s2")
]
outline = Outline(prologue=None, block=tuple(stages), epilogue=None, num_blocks=12)
result = search(outline, profile, 160)
print(result.digest, result.best.split.sizes, result.best.staggers, result.evaluations)
print("jax" in sys.modules, "flax" in sys.modules)
"""


def test_two_processes_decide_alike_whatever_the_order_of_the_file(tmp_path):
    """users.md T1."""
    random_table(random.Random(9), program(3, 12, has_ends=False), 160).save(tmp_path / "0.json")
    document = json.loads((tmp_path / "0.json").read_text())
    random.Random(0).shuffle(document["rows"])
    random.Random(1).shuffle(document["corun"])
    (tmp_path / "1.json").write_text(json.dumps(document))
    lines = []
    for seed in ("0", "1"):
        done = subprocess.run(
            [sys.executable, "-c", IN_A_NEW_PROCESS, str(tmp_path / f"{seed}.json")],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        )
        lines.append(done.stdout.splitlines())
    assert lines[0] == lines[1]
    assert lines[0][1] == "False False"
