"""Folders whose tensors are not those of the model: missing, unexpected, of another shape."""

import numpy as np
import pytest

import models
from tests.checkpoints import (
    QUERY,
    WORD,
    good_tensors,
    make,
    refused,
    task_tensors,
    without,
)


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
