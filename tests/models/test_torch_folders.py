import json
import os
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file
from typer.testing import CliRunner

import models
from models.parameters import fingerprint
from pbjax.cli.app import app
from tests.torch_files import Raw, View, save

DATA = Path(__file__).parents[1] / "data"
NAMES = json.loads((DATA / "bert" / "names.json").read_text())
ONES = np.ones((2, 3), np.float32)


def make(folder, **names):
    """BERT's fixture with its weights in other files."""
    folder.mkdir()
    (folder / "config.json").write_text((DATA / "bert" / "config.json").read_text())
    for name, tensors in names.items():
        save(folder / name, tensors)
    return folder


def bert():
    return load_file(DATA / "bert" / "model.safetensors")


def make_sharded(folder, change=lambda index: None):
    folder.mkdir()
    (folder / "config.json").write_text((DATA / "bert" / "config.json").read_text())
    text = json.dumps(NAMES["index"]).replace("model-", "pytorch_model-")
    index = json.loads(text.replace(".safetensors", ".bin"))
    for name in set(index["weight_map"].values()):
        save(folder / name, {k: v for k, v in bert().items() if index["weight_map"][k] == name})
    change(index)
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    return folder


def folder_refused(folder, **options):
    with pytest.raises(models.CheckpointError) as caught:
        models.load(folder, **options)
    return str(caught.value)


def test_folder_gives_the_same_parameters_as_safetensors(tmp_path):
    folder = make(tmp_path / "m", **{"pytorch_model.bin": bert()})
    loaded = models.load(folder, allow_pickle=True)
    assert fingerprint(loaded) == fingerprint(models.load(DATA / "bert"))


def test_without_the_switch_the_error_names_switch_and_danger(tmp_path):
    folder = make(tmp_path / "m", **{"pytorch_model.bin": bert()})
    message = folder_refused(folder)
    assert "weights only as pytorch_model.bin; only safetensors are read" in message
    assert "a pickle file is a program" in message
    assert "allow_pickle=True (--allow-pickle) reads its tensors without running it" in message


def test_safetensors_are_preferred(tmp_path):
    folder = make(tmp_path / "m", **{"pytorch_model.bin": {"wrong": ONES}})
    (folder / "model.safetensors").write_bytes((DATA / "bert/model.safetensors").read_bytes())
    loaded = models.load(folder, allow_pickle=True)
    assert fingerprint(loaded) == fingerprint(models.load(DATA / "bert"))


def test_switch_does_not_open_other_formats(tmp_path):
    folder = make(tmp_path / "m", **{"model.pt": bert()})
    assert "only safetensors are read; where" in folder_refused(folder, allow_pickle=True)


def test_bfloat16_folder_keeps_its_dtype(tmp_path):
    values = {key: value.astype(ml_dtypes.bfloat16) for key, value in bert().items()}
    folder = make(tmp_path / "m", **{"pytorch_model.bin": values})
    model = models.load(folder, allow_pickle=True)
    expected = models.load(DATA / "bert", "bfloat16")
    assert fingerprint(model) == fingerprint(expected)


def test_sharded_folder_is_read(tmp_path):
    folder = make_sharded(tmp_path / "m")
    loaded = models.load(folder, allow_pickle=True)
    assert fingerprint(loaded) == fingerprint(models.load(DATA / "bert"))


def test_tied_tensor_is_stored_once_and_counted_either_way(tmp_path):
    word = bert()["embeddings.word_embeddings.weight"]
    name = "pytorch_model-00001-of-00001.bin"
    tensors = {f"bert.{k}": v for k, v in bert().items() if "pooler" not in k}
    shared = View(word)
    tensors |= {
        "bert.embeddings.word_embeddings.weight": shared,
        "cls.predictions.decoder.weight": shared,
        "cls.predictions.bias": np.zeros(97, np.float32),
    }
    for key in ("weight", "bias"):
        shape = {"weight": (32, 32), "bias": (32,)}[key]
        tensors[f"cls.predictions.transform.dense.{key}"] = np.zeros(shape, np.float32)
        tensors[f"cls.predictions.transform.LayerNorm.{key}"] = np.zeros(32, np.float32)
    once = sum(v.nbytes for v in tensors.values() if isinstance(v, np.ndarray)) + word.nbytes
    for number, total in enumerate((once, once + word.nbytes)):
        folder = make(tmp_path / str(number), **{name: tensors})
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(
            json.dumps(config | {"architectures": ["BertForMaskedLM"]})
        )
        index = {"metadata": {"total_size": total}, "weight_map": dict.fromkeys(tensors, name)}
        (folder / "pytorch_model.bin.index.json").write_text(json.dumps(index))
        lines = []
        models.load(folder, allow_pickle=True, report=lines.append)
        assert lines[1].endswith("1 tied")


@pytest.mark.parametrize("target", ["../m.bin", "/etc/m.bin", "a/b.bin", ".bin", "m.safetensors"])
def test_index_that_leaves_the_folder_is_refused(tmp_path, target):
    def change(index):
        index["weight_map"][next(iter(index["weight_map"]))] = target

    message = folder_refused(make_sharded(tmp_path / "m", change), allow_pickle=True)
    assert "pytorch_model.bin.index.json: " in message
    assert f"maps to {target!r}; file names have no folder part" in message


def test_absent_shard_is_refused(tmp_path):
    folder = make_sharded(tmp_path / "m")
    next(folder.glob("*.bin")).unlink()
    assert "is absent; every mapped file must exist" in folder_refused(folder, allow_pickle=True)


def test_lfs_pointer_is_recognised(tmp_path):
    folder = make(tmp_path / "m")
    (folder / "pytorch_model.bin").write_text("version https://git-lfs.github.com/spec/v1\n")
    assert "git lfs pull" in folder_refused(folder, allow_pickle=True)


def test_convert_needs_the_switch_too(tmp_path):
    folder = make(tmp_path / "m", **{"pytorch_model.bin": bert()})
    with pytest.raises(models.CheckpointError, match="--allow-pickle"):
        models.convert(folder, tmp_path / "ours", report=lambda line: None)
    assert not (tmp_path / "ours").exists()
    models.convert(folder, tmp_path / "ours", allow_pickle=True, report=lambda line: None)
    expected = fingerprint(models.load(DATA / "bert"))
    assert fingerprint(models.load(tmp_path / "ours")) == expected


def test_refused_pickle_leaves_no_folder(tmp_path):
    value = {"weight": Raw(os.system, ("touch run",))}
    folder = make(tmp_path / "m", **{"pytorch_model.bin": value})
    with pytest.raises(models.CheckpointError, match=r"posix\.system"):
        models.convert(folder, tmp_path / "ours", allow_pickle=True, report=lambda line: None)
    assert [p.name for p in tmp_path.iterdir()] == ["m"]


def test_command_line_has_the_switch(tmp_path):
    folder = make(tmp_path / "m", **{"pytorch_model.bin": bert()})
    arguments = ["convert", str(folder), str(tmp_path / "ours")]
    refusal = CliRunner().invoke(app, arguments)
    assert refusal.exit_code == 2
    assert "(--allow-pickle) reads its tensors" in refusal.stderr
    result = CliRunner().invoke(app, [*arguments, "--allow-pickle"])
    assert result.exit_code == 0, result.output
    assert (tmp_path / "ours" / "config.json").is_file()


def test_command_line_refuses_a_program_by_name(tmp_path):
    value = {"weight": Raw(os.system, ("touch run",))}
    folder = make(tmp_path / "m", **{"pytorch_model.bin": value})
    arguments = ["convert", str(folder), str(tmp_path / "ours"), "--allow-pickle"]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 2
    assert "its pickle asks for posix.system" in result.stderr
