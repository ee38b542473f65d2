"""The good checkpoint of the tests, whole or changed, and how a changed one is refused."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import models

DATA = Path(__file__).parent / "data"
GOOD = DATA / "bert"
NAMES = json.loads((GOOD / "names.json").read_text())
QUERY = "encoder.layer.0.attention.self.query.weight"
REFERENCE = GOOD / "reference.npz"
WORD = "embeddings.word_embeddings.weight"


def good_tensors():
    return load_file(GOOD / "model.safetensors")


def good_config(**change):
    fields = json.loads((GOOD / "config.json").read_text())
    fields |= change
    return {name: value for name, value in fields.items() if value is not ...}


def make(folder, tensors=None, **config):
    """A folder with the good fixture's tensors and configuration, or changed ones."""
    folder.mkdir(exist_ok=True)
    save_file(good_tensors() if tensors is None else tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(good_config(**config)))
    return folder


def make_sharded(folder, change=lambda index: None):
    """The good fixture in the files that transformers would write, with a changed index."""
    folder.mkdir()
    index = json.loads(json.dumps(NAMES["index"]))
    tensors = good_tensors()
    for name in set(index["weight_map"].values()):
        part = {k: v for k, v in tensors.items() if index["weight_map"][k] == name}
        save_file(part, folder / name)
    change(index)
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "config.json").write_text(json.dumps(good_config()))
    return folder


def task_tensors(name):
    """The tensors that a task class saves: the good ones, and random heads."""
    good, generator = good_tensors(), np.random.default_rng(0)
    return {
        key: good[key.removeprefix("bert.")]
        if key.removeprefix("bert.") in good
        else generator.normal(size=shape).astype(np.float32)
        for key, shape in NAMES["classes"][name].items()
    }


def legacy(tensors):
    return {
        key.replace("LayerNorm.weight", "LayerNorm.gamma").replace(
            "LayerNorm.bias", "LayerNorm.beta"
        ): value
        for key, value in tensors.items()
    }


def without(tensors, *keys):
    return {key: value for key, value in tensors.items() if key not in keys}


def refused(folder, kind=models.CheckpointError, **arguments):
    """The message of the error with which a folder is refused."""
    with pytest.raises(models.CheckpointError) as caught:
        models.load(folder, **arguments)
    assert type(caught.value) is kind
    return str(caught.value)


def quiet(_):
    pass


def copy_good(folder, change=None):
    """The good fixture in a new folder, with changed tensors."""
    folder.mkdir()
    shutil.copyfile(GOOD / "config.json", folder / "config.json")
    tensors = load_file(GOOD / "model.safetensors")
    if change:
        change(tensors)
    save_file(tensors, folder / "model.safetensors")
    return folder
