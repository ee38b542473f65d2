"""What of a program is measured: sizes, budgets and pairs."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pbjax.device import ResourceClass
from pbjax.planning.profile_grid import paired_runs, single_runs
from pbjax.planning.profiling import ProgramSummary, fill, grid
from tests.rows import A, B, C, FakeTimer, profile, runs

GEMM = replace(A, resource=ResourceClass.TENSOR)
NORM = replace(B, resource=ResourceClass.MEMORY)
KERNELS = ProgramSummary(prologue=C, block=(GEMM, NORM, GEMM), epilogue=None, num_blocks=12)


def test_pairs_are_of_different_classes_without_and_within_budgets():
    pairs = paired_runs(KERNELS, 96, 132, {GEMM.fingerprint, NORM.fingerprint})
    assert all(a.stage is GEMM and b.stage is NORM for a, b in pairs)
    assert {(a.sm_budget, b.sm_budget) for a, b in pairs} == {(0, 0), (92, 40)}
    assert {(a.batch_size, b.batch_size) for a, b in pairs} == {(32, 32), (48, 48)}
    assert len(pairs) == 4


def test_stage_without_kernels_gets_no_budget():
    pairs = paired_runs(KERNELS, 96, 132, {GEMM.fingerprint})
    assert {(a.sm_budget, b.sm_budget) for a, b in pairs} == {(0, 0), (92, 0)}
    assert {
        p for a, b in paired_runs(KERNELS, 96, 132, ()) for p in (a.sm_budget, b.sm_budget)
    } == {0}


@given(st.integers(1, 5000), st.integers(8, 200))
def test_whatever_a_pair_is_compared_with_is_measured_alone(batch_size, num_sms):
    takers = {GEMM.fingerprint, NORM.fingerprint}
    singles = [each.key for each in single_runs(KERNELS, batch_size, num_sms, takers)]
    pairs = paired_runs(KERNELS, batch_size, num_sms, takers)
    assert len(set(singles)) == len(singles)
    assert {each.key for pair in pairs for each in pair} <= set(singles)
    assert {(s.fingerprint, 0, b) for s in KERNELS.stages for b in grid(batch_size)} <= set(singles)
    assert all(a.sm_budget + b.sm_budget in (0, num_sms) for a, b in pairs)


def test_budgets_are_measured_around_half_of_the_batch():
    singles = single_runs(KERNELS, 96, 132, {GEMM.fingerprint, NORM.fingerprint})
    within = {(each.stage.name, each.sm_budget): [] for each in singles if each.sm_budget}
    for each in singles:
        if each.sm_budget:
            within[each.stage.name, each.sm_budget].append(each.size)
    assert set(within) == {("a", 92), ("b", 40)}
    assert all(sizes == [32, 48, 64] for sizes in within.values())


@given(st.integers(1, 100_000))
def test_grid_reaches_from_the_smallest_sub_batch_to_the_batch(batch_size):
    sizes = grid(batch_size)
    assert sizes[0] == 2
    assert sizes[-1] == max(2, batch_size)
    assert list(sizes) == sorted(set(sizes))
    assert len(sizes) <= 8


@pytest.mark.parametrize(
    ("batch_size", "sizes"),
    [(1, (2,)), (2, (2,)), (3, (2, 3)), (96, (2, 12, 16, 24, 32, 48, 64, 96))],
)
def test_grid_prefers_sizes_without_ragged_tiles(batch_size, sizes):
    assert grid(batch_size) == sizes


@given(st.integers(1, 300), st.data())
def test_every_size_up_to_the_batch_has_seconds(batch_size, data):
    summary = ProgramSummary(prologue=None, block=(A,), epilogue=None, num_blocks=1)
    filled = fill(profile(), runs(summary, grid(batch_size)), FakeTimer())
    assert filled.seconds(A, data.draw(st.integers(1, batch_size))) > 0
