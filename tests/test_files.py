"""Files of figures: no figure that no measurement gives is read from any of them."""

import argparse
import importlib
import json
import math
import os
from functools import reduce

import pytest

from pbjax.device import ResourceClass
from pbjax.errors import FileError
from pbjax.files import check_writable
from pbjax.planning.plan import Plan
from pbjax.planning.profile_rows import CorunRow, Row
from pbjax.planning.profiling import Profile
from pbjax.roofline.measured_table import MeasuredTable
from pbjax.roofline.measured_table import Row as MeasuredRow
from pbjax.roofline.points import Measured
from tests.planning.test_plan import PLAN

from .fakes import provenance
from .planning.test_ceilings import FOUND

ROW = Row(
    stage="a",
    fingerprint="0",
    resource=ResourceClass.TENSOR,
    dtype="float32",
    batch_size=4,
    shape=(2,),
    sm_budget=0,
    median_s=1e-3,
    spread_s=1e-5,
    samples=5,
)
PAIR = CorunRow(
    stages=("a", "b"),
    fingerprints=("0", "1"),
    batch_sizes=(4, 4),
    sm_budgets=(0, 0),
    slowdowns=(1.1, 1.2),
)
MEASURED = Measured(
    device_kind="cpu",
    seconds=2e-3,
    stages={"mlp": 1e-3},
    kinds={"dense": 1e-3},
    other_s=1e-4,
    calls=3,
)
SAVED = (
    PLAN,
    FOUND,
    Profile(provenance=provenance(), rows=(ROW,), corun=(PAIR,)),
    MeasuredTable(
        provenance=provenance(),
        rows=(
            MeasuredRow(model="m", phase="decode", items=1, tokens=1, cached=8, measured=MEASURED),
        ),
    ),
)


def figures(document, place=()):
    """Places of all figures with a point in a document."""
    if isinstance(document, float):
        yield place
    items = document.items() if isinstance(document, dict) else ()
    items = enumerate(document) if isinstance(document, list) else items
    for key, value in items:
        yield from figures(value, (*place, key))


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, -1.0])
@pytest.mark.parametrize("saved", SAVED, ids=lambda saved: type(saved).__name__)
def test_a_figure_that_no_measurement_gives_is_refused_by_its_name(saved, value, tmp_path):
    path = tmp_path / "file.json"
    saved.save(path)
    assert type(saved).load(path) == saved
    text = path.read_text()
    places = list(figures(json.loads(text)))
    assert len(places) >= 3
    for place in places:
        document = json.loads(text)
        reduce(lambda part, key: part[key], place[:-1], document)[place[-1]] = value
        path.write_text(json.dumps(document))
        with pytest.raises(FileError) as error:
            type(saved).load(path)
        names = [key for key in place if isinstance(key, str)]
        assert names[-1] in str(error.value)


def test_a_number_too_large_for_a_float_is_refused(tmp_path):
    path = tmp_path / "plan.json"
    PLAN.save(path)
    path.write_text(path.read_text().replace("0.0011", "1e999"))
    with pytest.raises(FileError, match=r"measured\.split: Input should be a finite number"):
        Plan.load(path)


# Where something is to be written


def left(folder):
    return sorted(path.name for path in folder.rglob("*"))


@pytest.mark.parametrize("folder", [False, True])
def test_a_place_that_can_be_written_is_left_as_it_was(tmp_path, folder):
    check_writable("--out", tmp_path / "new" / "deep" / "place", folder=folder)
    assert left(tmp_path) == []
    check_writable("--out", None, folder=folder)
    check_writable("--out", tmp_path, folder=True)
    (tmp_path / "file").write_text("kept")
    check_writable("--out", tmp_path / "file")
    assert left(tmp_path) == ["file"]
    assert (tmp_path / "file").read_text() == "kept"


def test_a_pipe_is_written_into_and_stays_one(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with os.fdopen(os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)) as reader:
        check_writable("--out", pipe)
        PLAN.save(pipe)
        assert json.loads(reader.read())["plan"]["model"] == PLAN.model
    assert pipe.is_fifo()
    assert left(tmp_path) == ["pipe"]


def test_a_link_stays_one_and_its_file_is_written(tmp_path):
    (tmp_path / "folder").mkdir()
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "folder" / "plan.json")
    PLAN.save(link)
    PLAN.save(link)
    assert link.is_symlink()
    assert Plan.load(tmp_path / "folder" / "plan.json") == PLAN
    assert left(tmp_path) == ["folder", "link", "plan.json"]


@pytest.mark.parametrize(
    ("place", "folder", "found"),
    [
        ("file/in", False, "Not a directory|File exists"),
        ("file/in", True, "Not a directory|File exists"),
        ("file", True, "Not a directory|File exists"),
        ("folder", False, "Is a directory"),
        ("n" * 300, False, "File name too long"),
    ],
)
def test_a_place_that_cannot_be_written_is_refused_with_its_option(tmp_path, place, folder, found):
    (tmp_path / "file").write_text("kept")
    (tmp_path / "folder").mkdir()
    message = rf"--out .*{place[:9]}.*: ({found}); a .* that can be written is allowed; choose"
    with pytest.raises(FileError, match=message):
        check_writable("--out", tmp_path / place, folder=folder)
    assert left(tmp_path) == ["file", "folder"]


@pytest.mark.parametrize(("text", "found"), [("", "it is empty"), ("-", "- is neither standard")])
@pytest.mark.parametrize("kind", ["new_file", "new_folder"])
def test_scripts_refuse_an_empty_place_and_a_dash(kind, text, found, monkeypatch):
    monkeypatch.syspath_prepend("scripts")
    with pytest.raises(argparse.ArgumentTypeError, match=found):
        getattr(importlib.import_module("benchmarks.output_paths"), kind)(text)
