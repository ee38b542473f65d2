"""Folders that are incomplete or damaged: config.json, weights, shards."""

import warnings

import pytest

import models
from models.hf_folder import read_headers
from tests.checkpoints import (
    GOOD,
    NAMES,
    good_tensors,
    make,
    make_sharded,
    refused,
)

# config.json


@pytest.mark.parametrize("value", [0, -1, 1.5, "32", None, True, 2**31])
@pytest.mark.parametrize("name", ["hidden_size", "vocab_size"])
def test_malformed_size_is_refused_by_name(tmp_path, name, value):
    message = refused(make(tmp_path / "m", **{name: value}), models.ConfigError)
    assert f"config.json: {name} is {value!r}" in message


@pytest.mark.parametrize("value", [0, -1e-12, "1e-12", None, True])
def test_malformed_epsilon_is_refused(tmp_path, value):
    message = refused(make(tmp_path / "m", layer_norm_eps=value), models.ConfigError)
    assert f"config.json: layer_norm_eps is {value!r}" in message


@pytest.mark.parametrize(
    ("name", "value", "allowed"),
    [
        ("hidden_act", "relu", "supported are 'gelu', 'gelu_fast'"),
        ("hidden_act", ["gelu"], "supported are 'gelu'"),
        ("is_decoder", True, "only False"),
        ("is_decoder", 1, "only False"),
        ("add_cross_attention", True, "only False"),
        ("is_encoder_decoder", True, "only False"),
        ("position_embedding_type", "relative_key", "only 'absolute'"),
        ("quantization_config", {"bits": 4}, "only None"),
        ("pruned_heads", {"0": [1]}, "only {} or None"),
        ("architectures", ["BertLMHeadModel"], "supported are BertForMaskedLM"),
        ("architectures", ["BertModel", "BertForMaskedLM"], "one alone"),
        ("architectures", "BertModel", "one alone"),
        ("num_attention_heads", 5, "it must divide hidden_size 32"),
    ],
)
def test_unsupported_value_is_refused_by_name(tmp_path, name, value, allowed):
    message = refused(make(tmp_path / "m", **{name: value}), models.ConfigError)
    assert f"config.json: {name} is " in message
    assert allowed in message


@pytest.mark.parametrize("value", ["roberta", None, 3, ...])
def test_unknown_model_type_is_refused(tmp_path, value):
    message = refused(make(tmp_path / "m", model_type=value), models.ConfigError)
    assert "model_type is" in message
    assert "supported are 'bert'" in message


def test_unknown_fields_give_one_warning(tmp_path):
    folder = make(tmp_path / "m", surprise=1, another=2)
    with pytest.warns(models.CheckpointWarning, match="another, surprise") as caught:
        models.load(folder)
    assert len(caught) == 1


def test_fields_of_the_other_major_version_give_no_warning(tmp_path):
    folder = make(
        tmp_path / "m", dtype="float32", torch_dtype=None, tie_word_embeddings=True,
        position_embedding_type=..., gradient_checkpointing=False, id2label={"0": "a"},
    )  # fmt: skip
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        models.load(folder)
    assert not [str(w.message) for w in caught if w.category is models.CheckpointWarning]


@pytest.mark.parametrize("name", ["gelu_new", "gelu_fast", "gelu_pytorch_tanh"])
def test_tanh_names_of_gelu_are_understood(tmp_path, name):
    assert models.load(make(tmp_path / "m", hidden_act=name)).config.activation == "gelu_tanh"


@pytest.mark.parametrize(
    "text",
    [b"", b"{", b"[1]", b"3", b'{"a": 1, "a": 2}', b"\xff\xfe{}", b"[" * 100_000],
    ids=["empty", "open", "list", "number", "twice", "encoding", "deep"],
)
def test_corrupt_config_is_refused(tmp_path, text):
    folder = make(tmp_path / "m")
    (folder / "config.json").write_bytes(text)
    assert "config.json: " in refused(folder)


# Files


def test_absent_folder_is_refused():
    assert "no such folder; a local folder" in refused("bert-base-uncased")
    assert refused("minilm") == (
        "minilm: the name of a preset, which has sizes and no weights; a local folder with"
        " config.json is needed, nothing is downloaded; give the path of the folder"
    )


def test_file_instead_of_a_folder_is_refused():
    assert "a file; a local folder" in refused(GOOD / "model.safetensors")


def test_absent_config_is_refused(tmp_path):
    (make(tmp_path / "m") / "config.json").unlink()
    assert "config.json: no such file" in refused(tmp_path / "m")


def test_absent_weights_are_refused(tmp_path):
    (make(tmp_path / "m") / "model.safetensors").unlink()
    assert "no weights; model.safetensors or" in refused(tmp_path / "m")


@pytest.mark.parametrize(
    "name", ["pytorch_model.bin", "model.pt", "flax_model.msgpack", "tf_model.h5", "m.gguf"]
)
def test_other_formats_are_refused_with_the_recipe(tmp_path, name):
    folder = make(tmp_path / "m")
    (folder / "model.safetensors").rename(folder / name)
    message = refused(folder)
    assert f"weights only as {name}" in message
    assert "save_pretrained(NEW_FOLDER, safe_serialization=True)" in message


@pytest.mark.parametrize("kept", [0, 4, 8, 500, -1])
def test_truncated_file_is_refused(tmp_path, kept):
    file = make(tmp_path / "m") / "model.safetensors"
    file.write_bytes(file.read_bytes()[:kept])
    assert "model.safetensors: not readable as safetensors" in refused(tmp_path / "m")


def test_lfs_pointer_is_recognised(tmp_path):
    file = make(tmp_path / "m") / "model.safetensors"
    file.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")
    assert "git lfs pull" in refused(tmp_path / "m")


# Shards


def first(index):
    return next(iter(index["weight_map"]))


def remap(target):
    def change(index):
        index["weight_map"][first(index)] = target

    return change


@pytest.mark.parametrize(
    "target",
    ["../model.safetensors", "/etc/model.safetensors", "a/b.safetensors", "..\\b.safetensors",
     "", ".safetensors", "weights.bin", 3, None],
)  # fmt: skip
def test_index_that_leaves_the_folder_is_refused(tmp_path, target):
    message = refused(make_sharded(tmp_path / "m", remap(target)))
    assert f"maps to {target!r}; file names have no folder part" in message


def test_absent_shard_is_refused(tmp_path):
    folder = make_sharded(tmp_path / "m")
    name = max(NAMES["index"]["weight_map"].values())
    (folder / name).unlink()
    assert f"file {name} is absent" in refused(folder)


def test_truncated_shard_is_refused(tmp_path):
    folder = make_sharded(tmp_path / "m")
    file = folder / max(NAMES["index"]["weight_map"].values())
    file.write_bytes(file.read_bytes()[:-10])
    assert f"{file.name}: not readable as safetensors" in refused(folder)


def test_tensor_in_another_shard_than_mapped_is_refused(tmp_path):
    def change(index):
        names = sorted(set(index["weight_map"].values()))
        old = index["weight_map"][first(index)]
        index["weight_map"][first(index)] = names[names.index(old) - 1]

    assert f" {first(NAMES['index'])};" in refused(make_sharded(tmp_path / "m", change))


def test_unmapped_tensor_is_refused(tmp_path):
    key = first(NAMES["index"])
    folder = make_sharded(tmp_path / "m", lambda index: index["weight_map"].pop(key))
    assert f"holds unmapped {key}" in refused(folder)


@pytest.mark.parametrize("total_size", [1, 1.5, "87552", [], 10**30])
def test_another_total_size_is_warned_of_and_the_tensors_are_read(tmp_path, total_size):
    folder = make_sharded(
        tmp_path / "m", lambda index: index["metadata"].update(total_size=total_size)
    )
    with pytest.warns(models.CheckpointWarning) as caught:
        headers = read_headers(folder)
    assert str(caught[0].message) == (
        f"{folder}/model.safetensors.index.json: total_size is {total_size!r};"
        " the tensors have 87552 bytes, which are read"
    )
    assert set(headers) == set(good_tensors())


@pytest.mark.parametrize(
    "change",
    [
        lambda index: index.pop("metadata"),
        lambda index: index.update(metadata=None),
        lambda index: index.update(metadata={}),
        lambda index: index.update(metadata={"mergekit_version": "0.1"}),
        lambda index: index["metadata"].update(total_size=None),
        lambda index: index["metadata"].update(total_size=87552.0),
    ],
)
def test_index_without_total_size_is_read_without_a_word(tmp_path, change):
    headers = read_headers(make_sharded(tmp_path / "m", change))
    assert sum(header.num_bytes for header in headers.values()) == 87552


def test_index_without_a_map_is_refused(tmp_path):
    folder = make_sharded(tmp_path / "m", lambda index: index.pop("weight_map"))
    assert "index.json: weight_map" in refused(folder)
