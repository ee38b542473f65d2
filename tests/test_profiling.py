"""The measured table: look-up, merging, files, and filling it through a timer."""

import json
import os
import random
from dataclasses import replace
from hashlib import sha256

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pbjax.device import ResourceClass
from pbjax.errors import DeviceError, FileError, InputError
from pbjax.profile_grid import paired_runs, single_runs
from pbjax.profiling import (
    CorunRow,
    Outline,
    Profile,
    Row,
    Run,
    StageInfo,
    Timing,
    fill,
    fill_corun,
    find_profile,
    grid,
    usable_rows,
)

from .fakes import provenance

PROVENANCE = provenance(command="pbjax profile")


def stage(name):
    return StageInfo(
        name=name,
        fingerprint=sha256(name.encode()).hexdigest()[:12],
        resource=ResourceClass.CUDA,
        dtype="float32",
        shape=(4, 8),
        flops_per_row=1.0,
        bytes_per_row=1.0,
        weight_bytes=0,
    )


A, B, C = stage("a"), stage("b"), stage("c")


def row(stage, batch_size, median_s=1.0, sm_budget=0):
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
        samples=5,
    )


def corun(stages, batch_sizes, slowdowns, sm_budgets=(0, 0)):
    return CorunRow(
        stages=(stages[0].name, stages[1].name),
        fingerprints=(stages[0].fingerprint, stages[1].fingerprint),
        batch_sizes=batch_sizes,
        sm_budgets=sm_budgets,
        slowdowns=slowdowns,
    )


def profile(*rows, corun=(), **provenance):
    return Profile(provenance=replace(PROVENANCE, **provenance), rows=rows, corun=tuple(corun))


TABLE = profile(
    row(A, 2, 1.0),
    row(A, 8, 4.0),
    row(B, 2, 2.0),
    row(B, 8, 2.0),
    corun=[corun((A, B), (8, 8), (1.25, 1.5))],
)


class FakeTimer:
    """Counts its calls; raises when it has answered `limit` times."""

    def __init__(self, limit=1000):
        self.calls = []
        self.limit = limit

    def __call__(self, run):
        if len(self.calls) == self.limit:
            raise KeyboardInterrupt
        self.calls.append((run.stage.name, run.size))
        return Timing(median_s=run.size * 1.23456e-3, spread_s=1e-6, samples=5)


def runs(outline, sizes, sm_budget=0):
    return [
        Run(stage=stage, batch_size=size, sm_budget=sm_budget)
        for stage in outline.stages
        for size in sizes
    ]


def run(stage, size, sm_budget=0):
    return Run(stage=stage, batch_size=size, sm_budget=sm_budget)


# Look-up


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


def test_rows_completed_here_carry_the_provenance_of_here():
    here = profile(jax="0.12.0", date="2025-06-01")
    other_jax = usable_rows(TABLE, "cpu", "0.12.0").profile.merge(here)
    assert other_jax.provenance.jax == "0.11.2 + 0.12.0"
    assert other_jax.rows == TABLE.rows
    gpu = profile(device_kind="NVIDIA H200")
    assert usable_rows(TABLE, "NVIDIA H200", "0.11.2").profile.merge(gpu) == gpu


# Files


def test_saved_table_reads_back_equal(tmp_path):
    TABLE.save(tmp_path / "nvidia_h200" / "bert.json")
    assert Profile.load(tmp_path / "nvidia_h200" / "bert.json") == TABLE


def test_equal_tables_are_saved_as_equal_bytes(tmp_path):
    rows = list(TABLE.rows)
    random.Random(0).shuffle(rows)
    TABLE.save(tmp_path / "a.json")
    replace(TABLE, rows=tuple(rows)).save(tmp_path / "b.json")
    assert (tmp_path / "a.json").read_bytes() == (tmp_path / "b.json").read_bytes()


def test_file_has_the_documented_keys_in_order_and_a_line_for_each_row(tmp_path):
    TABLE.save(tmp_path / "a.json")
    text = (tmp_path / "a.json").read_text()
    assert list(json.loads(text)) == ["schema_version", "provenance", "rows", "corun"]
    assert sum('"median_s"' in line for line in text.splitlines()) == len(TABLE.rows)


def test_empty_table_reads_back_equal(tmp_path):
    profile().save(tmp_path / "a.json")
    assert Profile.load(tmp_path / "a.json") == profile()


def edited(tmp_path, edit):
    TABLE.save(tmp_path / "a.json")
    document = json.loads((tmp_path / "a.json").read_text())
    edit(document)
    (tmp_path / "a.json").write_text(json.dumps(document))
    return tmp_path / "a.json"


@pytest.mark.parametrize(
    ("edit", "place"),
    [
        (lambda d: d.update(schema_version=2), r"schema_version: Input should be 1"),
        (lambda d: d.pop("schema_version"), r"schema_version: Field required"),
        (lambda d: d.pop("rows"), r"rows: Field required"),
        (lambda d: d.update(extra=1), r"extra: "),
        (lambda d: d["rows"][2].update(batch_size="2"), r"rows\.2\.batch_size: .*integer"),
        (lambda d: d["rows"][1].update(batch_size=-2), r"rows\.1: .*batch_size -2"),
        (lambda d: d["rows"][0].update(median_s=float("nan")), r"rows\.0\.median_s: .*finite"),
        (lambda d: d["rows"][0].update(resource="MAGIC"), r"rows\.0\.resource: "),
        (lambda d: d["rows"][0].pop("fingerprint"), r"rows\.0\.fingerprint: .*required"),
        (lambda d: d["rows"].append(d["rows"][0]), r"two rows for"),
        (lambda d: d["corun"][0].update(slowdowns=[1.0]), r"corun\.0\.slowdowns"),
        (lambda d: d["provenance"].update(jax=None), r"provenance\.jax: .*string"),
    ],
)
def test_foreign_content_is_refused_with_its_place(tmp_path, edit, place):
    with pytest.raises(FileError, match=place):
        Profile.load(edited(tmp_path, edit))


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"null", b"\xff\xfe\x00", b"not json"])
def test_corrupt_file_is_refused(tmp_path, content):
    (tmp_path / "a.json").write_bytes(content)
    with pytest.raises(FileError, match=r"a\.json.*schema_version 1 is allowed.*measure again"):
        Profile.load(tmp_path / "a.json")


@given(share=st.floats(0, 0.99))
def test_truncated_file_is_refused(tmp_path_factory, share):
    path = tmp_path_factory.mktemp("cut") / "a.json"
    TABLE.save(path)
    text = path.read_bytes().rstrip()
    path.write_bytes(text[: int(len(text) * share)])
    with pytest.raises(FileError):
        Profile.load(path)


def test_missing_file_is_refused(tmp_path):
    with pytest.raises(FileError, match=r"No such file"):
        Profile.load(tmp_path / "none.json")


def test_failed_save_keeps_the_old_file_and_leaves_no_other(tmp_path, monkeypatch):
    TABLE.save(tmp_path / "a.json")
    before = (tmp_path / "a.json").read_bytes()

    def full_disk(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("pathlib.Path.replace", full_disk)
    with pytest.raises(FileError, match=r"No space left on device"):
        profile(row(C, 2)).save(tmp_path / "a.json")
    assert (tmp_path / "a.json").read_bytes() == before
    assert os.listdir(tmp_path) == ["a.json"]


def test_interrupted_save_leaves_no_file(tmp_path, monkeypatch):
    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("pathlib.Path.replace", interrupt)
    with pytest.raises(KeyboardInterrupt):
        TABLE.save(tmp_path / "a.json")
    assert os.listdir(tmp_path) == []


def test_profile_is_found_in_the_first_folder_that_has_it(tmp_path):
    for folder in ("one", "two"):
        TABLE.save(tmp_path / folder / "cpu" / "bert.json")
    folders = (tmp_path / "none", tmp_path / "one", tmp_path / "two")
    assert find_profile("cpu", "bert", folders) == tmp_path / "one" / "cpu" / "bert.json"
    assert find_profile("cpu", "gpt2", folders) is None


@pytest.mark.parametrize("name", ["../secret", "a/b", "", ".hidden"])
def test_profile_name_is_no_path(name):
    with pytest.raises(InputError, match=r"is no file name"):
        find_profile("cpu", name)


# Measuring


OUTLINE = Outline(prologue=C, block=(A, B, A), epilogue=None, num_blocks=12)


def test_each_different_stage_is_measured_once_for_each_size():
    """users.md T6: more blocks measure no more rows."""
    few, many = FakeTimer(), FakeTimer()
    fill(profile(), runs(replace(OUTLINE, num_blocks=2), (2, 8)), few)
    fill(profile(), runs(replace(OUTLINE, num_blocks=24), (2, 8)), many)
    assert few.calls == many.calls
    assert few.calls == [(s, b) for s in ("c", "a", "b") for b in (2, 8)]


def test_only_missing_rows_are_measured():
    timer = FakeTimer()
    filled = fill(TABLE, runs(OUTLINE, (2, 4)), timer)
    assert timer.calls == [("c", 2), ("c", 4), ("a", 4), ("b", 4)]
    assert filled.seconds(A, 8) == 4.0


def test_second_fill_measures_nothing():
    timer = FakeTimer()
    filled = fill(profile(), runs(OUTLINE, (2, 4)), timer)
    timer.calls.clear()
    assert fill(filled, runs(OUTLINE, (4, 2, 1)), timer) == filled
    assert timer.calls == []


def test_size_of_one_is_measured_as_two_and_once():
    timer = FakeTimer()
    fill(profile(), runs(OUTLINE, (1, 2)), timer)
    assert timer.calls == [("c", 2), ("a", 2), ("b", 2)]


def test_measured_seconds_have_four_digits():
    filled = fill(profile(), runs(OUTLINE, (8,)), FakeTimer())
    assert filled.seconds(A, 8) == 9.876e-3


def test_interrupt_keeps_finished_rows():
    kept = []
    with pytest.raises(KeyboardInterrupt):
        fill(profile(), runs(OUTLINE, (2, 8)), FakeTimer(limit=3), on_row=kept.append)
    timer = FakeTimer()
    fill(kept[-1], runs(OUTLINE, (2, 8)), timer)
    assert len(kept[-1].rows) == 3
    assert timer.calls == [("a", 8), ("b", 2), ("b", 8)]


def test_progress_counts_up_to_the_number_of_missing_rows():
    seen = []
    wanted = [*runs(OUTLINE, (2, 4)), run(A, 4, 92)]
    fill(TABLE, wanted, FakeTimer(), progress=lambda *args: seen.append(args))
    assert [done for done, _, _ in seen] == [0, 1, 2, 3, 4, 5]
    assert seen[0] == (0, 5, "c at batch size 2")
    assert seen[-2] == (4, 5, "a at batch size 4 on 92 SMs")


def test_sm_budget_of_a_run_is_written_to_its_row():
    filled = fill(TABLE, runs(OUTLINE, (2,), 48), FakeTimer())
    assert filled.seconds(A, 2, sm_budget=48) == 2.469e-3
    assert filled.seconds(A, 2) == 1.0


def test_timer_that_finds_nonsense_is_refused():
    with pytest.raises(InputError, match=r"median_s is nan"):
        fill(
            profile(),
            runs(OUTLINE, (2,)),
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


# What is measured


GEMM = replace(A, resource=ResourceClass.TENSOR)
NORM = replace(B, resource=ResourceClass.MEMORY)
KERNELS = Outline(prologue=C, block=(GEMM, NORM, GEMM), epilogue=None, num_blocks=12)


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
    outline = Outline(prologue=None, block=(A,), epilogue=None, num_blocks=1)
    filled = fill(profile(), runs(outline, grid(batch_size)), FakeTimer())
    assert filled.seconds(A, data.draw(st.integers(1, batch_size))) > 0
