"""Conformers: sizes, configuration, and folders of checkpoints."""

import dataclasses
import json

import numpy as np
import pytest
from flax import nnx

import models
from models.family_config import check_choice
from models.keymap import abstract_parameters, count_parameters
from models.numeric import TOLERANCE
from models.parameters import fingerprint, parameters_of
from models.wav2vec2_conformer.checkpoint import key_map
from tests.encoders import (
    DATA,
    fields_of,
    load,
    make,
    refused,
    tensors_of,
)

NAME = "conformer"
NAMES = json.loads((DATA / NAME / "names.json").read_text())["classes"]
# pos_conv_embed (weight, norm and bias) and masked_spec_embed, which no forward pass uses.
UNUSED = 1024 * 64 * 128 + 128 + 1024 + 1024


def tensors(name="Wav2Vec2ConformerForCTC"):
    """The good fixture's tensors under the names of a class, the rest of them random."""
    good, generator = tensors_of(NAME), np.random.default_rng(0)
    prefix = "wav2vec2_conformer."
    return {
        key: good[key]
        if key in good
        else good.get(f"{prefix}{key}", generator.normal(size=shape).astype(np.float32))
        for key, shape in NAMES[name].items()
    }


# Sizes and configuration


@pytest.mark.parametrize(
    ("config", "total"),
    [
        (models.Wav2Vec2ConformerConfig.large(), 618_591_904),
        (models.Wav2Vec2ConformerConfig.large_rotary(), 593_376_928),
    ],
    ids=["relative", "rotary"],
)
def test_full_size_model_has_the_known_number_of_parameters(config, total):
    model = nnx.eval_shape(lambda: models.Wav2Vec2ConformerModel(config, rngs=nnx.Rngs(0)))
    # The total counts a convolution that is stored, never called, and dropped; see below.
    assert count_parameters(abstract_parameters(model, nnx.Param)) + UNUSED == total
    assert {leaf.path for leaf in key_map(config)} == set(abstract_parameters(model))


def test_statistics_are_no_parameters():
    model = load(NAME)
    shapes, counted = abstract_parameters(model), abstract_parameters(model, nnx.Param)
    assert sorted({path.rpartition(".")[2] for path in set(shapes) - set(counted)}) == [
        "mean",
        "var",
    ]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_layers": 0, "mlp_dim": -1}, "num_layers is 0, mlp_dim is -1"),
        ({"num_heads": 7}, "embed_dim is 1024 with 7 heads"),
        ({"num_heads": 1024, "positions": "rotary"}, "rotary positions need a multiple of 2048"),
        ({"kernel_size": 32}, "kernel_size is 32; only an odd number"),
        ({"conv_kernels": (3, 3)}, "7, 2, 7 convolution dims, kernels and strides"),
        ({"conv_dims": (0,) * 7}, "convolutions have sizes 0"),
        ({"vocab_size": -1}, "vocab_size is -1"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(change, message):
    with pytest.raises(models.ConfigError, match=message):
        dataclasses.replace(models.Wav2Vec2ConformerConfig.large(), **change)


def test_unknown_choice_is_refused():
    config = models.ConformerConfig.conformer_l()
    with pytest.raises(models.ConfigError, match="activation is 'silu'; supported are gelu, tanh;"):
        check_choice(config, "activation", ("gelu", "tanh"))


def test_tiny_config_is_that_of_its_file():
    config = models.Wav2Vec2ConformerConfig.from_hugging_face(fields_of(NAME))
    assert config == models.Wav2Vec2ConformerConfig(
        num_layers=2,
        embed_dim=24,
        mlp_dim=40,
        num_heads=6,
        kernel_size=7,
        positions="relative",
        conv_dims=(12, 16, 20),
        conv_kernels=(10, 3, 2),
        conv_strides=(5, 2, 2),
        conv_bias=True,
        conv_norm="layer",
        vocab_size=13,
        blank_id=3,
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"position_embeddings_type": None}, "position_embeddings_type is None"),
        ({"add_adapter": True}, "add_adapter is True"),
        ({"use_weighted_layer_sum": True}, "use_weighted_layer_sum is True"),
        ({"conv_depthwise_kernel_size": 8}, "conv_depthwise_kernel_size is 8; an odd number"),
        ({"feat_extract_norm": "batch"}, "feat_extract_norm is 'batch'"),
        ({"feat_extract_activation": "relu"}, "feat_extract_activation is 'relu'"),
        ({"hidden_act": "relu"}, "hidden_act is 'relu'"),
        ({"conv_dim": 512}, "conv_dim is 512; a list"),
        ({"conv_stride": [5, 0, 2]}, "conv_stride is 0"),
        ({"conv_kernel": [10, 3]}, "3, 2, 3 convolution dims"),
        ({"vocab_size": None}, "vocab_size is None"),
        ({"pad_token_id": -1}, "pad_token_id is -1"),
        ({"architectures": ["Wav2Vec2ConformerForXVector"]}, "Wav2Vec2ConformerForXVector"),
    ],
)
def test_unsupported_field_is_refused_by_name(change, message):
    with pytest.raises(models.ConfigError, match=message):
        models.Wav2Vec2ConformerConfig.from_hugging_face(fields_of(NAME, **change))


@pytest.mark.parametrize(
    ("name", "default"),
    [("conv_bias", False), ("feat_extract_norm", "group"), ("rotary_embedding_base", 10000)],
)
def test_absent_field_has_the_default_of_transformers(name, default):
    parse = models.Wav2Vec2ConformerConfig.from_hugging_face
    assert parse(fields_of(NAME, **{name: ...})) == parse(fields_of(NAME, **{name: default}))


# Folders


def test_unused_tensors_are_dropped_by_name():
    lines = []
    models.load(DATA / "conformer_rotary", report=lines.append)
    assert lines[0] == (
        "config   wav2vec2-conformer, Wav2Vec2ConformerModel: 2 layers x 24, rotary positions"
    )
    assert lines[1] == (
        "keys     77 read, 0 missing, 0 unexpected, 7 dropped (inv_freq 1, num_batches_tracked 2,"
        " pos_conv_embed 3, masked_spec_embed 1), 0 tied"
    )


@pytest.mark.parametrize("name", ["Wav2Vec2ConformerModel", "Wav2Vec2ConformerForPreTraining"])
def test_features_of_other_classes_are_the_same(tmp_path, name):
    model = models.load(make(tmp_path / "m", NAME, tensors(name), architectures=[name]))
    assert model.head is None
    expected = {
        p.path: p.value for p in parameters_of(load(NAME)) if not p.path.startswith("head.")
    }
    found = {p.path: p.value for p in parameters_of(model)}
    assert found.keys() == expected.keys()
    assert all((found[path] == expected[path]).all() for path in found)


def test_old_spelling_of_weight_norm_is_dropped(tmp_path):
    old = {"original0": "weight_g", "original1": "weight_v"}
    found = {}
    for key, value in tensors().items():
        owner, _, last = key.rpartition(".")
        renamed = f"{owner.removesuffix('.parametrizations.weight')}.{old.get(last, last)}"
        found[renamed] = value
    assert fingerprint(models.load(make(tmp_path / "m", NAME, found))) == fingerprint(load(NAME))


@pytest.mark.parametrize("name", ["running_mean", "running_var"])
def test_missing_statistic_is_named(tmp_path, name):
    key = f"encoder.layers.1.conv_module.batch_norm.{name}"
    found = tensors()
    del found[f"wav2vec2_conformer.{key}"]
    assert f"missing     {key}" in refused(make(tmp_path / "m", NAME, found))


def test_file_without_the_number_of_batches_is_read(tmp_path):
    found = {k: v for k, v in tensors().items() if not k.endswith("num_batches_tracked")}
    assert fingerprint(models.load(make(tmp_path / "m", NAME, found))) == fingerprint(load(NAME))


def test_unknown_tensor_is_unexpected(tmp_path):
    extra = {"wav2vec2_conformer.adapter.proj.weight": np.ones((2, 2), np.float32)}
    message = refused(make(tmp_path / "m", NAME, tensors() | extra))
    assert "unexpected  wav2vec2_conformer.adapter.proj.weight" in message


def test_relative_tensors_do_not_fit_rotary_positions(tmp_path):
    message = refused(make(tmp_path / "m", NAME, tensors(), position_embeddings_type="rotary"))
    assert "6 unexpected" in message
    assert "encoder.layers.0.self_attn.pos_bias_u" in message


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"conv_depthwise_kernel_size": 5}, "wanted [24, 1, 5] by conv_depthwise_kernel_size 5"),
        ({"conv_kernel": [9, 3, 2]}, "wanted [12, 1, 9] by conv_kernel [9, 3, 2]"),
        ({"num_attention_heads": 4}, "wanted [4, 6] by num_attention_heads 4, hidden_size 24"),
        ({"vocab_size": 14}, "wanted [14, 24] by vocab_size 14"),
        ({"intermediate_size": 41}, "wanted [41, 24] by intermediate_size 41"),
    ],
)
def test_wrong_shape_names_the_field_at_fault(tmp_path, change, message):
    assert message in refused(make(tmp_path / "m", NAME, tensors(), **change))


def test_convolution_of_another_width_is_no_linear(tmp_path):
    key = "wav2vec2_conformer.encoder.layers.0.conv_module.pointwise_conv2.weight"
    found = tensors()
    found[key] = np.repeat(found[key], 2, axis=2)
    message = refused(make(tmp_path / "m", NAME, found))
    assert f"{key} has shape [24, 24, 2], wanted [24, 24, 1]" in message


def test_conversion_is_checked_against_the_reference_and_loads_again(tmp_path):
    source = DATA / "conformer"
    report = models.convert(
        source, tmp_path / "m", reference=source / "reference.npz", report=lambda _: None
    )
    assert max(report.numeric.errors.values()) <= TOLERANCE
    again = models.load(tmp_path / "m", verify=True)
    assert again.config == load(NAME).config
    assert fingerprint(again) == fingerprint(load(NAME))
