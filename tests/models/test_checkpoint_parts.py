import itertools
import json
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

import models
from models import orbax_folder
from models.parameters import fingerprint, parameters_of

DATA = Path(__file__).parents[1] / "data"


@pytest.fixture(scope="module")
def converted(tmp_path_factory):
    target = tmp_path_factory.mktemp("converted") / "ours"
    models.convert(DATA / "bert", target, report=lambda line: None)
    return target


@pytest.fixture(scope="module")
def whole():
    return {p.path: p.value for p in parameters_of(models.load(DATA / "bert"))}


@pytest.fixture(params=["hugging face", "ours"])
def folder(request, converted):
    return converted if request.param == "ours" else DATA / "bert"


@pytest.mark.parametrize("prefix", ["layers.1", "embeddings", "layers.0.mlp.up.kernel", "pooler"])
def test_part_has_the_values_of_the_whole(folder, whole, prefix):
    part = models.load_parameters(folder, prefix)
    assert set(part) == {path for path in whole if f"{path}.".startswith(f"{prefix}.")}
    for path, value in part.items():
        np.testing.assert_array_equal(value, whole[path])


def test_part_is_restored_onto_another_dtype(folder, whole):
    part = models.load_parameters(folder, "layers.0", "bfloat16")
    assert {value.dtype for value in part.values()} == {jnp.dtype("bfloat16")}
    for path, value in part.items():
        np.testing.assert_array_equal(value, whole[path].astype("bfloat16"))


def test_prefix_ends_at_a_dot(folder):
    with pytest.raises(models.CheckpointError, match="no parameter lies below 'layer'"):
        models.load_parameters(folder, "layer")


def test_part_of_a_damaged_folder_is_refused(tmp_path):
    (tmp_path / "config.json").write_bytes((DATA / "bert/config.json").read_bytes())
    whole = (DATA / "bert/model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(whole[:-1])
    with pytest.raises(models.CheckpointError, match="not readable as safetensors"):
        models.load_parameters(tmp_path, "pooler")


def test_progress_of_a_part_counts_its_bytes(folder):
    steps = []
    part = models.load_parameters(
        folder, "layers.0", progress=lambda done, total: steps.append((done, total))
    )
    size = sum(value.nbytes for value in part.values())
    assert steps[0] == (0, size)
    assert steps[-1] == (size, size)


def test_our_folder_is_read_group_by_group(converted, monkeypatch, whole):
    monkeypatch.setattr(orbax_folder, "GROUP_BYTES", 8000)
    steps = []
    module = models.load(converted, progress=lambda done, total: steps.append((done, total)))
    assert fingerprint(module) == fingerprint(models.load(DATA / "bert"))
    size = sum(value.nbytes for value in whole.values())
    assert len(steps) > 5
    assert steps == sorted(steps)
    assert steps[-1] == (size, size)
    most = max(later - earlier for (earlier, _), (later, _) in itertools.pairwise(steps))
    assert most <= max(8000, *(value.nbytes for value in whole.values()))


def test_part_reads_nothing_of_the_rest(converted, monkeypatch):
    asked = []
    restore = orbax_folder.orbax.checkpoint.PyTreeCheckpointer.restore

    def spy(self, place, args):
        asked.extend(args.item)
        return restore(self, place, args=args)

    monkeypatch.setattr(orbax_folder.orbax.checkpoint.PyTreeCheckpointer, "restore", spy)
    part = models.load_parameters(converted, "layers.1.attention")
    assert sorted(asked) == sorted(part)


def test_values_are_copies_of_the_file(tmp_path):
    (tmp_path / "config.json").write_bytes((DATA / "bert/config.json").read_bytes())
    file = tmp_path / "model.safetensors"
    file.write_bytes((DATA / "bert/model.safetensors").read_bytes())
    model = models.load(tmp_path)
    before = fingerprint(model)
    with file.open("r+b") as damaged:
        damaged.write(bytes(file.stat().st_size))
    assert fingerprint(model) == before


def test_config_of_parts_is_checked(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "nothing"}))
    with pytest.raises(models.ConfigError, match="model_type is 'nothing'"):
        models.load_parameters(tmp_path, "layers.0")
