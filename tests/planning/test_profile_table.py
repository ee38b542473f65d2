"""The measured table: look-up, what pairs save, what is refused, merging."""

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


def test_pair_saves_what_its_slowdowns_leave():
    # together max(4 * 1.25, 2 * 1.5) = 5 of 4 + 2 seconds
    assert TABLE.pair_saving((A, 8), (B, 8)) == pytest.approx(1 / 6)


def test_pair_saving_does_not_depend_on_the_order_of_the_two():
    assert TABLE.pair_saving((A, 8), (B, 5)) == TABLE.pair_saving((B, 5), (A, 8))


def test_pair_without_a_row_saves_nothing():
    assert TABLE.pair_saving((A, 8), (A, 8)) == 0.0


def test_pair_that_is_slower_together_saves_nothing():
    table = profile(row(A, 2), row(B, 2), corun=[corun((A, B), (2, 2), (2.5, 2.5))])
    assert table.pair_saving((A, 2), (B, 2)) == 0.0


def test_pair_within_budgets_may_lose_but_is_no_shorter_than_its_longest_stage():
    rows = [row(s, b, b * 0.1) for s in (A, B) for b in (2, 8)]
    rows += [row(A, b, b * 0.15, sm_budget=92) for b in (2, 8)]
    table = profile(*rows, corun=[corun((A, B), (8, 8), (1.5, 1.0), (92, 0))])
    assert table.pair_saving((A, 8), (B, 8), (92, 0)) == pytest.approx(1 - 1.8 / 1.6)
    assert table.pair_saving((A, 8), (B, 8)) == 0.0
    alone = profile(*rows)
    assert alone.pair_saving((A, 8), (B, 8), (92, 0)) == pytest.approx(1 - 2.0 / 1.6)
    assert alone.budgets(A) == (0, 92)
    assert alone.budgets(B) == (0,)


def test_pair_saving_comes_from_the_nearest_row():
    near, far = corun((A, B), (8, 8), (1.5, 1.5)), corun((A, B), (2, 2), (1.0, 1.0))
    table = profile(row(A, 2), row(A, 8), row(B, 2), row(B, 8), corun=[far, near])
    assert table.pair_saving((A, 6), (B, 6)) == pytest.approx(0.25)
    assert table.pair_saving((A, 3), (B, 3)) == pytest.approx(0.5)


def test_company_makes_no_stage_faster():
    table = profile(row(A, 2), row(B, 2), corun=[corun((A, B), (2, 2), (0.5, 0.5))])
    assert table.pair_saving((A, 2), (B, 2)) == 0.5


def test_stage_beside_itself_is_slowed_equally_on_both_sides():
    rows = (row(A, 2, 1.0), row(A, 8, 1.5))
    table = profile(*rows, corun=[corun((A, A), (4, 4), (1.0, 1.4))])
    assert table.pair_saving((A, 2), (A, 8)) == table.pair_saving((A, 8), (A, 2))


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
