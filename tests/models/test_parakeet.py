import dataclasses
import json

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import models
from models.keymap import abstract_parameters, count_parameters
from models.numeric import TOLERANCE
from models.parakeet.checkpoint import key_map
from models.parakeet.config import count_frames
from models.parakeet.modules import check_mels, frame_mask
from tests.checkpoints import DATA
from tests.encoders import (
    call,
    changed,
    equations,
    errors,
    errors_of,
    fields_of,
    load,
    make,
    operations,
    reference,
    refused,
    scopes,
    tensors_of,
    trace,
)

NAME = "parakeet"


def mels(batch_size=2):
    """Rows of noise, every second one padded on the right."""
    generator = np.random.default_rng(batch_size)
    mask = np.ones((batch_size, 83), np.int32)
    mask[1::2, 50:] = 0
    values = generator.normal(size=(batch_size, 83, 24)) * mask[:, :, None]
    return {"input_features": values.astype(np.float32), "attention_mask": mask}


def encoder_fields(**change):
    fields = fields_of(NAME)["encoder_config"] | change
    return {name: value for name, value in fields.items() if value is not ...}


# The forward pass


@pytest.mark.parametrize(
    "point", ["hidden_embedding", "hidden_block_0", "last_hidden_state", "logits"]
)
def test_value_agrees_with_transformers(point):
    assert errors_of(NAME)[point] <= TOLERANCE


@pytest.mark.parametrize(
    ("path", "fault"),
    [
        ("encoder.layers.0.convolution.batch_norm.mean", jnp.zeros_like),
        ("encoder.layers.1.convolution.batch_norm.var", jnp.ones_like),
        ("encoder.layers.0.convolution.depthwise", lambda x: x[::-1]),
        ("encoder.layers.0.convolution.depthwise_bias", jnp.zeros_like),
        ("encoder.layers.0.attention.position.kernel", jnp.transpose),
        ("encoder.layers.0.attention.content_bias", jnp.zeros_like),
        ("subsampling.strided.2.kernel", lambda x: x.transpose(1, 0, 2, 3)),
        ("subsampling.strided.1.bias", jnp.zeros_like),
        ("subsampling.pointwise.0.kernel", jnp.transpose),
        ("head.kernel", lambda x: x[::-1]),
    ],
)
def test_wrong_variable_is_noticed(path, fault):
    assert max(errors(changed(load(NAME), **{path: fault}), NAME).values()) > 100 * TOLERANCE


def test_bins_outside_of_channels_are_noticed():
    def swap(kernel):
        return kernel.reshape(6, 3, -1).transpose(1, 0, 2).reshape(kernel.shape)

    found = errors(changed(load(NAME), **{"subsampling.output.kernel": swap}), NAME)
    assert found["hidden_embedding"] > 0.1


@pytest.mark.parametrize(
    ("change", "point"),
    [
        ({"scale_input": False}, "hidden_embedding"),
        ({"masks_convolution": False}, "hidden_block_0"),
    ],
)
def test_wrong_flag_is_noticed(change, point):
    model = load(NAME)
    found = errors(changed(model, dataclasses.replace(model.config, **change)), NAME)
    assert found[point] > 0.01


def test_ignored_mask_is_noticed():
    expected = reference(NAME)
    output = call(load(NAME), input_features=expected.inputs["input_features"])
    difference = np.abs(output.logits - expected.outputs["logits"])
    assert difference[0].max() < 1e-4
    assert difference[1, :7].max() > 0.1


def test_padding_does_not_reach_the_frames_of_a_row():
    given = mels()
    noise = 9 * (1 - given["attention_mask"][:, :, None]).astype(np.float32)
    # The first convolution sees one frame of padding, as it does in transformers.
    noise[:, 50] = 0
    other = given | {"input_features": given["input_features"] + noise}
    one, two = (call(load(NAME), **g).logits for g in (given, other))
    np.testing.assert_array_equal(one[0], two[0])
    np.testing.assert_array_equal(one[1, :7], two[1, :7])


def test_row_does_not_reach_others():
    given = mels()
    values = given["input_features"]
    other = given | {"input_features": np.stack([values[0], -values[1]])}
    one, two = (call(load(NAME), **g).logits for g in (given, other))
    np.testing.assert_array_equal(one[0], two[0])
    assert np.abs(one[1] - two[1]).max() > 0.1


@pytest.mark.parametrize("empty", [0, 1])
def test_row_without_frames_is_finite(empty):
    given = mels()
    given["attention_mask"][empty] = 0
    assert np.isfinite(call(load(NAME), **given).logits).all()


@pytest.mark.parametrize("batch_size", [1, 3, 5])
def test_any_batch_size_traces_to_the_same_operations(batch_size):
    assert operations(load(NAME), **mels(batch_size)) == operations(load(NAME), **mels(2))


def test_every_operation_has_a_scope():
    blocks = {"mlp_before", "attention", "convolution", "mlp_after"}
    assert scopes(load(NAME), **mels()) == {"subsampling", "mask", "positions", "head"} | blocks


def test_bfloat16_products_and_convolutions_stay_in_bfloat16():
    jaxpr = trace(load(NAME, "bfloat16"), **mels())
    kinds = {"dot_general", "conv_general_dilated"}
    found = [e for e in equations(jaxpr.jaxpr) if e.primitive.name in kinds]
    assert {v.aval.dtype for e in found for v in e.invars} == {jnp.dtype("bfloat16")}
    assert {aval.dtype for aval in jaxpr.out_avals} == {jnp.dtype("bfloat16")}


def test_frames_are_counted_as_the_convolutions_make_them():
    config = load(NAME).config
    assert [count_frames(config, length) for length in (1, 8, 9, 50, 83)] == [1, 1, 2, 7, 11]
    mask = np.zeros((3, 83), np.int32)
    mask[0], mask[1, :50] = 1, 1
    assert frame_mask(config, mask).sum(axis=1).tolist() == [11, 7, 0]


def test_more_frames_than_positions_are_computed_as_transformers_does():
    with np.load(DATA / NAME / "long.npz") as file:
        mels, expected = file["eighths"].astype(np.float32) / 8, file["logits"]
    model = load(NAME)
    assert count_frames(model.config, mels.shape[1]) == 38 > model.config.max_seq_len
    logits = call(model, input_features=mels).logits
    np.testing.assert_allclose(logits, expected, atol=2e-5 * expected.std())


@pytest.mark.parametrize(
    ("shape", "mask", "message"),
    [
        ((83, 24), None, r"\[batch, frames, 24\] is needed"),
        ((2, 83, 25), None, r"\[batch, frames, 24\] is needed"),
        ((2, 0, 24), None, "at least one frame"),
        ((2, 83, 24), (2, 11), r"attention_mask\): shape is \(2, 11\)"),
    ],
)
def test_spectrograms_that_do_not_fit_are_refused(shape, mask, message):
    with pytest.raises(models.InputError, match=message):
        check_mels(load(NAME).config, shape, mask)


def test_model_checks_the_shape_of_its_spectrograms():
    with pytest.raises(models.InputError, match=r"shape is \(2, 83, 25\)"):
        load(NAME)(np.zeros((2, 83, 25), np.float32))


# Sizes and configuration


@pytest.mark.parametrize(
    ("config", "total"),
    [
        (models.ParakeetConfig.ctc_0_6b(), 608_799_745),
        (models.ParakeetConfig.ctc_1_1b(), 1_062_540_289),
    ],
    ids=["0.6b", "1.1b"],
)
def test_full_size_model_has_the_known_number_of_parameters(config, total):
    model = nnx.eval_shape(lambda: models.ParakeetModel(config, rngs=nnx.Rngs(0)))
    assert count_parameters(abstract_parameters(model, nnx.Param)) == total
    assert {leaf.path for leaf in key_map(config)} == set(abstract_parameters(model))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_mels": 81}, "num_mels is 81, which the convolutions reduce to 11; a 8th"),
        ({"num_convolutions": 0}, "num_convolutions is 0"),
        ({"vocab_size": -1}, "vocab_size is -1"),
        ({"kernel_size": 8}, "kernel_size is 8"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(change, message):
    with pytest.raises(models.ConfigError, match=message):
        dataclasses.replace(models.ParakeetConfig.ctc_0_6b(), **change)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"subsampling_factor": 6}, "encoder_config: subsampling_factor is 6; a power of two"),
        ({"subsampling_factor": 1}, "subsampling_factor is 1; a power of two"),
        ({"num_key_value_heads": 3}, "num_key_value_heads is 3"),
        ({"scale_input": 1}, "scale_input is 1; true or false"),
        ({"hidden_act": "relu"}, "hidden_act is 'relu'"),
    ],
)
def test_unsupported_field_of_the_encoder_is_refused_by_name(change, message):
    fields = fields_of(NAME, encoder_config=encoder_fields(**change))
    with pytest.raises(models.ConfigError, match=message):
        models.ParakeetConfig.from_hugging_face(fields)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"encoder_config": []}, r"encoder_config is \[\]; an object"),
        ({"vocab_size": 0}, "vocab_size is 0"),
        ({"architectures": ["ParakeetForTDT"]}, "ParakeetForTDT"),
    ],
)
def test_unsupported_field_is_refused_by_name(change, message):
    with pytest.raises(models.ConfigError, match=message):
        models.ParakeetConfig.from_hugging_face(fields_of(NAME, **change))


@pytest.mark.parametrize("name", ["attention_bias", "convolution_bias", "scale_input"])
def test_absent_flag_is_true(name):
    parse = models.ParakeetConfig.from_hugging_face
    absent, present = (
        parse(fields_of(NAME, encoder_config=encoder_fields(**{name: value})))
        for value in (..., True)
    )
    assert absent == present


# Folders


def encoder_alone():
    found = {k: v for k, v in tensors_of(NAME).items() if not k.startswith("ctc_head")}
    return {key.removeprefix("encoder."): value for key, value in found.items()}


def test_encoder_alone_is_read_without_prefix(tmp_path):
    folder = make(tmp_path / "m", NAME, encoder_alone())
    fields = encoder_fields(architectures=["ParakeetEncoder"])
    (folder / "config.json").write_text(json.dumps(fields))
    output = call(models.load(folder), **mels())
    assert output.logits is None
    expected = call(load(NAME), **mels()).last_hidden_state
    np.testing.assert_array_equal(output.last_hidden_state, expected)


def test_file_without_biases_is_read(tmp_path):
    plain = encoder_fields(attention_bias=False, convolution_bias=False)
    without = ("_proj", ".linear1", ".linear2", "wise_conv", "wise_conv1", "wise_conv2")
    endings = tuple(f"{name}.bias" for name in without)
    found = {k: v for k, v in tensors_of(NAME).items() if not k.endswith(endings)}
    model = models.load(make(tmp_path / "m", NAME, found, encoder_config=plain))
    assert model.encoder.layers[0].convolution.depthwise_bias is None
    assert model.encoder.layers[1].mlp_after.down.bias is None
    assert np.isfinite(call(model, **mels()).logits).all()


@pytest.mark.parametrize(
    "key",
    ["subsampling.layers.6.bias", "layers.1.conv.norm.running_var", "layers.0.self_attn.bias_u"],
)
def test_missing_tensor_is_named(tmp_path, key):
    found = tensors_of(NAME)
    del found[f"encoder.{key}"]
    assert f"missing     {key}" in refused(make(tmp_path / "m", NAME, found))


def test_wrong_shape_names_the_field_of_the_section(tmp_path):
    fields = encoder_fields(conv_kernel_size=7)
    message = refused(make(tmp_path / "m", NAME, encoder_config=fields))
    assert "wanted [24, 1, 7] by encoder_config.conv_kernel_size 7" in message
