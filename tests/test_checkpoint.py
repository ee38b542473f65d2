import json
import subprocess
import sys
import warnings
from pathlib import Path

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import models
from models.parameters import fingerprint

DATA = Path(__file__).parent / "data"
GOOD = DATA / "bert"
NAMES = json.loads((GOOD / "names.json").read_text())
QUERY = "encoder.layer.0.attention.self.query.weight"
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


@pytest.fixture(scope="module")
def good_fingerprint():
    return fingerprint(models.load(GOOD))


# Accepted spellings


@pytest.mark.parametrize("spelling", [dict, legacy])
@pytest.mark.parametrize("name", ["BertModel", "BertForSequenceClassification"])
def test_class_with_pooler_gives_the_same_parameters(tmp_path, good_fingerprint, name, spelling):
    folder = make(tmp_path / "m", spelling(task_tensors(name)), architectures=[name])
    assert fingerprint(models.load(folder)) == good_fingerprint


@pytest.mark.parametrize("spelling", [dict, legacy])
def test_pretraining_class_gives_pooler_and_masked_lm_head(tmp_path, spelling):
    tensors = task_tensors("BertForPreTraining")
    folder = make(tmp_path / "m", spelling(tensors), architectures=["BertForPreTraining"])
    model, ids = models.load(folder), np.ones((1, 4), np.int32)
    expected = models.load(GOOD)(ids).pooler_output
    np.testing.assert_array_equal(model(ids).pooler_output, expected)
    head = model.masked_lm_head
    np.testing.assert_array_equal(head.bias[...], tensors["cls.predictions.bias"])
    key = "cls.predictions.transform.dense.weight"
    np.testing.assert_array_equal(head.transform.kernel[...], tensors[key].T)


@pytest.mark.parametrize("name", ["BertForMaskedLM", "BertForQuestionAnswering"])
def test_class_without_pooler_gives_none(tmp_path, name):
    model = models.load(make(tmp_path / "m", task_tensors(name), architectures=[name]))
    ids = np.ones((1, 4), np.int32)
    output = model(ids)
    assert output.pooler_output is None
    expected = models.load(GOOD)(ids).last_hidden_state
    np.testing.assert_array_equal(output.last_hidden_state, expected)


def test_base_model_saved_without_pooler_gives_none(tmp_path):
    tensors = without(good_tensors(), "pooler.dense.weight", "pooler.dense.bias")
    assert models.load(make(tmp_path / "m", tensors)).pooler is None


def test_prefixed_base_model_is_read(tmp_path, good_fingerprint):
    tensors = {f"bert.{key}": value for key, value in good_tensors().items()}
    assert fingerprint(models.load(make(tmp_path / "m", tensors))) == good_fingerprint


def test_position_ids_of_old_files_are_dropped(tmp_path, good_fingerprint):
    tensors = good_tensors() | {"embeddings.position_ids": np.arange(16)[None]}
    lines = []
    model = models.load(make(tmp_path / "m", tensors), report=lines.append)
    assert fingerprint(model) == good_fingerprint
    assert "1 dropped (position_ids 1)" in lines[1]


def test_missing_architectures_mean_the_base_model(tmp_path, good_fingerprint):
    folder = make(tmp_path / "m", architectures=...)
    assert fingerprint(models.load(folder)) == good_fingerprint


def test_sharded_folder_is_read(tmp_path, good_fingerprint):
    assert len(set(NAMES["index"]["weight_map"].values())) > 2
    assert fingerprint(models.load(make_sharded(tmp_path / "m"))) == good_fingerprint


def test_single_file_is_preferred_to_an_index(tmp_path, good_fingerprint):
    folder = make(tmp_path / "m")
    (folder / "model.safetensors.index.json").write_text("broken")
    assert fingerprint(models.load(folder)) == good_fingerprint


def test_linked_files_are_read(tmp_path, good_fingerprint):
    folder = make(tmp_path / "m")
    (folder / "model.safetensors").rename(tmp_path / "blob")
    (folder / "model.safetensors").symlink_to(tmp_path / "blob")
    assert fingerprint(models.load(folder)) == good_fingerprint


# The report


def test_report_of_the_good_fixture():
    lines = []
    models.load(GOOD, report=lines.append)
    total = sum(tensor.size for tensor in good_tensors().values())
    assert lines == [
        "config   bert, BertModel: 2 layers x 32, vocabulary 97",
        "keys     39 read, 0 missing, 0 unexpected, 0 dropped, 0 tied",
        f"params   {total:,}, expected {total:,}",
    ]


def test_report_names_the_dropped_heads(tmp_path):
    lines = []
    name = "BertForPreTraining"
    models.load(make(tmp_path / "m", task_tensors(name), architectures=[name]), report=lines.append)
    assert lines[1].endswith("2 dropped (seq_relationship 2), 0 tied")


def test_report_counts_tied_tensors(tmp_path):
    tensors = task_tensors("BertForMaskedLM")
    tensors["cls.predictions.decoder.weight"] = good_tensors()[WORD]
    tensors["cls.predictions.decoder.bias"] = tensors["cls.predictions.bias"].copy()
    lines = []
    folder = make(tmp_path / "m", tensors, architectures=["BertForMaskedLM"])
    models.load(folder, report=lines.append)
    assert lines[1].endswith("0 dropped, 2 tied")


def test_progress_counts_every_byte_once():
    steps = []
    models.load(GOOD, progress=lambda done, total: steps.append((done, total)))
    tensors = good_tensors()
    size = sum(tensor.nbytes for tensor in tensors.values())
    assert steps[0] == (0, size)
    assert steps[-1] == (size, size)
    assert len(steps) == len(tensors) + 1
    assert steps == sorted(steps)


# Keys and shapes


def test_missing_tensor_is_reported(tmp_path):
    message = refused(make(tmp_path / "m", without(good_tensors(), QUERY)), models.KeyMismatchError)
    assert "38 read, 1 missing, 0 unexpected" in message
    assert f"missing     {QUERY}" in message
    assert message.endswith("numeric  not run")


def test_all_missing_tensors_are_reported_in_order(tmp_path):
    keys = sorted(key for key in good_tensors() if key.startswith("encoder.layer.1."))
    message = refused(make(tmp_path / "m", without(good_tensors(), *keys)), models.KeyMismatchError)
    found = [line.split()[1] for line in message.splitlines() if line.startswith("missing ")]
    assert found == keys


def test_unexpected_tensor_is_reported(tmp_path):
    tensors = good_tensors() | {"encoder.layer.2.output.dense.bias": np.zeros(32, np.float32)}
    message = refused(make(tmp_path / "m", tensors), models.KeyMismatchError)
    assert "39 read, 0 missing, 1 unexpected" in message
    assert "unexpected  encoder.layer.2.output.dense.bias" in message


def test_bare_gamma_is_not_a_norm(tmp_path):
    tensors = good_tensors() | {"encoder.layer.0.gamma": np.zeros(32, np.float32)}
    message = refused(make(tmp_path / "m", tensors), models.KeyMismatchError)
    assert "unexpected  encoder.layer.0.gamma" in message


@pytest.mark.parametrize("part", ["weight", "bias"])
def test_half_a_pooler_is_a_missing_tensor(tmp_path, part):
    tensors = without(good_tensors(), f"pooler.dense.{part}")
    message = refused(make(tmp_path / "m", tensors), models.KeyMismatchError)
    assert f"missing     pooler.dense.{part}" in message


def test_class_with_pooler_needs_it(tmp_path):
    tensors = without(
        task_tensors("BertForPreTraining"), "bert.pooler.dense.weight", "bert.pooler.dense.bias"
    )
    folder = make(tmp_path / "m", tensors, architectures=["BertForPreTraining"])
    assert "2 missing" in refused(folder, models.KeyMismatchError)


@pytest.mark.parametrize(
    ("key", "shape", "blamed"),
    [
        (WORD, (96, 32), r"[96, 32], wanted [97, 32] by vocab_size 97"),
        (QUERY, (32, 31), r"[32, 31], wanted [32, 32] by hidden_size 32"),
        (
            "encoder.layer.1.intermediate.dense.weight",
            (32, 64),
            r"[32, 64], wanted [64, 32] by intermediate_size 64, hidden_size 32",
        ),
        (
            "embeddings.position_embeddings.weight",
            (16, 32, 1),
            r"[16, 32, 1], wanted [16, 32] by max_position_embeddings 16, hidden_size 32",
        ),
    ],
)
def test_wrong_shape_names_the_field_at_fault(tmp_path, key, shape, blamed):
    tensors = good_tensors() | {key: np.zeros(shape, np.float32)}
    message = refused(make(tmp_path / "m", tensors), models.KeyMismatchError)
    assert f"fault       {key} has shape {blamed}" in message


def test_both_spellings_of_a_norm_are_refused(tmp_path):
    key = "embeddings.LayerNorm"
    tensors = good_tensors() | {f"{key}.gamma": np.ones(32, np.float32)}
    message = refused(make(tmp_path / "m", tensors), models.KeyMismatchError)
    assert f"{key}.gamma and {key}.weight are two spellings" in message


def test_half_the_prefixes_are_refused(tmp_path):
    tensors = {
        (f"bert.{key}" if "layer.0" in key else key): value for key, value in good_tensors().items()
    }
    message = refused(make(tmp_path / "m", tensors), models.KeyMismatchError)
    assert "16 tensors have the prefix 'bert.', 23 of the model lack it" in message
    assert "embeddings.LayerNorm.bias, embeddings.LayerNorm.weight," in message


def test_untied_head_is_refused(tmp_path):
    tensors = task_tensors("BertForMaskedLM")
    tensors["cls.predictions.decoder.weight"] = good_tensors()[WORD] * 1.5
    folder = make(tmp_path / "m", tensors, architectures=["BertForMaskedLM"])
    message = refused(folder, models.KeyMismatchError)
    assert (
        "cls.predictions.decoder.weight differs from bert.embeddings.word_embeddings.weight"
        in message
    )


def test_head_that_the_config_unties_is_dropped(tmp_path):
    tensors = task_tensors("BertForMaskedLM")
    tensors["cls.predictions.decoder.weight"] = good_tensors()[WORD] * 1.5
    lines = []
    folder = make(
        tmp_path / "m", tensors, architectures=["BertForMaskedLM"], tie_word_embeddings=False
    )
    model = models.load(folder, report=lines.append)
    assert lines[1].endswith("6 dropped (predictions 6), 0 tied")
    assert model.masked_lm_head is None


def test_half_a_masked_lm_head_is_a_missing_tensor(tmp_path):
    key = "cls.predictions.transform.dense.bias"
    tensors = without(task_tensors("BertForMaskedLM"), key)
    folder = make(tmp_path / "m", tensors, architectures=["BertForMaskedLM"])
    assert f"missing     {key}" in refused(folder, models.KeyMismatchError)


def test_far_too_many_layers_are_refused_at_once(tmp_path):
    message = refused(make(tmp_path / "m", num_hidden_layers=10**9), models.KeyMismatchError)
    assert "39 tensors for 1000000000 layers" in message


# Dtypes and values


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", jnp.bfloat16, np.float16])
def test_tensors_are_rounded_to_the_dtype_asked_for(dtype):
    model = models.load(GOOD, dtype)
    for key, value in (
        (QUERY, model.layers[0].attention.query.kernel[...].T),
        (WORD, model.embeddings.word.embedding[...]),
    ):
        np.testing.assert_array_equal(value, good_tensors()[key].astype(jnp.dtype(dtype)))


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float16])
def test_dtype_of_the_file_is_kept(tmp_path, dtype):
    tensors = {key: value.astype(dtype) for key, value in good_tensors().items()}
    model = models.load(make(tmp_path / "m", tensors))
    assert model.embeddings.word.embedding[...].dtype == dtype
    assert model(np.ones((1, 3), np.int32)).last_hidden_state.dtype == dtype


def test_mixed_dtypes_need_a_choice(tmp_path):
    tensors = good_tensors()
    tensors[QUERY] = tensors[QUERY].astype(np.float16)
    folder = make(tmp_path / "m", tensors)
    assert "tensors are of dtypes float16, float32" in refused(folder)
    assert models.load(folder, "float32").layers[0].attention.query.kernel.dtype == jnp.float32


@pytest.mark.parametrize("dtype", ["float64", "int8", "nonsense", np.int32])
def test_unsupported_dtype_argument_is_refused(dtype):
    assert "supported are float32, float16, bfloat16" in refused(GOOD, dtype=dtype)


@pytest.mark.parametrize("dtype", [np.float64, np.int64, np.int8])
def test_tensor_of_unsupported_dtype_is_refused(tmp_path, dtype):
    tensors = good_tensors()
    tensors[QUERY] = tensors[QUERY].astype(dtype)
    message = refused(make(tmp_path / "m", tensors), models.KeyMismatchError)
    assert f"fault       {QUERY} has dtype" in message


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_value_that_is_not_finite_is_refused(tmp_path, value):
    tensors = good_tensors()
    tensors[QUERY][3, 4] = value
    message = refused(make(tmp_path / "m", tensors))
    assert f"{QUERY} has 1 values that are not finite" in message


def test_value_beyond_the_dtype_is_refused(tmp_path):
    tensors = good_tensors()
    tensors[QUERY][3, 4] = 1e6
    folder = make(tmp_path / "m", tensors)
    assert f"{QUERY} has 1 values beyond float16" in refused(folder, dtype="float16")
    assert models.load(folder, "bfloat16") is not None


# config.json

SIZES = (
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "intermediate_size",
    "vocab_size",
    "max_position_embeddings",
    "type_vocab_size",
)


@pytest.mark.parametrize("name", [*SIZES, "layer_norm_eps", "hidden_act"])
def test_absent_field_is_refused_by_name(tmp_path, name):
    message = refused(make(tmp_path / "m", **{name: ...}), models.ConfigError)
    assert f"config.json: {name} is missing" in message


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


def test_wrong_total_size_is_refused(tmp_path):
    folder = make_sharded(tmp_path / "m", lambda index: index["metadata"].update(total_size=1))
    assert "total_size is 1; both must agree" in refused(folder)


@pytest.mark.parametrize("part", ["metadata", "weight_map"])
def test_incomplete_index_is_refused(tmp_path, part):
    folder = make_sharded(tmp_path / "m", lambda index: index.pop(part))
    assert f"index.json: {part}" in refused(folder)


# The rest


@pytest.mark.parametrize(
    ("kind", "code"),
    [
        (models.CheckpointError, 2),
        (models.ConfigError, 3),
        (models.KeyMismatchError, 4),
        (models.NumericError, 5),
    ],
)
def test_exit_codes(kind, code):
    assert kind.exit_code == code
    assert issubclass(kind, models.CheckpointError)
    assert issubclass(kind, ValueError)


@pytest.mark.parametrize(
    "change", [{"hidden_act": "relu"}, {"model_type": "gpt5"}, {"vocab_size": ...}]
)
def test_message_is_one_line_in_four_parts(tmp_path, change):
    message = refused(make(tmp_path / "m", **change), models.ConfigError)
    assert "\n" not in message
    assert message.count(";") == 2
    assert message.startswith(f"{tmp_path / 'm'}/config.json: ")


def test_tokenizer_comes_as_its_file_says(tmp_path):
    import tokenizers

    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "?": 1}, unk_token="?"))
    tokenizer.enable_truncation(7)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    loaded = models.load_tokenizer(tmp_path)
    assert loaded.encode("a").ids == [0]
    assert loaded.truncation["max_length"] == 7


def test_absent_tokenizer_is_refused(tmp_path):
    with pytest.raises(models.CheckpointError, match=r"tokenizer\.json: no such file"):
        models.load_tokenizer(tmp_path)


@pytest.mark.parametrize("text", [b"", b"{}", b"\xff"])
def test_corrupt_tokenizer_is_refused(tmp_path, text):
    (tmp_path / "tokenizer.json").write_bytes(text)
    with pytest.raises(models.CheckpointError, match="not readable as a tokenizer"):
        models.load_tokenizer(tmp_path)


def test_importing_models_loads_nothing_heavy():
    code = "import models, sys; print({'jax', 'flax', 'numpy'} & set(sys.modules))"
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert result.stdout.strip() == "set()"


def test_every_exported_name_exists():
    assert all(getattr(models, name) is not None for name in models.__all__)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = models.nothing


def test_fixtures_stay_small():
    assert sum(f.stat().st_size for f in DATA.rglob("*") if f.is_file()) <= 1_500_000
