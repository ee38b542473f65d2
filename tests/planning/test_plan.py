"""Plans and the files that hold them: read strictly, written whole or not at all."""

import json
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pbjax.errors import FileError, InputError
from pbjax.files import write_atomically
from pbjax.planning.plan import Plan, Seconds

PLAN = Plan(
    model="bert",
    fingerprint="0123456789ab",
    device_kind="cpu",
    jax="0.11.2",
    batch_size=6,
    sizes=(3, 2, 1),
    staggers=(0, 1, 2),
    unroll=1,
    compiler_options={"a": True, "b": 3, "c": "CONCURRENT"},
    decision="split",
    reason="faster",
    digest="",
    predicted=Seconds(unsplit=2e-3, split=1e-3),
    measured=Seconds(unsplit=2e-3, sequential=2.5e-3, split=1.1e-3),
    max_difference=1e-7,
    date="2026-01-01T00:00:00+00:00",
)


def refused(call, kind):
    with pytest.raises(kind) as error:
        call()
    message = str(error.value)
    assert "\n" not in message
    assert message.count(";") >= 2
    return message


@pytest.mark.parametrize("plan", [PLAN, replace(PLAN, max_difference=None, predicted=Seconds())])
def test_saved_plan_reads_back_equal(tmp_path, plan):
    plan.save(tmp_path / "a" / "plan.json")
    assert Plan.load(tmp_path / "a" / "plan.json") == plan


def test_plan_of_the_schema_before_budgets_has_none(tmp_path):
    def as_version_1(document):
        document["schema_version"] = 1
        del document["plan"]["sm_budgets"]

    assert Plan.load(edited(tmp_path, as_version_1)) == PLAN


@pytest.mark.parametrize(("decision", "options"), [("split", {"a": True}), ("unsplit", {})])
def test_options_of_schema_2_are_those_of_the_split(tmp_path, decision, options):
    """The whole batch then ran without any, as the model is written."""

    def as_version_2(document):
        document["schema_version"] = 2
        document["plan"] |= {"decision": decision, "compiler_options": {"a": True}}
        del document["plan"]["layers"]

    plan = Plan.load(edited(tmp_path, as_version_2))
    assert (plan.decision, plan.compiler_options, plan.layers) == (decision, options, "as given")


@pytest.mark.parametrize("kind", ["NVIDIA H200", "cpu", "NVIDIA of tomorrow"])
def test_budgets_are_kept(tmp_path, kind):
    plan = replace(PLAN, device_kind=kind, sm_budgets={"TENSOR": 84, "MEMORY": 48})
    plan.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == plan


@pytest.mark.parametrize(
    "budgets", [{"TENSOR": 85, "MEMORY": 48}, {"TENSOR": 0}, {"CUDA": -1}, {"tensor": 8}], ids=str
)
def test_budgets_that_the_device_cannot_give_are_refused(budgets):
    message = refused(
        lambda: replace(PLAN, device_kind="NVIDIA H200", sm_budgets=budgets), InputError
    )
    assert "132" in message


def test_path_may_be_text(tmp_path):
    PLAN.save(str(tmp_path / "plan.json"))
    assert Plan.load(str(tmp_path / "plan.json")) == PLAN


def test_equal_plans_are_saved_as_equal_bytes(tmp_path):
    PLAN.save(tmp_path / "a.json")
    replace(PLAN).save(tmp_path / "b.json")
    assert (tmp_path / "a.json").read_bytes() == (tmp_path / "b.json").read_bytes()


@pytest.mark.parametrize(
    ("sizes", "staggers"),
    [
        ((), ()),
        ((3, 2), (0, 1)),
        ((6, 0), (0, 1)),
        ((7, -1), (0, 1)),
        ((3, 3), (0,)),
        ((2, 2, 1, 1), (0, 0, 0, 0)),
    ],
)
def test_sizes_that_are_no_split_of_the_batch_are_refused(sizes, staggers):
    refused(lambda: replace(PLAN, sizes=sizes, staggers=staggers), InputError)


@pytest.mark.parametrize(
    "change", [{"unroll": 0}, {"unroll": -1}, {"sizes": (6,), "staggers": (0,)}], ids=str
)
def test_plan_that_cannot_run_is_refused(change):
    refused(lambda: replace(PLAN, **change), InputError)


def edited(tmp_path, edit):
    PLAN.save(tmp_path / "plan.json")
    document = json.loads((tmp_path / "plan.json").read_text())
    edit(document)
    (tmp_path / "plan.json").write_text(json.dumps(document))
    return tmp_path / "plan.json"


@pytest.mark.parametrize(
    ("edit", "place"),
    [
        (lambda d: d.update(schema_version=4), "schema_version"),
        (lambda d: d.pop("schema_version"), "schema_version"),
        (lambda d: d.update(more=1), "more"),
        (lambda d: d.pop("plan"), "plan"),
        (lambda d: d["plan"].pop("sizes"), "plan.sizes"),
        (lambda d: d["plan"].update(other=1), "plan.other"),
        (lambda d: d["plan"].update(sizes=[3, 3, "0"]), "plan.sizes.2"),
        (lambda d: d["plan"].update(sizes=[3.5, 2.5]), "plan.sizes.0"),
        (lambda d: d["plan"].update(sizes=[3, 2]), "plan"),
        (lambda d: d["plan"].update(batch_size="6"), "plan.batch_size"),
        (lambda d: d["plan"].update(decision="maybe"), "plan.decision"),
        (lambda d: d["plan"].update(sm_budgets={"TENSOR": 8.5}), "plan.sm_budgets.TENSOR"),
        (lambda d: d["plan"].update(sm_budgets={"SM": 8}), "plan"),
        (lambda d: d["plan"]["measured"].update(fast=1.0), "plan.measured.fast"),
        (lambda d: d["plan"]["measured"].update(split="fast"), "plan.measured.split"),
    ],
)
def test_foreign_content_is_refused_with_its_place(tmp_path, edit, place):
    path = edited(tmp_path, edit)
    message = refused(lambda: Plan.load(path), FileError)
    assert f"load({str(path)!r}): {place}: " in message


@pytest.mark.parametrize(
    "content", [b"", b"{", b"[]", b"null", b"\xff\xfe", b"plan", b'{"schema_version": 1}']
)
def test_corrupt_file_is_refused(tmp_path, content):
    (tmp_path / "plan.json").write_bytes(content)
    refused(lambda: Plan.load(tmp_path / "plan.json"), FileError)


@settings(max_examples=30)
@given(share=st.floats(0, 0.99))
def test_truncated_file_is_refused(tmp_path_factory, share):
    path = tmp_path_factory.mktemp("cut") / "plan.json"
    PLAN.save(path)
    content = path.read_bytes().strip()
    path.write_bytes(content[: int(share * len(content))])
    refused(lambda: Plan.load(path), FileError)


def test_missing_file_and_folder_are_refused(tmp_path):
    assert "No such file" in refused(lambda: Plan.load(tmp_path / "none.json"), FileError)
    assert "directory" in refused(lambda: Plan.load(tmp_path), FileError)


def test_plan_that_cannot_be_written_leaves_nothing(tmp_path):
    (tmp_path / "file").write_text("")
    refused(lambda: PLAN.save(tmp_path / "file" / "plan.json"), FileError)
    refused(lambda: PLAN.save(tmp_path), FileError)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_failed_write_keeps_the_old_file(tmp_path, monkeypatch):
    PLAN.save(tmp_path / "plan.json")
    monkeypatch.setattr(
        "pathlib.Path.replace", lambda *_: (_ for _ in ()).throw(OSError(28, "full"))
    )
    message = refused(lambda: replace(PLAN, unroll=2).save(tmp_path / "plan.json"), FileError)
    assert "full" in message
    assert Plan.load(tmp_path / "plan.json") == PLAN
    assert [path.name for path in tmp_path.iterdir()] == ["plan.json"]


def test_text_is_written_as_utf_8(tmp_path):
    write_atomically(tmp_path / "a.txt", "Grüße 🙂\n")
    assert (tmp_path / "a.txt").read_bytes() == "Grüße 🙂\n".encode()
