"""Which rows of a table are used, and filling what is missing through a timer."""

from dataclasses import replace

import pytest

from pbjax.errors import InputError
from pbjax.planning.profiling import ProgramSummary, Timing, fill, fill_corun, usable_rows
from tests.rows import TABLE, A, B, C, FakeTimer, profile, row, run, runs


def test_own_device_and_version_are_used_without_a_word():
    usable = usable_rows(TABLE, "cpu", "0.11.2")
    assert usable.profile == TABLE
    assert usable.warning is None


def test_rows_of_another_device_are_not_used():
    usable = usable_rows(TABLE, "NVIDIA H200", "0.11.2")
    assert usable.profile.rows == usable.profile.corun == ()
    assert "device_kind differs ('cpu' in the profile, 'NVIDIA H200' here)" in usable.warning


def test_rows_of_another_jax_are_used_with_a_warning():
    usable = usable_rows(TABLE, "cpu", "0.12.0")
    assert usable.profile == TABLE
    assert "jax differs (0.11.2 in the profile, 0.12.0 here)" in usable.warning
    assert "\n" not in usable.warning


def test_rows_of_bursts_are_kept_with_a_warning():
    burst = replace(TABLE, clock="burst")
    usable = usable_rows(burst, "cpu", "0.11.2")
    assert usable.profile == burst
    assert "its seconds are of bursts" in usable.warning


def test_rows_of_bursts_do_not_mix_with_those_of_a_long_run():
    burst, empty = replace(TABLE, clock="burst"), replace(TABLE, rows=(), corun=())
    assert burst.merge(TABLE) == TABLE.merge(burst) == TABLE
    assert burst.merge(empty) == empty
    assert burst.merge(burst) == burst


def test_rows_completed_here_carry_the_provenance_of_here():
    here = profile(jax="0.12.0", date="2025-06-01")
    other_jax = usable_rows(TABLE, "cpu", "0.12.0").profile.merge(here)
    assert other_jax.provenance.jax == "0.11.2 + 0.12.0"
    assert other_jax.rows == TABLE.rows
    gpu = profile(device_kind="NVIDIA H200")
    assert usable_rows(TABLE, "NVIDIA H200", "0.11.2").profile.merge(gpu) == gpu


SUMMARY = ProgramSummary(prologue=C, block=(A, B, A), epilogue=None, num_blocks=12)


def test_each_different_stage_is_measured_once_for_each_size():
    """users.md T6: more blocks measure no more rows."""
    few, many = FakeTimer(), FakeTimer()
    fill(profile(), runs(replace(SUMMARY, num_blocks=2), (2, 8)), few)
    fill(profile(), runs(replace(SUMMARY, num_blocks=24), (2, 8)), many)
    assert few.calls == many.calls
    assert few.calls == [(s, b) for s in ("c", "a", "b") for b in (2, 8)]


def test_only_missing_rows_are_measured():
    timer = FakeTimer()
    filled = fill(TABLE, runs(SUMMARY, (2, 4)), timer)
    assert timer.calls == [("c", 2), ("c", 4), ("a", 4), ("b", 4)]
    assert filled.seconds(A, 8) == 4.0


def test_second_fill_measures_nothing():
    timer = FakeTimer()
    filled = fill(profile(), runs(SUMMARY, (2, 4)), timer)
    timer.calls.clear()
    assert fill(filled, runs(SUMMARY, (4, 2, 1)), timer) == filled
    assert timer.calls == []


def test_size_of_one_is_measured_as_two_and_once():
    timer = FakeTimer()
    fill(profile(), runs(SUMMARY, (1, 2)), timer)
    assert timer.calls == [("c", 2), ("a", 2), ("b", 2)]


def test_measured_seconds_have_four_digits():
    filled = fill(profile(), runs(SUMMARY, (8,)), FakeTimer())
    assert filled.seconds(A, 8) == 9.876e-3


def test_interrupt_keeps_finished_rows():
    kept = []
    with pytest.raises(KeyboardInterrupt):
        fill(profile(), runs(SUMMARY, (2, 8)), FakeTimer(limit=3), on_row=kept.append)
    timer = FakeTimer()
    fill(kept[-1], runs(SUMMARY, (2, 8)), timer)
    assert len(kept[-1].rows) == 3
    assert timer.calls == [("a", 8), ("b", 2), ("b", 8)]


def test_progress_counts_up_to_the_number_of_missing_rows():
    seen = []
    wanted = [*runs(SUMMARY, (2, 4)), run(A, 4, 92)]
    fill(TABLE, wanted, FakeTimer(), progress=lambda *args: seen.append(args))
    assert [done for done, _, _ in seen] == [0, 1, 2, 3, 4, 5]
    assert seen[0] == (0, 5, "c at batch size 2")
    assert seen[-2] == (4, 5, "a at batch size 4 on 92 SMs")


def test_sm_budget_of_a_run_is_written_to_its_row():
    filled = fill(TABLE, runs(SUMMARY, (2,), 48), FakeTimer())
    assert filled.seconds(A, 2, sm_budget=48) == 2.469e-3
    assert filled.seconds(A, 2) == 1.0


def test_timer_that_finds_nonsense_is_refused():
    with pytest.raises(InputError, match=r"median_s is nan"):
        fill(
            profile(),
            runs(SUMMARY, (2,)),
            lambda _: Timing(median_s=float("nan"), spread_s=0.0, samples=0),
        )


def test_only_missing_pairs_are_measured_and_each_once():
    calls = []

    def timer(first, second):
        calls.append((first.stage.name, first.size, second.stage.name, second.size))
        return Timing(median_s=6.0, spread_s=0.0, samples=5)

    pairs = [(run(B, 2), run(A, 8)), (run(A, 8), run(A, 8)), (run(A, 8), run(B, 8))]
    filled = fill_corun(TABLE, pairs, timer)
    assert calls == [("b", 2, "a", 8), ("a", 8, "a", 8)]
    assert filled.corun_rows(B, A)[0].slowdowns == (3.0, 1.5)
    assert {row.slowdowns for row in filled.corun} == {(1.25, 1.5), (3.0, 1.5), (1.5, 1.5)}
    assert fill_corun(filled, [(run(A, 8), run(B, 2))], timer) == filled


def test_pair_within_budgets_is_compared_with_its_stages_within_them():
    table = replace(TABLE, rows=(*TABLE.rows, row(A, 8, 5.0, 92)))
    timing = Timing(median_s=6.0, spread_s=0.0, samples=5)
    filled = fill_corun(table, [(run(A, 8, 92), run(B, 8))], lambda *_: timing)
    (found,) = [each for each in filled.corun if any(each.sm_budgets)]
    assert found.slowdowns == (1.2, 3.0)
    with pytest.raises(InputError, match="sm_budget=40"):
        fill_corun(table, [(run(A, 8), run(B, 8, 40))], lambda *_: timing)


def test_interrupted_pairs_keep_finished_rows():
    kept = []

    def timer(*_):
        if kept:
            raise KeyboardInterrupt
        return Timing(median_s=6.0, spread_s=0.0, samples=5)

    pairs = [(run(A, b), run(B, b)) for b in (2, 4)]
    with pytest.raises(KeyboardInterrupt):
        fill_corun(TABLE, pairs, timer, on_row=kept.append)
    assert len(kept[-1].corun) == len(TABLE.corun) + 1
