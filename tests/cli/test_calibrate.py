"""The command `pbjax calibrate`: what it prints, what it writes, and who reads it."""

import json
from dataclasses import asdict

import pytest
from typer.testing import CliRunner

from pbjax.cli.app import app
from pbjax.cli.calibrate import ceilings_text
from pbjax.device import find_device
from pbjax.planning.ceilings import Ceilings
from tests.fakes import provenance

HERE = provenance(commit="", date="2026-11-29", command="pbjax calibrate")
FOUND = Ceilings(
    provenance=HERE,
    tensor_flops_per_s={"float32": 2e11},
    cuda_flops_per_s=3e10,
    functions_per_s={"exp": 1e9},
    memory_bytes_per_s=5e9,
    weight_bytes_per_s=6e9,
    launch_s=2e-6,
)


@pytest.fixture
def run(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr("pbjax.tuning.calibration.calibrate", lambda kind, progress: FOUND)
    return lambda *arguments: CliRunner().invoke(app, list(map(str, arguments)))


def test_measured_stands_beside_the_datasheet():
    text = ceilings_text(FOUND, find_device("cpu", num_cores=4))
    (line,) = [line for line in text.splitlines() if line.startswith("product, float32")]
    assert line.split()[2:] == ["0.200", "0.200", "100%", "TFLOP/s"]
    assert "2.000" in next(line for line in text.splitlines() if line.startswith("launch"))


def test_what_was_measured_is_found_by_roofline(run, tmp_path):
    result = run("calibrate")
    assert result.exit_code == 0, result.stderr
    path = tmp_path / "pbjax" / "profiles" / "cpu" / "ceilings.json"
    assert result.stdout.endswith(f"written: {path}\n")
    assert Ceilings.load(path) == FOUND
    sizes = ("--device", "cpu", "--layers", 1, "--batch", 1, "--seq", 8, "--phase", "decode")
    text = " ".join(run("roofline", "gpt2", *sizes).stdout.split())
    assert "measured ceilings, 2026-11-29" in text
    sheet = run("roofline", "gpt2", *sizes, "--peaks", "datasheet")
    assert "measured ceilings" not in " ".join(sheet.stdout.split())


def test_json_and_another_place(run, tmp_path):
    result = run("calibrate", "--out", tmp_path / "mine.json", "--json")
    assert json.loads(result.stdout) == asdict(FOUND)
    assert Ceilings.load(tmp_path / "mine.json") == FOUND


def test_a_corrupt_file_is_named(run, tmp_path):
    path = tmp_path / "pbjax" / "profiles" / "cpu" / "ceilings.json"
    path.parent.mkdir(parents=True)
    path.write_text("{")
    result = run("roofline", "gpt2", "--device", "cpu", "--seq", 8)
    assert result.exit_code == 2
    assert str(path) in result.stderr


def test_a_place_that_cannot_be_written_is_refused_before_anything_is_measured(
    run, tmp_path, monkeypatch
):
    (tmp_path / "file").write_text("")
    monkeypatch.setattr("pbjax.tuning.calibration.calibrate", lambda *_: pytest.fail("it measured"))
    result = run("calibrate", "--out", tmp_path / "file" / "ceilings.json")
    assert result.exit_code == 2
    assert "can be written is allowed" in result.stderr
