"""Conformers: the forward pass, and the encoder by itself."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import models
from models.conformer import modules as conformer
from models.conformer.checkpoint import encoder_key_map
from models.conformer.modules import check_frames
from models.conformer.positions import relative_table, rotary_table, rotate, shift
from models.keymap import abstract_parameters, count_parameters
from models.numeric import TOLERANCE
from models.wav2vec2_conformer.checkpoint import FAMILY
from models.wav2vec2_conformer.config import count_frames, least_samples
from models.wav2vec2_conformer.modules import check_audio, frame_mask
from tests.encoders import (
    call,
    changed,
    equations,
    errors,
    errors_of,
    load,
    operations,
    reference,
    scopes,
    trace,
)

NAME = "conformer"
POINTS = ("hidden_embedding", "hidden_block_0", "last_hidden_state")
VALUES = [
    *(("conformer", point) for point in (*POINTS, "logits")),
    *(("conformer_rotary", point) for point in POINTS),
]

# Of Wav2Vec2ConformerModel's encoder without pos_conv_embed, counted in torch.
CONFORMER_L = 107_469_312


def worst(model, name=NAME):
    return max(errors(model, name).values())


def audio(batch_size=2, samples=400):
    """Rows of noise, every second one padded on the right."""
    generator = np.random.default_rng(batch_size)
    mask = np.ones((batch_size, samples), np.int32)
    mask[1::2, 250:] = 0
    values = generator.normal(size=mask.shape).astype(np.float32) * mask
    return {"input_values": values, "attention_mask": mask}


# The forward pass


@pytest.mark.parametrize(("name", "point"), VALUES)
def test_value_agrees_with_transformers(name, point):
    assert errors_of(name)[point] <= TOLERANCE


@pytest.mark.parametrize("name", ["conformer", "conformer_rotary"])
def test_every_value_of_the_reference_is_compared(name):
    assert sorted(errors_of(name)) == sorted(point for n, point in VALUES if n == name)


def test_reference_is_compared_at_the_frames_of_real_audio_alone():
    inputs = reference(NAME).inputs
    mask = FAMILY.token_mask(load(NAME).config, inputs)
    assert mask.shape == (2, 19)
    assert mask.sum(axis=1).tolist() == [19, 12]


@pytest.mark.parametrize(
    ("path", "fault"),
    [
        ("encoder.layers.0.convolution.batch_norm.mean", jnp.zeros_like),
        ("encoder.layers.1.convolution.batch_norm.var", jnp.ones_like),
        ("encoder.layers.0.convolution.batch_norm.scale", jnp.ones_like),
        ("encoder.layers.0.convolution.depthwise", lambda x: x[::-1]),
        ("encoder.layers.1.convolution.output.kernel", jnp.transpose),
        ("encoder.layers.0.convolution.gated.kernel", lambda x: jnp.roll(x, 24, axis=1)),
        ("encoder.layers.0.attention.query.kernel", jnp.transpose),
        ("encoder.layers.0.attention.position.kernel", jnp.transpose),
        ("encoder.layers.0.attention.content_bias", jnp.zeros_like),
        ("encoder.layers.0.attention.position_bias", jnp.zeros_like),
        ("convolutions.0.kernel", lambda x: x[::-1]),
        ("convolutions.1.bias", jnp.zeros_like),
        ("head.bias", jnp.zeros_like),
    ],
)
def test_wrong_variable_is_noticed(path, fault):
    assert worst(changed(load(NAME), **{path: fault})) > 0.01


@pytest.mark.parametrize(
    "fault",
    [
        lambda scores: scores[..., : scores.shape[2]],
        lambda scores: jnp.roll(shift(scores), 1, axis=-1),
    ],
    ids=["unshifted", "one-off"],
)
def test_wrong_relative_shift_is_noticed(monkeypatch, fault):
    monkeypatch.setattr(conformer, "shift", fault)
    base = float(np.random.default_rng().uniform(3, 9))
    # The base is not used with relative positions: a new one has the model traced anew.
    model = changed(load(NAME), dataclasses.replace(load(NAME).config, rotary_base=base))
    assert errors(model, NAME)["hidden_block_0"] > 0.1


def test_wrong_base_of_rotary_positions_is_noticed():
    model = load("conformer_rotary")
    config = dataclasses.replace(model.config, rotary_base=1000.0)
    assert worst(changed(model, config), "conformer_rotary") > 10 * TOLERANCE


def test_norm_over_time_is_not_one_over_channels():
    model = changed(load("conformer_rotary"), **{"convolutions.0.norm.scale": jnp.ones_like})
    assert worst(model, "conformer_rotary") > 0.1


def test_ignored_mask_is_noticed():
    expected = reference(NAME)
    output = call(load(NAME), input_values=expected.inputs["input_values"])
    difference = np.abs(output.logits - expected.outputs["logits"]).max(axis=(1, 2))
    assert difference[0] < 1e-4
    assert difference[1] > 0.1


@pytest.mark.parametrize("length", [1, 2, 5])
def test_shift_takes_the_column_of_the_difference(length):
    rows = 2 * length - 1
    scores = np.arange(2 * 3 * length * rows, dtype=np.float32).reshape(2, 3, length, rows)
    expected = [
        [scores[:, :, i, length - 1 - (i - j)] for j in range(length)] for i in range(length)
    ]
    np.testing.assert_array_equal(shift(jnp.asarray(scores)), np.moveaxis(expected, (0, 1), (2, 3)))


def test_relative_table_has_waves_of_falling_differences():
    differences = np.arange(4, -5, -1)[:, None]
    angles = differences / 10000 ** (np.arange(0, 6, 2) / 6)
    expected = np.stack([np.sin(angles), np.cos(angles)], axis=-1).reshape(9, 6)
    np.testing.assert_allclose(relative_table(5, 6), expected, atol=1e-6)


def test_rotation_multiplies_pairs_as_complex_numbers():
    x = np.random.default_rng(0).normal(size=(2, 5, 12)).astype(np.float32)
    heads = x.reshape(2, 5, 2, 6)
    angles = np.outer(np.arange(5), 100.0 ** -(np.arange(0, 6, 2) / 6))[:, None, :]
    turned = (heads[..., :3] + 1j * heads[..., 3:]) * np.exp(1j * angles)
    expected = np.concatenate([turned.real, turned.imag], axis=-1).reshape(x.shape)
    rotated = rotate(jnp.asarray(x), rotary_table(5, 6, 100.0), 2)
    np.testing.assert_allclose(rotated, expected, atol=1e-5)


def test_frames_are_counted_as_the_convolutions_make_them():
    config = load(NAME).config
    shape = trace(load(NAME), input_values=np.zeros((1, 400), np.float32)).out_avals[1].shape
    assert shape == (1, count_frames(config, 400), 13)
    assert least_samples(config) == 30
    assert (count_frames(config, 30), count_frames(config, 29)) == (1, 0)


def test_frame_mask_keeps_the_frames_that_lie_in_the_audio_whole():
    mask = np.zeros((4, 400), np.int32)
    mask[0], mask[1, :250], mask[2, :30], mask[3, :29] = 1, 1, 1, 1
    assert frame_mask(load(NAME).config, mask).sum(axis=1).tolist() == [19, 12, 1, 0]


def test_shortest_audio_is_accepted():
    shapes = [
        a.shape for a in trace(load(NAME), input_values=np.ones((2, 30), np.float32)).out_avals
    ]
    assert shapes == [(2, 1, 24), (2, 1, 13)]


def test_row_without_audio_is_finite():
    given = audio()
    given["attention_mask"][1] = 0
    assert np.isfinite(call(load(NAME), **given).logits).all()


def test_padded_samples_do_not_reach_the_frames_of_audio():
    given = audio()
    other = given | {"input_values": given["input_values"] + 9 * (1 - given["attention_mask"])}
    one, two = (call(load(NAME), **g).logits for g in (given, other))
    np.testing.assert_array_equal(one[0], two[0])
    np.testing.assert_array_equal(one[1, :12], two[1, :12])


@pytest.mark.parametrize("name", ["conformer", "conformer_rotary"])
def test_row_does_not_reach_others(name):
    given = audio()
    values = given["input_values"]
    other = given | {"input_values": np.stack([values[0], -values[1] + 0.5])}
    one, two = (call(load(name), **g).last_hidden_state for g in (given, other))
    np.testing.assert_array_equal(one[0], two[0])
    assert np.abs(one[1] - two[1]).max() > 0.1


@pytest.mark.parametrize("batch_size", [1, 3, 5])
@pytest.mark.parametrize("name", ["conformer", "conformer_rotary"])
def test_any_batch_size_traces_to_the_same_operations(name, batch_size):
    model = load(name)
    assert operations(model, **audio(batch_size)) == operations(model, **audio(2))


def test_boolean_mask_is_the_same_as_integers():
    mask, config = audio()["attention_mask"], load(NAME).config
    np.testing.assert_array_equal(frame_mask(config, mask), frame_mask(config, mask == 1))


def test_every_operation_has_a_scope():
    found = scopes(load(NAME), **audio())
    blocks = {"mlp_before", "attention", "convolution", "mlp_after"}
    assert found == {"features", "frame_mask", "mask", "positions", "norm", "head"} | blocks


def test_bfloat16_model_takes_norms_and_softmax_in_float32():
    jaxpr = trace(load(NAME, "bfloat16"), **audio())
    found = {
        equation.primitive.name: equation.invars[0].aval.dtype
        for equation in equations(jaxpr.jaxpr)
        if equation.primitive.name in {"reduce_max", "rsqrt", "exp", "logistic", "erfc"}
    }
    assert len(found) == 5
    assert set(found.values()) == {jnp.dtype("float32")}


@pytest.mark.parametrize("name", ["conformer", "conformer_rotary"])
def test_bfloat16_products_and_convolutions_stay_in_bfloat16(name):
    jaxpr = trace(load(name, "bfloat16"), **audio())
    kinds = {"dot_general", "conv_general_dilated"}
    found = [e for e in equations(jaxpr.jaxpr) if e.primitive.name in kinds]
    assert {v.aval.dtype for e in found for v in e.invars} == {jnp.dtype("bfloat16")}
    assert {aval.dtype for aval in jaxpr.out_avals} == {jnp.dtype("bfloat16")}


def test_output_is_a_frozen_tree_under_its_field_names():
    output = call(load(NAME), **audio())
    leaves, _ = jax.tree_util.tree_flatten_with_path(output)
    assert [str(path[0]) for path, _ in leaves] == [".last_hidden_state", ".logits"]
    with pytest.raises(dataclasses.FrozenInstanceError):
        output.logits = None


def test_features_have_no_logits():
    assert call(load("conformer_rotary"), **audio()).logits is None


@pytest.mark.parametrize(
    ("shape", "mask", "message"),
    [
        ((400,), None, r"shape is \(400,\); \[batch, samples\]"),
        ((2, 29), None, "29 samples make no frame; 30 or more"),
        ((2, 0), None, "0 samples make no frame"),
        ((2, 400), (2, 19), r"attention_mask\): shape is \(2, 19\)"),
    ],
)
def test_audio_that_does_not_fit_is_refused(shape, mask, message):
    with pytest.raises(models.InputError, match=message):
        check_audio(load(NAME).config, shape, mask)


# The encoder by itself


def test_encoder_agrees_with_the_same_encoder_behind_audio():
    stored = reference(NAME)
    mask = np.asarray(frame_mask(load(NAME).config, stored.inputs["attention_mask"]))
    states = stored.outputs["hidden_embedding"]
    output = call(load(NAME).encoder, hidden_states=states, attention_mask=mask)
    expected = stored.outputs["last_hidden_state"][mask]
    difference = np.abs(np.asarray(output.last_hidden_state)[mask] - expected)
    assert difference.max() <= TOLERANCE * expected.std()
    assert output.logits is None


@pytest.mark.parametrize(
    ("shape", "mask", "message"),
    [
        ((2, 19), None, r"\[batch, frames, 24\] is needed"),
        ((2, 19, 25), None, r"\[batch, frames, 24\] is needed"),
        ((2, 0, 24), None, "at least one frame"),
        ((2, 19, 24), (2, 18), r"attention_mask\): shape is \(2, 18\)"),
    ],
)
def test_frames_that_do_not_fit_are_refused(shape, mask, message):
    with pytest.raises(models.InputError, match=message):
        check_frames(load(NAME).config, shape, mask)


def test_conformer_l_has_the_known_number_of_parameters():
    config = models.ConformerConfig.conformer_l()
    model = nnx.eval_shape(lambda: models.ConformerEncoder(config, rngs=nnx.Rngs(0)))
    assert count_parameters(abstract_parameters(model, nnx.Param)) == CONFORMER_L
    assert {leaf.path for leaf in encoder_key_map(config)} == set(abstract_parameters(model))


def test_conformer_l_traces_in_bfloat16():
    config = models.ConformerConfig.conformer_l()
    model = nnx.eval_shape(
        lambda: models.ConformerEncoder(config, dtype="bfloat16", rngs=nnx.Rngs(0))
    )
    graphdef, state = nnx.split(model)
    frames = jax.ShapeDtypeStruct((32, 512, 512), jnp.bfloat16)
    output = jax.eval_shape(lambda s, x: nnx.merge(graphdef, s)(x), state, frames)
    last = output.last_hidden_state
    assert (last.shape, last.dtype) == ((32, 512, 512), jnp.bfloat16)
