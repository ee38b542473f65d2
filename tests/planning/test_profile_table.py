"""The measured table: look-up, refusals, merging."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pbjax.errors import DeviceError, InputError
from tests.rows import TABLE, A, B, C, corun, profile, row


def test_measured_row_is_returned_as_it_is():
    assert TABLE.seconds(A, 8) == 4.0


def test_size_between_rows_is_interpolated():
    assert TABLE.seconds(A, 4) == 2.0


def test_one_row_costs_what_two_rows_cost():
    assert TABLE.seconds(A, 1) == TABLE.seconds(A, 2)


@given(st.integers(1, 8), st.integers(1, 8))
def test_seconds_rise_where_the_rows_rise(small, large):
    small, large = sorted((small, large))
    assert TABLE.seconds(A, small) <= TABLE.seconds(A, large)


def test_missing_stage_is_named_with_what_to_do():
    with pytest.raises(InputError, match=r"stage='c'.*no row of this stage.*rows of a, b.*measure"):
        TABLE.seconds(C, 4)


def test_size_beyond_the_rows_is_not_extrapolated():
    with pytest.raises(InputError, match=r"stage='a', batch_size=9.*from 2 to 8.*batch size 9"):
        TABLE.seconds(A, 9)


def test_size_below_the_rows_is_not_extrapolated():
    with pytest.raises(InputError, match=r"sizes from 4 to 8 are allowed"):
        profile(row(A, 4), row(A, 8)).seconds(A, 3)


def test_missing_sm_budget_is_named():
    with pytest.raises(InputError, match=r"sm_budget=48.*it has no rows"):
        TABLE.seconds(A, 4, sm_budget=48)


def test_sm_budgets_have_rows_of_their_own():
    table = profile(row(A, 4, 1.0), row(A, 4, 2.0, sm_budget=48))
    assert (table.seconds(A, 4), table.seconds(A, 4, sm_budget=48)) == (1.0, 2.0)


@pytest.mark.parametrize("batch_size", [0, -1])
def test_no_rows_at_all_are_refused(batch_size):
    with pytest.raises(InputError, match=r"1 or more is allowed"):
        TABLE.seconds(A, batch_size)


def test_budgets_of_a_stage_are_those_of_its_rows():
    table = profile(row(A, 2), row(A, 8), row(A, 2, sm_budget=92), row(B, 2))
    assert table.budgets(A) == (0, 92)
    assert table.budgets(B) == (0,)
    assert table.budgets(C) == ()


def test_pair_is_found_in_either_order_with_its_sides_turned():
    (found,) = profile(corun=[corun((A, B), (2, 8), (1.1, 1.2), (40, 92))]).corun_rows(B, A)
    assert found == corun((B, A), (8, 2), (1.2, 1.1), (92, 40))


def test_stage_beside_itself_is_slowed_equally_on_both_sides():
    (found,) = profile(corun=[corun((A, A), (4, 4), (1.0, 1.4))]).corun_rows(A, A)
    assert found.slowdowns == pytest.approx((1.2, 1.2))


# Rows


@pytest.mark.parametrize("median_s", [-1.0, float("nan"), float("inf")])
def test_impossible_seconds_are_refused(median_s):
    with pytest.raises(InputError, match=r"Row\(stage='a'\): median_s is .*finite"):
        row(A, 2, median_s)


def test_size_of_zero_is_refused():
    with pytest.raises(InputError, match=r"batch_size 0"):
        row(A, 0)


def test_impossible_slowdown_is_refused():
    with pytest.raises(InputError, match=r"slowdowns\[0\] is 0;"):
        corun((A, B), (2, 2), (0.0, 1.0))


def test_two_rows_for_one_thing_are_refused():
    with pytest.raises(InputError, match=r"two rows for"):
        profile(row(A, 2, 1.0), row(A, 2, 2.0))


def test_one_pair_in_both_orders_is_one_thing():
    pair, turned = corun((A, B), (2, 8), (1.1, 1.2)), corun((B, A), (8, 2), (1.2, 1.1))
    with pytest.raises(InputError, match=r"two rows for"):
        profile(corun=[pair, turned])


@given(st.permutations([row(s, b) for s in (A, B) for b in (2, 4, 8)]))
def test_order_of_the_rows_changes_nothing(rows):
    table = profile(*rows)
    assert table == profile(*rows[::-1])
    assert [r.batch_size for r in table.rows] == [2, 4, 8, 2, 4, 8]


# Merging


def test_newer_row_wins_whichever_way_tables_are_merged():
    old = profile(row(A, 2, 1.0), row(A, 4, 1.0), date="2025-01-01")
    new = profile(row(A, 4, 2.0), row(A, 8, 2.0), date="2025-06-01")
    for merged in (old.merge(new), new.merge(old)):
        assert [r.median_s for r in merged.rows] == [1.0, 2.0, 2.0]
        assert merged.provenance.date == "2025-06-01"


def test_of_equal_dates_the_merged_table_wins():
    assert profile(row(A, 2, 1.0)).merge(profile(row(A, 2, 2.0))).rows[0].median_s == 2.0


def test_newer_pair_wins_in_either_order_of_its_stages():
    old = profile(corun=[corun((A, B), (2, 8), (1.1, 1.2))])
    new = profile(corun=[corun((B, A), (8, 2), (1.5, 1.4))], date="2025-06-01")
    assert old.merge(new).corun == new.corun


@pytest.mark.parametrize("date", ["2024-01-01", "2026-01-01"])
def test_rows_of_a_burst_give_way_to_those_of_a_long_run(date):
    burst = replace(profile(row(A, 2), date=date), clock="burst")
    long_run = profile(row(A, 4), date="2025-01-01")
    assert burst.merge(long_run) == long_run.merge(burst) == long_run


def test_tables_of_two_devices_do_not_merge():
    with pytest.raises(DeviceError, match=r"'cpu'.*'NVIDIA H200'"):
        profile(row(A, 2)).merge(profile(row(A, 4), device_kind="NVIDIA H200"))


def test_table_without_rows_gives_way_to_another_device():
    other = profile(row(A, 4), device_kind="NVIDIA H200")
    assert profile().merge(other) == other


def test_rows_of_two_jax_versions_name_both():
    merged = profile(row(A, 2), jax="0.11.1").merge(profile(row(A, 4), jax="0.11.2"))
    assert merged.provenance.jax == "0.11.1 + 0.11.2"
    assert merged.merge(profile(row(A, 8), jax="0.11.2")).provenance == merged.provenance
