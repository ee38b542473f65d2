"""`pbjax convert`: what it writes, and what it leaves alone."""

import json
import shutil
from pathlib import Path

import jax.numpy as jnp
import numpy as np
from typer.testing import CliRunner

import models
from pbjax.cli.app import app

FOLDER = Path(__file__).parents[1] / "data" / "bert"


def invoke(*arguments):
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def test_what_is_written_loads(tmp_path):
    result = invoke("convert", FOLDER, tmp_path / "out", "--json")
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)
    found = models.load(tmp_path / "out")(jnp.ones((1, 4), jnp.int32)).last_hidden_state
    expected = models.load(FOLDER)(jnp.ones((1, 4), jnp.int32)).last_hidden_state
    np.testing.assert_array_equal(found, expected)


def test_text_is_printed(tmp_path):
    result = invoke("convert", FOLDER, tmp_path / "out")
    assert result.exit_code == 0, result.output
    assert result.stdout.strip()


def test_a_broken_folder_leaves_nothing(tmp_path):
    broken = tmp_path / "broken"
    shutil.copytree(FOLDER, broken)
    weights = (broken / "model.safetensors").read_bytes()
    (broken / "model.safetensors").write_bytes(weights[: len(weights) // 2])
    result = invoke("convert", broken, tmp_path / "out", "--json")
    assert result.exit_code in (2, 4)
    assert result.stdout == ""
    assert result.stderr.splitlines()[-1].startswith("error: ")
    assert [path.name for path in tmp_path.iterdir()] == ["broken"]


def test_a_folder_is_not_overwritten(tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine.txt").write_text("mine")
    result = invoke("convert", FOLDER, tmp_path / "out", "--json")
    assert result.exit_code == 2
    assert result.stderr.splitlines()[-1].startswith("error: ")
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["mine.txt"]
