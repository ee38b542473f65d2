"""The numeric check of `convert`: against a reference, and for values that are not finite."""

import numpy as np
import pytest

import models
from tests.checkpoints import (
    DATA,
    GOOD,
    QUERY,
    REFERENCE,
    copy_good,
    quiet,
)


def transpose_query(tensors):
    tensors[QUERY] = np.ascontiguousarray(tensors[QUERY].T)


def test_wrong_weights_fail_the_numeric_check(tmp_path):
    source = copy_good(tmp_path / "m", transpose_query)
    with pytest.raises(models.NumericError, match=r"hidden_block_0 .* is allowed"):
        models.convert(source, tmp_path / "out", reference=REFERENCE, report=quiet)
    assert sorted(f.name for f in tmp_path.iterdir()) == ["m"]


def test_reference_of_another_weight_set_fails(tmp_path):
    other = DATA / "bert_default" / "reference.npz"
    with pytest.raises(models.NumericError, match="errors over std are"):
        models.convert(GOOD, tmp_path / "out", reference=other, report=quiet)


def edited_reference(tmp_path, **change):
    arrays = dict(np.load(REFERENCE)) | {name.replace("__", "."): v for name, v in change.items()}
    file = tmp_path / "edited.npz"
    np.savez(file, **{name: value for name, value in arrays.items() if value is not None})
    return file


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"inputs__input_ids": None}, "its inputs are attention_mask, token_type_ids"),
        (
            {
                f"inputs__{name}": np.ones((2, 20), np.int32)
                for name in ("input_ids", "attention_mask", "token_type_ids")
            },
            "the model refuses its inputs",
        ),
        ({"outputs__pooler_output": None}, "it has hidden_block_0"),
        ({"outputs__pooler_output": np.ones((2, 5), np.float32)}, "pooler_output has shape"),
        ({"outputs__pooler_output": np.full((2, 32), np.nan, np.float32)}, "pooler_output nan"),
    ],
)
def test_foreign_reference_fails(tmp_path, change, message):
    file = edited_reference(tmp_path, **change)
    with pytest.raises(models.NumericError, match=message):
        models.convert(GOOD, tmp_path / "out", reference=file, report=quiet)


def test_unreadable_reference_is_refused(tmp_path):
    (tmp_path / "cut.npz").write_bytes(REFERENCE.read_bytes()[:3000])
    for name in ("cut.npz", "absent.npz"):
        with pytest.raises(models.CheckpointError, match=f"{name}: not a readable reference"):
            models.convert(GOOD, tmp_path / "out", reference=tmp_path / name, report=quiet)


def test_reference_without_provenance_is_refused(tmp_path):
    file = edited_reference(tmp_path, meta=None)
    with pytest.raises(models.CheckpointError, match="not a readable reference"):
        models.convert(GOOD, tmp_path / "out", reference=file, report=quiet)


def test_overflowing_forward_pass_fails(tmp_path):
    def enlarge(tensors):
        for key in tensors:
            if "dense" in key:
                tensors[key] *= 1e30

    with pytest.raises(models.NumericError, match="not finite"):
        models.convert(copy_good(tmp_path / "m", enlarge), tmp_path / "out", report=quiet)
    assert not (tmp_path / "out").exists()
