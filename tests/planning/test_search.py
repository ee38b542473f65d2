"""The search: against the exhaustive one, its edges, its refusals, and that it repeats itself."""

import json
import os
import random
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pbjax.errors import InputError
from pbjax.planning.profiling import Profile
from pbjax.planning.search import SearchOptions, search
from pbjax.planning.throughput import evaluate
from pbjax.planning.timetable import Split
from tests.search_tables import ONE, PROVENANCE, TWO, program, random_table, table, with_budgets
from tests.throughput_truth import lower_bound

# Quality


@pytest.mark.parametrize(("seed", "num_stages"), [*((seed, 1) for seed in range(10)), (10, 2)])
def test_window_is_within_a_hundredth_of_exhaustive_for_a_tenth_of_the_evaluations(
    seed, num_stages
):
    chance = random.Random(seed)
    summary = program(num_stages, chance.choice((1, 2, 12)), chance.random() < 0.5)
    profile = random_table(chance, summary, 256, chance.choice((0, 0, 30)))
    window = search(summary, profile, 256)
    exhaustive = search(summary, profile, 256, policy="exhaustive")
    assert window.best.prediction.makespan_s <= 1.01 * exhaustive.best.prediction.makespan_s
    assert window.evaluations + window.bounds <= exhaustive.evaluations / 10


@settings(max_examples=20)
@given(st.randoms(use_true_random=False), st.integers(1, 20), st.integers(1, 3))
def test_small_batches_get_the_exhaustive_optimum(chance, batch_size, num_stages):
    summary = program(num_stages, chance.choice((1, 4)), chance.random() < 0.5)
    profile = random_table(chance, summary, batch_size)
    window = search(summary, profile, batch_size)
    exhaustive = search(summary, profile, batch_size, policy="exhaustive")
    assert window.best == exhaustive.best
    for count, candidate in exhaustive.by_count.items():
        found = window.by_count[count].prediction.makespan_s
        assert found == pytest.approx(candidate.prediction.makespan_s)


@pytest.mark.parametrize("seed", range(3))
def test_window_over_budgets_is_within_a_hundredth_of_exhaustive(seed):
    chance = random.Random(seed)
    summary = program(2, chance.choice((1, 12)))
    profile = with_budgets(chance, summary, random_table(chance, summary, 96))
    window = search(summary, profile, 96)
    exhaustive = search(summary, profile, 96, policy="exhaustive")
    assert window.best.prediction.makespan_s <= 1.01 * exhaustive.best.prediction.makespan_s
    assert window.evaluations + window.bounds <= exhaustive.evaluations / 10


@settings(max_examples=15)
@given(st.randoms(use_true_random=False), st.integers(1, 16), st.integers(1, 3))
def test_small_batches_get_the_exhaustive_optimum_of_all_budgets(chance, batch_size, num_stages):
    summary = program(num_stages, chance.choice((1, 4)), chance.random() < 0.5)
    profile = with_budgets(chance, summary, random_table(chance, summary, batch_size))
    window = search(summary, profile, batch_size)
    exhaustive = search(summary, profile, batch_size, policy="exhaustive")
    assert window.best == exhaustive.best
    assert window.best.sm_budgets == exhaustive.best.sm_budgets


@settings(max_examples=8)
@given(st.randoms(use_true_random=False), st.integers(2, 24))
def test_budgets_are_predicted_as_evaluate_does_and_chosen_only_if_faster(chance, batch_size):
    summary = program(2)
    profile = with_budgets(chance, summary, random_table(chance, summary, batch_size))
    result = search(summary, profile, batch_size)
    without = search(summary, profile, batch_size, SearchOptions(sm_budgets={}))
    assert not any(each.sm_budgets for each in without.by_count.values())
    for count, found in result.by_count.items():
        again = evaluate(summary, profile, found.split, found.staggers, sm_budgets=found.sm_budgets)
        assert found.prediction == again
        assert sum(found.sm_budgets.values()) <= 132
        if found.sm_budgets:
            best = without.by_count[count].prediction.makespan_s
            assert found.prediction.makespan_s < best


@settings(max_examples=12)
@given(st.randoms(use_true_random=False), st.integers(1, 300), st.integers(1, 4))
def test_result_is_between_the_bound_and_the_unsplit_program(chance, batch_size, num_stages):
    summary = program(num_stages)
    profile = random_table(chance, summary, batch_size)
    result = search(summary, profile, batch_size)
    best = result.best.prediction.makespan_s
    assert lower_bound(summary, profile, batch_size) <= best * (1 + 1e-9)
    assert best <= result.by_count[1].prediction.makespan_s * (1 + 1e-9)


@settings(max_examples=12)
@given(st.randoms(use_true_random=False), st.integers(2, 200))
def test_candidates_predict_what_evaluate_does(chance, batch_size):
    summary = program(3)
    profile = random_table(chance, summary, batch_size)
    result = search(summary, profile, batch_size)
    for candidate in (*result.by_count.values(), result.runner_up):
        again = evaluate(summary, profile, candidate.split, candidate.staggers)
        assert candidate.prediction == again
        assert candidate.split.batch_size == batch_size


def test_large_batch_is_searched_within_its_evaluations():
    summary = program(6, 12)
    profile = random_table(random.Random(3), summary, 4096)
    result = search(summary, profile, 4096, SearchOptions(max_evaluations=500))
    assert result.evaluations + result.bounds <= 500 + 4 * 91
    assert set(result.by_count) == {1, 2, 3}


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


# Repeatability


def test_shuffled_rows_give_the_same_result():
    summary = program(3)
    profile = random_table(random.Random(6), summary, 200)
    rows, pairs = list(profile.rows), list(profile.corun)
    random.Random(1).shuffle(rows)
    random.Random(2).shuffle(pairs)
    shuffled = Profile(provenance=PROVENANCE, rows=tuple(rows), corun=tuple(pairs))
    first, second = search(summary, profile, 200), search(summary, shuffled, 200)
    assert first.digest == second.digest
    assert first.best == second.best
    assert first.trajectory == second.trajectory


def test_digest_changes_with_program_table_and_options():
    summary, other = program(2), program(2, num_blocks=4)
    profile, changed = (random_table(random.Random(seed), summary, 32) for seed in (1, 2))
    digests = {
        search(summary, profile, 32).digest,
        search(other, profile, 32).digest,
        search(summary, changed, 32).digest,
        search(summary, profile, 31).digest,
        search(summary, profile, 32, SearchOptions(epsilon=0.01)).digest,
        search(summary, with_budgets(random.Random(1), summary, profile), 32).digest,
    }
    assert len(digests) == 6


IN_A_NEW_PROCESS = """
import sys
from pbjax.device import ResourceClass
from pbjax.planning.profiling import Profile, ProgramSummary, StageInfo
from pbjax.planning.search import search
profile = Profile.load(sys.argv[1])
rows = {row.stage: row for row in profile.rows}
stages = [
    StageInfo(
        name=name, fingerprint=rows[name].fingerprint, resource=rows[name].resource,
        dtype="float32", shape=(4,), flops_per_row=1.0, bytes_per_row=1.0, weight_bytes=0,
    )
    for name in ("s0", "s1", "s2")
]
summary = ProgramSummary(prologue=None, block=tuple(stages), epilogue=None, num_blocks=12)
result = search(summary, profile, 160)
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
