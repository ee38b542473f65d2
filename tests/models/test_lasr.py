import dataclasses
import json

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import models
from models.conformer.convolution import depthwise_convolution
from models.kernels import HOPPER, with_kernels
from models.keymap import abstract_parameters, count_parameters
from models.lasr.checkpoint import key_map
from models.lasr.config import count_frames, least_frames
from models.lasr.modules import check_mels, frame_mask
from models.numeric import TOLERANCE
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

NAME = "lasr"
VALUES = ["hidden_embedding", "hidden_block_0", "last_hidden_state", "logits"]


def mels(batch_size=2):
    """Rows of noise, every second one padded on the right."""
    generator = np.random.default_rng(batch_size)
    mask = np.ones((batch_size, 83), np.int32)
    mask[1::2, 50:] = 0
    values = generator.normal(size=(batch_size, 83, 16)) * mask[:, :, None]
    return {"input_features": values.astype(np.float32), "attention_mask": mask}


def encoder_fields(**change):
    fields = fields_of(NAME)["encoder_config"] | change
    return {name: value for name, value in fields.items() if value is not ...}


# The forward pass


@pytest.mark.parametrize("point", VALUES)
def test_value_agrees_with_transformers(point):
    assert errors_of(NAME)[point] <= TOLERANCE


def test_every_value_of_the_reference_is_compared():
    assert sorted(errors_of(NAME)) == sorted(VALUES)


def test_reference_has_an_even_kernel_odd_lengths_and_padding():
    given = reference(NAME).inputs
    assert load(NAME).config.kernel_size % 2 == 0
    assert given["attention_mask"].sum(axis=1).tolist() == [83, 50]


@pytest.mark.parametrize(
    ("path", "fault"),
    [
        ("layers.0.convolution.batch_norm.mean", jnp.zeros_like),
        ("layers.1.convolution.batch_norm.var", jnp.ones_like),
        ("layers.0.convolution.depthwise", lambda x: x[::-1]),
        ("layers.0.convolution.depthwise", lambda x: jnp.roll(x, 1, axis=0)),
        ("layers.0.attention.query.kernel", jnp.transpose),
        ("layers.1.attention.output.kernel", jnp.transpose),
        ("layers.0.mlp_before.norm.scale", jnp.ones_like),
        ("subsampling.strided.0.kernel", lambda x: x[::-1]),
        ("subsampling.strided.0.kernel", lambda x: x.transpose(0, 2, 1)),
        ("subsampling.strided.1.bias", jnp.zeros_like),
        ("norm.scale", jnp.ones_like),
        ("head.kernel", lambda x: x[::-1]),
    ],
)
def test_wrong_variable_is_noticed(path, fault):
    assert max(errors(changed(load(NAME), **{path: fault}), NAME).values()) > 100 * TOLERANCE


@pytest.mark.parametrize(
    "change",
    [
        {"mlp_residual": (1.25, 0.5)},
        {"mlp_residual": (1.5, 0.625)},
        {"convolution_residual": (1.75, 1.0)},
        {"convolution_residual": (2.0, 0.875)},
        {"rotary_base": 1000.0},
        {"norm_eps": 1e-6},
        {"activation": "gelu"},
    ],
)
def test_wrong_constant_is_noticed(change):
    model = load(NAME)
    found = errors(changed(model, dataclasses.replace(model.config, **change)), NAME)
    assert found["last_hidden_state"] > 2 * TOLERANCE


def test_ignored_mask_is_noticed():
    expected = reference(NAME)
    output = call(load(NAME), input_features=expected.inputs["input_features"])
    difference = np.abs(output.logits - expected.outputs["logits"])
    assert difference[0].max() < 1e-4
    assert difference[1, :10].max() > 0.1


@pytest.mark.parametrize("width", [1, 2, 5, 8])
def test_even_kernel_sees_one_frame_more_after_its_own(width):
    x = np.zeros((1, 21, 1), np.float32)
    x[0, 10] = 1
    kernel = np.arange(1, width + 1, dtype=np.float32).reshape(width, 1, 1)
    seen = np.asarray(depthwise_convolution(jnp.asarray(x), jnp.asarray(kernel)))[0, :, 0]
    first = 10 - width // 2
    np.testing.assert_array_equal(seen[first : first + width], kernel[::-1, 0, 0])
    assert np.count_nonzero(seen) == width


def test_padding_does_not_reach_the_frames_of_a_row():
    given = mels()
    noise = 9 * (1 - given["attention_mask"][:, :, None]).astype(np.float32)
    other = given | {"input_features": given["input_features"] + noise}
    one, two = (call(load(NAME), **g).logits for g in (given, other))
    np.testing.assert_array_equal(one[0], two[0])
    np.testing.assert_array_equal(one[1, :10], two[1, :10])


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
    around = {"subsampling", "mask", "rotary_table", "norm", "head"}
    assert scopes(load(NAME), **mels()) == around | blocks


def test_bfloat16_products_and_convolutions_stay_in_bfloat16():
    jaxpr = trace(load(NAME, "bfloat16"), **mels())
    kinds = {"dot_general", "conv_general_dilated"}
    found = [e for e in equations(jaxpr.jaxpr) if e.primitive.name in kinds]
    assert {v.aval.dtype for e in found for v in e.invars} == {jnp.dtype("bfloat16")}
    assert {aval.dtype for aval in jaxpr.out_avals} == {jnp.dtype("bfloat16")}


def test_frames_are_counted_as_the_convolutions_make_them():
    config = load(NAME).config
    assert [count_frames(config, length) for length in (13, 14, 16, 17, 50, 83)] == [
        1, 1, 1, 2, 10, 18,
    ]  # fmt: skip
    assert count_frames(config, least_frames(config) - 1) < 1 == least_frames(config) - 12
    mask = np.zeros((3, 83), np.int32)
    mask[0], mask[1, :50] = 1, 1
    assert frame_mask(config, mask).sum(axis=1).tolist() == [18, 10, 0]


@pytest.mark.parametrize(
    ("shape", "mask", "message"),
    [
        ((83, 16), None, r"\[batch, frames, 16\] is needed"),
        ((2, 83, 17), None, r"\[batch, frames, 16\] is needed"),
        ((2, 12, 16), None, "12 frames; the first output needs 13"),
        ((2, 83, 16), (2, 18), r"attention_mask\): shape is \(2, 18\)"),
    ],
)
def test_spectrograms_that_do_not_fit_are_refused(shape, mask, message):
    with pytest.raises(models.InputError, match=message):
        check_mels(load(NAME).config, shape, mask)


def test_model_checks_the_shape_of_its_spectrograms():
    with pytest.raises(models.InputError, match=r"shape is \(2, 83, 17\)"):
        load(NAME)(np.zeros((2, 83, 17), np.float32))


# Sizes and configuration


def test_full_size_model_has_the_known_number_of_parameters():
    config = models.LasrConfig.ctc()
    model = nnx.eval_shape(lambda: models.LasrModel(config, rngs=nnx.Rngs(0)))
    assert count_parameters(abstract_parameters(model, nnx.Param)) == 105_265_408
    assert {leaf.path for leaf in key_map(config)} == set(abstract_parameters(model))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_heads": 7}, "embed_dim is 512 with 7 heads; rotary positions need a multiple of 14"),
        ({"num_heads": 512}, "embed_dim is 512 with 512 heads"),
        ({"num_mels": 0}, "num_mels is 0"),
        ({"subsampling_stride": 0}, "subsampling_stride is 0"),
        ({"vocab_size": -1}, "vocab_size is -1"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(change, message):
    with pytest.raises(models.ConfigError, match=message):
        dataclasses.replace(models.LasrConfig.ctc(), **change)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_key_value_heads": 3}, "encoder_config: num_key_value_heads is 3"),
        ({"head_dim": 8}, "head_dim is 8"),
        ({"hidden_act": "relu"}, "hidden_act is 'relu'"),
        ({"attention_bias": 1}, "attention_bias is 1; true or false"),
        ({"feed_forward_residual_weights": [1.5]}, "feed_forward_residual_weights is .* two"),
        ({"conv_residual_weights": [1.0, True]}, "conv_residual_weights is .* two numbers"),
        ({"conv_residual_weights": 2.0}, "conv_residual_weights is 2.0; a list of two numbers"),
        (
            {"rope_parameters": {"rope_theta": 1e4, "rope_type": "yarn"}},
            "rope_type is 'yarn'; supported are",
        ),
        (
            {
                "rope_parameters": {
                    "rope_theta": 1e4,
                    "rope_type": "llama3",
                    "factor": 8.0,
                    "low_freq_factor": 1.0,
                    "high_freq_factor": 4.0,
                    "original_max_position_embeddings": 64,
                }
            },
            "rope_parameters is scaled; only rope_type 'default'",
        ),
    ],
)
def test_unsupported_field_of_the_encoder_is_refused_by_name(change, message):
    fields = fields_of(NAME, encoder_config=encoder_fields(**change))
    with pytest.raises(models.ConfigError, match=message):
        models.LasrConfig.from_hugging_face(fields)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"encoder_config": []}, r"encoder_config is \[\]; an object"),
        ({"vocab_size": 0}, "vocab_size is 0"),
        ({"architectures": ["LasrForTDT"]}, "LasrForTDT"),
    ],
)
def test_unsupported_field_is_refused_by_name(change, message):
    with pytest.raises(models.ConfigError, match=message):
        models.LasrConfig.from_hugging_face(fields_of(NAME, **change))


@pytest.mark.parametrize(
    ("name", "default"),
    [
        ("attention_bias", False),
        ("convolution_bias", False),
        ("feed_forward_residual_weights", [1.5, 0.5]),
        ("conv_residual_weights", [2.0, 1.0]),
    ],
)
def test_absent_field_has_the_default_of_transformers(name, default):
    parse = models.LasrConfig.from_hugging_face
    absent, present = (
        parse(fields_of(NAME, encoder_config=encoder_fields(**{name: value})))
        for value in (..., default)
    )
    assert absent == present


# Folders


def encoder_alone():
    found = {k: v for k, v in tensors_of(NAME).items() if not k.startswith("ctc_head")}
    return {key.removeprefix("encoder."): value for key, value in found.items()}


def test_encoder_alone_is_read_without_prefix(tmp_path):
    folder = make(tmp_path / "m", NAME, encoder_alone())
    fields = encoder_fields(architectures=["LasrEncoder"])
    (folder / "config.json").write_text(json.dumps(fields))
    output = call(models.load(folder), **mels())
    assert output.logits is None
    expected = call(load(NAME), **mels()).last_hidden_state
    np.testing.assert_array_equal(output.last_hidden_state, expected)


def test_file_with_biases_is_read(tmp_path):
    fields = encoder_fields(attention_bias=True, convolution_bias=True)
    config = models.LasrConfig.from_hugging_face(fields_of(NAME, encoder_config=fields))
    found = tensors_of(NAME)
    shapes = abstract_parameters(nnx.eval_shape(lambda: models.LasrModel(config, rngs=nnx.Rngs(0))))
    added = {
        f"encoder.{leaf.key}": np.full(shapes[leaf.path], 0.1, np.float32)
        for leaf in key_map(config)
        if leaf.key.startswith("layers") and f"encoder.{leaf.key}" not in found
    }
    assert len(added) == 2 * (4 + 4 + 3)
    model = models.load(make(tmp_path / "m", NAME, found | added, encoder_config=fields))
    difference = call(model, **mels()).logits - call(load(NAME), **mels()).logits
    assert np.abs(difference).max() > 0.1


def test_converted_folder_gives_the_same_values(tmp_path):
    source = make(tmp_path / "m", NAME)
    models.convert(source, tmp_path / "ours", reference=None, report=lambda line: None)
    model = models.load(tmp_path / "ours", verify=True)
    assert model.config == load(NAME).config
    assert max(errors(model, NAME).values()) <= TOLERANCE


@pytest.mark.parametrize(
    "key",
    ["subsampler.conv_1.bias", "layers.1.conv.norm.running_var", "out_norm.weight"],
)
def test_missing_tensor_is_named(tmp_path, key):
    found = tensors_of(NAME)
    del found[f"encoder.{key}"]
    assert f"missing     {key}" in refused(make(tmp_path / "m", NAME, found))


def test_unexpected_tensor_is_named(tmp_path):
    found = tensors_of(NAME) | {"encoder.out_norm.bias": np.zeros(24, np.float32)}
    assert "unexpected  encoder.out_norm.bias" in refused(make(tmp_path / "m", NAME, found))


def test_wrong_shape_names_the_field_of_the_section(tmp_path):
    fields = encoder_fields(conv_kernel_size=7)
    message = refused(make(tmp_path / "m", NAME, encoder_config=fields))
    assert "wanted [24, 1, 7] by encoder_config.conv_kernel_size 7" in message


def test_kernels_give_the_same_values():
    expected = reference(NAME)
    output = call(with_kernels(load(NAME), HOPPER), **expected.inputs)
    for row, length in enumerate((18, 10)):
        actual, wanted = output.logits[row, :length], expected.outputs["logits"][row, :length]
        np.testing.assert_allclose(actual, wanted, atol=TOLERANCE * np.std(wanted))
