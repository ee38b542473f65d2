"""Hugging Face folders that are read: spellings, report, dtypes and values, tokenizer."""

import subprocess
import sys

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import models
from models.parameters import fingerprint
from tests.checkpoints import (
    DATA,
    GOOD,
    NAMES,
    QUERY,
    WORD,
    good_tensors,
    legacy,
    make,
    make_sharded,
    refused,
    task_tensors,
    without,
)


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
    kernel = models.load(folder, "bfloat16").layers[0].attention.query.kernel[...]
    assert kernel[4, 3] == jnp.bfloat16(1e6)


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
    "change", [{"hidden_act": "relu"}, {"model_type": "gpt5"}, {"vocab_size": "many"}]
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


def test_every_exported_name_is_that_of_its_object():
    objects = {name: getattr(models, name) for name in models.__all__ if name != "FAMILIES"}
    assert {name: value.__name__ for name, value in objects.items()} == {n: n for n in objects}
    assert {value.__module__.partition(".")[0] for value in objects.values()} == {"models"}


def test_name_that_is_not_exported_is_refused():
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = models.nothing


def test_fixtures_stay_small():
    assert sum(f.stat().st_size for f in DATA.rglob("*") if f.is_file()) <= 1_500_000
