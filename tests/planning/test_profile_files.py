"""The measured table as a file: written whole, read strictly, found by device and model."""

import json
import os
import random
import subprocess
import sys
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pbjax.errors import DeviceError, FileError, InputError, PbjaxWarning
from pbjax.planning.profiling import Profile, find_profile
from tests.rows import TABLE, A, B, C, profile, row


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


@pytest.mark.parametrize(("clock", "version"), [("burst", 1), ("long run", 2)])
def test_version_says_at_which_clock_a_table_was_measured(tmp_path, clock, version):
    table = replace(TABLE, clock=clock)
    table.save(tmp_path / "a.json")
    assert json.loads((tmp_path / "a.json").read_text())["schema_version"] == version
    assert Profile.load(tmp_path / "a.json") == table


def edited(tmp_path, edit):
    TABLE.save(tmp_path / "a.json")
    document = json.loads((tmp_path / "a.json").read_text())
    edit(document)
    (tmp_path / "a.json").write_text(json.dumps(document))
    return tmp_path / "a.json"


@pytest.mark.parametrize(
    ("edit", "place"),
    [
        (lambda d: d.update(schema_version=3), r"schema_version: Input should be 1 or 2"),
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
    with pytest.raises(
        FileError, match=r"a\.json.*schema_version 1 or 2 is allowed.*measure again"
    ):
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
    with pytest.raises(InputError, match=r"is not a file name"):
        find_profile("cpu", name)


# Tables that several runs complete


def test_rows_of_another_run_stay(tmp_path):
    path = tmp_path / "new" / "a.json"
    one, other = profile(row(A, 2)), profile(row(B, 2))
    one.save_into(path)
    other.save_into(path)
    replace(one, rows=(*one.rows, row(A, 4))).save_into(path)
    assert Profile.load(path).rows == profile(row(A, 2), row(A, 4), row(B, 2)).rows
    assert os.listdir(path.parent) == ["a.json"]


ADD_ROWS = """
import sys
from dataclasses import replace
from pbjax.planning.profiling import Profile
path, size = sys.argv[1], int(sys.argv[2])
table = Profile.load(path)
for index in range(20):
    first = table.rows[0]
    new = replace(first, batch_size=1000 * size + index, samples=size)
    table = replace(table, rows=(*table.rows, new))
    table.save_into(path)
"""


def test_two_processes_lose_no_row(tmp_path):
    path = tmp_path / "a.json"
    profile(row(A, 2)).save(path)
    command = [sys.executable, "-c", ADD_ROWS, str(path)]
    runs = [subprocess.Popen([*command, size], stderr=subprocess.PIPE) for size in ("1", "2")]
    for run in runs:
        _, errors = run.communicate(timeout=60)
        assert run.returncode == 0, errors.decode()
    expected = {2, *range(1000, 1020), *range(2000, 2020)}
    assert {row.batch_size for row in Profile.load(path).rows} == expected
    assert os.listdir(tmp_path) == ["a.json"]


def test_table_of_another_device_is_not_replaced(tmp_path):
    profile(row(A, 2), device_kind="NVIDIA H200").save(tmp_path / "a.json")
    before = (tmp_path / "a.json").read_bytes()
    with pytest.raises(DeviceError, match="one table is of 'NVIDIA H200'"):
        profile(row(B, 2)).save_into(tmp_path / "a.json")
    assert (tmp_path / "a.json").read_bytes() == before


def test_file_system_without_locks_is_warned_of(tmp_path, monkeypatch):
    def no_locks(*_):
        raise OSError(37, "No locks available")

    monkeypatch.setattr("fcntl.flock", no_locks)
    with pytest.warns(PbjaxWarning, match=r"cannot be locked \(No locks available\): of two runs"):
        profile(row(A, 2)).save_into(tmp_path / "a.json")
    assert Profile.load(tmp_path / "a.json").rows == (row(A, 2),)
